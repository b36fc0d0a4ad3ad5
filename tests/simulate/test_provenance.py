"""Shares that add up, and what a profile is said to leave out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from perfmodel.cost.collectives import CollectiveCost
from perfmodel.cost.groups import Route
from perfmodel.hardware.interconnect import CallRecord, Coupling, Interconnect
from perfmodel.hardware.profile import Launch
from perfmodel.program.program import HOST, Collective, Edit, Inserted, Program
from perfmodel.simulate.provenance import collective_shares, communication_warnings, kernel_shares, kernel_warnings
from perfmodel.simulate.timeline import Communication
from tests.report.synthetic import prediction, profile, timeline

EXACT = CollectiveCost(1.0, 0.0, "exact", 0.0, 0.0)
FAR = CollectiveCost(3.0, 0.0, "extrapolated", 0.0, 0.0)
SIZE = Collective("all_reduce", "float32", 4, 4)
CALLS = {"all_reduce": CallRecord(time_s=1e-6)}
COUPLINGS = {"gemm_fp32": Coupling(compute_factor=1.1, communication_factor=1.1, tail_share=0.5)}
BYTES = {"4": 1}


def program(*collectives: Collective) -> Program:
    return replace(prediction().program, collectives=collectives)


def test_kernels_by_source() -> None:
    assert kernel_shares(prediction().kernels) == {
        "exact": pytest.approx(30 / 37),
        "curve": pytest.approx(2 / 37),
        "roofline": pytest.approx(5 / 37),
    }
    unstable = profile().model_copy(update={"unstable": (prediction().kernels[0].key,)})
    assert [warning.split(":")[0] for warning in kernel_warnings(prediction().kernels, unstable)] == [
        "14 % of the device time is from a roofline",
        "1 kernels of this step were measured unstable",
    ]


def test_collectives_by_their_time_alone_as_often_as_they_run() -> None:
    """One of 1 s three times, and one of 3 s that is slowed to 5."""
    ran = [Communication(number, 0, 1, 0.0, 0.0, end_s) for number, end_s in [(0, 1.0), (0, 1.0), (0, 1.0), (1, 5.0)]]
    found = collective_shares(replace(timeline(), communications=tuple(ran)), [EXACT, FAR])
    assert found == {"exact": 0.5, "curve": 0.0, "extrapolated": 0.5}
    assert collective_shares(timeline(), []) == {}


@pytest.mark.parametrize(
    ("known", "named"),
    [
        ({"host": CALLS, "couplings": COUPLINGS, "communicator_bytes": BYTES}, []),
        ({"host": {"reference": CALLS["all_reduce"]}, "couplings": COUPLINGS, "communicator_bytes": BYTES}, ["host call times"]),
        ({"host": CALLS, "communicator_bytes": BYTES}, ["couplings"]),
        ({"host": CALLS, "couplings": COUPLINGS}, ["communicator_bytes"]),
        ({}, ["host call times", "couplings", "communicator_bytes"]),
    ],
)  # fmt: skip
def test_what_an_interconnect_lacks_is_named_once(known: dict[str, object], named: list[str]) -> None:
    wires = Interconnect.model_validate({"backend": "nccl", **known})
    found = list(communication_warnings(program(SIZE), [EXACT], [Route("w", wires)], profile(), "w"))
    assert len(found) == bool(named)
    words = "".join(found)
    assert [name for name in ("host call times", "couplings", "communicator_bytes") if f"no {name} (" in words] == named
    assert list(communication_warnings(program(), [], [], profile(), "w")) == []


@pytest.mark.parametrize(("measured", "warns"), [({}, True), ({"fsdp forward group": CALLS["all_reduce"]}, False)])
def test_calls_of_fully_shard_that_were_not_measured_are_named(measured: dict[str, CallRecord], warns: bool) -> None:
    known = {"host": CALLS | measured, "couplings": COUPLINGS, "communicator_bytes": BYTES}
    wires = Interconnect.model_validate({"backend": "nccl", **known})
    calls = Edit(0, 0, (Inserted(HOST, call="fsdp forward group"),))
    sharded = replace(program(SIZE), edits=(calls,))
    waiting = Launch(waiting_gap_s=(0.0, 1e-6))
    told = profile().model_copy(update={"launch": waiting})
    found = list(communication_warnings(sharded, [EXACT], [Route("w", wires)], told, "w"))
    assert ["no times of fully_shard's hooks" in each for each in found] == [True] * warns
    (first, *others) = communication_warnings(sharded, [EXACT], [Route("w", wires)], profile(), "w")
    assert "no waiting_gap_s" in first
    assert others == found


def test_a_cpu_needs_neither_couplings_nor_memory() -> None:
    wires = Interconnect(backend="gloo", host=CALLS)
    assert list(communication_warnings(program(SIZE), [EXACT], [Route("w", wires)], profile("cpu"), "w")) == []
