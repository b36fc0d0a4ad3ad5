"""A prediction against traces: its own, and one that differs in known ways."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perfmodel.errors import PerfModelError
from perfmodel.report.chrome_trace import chrome_trace, save_chrome_trace
from perfmodel.report.diff import DiffRow, diff_with_trace
from perfmodel.report.diff_text import diff_report
from perfmodel.report.text import rendered
from tests.report.pipelines import pipeline
from tests.report.synthetic import prediction

WHOLE = """\
predicted 38 us, in the trace 37 us: +1 us, +2.7 %

by class of kernel
              predicted  trace  difference  of step  matched  unmatched
gemm              30 us  30 us       +0 ns  +0.00 %        3
optimizer          5 us   5 us       +0 ns  +0.00 %        1
pointwise          2 us   2 us       +0 ns  +0.00 %        1
device waits       1 us   0 ns       +1 us  +2.70 %

by operator
               predicted  trace  difference  of step  matched  unmatched
_foreach_add_       5 us   5 us       +0 ns  +0.00 %        1
add                 2 us   2 us       +0 ns  +0.00 %        1
mm                 30 us  30 us       +0 ns  +0.00 %        3
device waits        1 us   0 ns       +1 us  +2.70 %

The profiler slows the host: waiting times in the trace are too long, kernel times hold.
"""


def row(name: str, counts: tuple[int, int, int], predicted_us: float, measured_us: float) -> DiffRow:
    seconds = [pytest.approx(value * 1e-6) for value in (predicted_us, measured_us)]
    return DiffRow(name, *counts, *seconds)  # type: ignore[arg-type]


def test_a_prediction_agrees_with_its_own_trace(tmp_path: Path) -> None:
    save_chrome_trace(prediction(), tmp_path / "t.json")
    diff = diff_with_trace(prediction(), tmp_path / "t.json")
    # the trace ends with its last kernel, 1 us before the next step begins
    assert diff.kinds == (
        row("gemm", (3, 0, 0), 30, 30),
        row("optimizer", (1, 0, 0), 5, 5),
        row("pointwise", (1, 0, 0), 2, 2),
        row("device waits", (0, 0, 0), 1, 0),
    )


def test_what_differs_is_named(tmp_path: Path) -> None:
    trace = chrome_trace(prediction())
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


def test_text(tmp_path: Path) -> None:
    save_chrome_trace(prediction(), tmp_path / "t.json")
    assert rendered(diff_report(diff_with_trace(prediction(), tmp_path / "t.json"))) == WHOLE


def test_unmatched_calls_are_said(tmp_path: Path) -> None:
    trace = chrome_trace(prediction())
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
    assert rendered(diff_report(diff)).splitlines()[-1].startswith("The profiler slows every operator on a CPU")


@pytest.mark.parametrize(("rank", "busy_us", "measured_us"), [(0, 15, 24), (1, 16, 18)])
def test_a_pipeline_is_compared_rank_by_rank(rank: int, busy_us: float, measured_us: float, tmp_path: Path) -> None:
    trace = chrome_trace(pipeline())
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
