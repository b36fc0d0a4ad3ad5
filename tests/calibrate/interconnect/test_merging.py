"""A profile with interconnects that were measured again."""

from __future__ import annotations

import math

import pytest

from calibrate.interconnect.merging import merged
from perfmodel.hardware.interconnect import CollectiveRecord, ContentionRecord, Coupling, Interconnect, collective_key
from perfmodel.hardware.profile import Device, Profile


def test_what_was_not_measured_again_stays() -> None:
    def wires(size: int, time_s: float) -> Interconnect:
        return Interconnect(
            backend="gloo",
            collectives={collective_key("all_reduce", 2, "float32", size): CollectiveRecord(time_s=time_s)},
        )

    profile = Profile(name="test", device=Device(kind="cpu", name="cpu", memory_bytes=1))
    once = merged(profile, "gloo", wires(1024, 1.0))
    twice = merged(once, "gloo", wires(2048, 2.0))
    assert once.interconnect == twice.interconnect == "gloo"
    assert [record.time_s for record in twice.interconnects["gloo"].collectives.values()] == [1.0, 2.0]
    assert twice.interconnects["gloo"].segments["all_reduce 2"][0].most_bytes == 2048


def test_a_second_calibration_tells_how_far_the_wires_differ() -> None:
    def wires(*times_s: float) -> Interconnect:
        records = {f"all_reduce 2 float32 {1024 << n}": CollectiveRecord(time_s=each) for n, each in enumerate(times_s)}
        return Interconnect(backend="gloo", collectives=records)

    profile = Profile(name="test", device=Device(kind="cpu", name="cpu", memory_bytes=1))
    once = merged(profile, "gloo", wires(1.0, 2.0, 4.0))
    assert once.interconnects["gloo"].rerun_spread is None
    twice = merged(once, "gloo", wires(1.1, 2.2, 400.0)).interconnects["gloo"]
    assert twice.rerun_spread == pytest.approx(math.log(1.1) / (0.6745 * math.sqrt(2)))
    other = Interconnect(backend="gloo", collectives={"broadcast 2 float32 64": CollectiveRecord(time_s=1.0)})
    kept = merged(profile.model_copy(update={"interconnects": {"gloo": twice}}), "gloo", other)
    assert kept.interconnects["gloo"].rerun_spread == twice.rerun_spread


def test_own_kernels_that_were_not_measured_again_stay() -> None:
    def wires(**factors: float) -> Interconnect:
        pair = {"compute_s": 1.0, "communication_s": 1.0, "communication_factor": 1.0}
        own = {
            key: {"all_gather 2 float32 8": ContentionRecord(compute_factor=factor, **pair)}
            for key, factor in factors.items()
        }
        couplings = {
            key: Coupling(compute_factor=factor, communication_factor=1.0, tail_share=1.0)
            for key, factor in factors.items()
        }
        return Interconnect(backend="nccl", own_contention=own, own_couplings=couplings)

    profile = Profile(name="test", device=Device(kind="cpu", name="cpu", memory_bytes=1))
    twice = merged(merged(profile, "nvlink", wires(one=1.25, two=1.5)), "nvlink", wires(two=1.75, three=2.0))
    found = twice.interconnects["nvlink"]
    expected = {"one": 1.25, "two": 1.75, "three": 2.0}
    assert {key: each.compute_factor for key, each in found.own_couplings.items()} == expected
    assert {
        key: each.compute_factor for key, pairs in found.own_contention.items() for each in pairs.values()
    } == expected


def test_a_kernel_measured_beside_something_else_keeps_what_it_had() -> None:
    def wires(name: str, factor: float, **couplings: object) -> Interconnect:
        record = ContentionRecord(compute_factor=factor, communication_factor=1.0, compute_s=1.0, communication_s=1.0)
        return Interconnect(backend="nccl", own_contention={"one": {name: record}}, **couplings)

    coupling = Coupling(compute_factor=1.5, communication_factor=1.0, tail_share=1.0)
    profile = Profile(name="test", device=Device(kind="cpu", name="cpu", memory_bytes=1))
    first = wires("all_gather 2 float32 8", 1.25, own_couplings={"one": coupling})
    second = wires("wait 2 float32 8", 1.5, own_message_couplings={"wait": {"one": coupling}})
    found = merged(merged(profile, "nvlink", first), "nvlink", second).interconnects["nvlink"]
    factors = {name: each.compute_factor for name, each in found.own_contention["one"].items()}
    assert factors == {"all_gather 2 float32 8": 1.25, "wait 2 float32 8": 1.5}
    assert (found.own_couplings, found.own_message_couplings) == ({"one": coupling}, {"wait": {"one": coupling}})


def test_roles_in_messages_that_were_not_measured_again_stay() -> None:
    def wires(**factors: dict[str, float]) -> Interconnect:
        roles = {
            role: {
                kind: Coupling(compute_factor=factor, communication_factor=1.0, tail_share=1.0)
                for kind, factor in kinds.items()
            }
            for role, kinds in factors.items()
        }
        return Interconnect.model_validate({"backend": "nccl", "message_couplings": roles})

    profile = Profile(name="test", device=Device(kind="cpu", name="cpu", memory_bytes=1))
    once = merged(profile, "nvlink", wires(send={"row": 1.25, "gemm_fp32": 1.5}, wait={"row": 2.0}))
    twice = merged(once, "nvlink", wires(send={"row": 1.75}, receive={"row": 1.1}))
    found = twice.interconnects["nvlink"].message_couplings
    assert {role: {kind: each.compute_factor for kind, each in kinds.items()} for role, kinds in found.items()} == {
        "send": {"row": 1.75, "gemm_fp32": 1.5},
        "receive": {"row": 1.1},
        "wait": {"row": 2.0},
    }


def test_messages_ahead_are_those_measured_last_and_stay_if_not_measured_again() -> None:
    def wires(counts: dict[int, int]) -> Interconnect:
        return Interconnect(backend="nccl", messages_ahead=counts)

    profile = Profile(name="test", device=Device(kind="cpu", name="cpu", memory_bytes=1))
    once = merged(profile, "nvlink", wires({1024: 8, 2048: 4, 4096: 0}))
    kept = merged(once, "nvlink", wires({}))
    assert kept.interconnects["nvlink"].messages_ahead == {1024: 8, 2048: 4, 4096: 0}
    again = merged(kept, "nvlink", wires({1024: 2, 2048: 0}))  # rows of one calibration belong together
    assert again.interconnects["nvlink"].messages_ahead == {1024: 2, 2048: 0}


def test_messages_alone_do_not_tell_how_far_calibrations_differ() -> None:
    def wires(time_s: float) -> Interconnect:
        return Interconnect(backend="gloo", collectives={"exchange 2 float32 64": CollectiveRecord(time_s=time_s)})

    profile = Profile(name="test", device=Device(kind="cpu", name="cpu", memory_bytes=1))
    twice = merged(merged(profile, "gloo", wires(1.0)), "gloo", wires(2.0)).interconnects["gloo"]
    assert twice.rerun_spread is None
    assert twice.segments["exchange 2"][0].alpha_s == 2.0
