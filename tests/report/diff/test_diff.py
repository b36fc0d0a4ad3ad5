"""A prediction against traces: its own, and one that differs in known ways."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perfmodel.errors import PerfModelError
from perfmodel.files.kinds import PREDICTED_BY
from perfmodel.hardware.measurement import load_measurement
from perfmodel.hardware.profile import find_profile, load_profile
from perfmodel.prediction.predict import predict
from perfmodel.prediction.prediction import Prediction
from perfmodel.report.diff.diff import CONCURRENT, DiffRow, diff_with_trace
from perfmodel.report.diff.text import diff_report
from perfmodel.report.text.prediction import rendered
from perfmodel.report.traces.chrome import chrome_trace, save_chrome_trace
from perfmodel.scenario.yaml_file import load_question, parse_scenario
from perfmodel.simulate.timeline import SideKernel
from perfmodel.units import US
from tests.report.pipelines import pipeline
from tests.report.synthetic import prediction

WHOLE = """\
predicted 38 us, in the trace 38 us: +0 ns, +0.0 %

by class of kernel
              predicted  trace  difference  of step  matched  unmatched
gemm              30 us  30 us       +0 ns  +0.00 %        3
optimizer          5 us   5 us       +0 ns  +0.00 %        1
pointwise          2 us   2 us       +0 ns  +0.00 %        1
device waits       1 us   1 us       +0 ns  +0.00 %

by operator
               predicted  trace  difference  of step  matched  unmatched
_foreach_add_       5 us   5 us       +0 ns  +0.00 %        1
add                 2 us   2 us       +0 ns  +0.00 %        1
mm                 30 us  30 us       +0 ns  +0.00 %        3
device waits        1 us   1 us       +0 ns  +0.00 %
"""


def row(name: str, counts: tuple[int, int, int], predicted_us: float, measured_us: float) -> DiffRow:
    seconds = [pytest.approx(value * 1e-6) for value in (predicted_us, measured_us)]
    return DiffRow(name, *counts, *seconds)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_a_prediction_agrees_with_its_own_trace(kind: str, tmp_path: Path) -> None:
    save_chrome_trace(prediction(kind), tmp_path / "t.json")
    diff = diff_with_trace(prediction(kind), tmp_path / "t.json")
    assert diff.kinds == (
        row("gemm", (3, 0, 0), 30, 30),
        row("optimizer", (1, 0, 0), 5, 5),
        row("pointwise", (1, 0, 0), 2, 2),
        row("device waits", (0, 0, 0), 1, 1),
    )


def recorded(shown: Prediction) -> dict[str, Any]:
    """The prediction's trace without what only a prediction's says: how long the step is beyond its last kernel."""
    trace = chrome_trace(shown)
    del trace["otherData"]
    return trace


def test_what_differs_is_named(tmp_path: Path) -> None:
    trace = recorded(prediction())
    for event in trace["traceEvents"]:
        number = event.get("args", {}).get("External id", 0)
        if event.get("cat") == "kernel":
            event["dur"] += 4 * (number == 3)  # the first mm of backward takes longer
            event["ts"] += 4 * (number > 3)
        if event.get("cat") == "cpu_op" and number == 2:
            event["name"] = "aten::sub"  # another operator in place of the add
    path = tmp_path / "t.json"
    path.write_text(json.dumps(trace))
    diff = diff_with_trace(prediction(), path)
    assert diff.kinds == (
        row("gemm", (3, 0, 0), 30, 34),
        row("pointwise", (0, 1, 0), 2, 0),
        row("sub", (0, 0, 1), 0, 2),
        row("optimizer", (1, 0, 0), 5, 5),
        row("device waits", (0, 0, 0), 1, 0),
    )
    for rows in (diff.kinds, diff.operators):
        assert sum(part.difference_s for part in rows) == pytest.approx(diff.difference_s)


def test_a_busy_device_waits_for_nothing(tmp_path: Path) -> None:
    """What rounding leaves, less than a trace can say, is no waiting."""
    timeline = prediction().timeline
    ends_s = np.append(timeline.end_s[:-1], 42e-6)
    busy = replace(prediction(), timeline=replace(timeline, end_s=ends_s, step_time_s=38e-6 + 0.4e-9))
    save_chrome_trace(busy, tmp_path / "t.json")
    waiting = diff_with_trace(busy, tmp_path / "t.json").kinds[-1]
    assert (waiting.predicted_s, waiting.measured_s) == (0.0, 0.0)


def test_text(tmp_path: Path) -> None:
    save_chrome_trace(prediction(), tmp_path / "t.json")
    assert rendered(diff_report(diff_with_trace(prediction(), tmp_path / "t.json"))) == WHOLE


@pytest.mark.parametrize(("kind", "slowed"), [("cuda", "the host"), ("cpu", "every operator on a CPU")])
def test_only_a_profiler_slows_the_step(kind: str, slowed: str, tmp_path: Path) -> None:
    trace, path = chrome_trace(prediction(kind)), tmp_path / "t.json"
    for last in ("device waits", f"The profiler slows {slowed}"):
        path.write_text(json.dumps(trace))
        lines = rendered(diff_report(diff_with_trace(prediction(kind), path))).splitlines()
        assert lines[-1].startswith(last)
        trace.pop(PREDICTED_BY, None)


def test_unmatched_calls_are_said(tmp_path: Path) -> None:
    trace = recorded(prediction())
    for event in trace["traceEvents"]:
        if event.get("cat") == "cpu_op" and event["args"]["External id"] == 2:
            event["name"] = "aten::mm"
    (tmp_path / "t.json").write_text(json.dumps(trace))
    lines = rendered(diff_report(diff_with_trace(prediction(), tmp_path / "t.json"))).splitlines()
    assert "gemm              30 us  32 us       -2 us  -5.41 %        3  1 in the trace" in lines
    assert "pointwise          2 us   0 ns       +2 us  +5.41 %           1 predicted" in lines


def test_a_cpu_is_told_apart(tmp_path: Path) -> None:
    save_chrome_trace(prediction("cpu"), tmp_path / "t.json")
    diff = diff_with_trace(prediction("cpu"), tmp_path / "t.json")
    assert not diff.on_device
    assert [part.matched for part in diff.kinds] == [3, 1, 1, 0]


@pytest.mark.parametrize(("rank", "busy_us", "measured_us"), [(0, 15, 24), (1, 16, 18)])
def test_a_pipeline_is_compared_rank_by_rank(rank: int, busy_us: float, measured_us: float, tmp_path: Path) -> None:
    trace = recorded(pipeline())
    trace["distributedInfo"]["rank"] = rank
    path = tmp_path / "t.json"
    path.write_text(json.dumps(trace))
    diff = diff_with_trace(pipeline(), path)
    calls = {0: 7, 1: 5}[rank]
    assert diff.rank == rank
    # the step is measured from the first operator to the end of the last; messages between them are in no class
    assert diff.measured_step_s * 1e6 == pytest.approx(measured_us)
    assert diff.kinds == (
        row("gemm", (calls, 0, 0), busy_us, busy_us),
        row("device waits, or communicates alone", (0, 0, 0), 25 - busy_us, measured_us - busy_us),
    )
    assert rendered(diff_report(diff)).startswith(f"rank {rank}: predicted 25 us, in the trace {measured_us} us: ")


@pytest.mark.parametrize(("info", "got"), [({}, "none"), ({"rank": 2}, "2")])
def test_a_trace_of_no_rank_of_the_pipeline_is_refused(info: dict[str, int], got: str, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps(chrome_trace(prediction()) | {"distributedInfo": info}))
    with pytest.raises(PerfModelError) as error:
        diff_with_trace(pipeline(), path)
    assert str(error.value) == (
        f"{path}: a trace of a pipeline must name its rank, from 0 to 1, under distributedInfo (got {got}). Record one "
        "while torch.distributed is in use."
    )


def with_a_copy_stream() -> Prediction:
    """The add also runs twice on stream 2, from 15 to 19 and from 30 to 34, launched with the add and with the optimizer."""
    shown = prediction()
    times_us = ((5, 6, 15, 19), (12, 13, 30, 34))
    side = tuple(SideKernel(1, 1, 2, *(each * US for each in times)) for times in times_us)
    return replace(shown, timeline=replace(shown.timeline, side=side))


def test_operators_of_other_streams_are_aligned_as_they_are_launched(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    trace = recorded(with_a_copy_stream())
    for event in trace["traceEvents"]:
        if event.get("cat") == "kernel" and event["tid"] == 9:
            event["ts"] += 2  # past the start of an operator of the compute stream
    path.write_text(json.dumps(trace))
    diff = diff_with_trace(with_a_copy_stream(), path)
    assert diff.kinds == (
        row("gemm", (3, 0, 0), 30, 30),
        row("optimizer", (1, 0, 0), 5, 5),
        row("pointwise", (3, 0, 0), 10, 10),
        row(CONCURRENT, (0, 0, 0), -8, -8),
        row("device waits", (0, 0, 0), 1, 0),
    )
    assert sum(part.difference_s for part in diff.kinds) == pytest.approx(diff.difference_s)


SHIPPED = [
    "gpt2-batch1",
    "gpt-medium-ddp-host-memory",
    "gpt2.7b-naive",
    "gpt2.7b-flat",
    "gpt2.7b-overlap",
    "gpt2.7b-zero1",
    "gpt2.7b-zero3",
    "gpt2.7b-1f1b",
    "resnet50-channels-last",
]
MEASURED = [
    "four-gpu-node-ranks/gpt-medium-amp-accumulation4-ddp4",
    "two-gpu-nodes/gpt-large-fp32-nvlink2-zero1-scatter",
    "second-two-gpu-node/llama-1b-mixed-bf16-host2-zero2",
    "second-two-gpu-node/gpt-large-fp32-accumulation4-nvlink2-zero3",
    "second-two-gpu-node/gpt-medium-mixed-offload-nvlink2-zero3",
    "fourth-four-gpu-node/gpt-large-fp32-host2-gpipe-m8",
    "fourth-four-gpu-node/gpt-large-fp32-nvlink2-interleaved-1f1b-m4",
    "fourth-four-gpu-node/gpt-large-fp32-nvlink2-looped-bfs-m8",
    "fourth-four-gpu-node/gpt-large-fp32-nvlink2-interleaved-zero-bubble-m8",
    "fourth-four-gpu-node/gpt-large-fp32-nvlink2-zbv-zero-bubble-m8",
    "fourth-four-gpu-node/gpt-large-fp32-nvlink2-dualpipev-m8",
    "fifth-four-gpu-node/gpt-large-fp32-nvlink4-dp2-1f1b-m8",
]


def _shipped(name: str) -> Prediction:
    return predict(*load_question(Path(f"scenarios/{name}.yaml"), (), None))


def _measured(name: str) -> Prediction:
    asked = load_measurement(Path(f"results/{name}.json")).scenario
    if name.endswith("-m8"):  # half as many micro-batches, of the same size, show as much
        asked["batch"]["size"] //= 2
        asked["parallelism"]["pp"]["micro_batches"] //= 2
    scenario = parse_scenario(asked, name)
    return predict(scenario, load_profile(find_profile(scenario.hardware.profile)))


@pytest.mark.parametrize(
    ("predicted", "name"), [*((_shipped, name) for name in SHIPPED), *((_measured, name) for name in MEASURED)]
)
def test_a_prediction_differs_nowhere_from_its_own_trace(
    predicted: Callable[[str], Prediction], name: str, tmp_path: Path
) -> None:
    """Of every strategy and every schedule: each operator is matched, and each difference is nothing at all."""
    shown, path = predicted(name), tmp_path / "t.json"
    trace = chrome_trace(shown)
    for rank in {0, len(shown.by_rank) - 1}:
        trace["distributedInfo"]["rank"] = rank
        path.write_text(json.dumps(trace))
        diff = diff_with_trace(shown, path)
        assert diff.measured_step_s == diff.predicted_step_s == shown.step_time_s
        for each in (*diff.kinds, *diff.operators):
            assert (each.name, each.only_predicted, each.only_measured, each.difference_s) == (each.name, 0, 0, 0.0)
        launches = len(shown.by_rank[rank].timeline.launches)
        assert sum(each.matched for each in diff.operators) == sum(each.matched for each in diff.kinds) == launches > 0
