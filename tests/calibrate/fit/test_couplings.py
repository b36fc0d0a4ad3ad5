"""Couplings found again from loops that were slowed by them, and from pairs measured on two GPUs."""

from __future__ import annotations

import pytest

from calibrate.fit.couplings import (
    coupling_error,
    fit_couplings,
    fit_message_couplings,
    fit_own_couplings,
    fit_own_message_couplings,
    slowed_loops,
)
from perfmodel.hardware.interconnect import ContentionRecord

US = 1e-6
# Two ranks: time of the kernel, and both factors beside all_reduce of 25 MiB, of 256 MiB, all_gather, reduce_scatter.
COLLECTIVES = {
    "all_reduce 2 float32 26214400": 116 * US,
    "all_reduce 2 float32 268435456": 894 * US,
    "all_gather 2 float32 268435456": 547 * US,
    "reduce_scatter 2 float32 268435456": 559 * US,
}
MEASURED = {
    "gemm_bf16_8192": (1543.6, (1.011, 1.145, 1.126, 1.113), (2.711, 1.755, 2.059, 2.027)),
    "gemm_bf16_2048": (25.1, (1.805, 1.763, 1.821, 1.848), (1.186, 1.111, 1.139, 1.147)),
    "add_256MiB": (187.8, (1.077, 1.119, 1.118, 1.111), (2.156, 2.115, 2.166, 2.108)),
    "attention_bf16": (147.8, (1.156, 1.181, 1.166, 1.189), (1.496, 1.140, 1.229, 1.211)),
}


def record(compute_s: float, communication_s: float, factors: tuple[float, float]) -> ContentionRecord:
    return ContentionRecord(
        compute_s=compute_s, communication_s=communication_s, compute_factor=factors[0], communication_factor=factors[1]
    )


def test_loops_that_do_not_slow_each_other_take_what_they_take_alone() -> None:
    compute, communication = slowed_loops(100 * US, 300 * US, (1.0, 1.0, 1.0))
    assert (compute, communication) == (pytest.approx(1.0), pytest.approx(1.0))


def test_loops_that_always_overlap_are_slowed_by_their_factors() -> None:
    compute, communication = slowed_loops(50 * US, 1000 * US, (1.5, 1.25, 1.0))
    assert compute == pytest.approx(1.5, rel=0.01)
    assert communication == pytest.approx(1.25, rel=0.01)


def test_a_collective_waits_for_the_tail_of_each_kernel() -> None:
    """One of 10 us after one of 1000 us that lets it in for the last 100 only: ten to a kernel at most."""
    _, communication = slowed_loops(1000 * US, 10 * US, (1.0, 1.0, 0.1))
    assert communication > 8


@pytest.mark.parametrize("coupling", [(1.2, 1.5, 0.3), (1.8, 1.2, 0.1)])
def test_a_coupling_is_found_again(coupling: tuple[float, float, float]) -> None:
    pairs = {
        f"add_256MiB {key}": record(190 * US, seconds, slowed_loops(190 * US, seconds, coupling))
        for key, seconds in COLLECTIVES.items()
    }
    found = fit_couplings(pairs)["pointwise"]
    assert found.fitted_error < 0.03
    assert found.held_out_error < 0.08


def test_measured_pairs_are_explained_within_five_per_cent() -> None:
    pairs = {
        f"{kernel} {key}": record(compute_us * US, seconds, factors)
        for kernel, (compute_us, computing, communicating) in MEASURED.items()
        for (key, seconds), factors in zip(COLLECTIVES.items(), zip(computing, communicating, strict=True), strict=True)
    }
    found = fit_couplings(pairs)
    assert set(found) == {"attention", "gemm_bf16", "gemm_bf16_small", "pointwise"}
    errors = [coupling.held_out_error for coupling in found.values()]
    assert sum(errors) / len(errors) < 0.05
    assert all(coupling.pairs == 4 for coupling in found.values())


def test_unknown_kernels_are_left_out() -> None:
    assert fit_couplings({"mystery all_reduce 2 float32 26214400": record(US, US, (1.0, 1.0))}) == {}


def test_the_error_is_the_mean_of_both_factors() -> None:
    pair = record(100 * US, 300 * US, (1.25, 1.0))
    assert coupling_error((1.0, 1.0, 1.0), [pair]) == pytest.approx(0.1)


@pytest.mark.parametrize("kernel_s", [80 * US, 155 * US, 500 * US])
@pytest.mark.parametrize("coupling", [(1.7, 1.15, 0.13), (2.0, 1.0, 1.0)])
def test_a_kernels_own_coupling_is_found_from_a_long_and_a_short_collective(
    kernel_s: float, coupling: tuple[float, float, float]
) -> None:
    wires = {"all_gather 2 float32 268435456": 547 * US, "all_gather 2 float32 26214400": 80 * US}
    pairs = {
        key: record(kernel_s, seconds, slowed_loops(kernel_s, seconds, coupling)) for key, seconds in wires.items()
    }
    found = fit_own_couplings({"some kernel": pairs, "none": {}})
    assert list(found) == ["some kernel"]
    own = found["some kernel"]
    assert (own.compute_factor, own.communication_factor) == pytest.approx(coupling[:2], rel=0.12)
    assert own.fitted_error < 0.02
    assert (own.pairs, own.held_out_error, own.kernel_s) == (2, None, kernel_s)


def test_kernels_that_do_nothing_tell_the_pause_between_kernels() -> None:
    factors = {"all_reduce 2 float32 26214400": 4.0, "all_gather 2 float32 268435456": 5.0}
    pairs = {f"add_one {key}": record(2 * US, COLLECTIVES[key], (factor, 1.3)) for key, factor in factors.items()}
    found = fit_couplings(pairs)["pause"]
    assert (found.compute_factor, found.communication_factor, found.kernel_s, found.pairs) == (4.5, 1.0, 2 * US, 2)


@pytest.mark.parametrize("role", ["send", "receive"])
def test_messages_have_couplings_by_role(role: str) -> None:
    """Found again from a long and a short one; pairs with collectives, and in the other role, have no part in it."""
    kernel_s, coupling = 155 * US, (1.7, 1.15, 0.13)
    wires = {"2 float32 67108864": 200 * US, "2 float32 4194304": 30 * US}
    pairs = {
        f"add_256MiB {role} {key}": record(kernel_s, seconds, slowed_loops(kernel_s, seconds, coupling))
        for key, seconds in wires.items()
    }
    pairs["add_one send 2 float32 67108864"] = record(2 * US, 200 * US, (4.0, 1.3))
    pairs["add_256MiB all_reduce 2 float32 26214400"] = record(kernel_s, 116 * US, (3.0, 3.0))
    found = fit_message_couplings(pairs)
    assert set(found) == {"send", role}
    fitted = found[role]["pointwise"]
    assert (fitted.compute_factor, fitted.communication_factor) == pytest.approx(coupling[:2], rel=0.12)
    assert (fitted.pairs, fitted.kernel_s) == (2, kernel_s)
    assert fitted.fitted_error < 0.02
    assert found["send"]["pause"].compute_factor == 4.0
    assert set(fit_couplings(pairs)) == {"pointwise"}


def test_a_receive_that_waits_slows_kernels_and_nothing_else() -> None:
    found = fit_message_couplings({"layer_norm wait 2 float32 67108864": record(80 * US, 200 * US, (1.25, 1.0))})
    ((role, couplings),) = found.items()
    assert (role, list(couplings)) == ("wait", ["row"])
    assert couplings["row"].compute_factor == 1.25
    assert (couplings["row"].communication_factor, couplings["row"].tail_share) == (1.0, 1.0)


def test_own_kernels_beside_a_receive_that_waits_have_couplings_of_their_own() -> None:
    def pair(factor: float) -> ContentionRecord:
        return ContentionRecord(compute_factor=factor, communication_factor=1.0, compute_s=1e-3, communication_s=2e-4)

    records = {"a": {"wait 2 float32 67108864": pair(1.3)}, "b": {"wait 2 float32 67108864": pair(0.98)}, "c": {}}
    found = fit_own_message_couplings(records)
    assert {key: each.compute_factor for key, each in found["wait"].items()} == {"a": 1.3, "b": 1.0}
    assert fit_own_couplings(records) == {}
    assert fit_own_message_couplings({"c": {"all_reduce 2 float32 8": pair(1.2)}}) == {}
