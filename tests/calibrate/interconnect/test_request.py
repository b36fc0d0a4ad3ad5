"""Measuring an interconnect, end to end over gloo on two ranks. No test asserts more of a time than its sign."""

from __future__ import annotations

import pytest

from calibrate.interconnect.request import Measured, Request, measure
from perfmodel.cost.piecewise import fit_curves
from perfmodel.hardware.interconnect import CollectiveRecord, collective_key


@pytest.fixture(scope="module")
def gloo() -> Measured:
    exact = (("all_reduce", "float32", 12344, 2),)
    found = measure(Request("gloo", 2, "cpu", 60.0, exact, most_bytes=4096), timeout_s=180)
    assert found is not None
    return found


def test_every_kind_is_measured_over_the_ladder_and_the_exact_sizes(gloo) -> None:
    found, stages_s = gloo.interconnect, gloo.stages_s
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
    keys = {collective_key(kind, 2, "float32", size) for kind in kinds for size in (1024, 2048, 4096)}
    assert set(found.collectives) == keys | {"all_reduce 2 float32 12344"}
    assert found.collectives["all_reduce 2 float32 12344"].origin == "scenario"
    assert all(record.time_s and record.samples > 1 for record in found.collectives.values())
    assert set(found.segments) == {f"{kind} 2" for kind in kinds}
    assert set(stages_s) == {"group of 2", "calls"}


def test_host_calls_are_measured(gloo) -> None:
    found = gloo.interconnect
    ddp = {"ddp forward", "ddp parameter", "ddp bucket"}
    sharded = {f"fsdp {what} {each}" for what in ("forward", "gather", "reduce") for each in ("group", "parameter")}
    loops = ("clip", "zero_grad", "optimizer adamw foreach", "optimizer adamw fused", "optimizer sgd-momentum for-loop")
    over_dtensors = {f"dtensor {loop}{each}" for loop in loops for each in ("", " parameter")}
    assert {"reference", "all_reduce", "all_reduce async", "wait", *ddp, *sharded, *over_dtensors} <= set(found.host)
    assert "dtensor optimizer sgd fused" not in found.host  # torch has no rule for it
    assert sum(found.host[name].time_s for name in sharded) > 0
    assert found.host["dtensor optimizer adamw for-loop parameter"].time_s > 0
    assert all(call.time_s >= 0 for call in found.host.values())
    assert (found.backend, found.nodes, found.contention) == ("gloo", 1, {})


def test_curves_leave_out_scenarios_sizes_and_failures() -> None:
    records = {
        "all_reduce 2 float32 1024": CollectiveRecord(time_s=1.0),
        "all_reduce 2 float32 1000": CollectiveRecord(time_s=9.0, origin="scenario"),
        "all_reduce 2 float32 2048": CollectiveRecord(error="out of memory"),
    }
    ((only,),) = fit_curves(records).values()
    assert (only.points, only.alpha_s) == (1, 1.0)
