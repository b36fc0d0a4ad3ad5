"""A changed datasheet scales what was measured, by the resource that limits a kernel, and no more than that."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibrate.kernels import operators
from calibrate.kernels.operators import tensor
from perfmodel.cost.kernels.kernel_cost import KernelCost
from perfmodel.cost.kernels.lookup import kernel_costs
from perfmodel.cost.kernels.roofline import LAUNCH_FLOOR_S, busy_time_s
from perfmodel.cost.kernels.scaling import (
    CACHED,
    LIMITED,
    SCALED_SPREAD,
    before_scaling,
    scaled_cost,
    scaling_spread,
)
from perfmodel.cost.kernels.work import least_bytes
from perfmodel.hardware.interconnect import TransferRecord
from perfmodel.hardware.profile import Cache, Device, KernelRecord, Launch, Profile
from perfmodel.hardware.rescaling import rescaled
from perfmodel.trace.kernel_key import kernel_key
from perfmodel.trace.operation import Operation

LARGE, SMALL = tensor("float32", 8192, 8192), tensor("float32", 512, 512)
ADD, SMALL_ADD = operators.binary("add.Tensor", LARGE, LARGE), operators.binary("add.Tensor", SMALL, SMALL)
MM = operators.mm("float32", 4096, 4096, 4096)
DEVICE = Device(
    kind="cuda", name="GPU", memory_bytes=1 << 40, multiprocessors=128, l2_bytes=50_000_000,
    peak_flops_per_s={"fp32": 50e12, "tf32": 400e12}, peak_memory_bytes_per_s=4e12,
)  # fmt: skip
FLOOR_S = LAUNCH_FLOOR_S["cuda"]
ratios = st.floats(min_value=0.05, max_value=20)


def profile(operation: Operation, time_s: float, cold_time_s: float | None = None) -> Profile:
    record = KernelRecord(time_s=time_s, cold_time_s=cold_time_s, kernels=1)
    return Profile(
        name="p", device=DEVICE, launch=Launch(gap_s=1e-6), cache=Cache(capacity_bytes=30e6),
        kernels={kernel_key(operation): record},
    )  # fmt: skip


def asked(known: Profile, flops: float = 1.0, memory: float = 1.0, l2: float = 1.0, gap_s: float = 1e-6) -> Profile:
    device = known.device.model_copy(
        update={
            "peak_flops_per_s": {kind: flops * peak for kind, peak in known.device.peak_flops_per_s.items()},
            "peak_memory_bytes_per_s": memory * (known.device.peak_memory_bytes_per_s or 0),
            "l2_bytes": int(l2 * known.device.l2_bytes),
        }
    )
    return rescaled(known, known.model_copy(update={"device": device, "launch": Launch(gap_s=gap_s)}))


def cost(operation: Operation, on: Profile) -> KernelCost:
    return kernel_costs([operation], on, matmul_tf32=False)[0]


def at_efficiency(operation: Operation, efficiency: float) -> Profile:
    """A profile in which the operation reaches that share of what well-tuned kernels sustain."""
    busy_s = busy_time_s(operation, DEVICE, False, least_bytes(operation))
    return profile(operation, FLOOR_S + busy_s / efficiency)


def test_a_kernel_that_memory_limits_follows_bandwidth_alone() -> None:
    known = at_efficiency(ADD, 0.9)
    before = cost(ADD, known)
    after = cost(ADD, asked(known, memory=2))
    assert after.time_s - FLOOR_S == pytest.approx((before.time_s - FLOOR_S) / 2)
    assert after.scaling is not None
    assert (after.scaling.warm.before_s, after.source) == (before.time_s, "exact")
    assert cost(ADD, asked(known, flops=2)) == before


def test_a_product_follows_its_own_peak_alone() -> None:
    known = at_efficiency(MM, 0.9)
    before = cost(MM, known)
    assert cost(MM, asked(known, flops=2)).time_s - FLOOR_S == pytest.approx((before.time_s - FLOOR_S) / 2)
    assert cost(MM, asked(known, memory=2)) == before
    tf32 = known.device.peak_flops_per_s | {"tf32": 800e12}
    device = known.device.model_copy(update={"peak_flops_per_s": tf32})
    assert cost(MM, rescaled(known, known.model_copy(update={"device": device}))) == before


def test_a_product_is_held_by_a_memory_that_is_slow_enough() -> None:
    known = at_efficiency(MM, 1.0)
    after = cost(MM, asked(known, memory=1e-3))
    assert after.time_s - FLOOR_S == pytest.approx(
        busy_time_s(MM, asked(known, memory=1e-3).device, False, least_bytes(MM)), rel=1e-6
    )


def test_a_kernel_far_from_its_roofline_follows_it_in_part() -> None:
    known = at_efficiency(ADD, LIMITED / 2)
    busy_s = cost(ADD, known).time_s - FLOOR_S
    assert cost(ADD, asked(known, memory=2)).time_s - FLOOR_S == pytest.approx(busy_s * (1 - 0.5 / 2))


def test_what_the_cache_holds_does_not_gain_from_a_faster_memory() -> None:
    known = profile(SMALL_ADD, 5e-6, cold_time_s=7e-6)
    after = cost(SMALL_ADD, asked(known, memory=1.5))
    assert after.time_s == 5e-6
    assert 5e-6 <= after.cold_time_s < 7e-6
    slower = cost(SMALL_ADD, asked(known, memory=0.5))
    assert slower.time_s == 5e-6 and slower.cold_time_s > 7e-6


def test_a_larger_cache_holds_what_was_missed() -> None:
    between = tensor("float32", 2048, 2048)
    neg = operators.unary("neg.default", between)  # 34 MB: some of it is held in 30 MB, all of it in 60
    known = profile(neg, 15e-6, cold_time_s=16e-6)
    larger, smaller = (cost(neg, asked(known, l2=l2)) for l2 in (2, 0.1))
    assert larger.time_s < 15e-6 and larger.cold_time_s == 16e-6
    assert larger.time_s > FLOOR_S + CACHED * (15e-6 - FLOOR_S)
    assert 15e-6 < smaller.time_s <= smaller.cold_time_s == 16e-6


def test_gaps_are_contained_in_times() -> None:
    known = profile(ADD, 250e-6)
    assert cost(ADD, asked(known, gap_s=0.0)).time_s == pytest.approx(249e-6)
    assert cost(ADD, asked(known, gap_s=3e-6)).time_s == pytest.approx(252e-6)
    assert cost(ADD, asked(known, gap_s=3e-6)).scaling is None


def test_copies_to_the_host_do_not_follow_the_device() -> None:
    on_host = tensor("float32", 1024)._replace(device="cpu")
    keywords = (("device", "cuda"), ("non_blocking", True))
    copy = Operation("aten._to_copy.default", (on_host,), keywords, (tensor("float32", 1024),))
    known = Profile(name="p", device=DEVICE, transfers={"h2d pinned 4096": TransferRecord(time_s=3e-6)})
    assert cost(copy, asked(known, memory=4)) == cost(copy, known)


def test_a_roofline_is_that_of_the_device_that_is_asked_about() -> None:
    known = Profile(name="p", device=DEVICE, launch=Launch(gap_s=1e-6))
    for operation in (ADD, MM):
        on = asked(known, flops=3, memory=5)
        alone = Profile(name="p", device=on.device)
        assert cost(operation, on).time_s == pytest.approx(cost(operation, alone).time_s)


def test_scaling_widens_what_is_not_known() -> None:
    known = at_efficiency(ADD, 1.0)
    assert scaling_spread(cost(ADD, known), 1e-3) == 0
    fourfold = cost(ADD, asked(known, memory=4))
    assert scaling_spread(fourfold, fourfold.cold_time_s) == pytest.approx(SCALED_SPREAD * math.log(4))


def test_how_much_of_a_slow_kernel_follows_is_as_uncertain_as_of_a_fast_one() -> None:
    """Far from its roofline little time is scaled, but whatever holds it may follow the datasheet as well."""
    fast, slow = (cost(ADD, asked(at_efficiency(ADD, efficiency), memory=4)) for efficiency in (1.0, LIMITED / 5))
    assert scaling_spread(slow, slow.time_s) == pytest.approx(scaling_spread(fast, fast.time_s))


def test_of_a_call_in_a_step_is_known_what_it_took_before() -> None:
    known = profile(SMALL_ADD, 5e-6, cold_time_s=7e-6)
    after = cost(SMALL_ADD, asked(known, memory=0.5))
    assert before_scaling(after, after.time_s).before_s == pytest.approx(5e-6)
    assert before_scaling(after, after.cold_time_s).before_s == pytest.approx(7e-6)
    slowed = before_scaling(after, 2 * after.cold_time_s)
    assert slowed.before_s == pytest.approx(14e-6)
    assert 0 < slowed.following_s <= slowed.before_s
    unscaled = before_scaling(cost(SMALL_ADD, known), 6e-6)
    assert (unscaled.before_s, unscaled.following_s) == (6e-6, 0)


@given(efficiency=st.floats(0.01, 1.5), operation=st.sampled_from([ADD, SMALL_ADD, MM]))
def test_nothing_changes_at_equal_datasheets(efficiency: float, operation: Operation) -> None:
    known = at_efficiency(operation, efficiency)
    before = cost(operation, known)
    assert scaled_cost(before, operation, known, known, False) is before
    assert cost(operation, asked(known)) == before


@given(
    efficiency=st.floats(0.01, 1.5), cold=st.floats(1, 3), flops=ratios, memory=ratios, l2=ratios, more=st.floats(1, 10)
)
def test_more_of_anything_is_never_slower(
    efficiency: float, cold: float, flops: float, memory: float, l2: float, more: float
) -> None:
    for operation in (ADD, SMALL_ADD, MM):
        warm_s = at_efficiency(operation, efficiency).kernels[kernel_key(operation)].time_s or 0.0
        known = profile(operation, warm_s, cold * warm_s)
        before = cost(operation, asked(known, flops, memory, l2))
        for grown in ((more * flops, memory, l2), (flops, more * memory, l2), (flops, memory, more * l2)):
            after = cost(operation, asked(known, *grown))
            assert after.time_s <= before.time_s * (1 + 1e-9)
            assert after.cold_time_s <= before.cold_time_s * (1 + 1e-9)
            assert after.time_s <= after.cold_time_s
