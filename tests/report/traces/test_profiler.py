"""Reading torch.profiler's traces: which operator a kernel counts for, and where a step begins and ends."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from perfmodel.errors import PerfModelError
from perfmodel.report.traces import profiler as profiler_trace
from perfmodel.report.traces.profiler import RecordedOperator, load_step
from perfmodel.units import MIB

Event = dict[str, Any]


def slice_of(category: str, name: str, start: float, duration: float, thread: int = 1, **args: int) -> Event:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 1,
        "tid": thread,
        "ts": start,
        "dur": duration,
        "args": args,
    }


def launch(start: float, correlation: int, thread: int = 1) -> Event:
    return slice_of("cuda_runtime", "cudaLaunchKernel", start, 0.5, thread, correlation=correlation)


def kernel(start: float, duration: float, correlation: int) -> Event:
    return slice_of("kernel", "void some_kernel<float>(float*)", start, duration, 7, correlation=correlation)


def written(folder: Path, events: list[Event]) -> Path:
    path = folder / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def operator(name: str, start_us: float, busy_us: float, kernels: int) -> RecordedOperator:
    return RecordedOperator(name, pytest.approx(start_us * 1e-6), pytest.approx(busy_us * 1e-6), kernels)  # type: ignore[arg-type]


def test_kernels_count_for_the_outermost_known_call(tmp_path: Path) -> None:
    events = [
        slice_of("cpu_op", "aten::linear", 0, 10),
        slice_of("cpu_op", "aten::mm", 2, 6),
        launch(3, 1),
        launch(5, 2),
        slice_of("cpu_op", "aten::clone", 20, 10),
        slice_of("cpu_op", "aten::copy_", 22, 5),
        launch(23, 3),
        kernel(100, 10, 1),
        kernel(110, 5, 2),
        kernel(120, 4, 3),
    ]
    step = load_step(written(tmp_path, events), {"mm", "clone", "copy_"})
    assert step.operators == (operator("mm", 100, 15, 2), operator("clone", 120, 4, 1))
    assert (step.busy_s, step.step_s) == (pytest.approx(19e-6), pytest.approx(24e-6))


def test_unknown_calls_go_by_the_innermost_name_and_orphans_by_the_kernels(tmp_path: Path) -> None:
    events = [
        slice_of("cpu_op", "aten::outer", 0, 10),
        slice_of("cpu_op", "aten::inner", 1, 5),
        launch(2, 1),
        kernel(50, 3, 1),
        slice_of("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 60, 2, 7, correlation=9),
    ]
    step = load_step(written(tmp_path, events), {"mm"})
    assert step.operators == (operator("inner", 50, 3, 1), operator("Memcpy DtoH (Device -> Pageable)", 60, 2, 1))


def test_calls_of_another_thread_do_not_own_a_launch(tmp_path: Path) -> None:
    events = [
        slice_of("cpu_op", "aten::mm", 0, 100, thread=1),
        slice_of("cpu_op", "aten::add", 10, 5, thread=2),
        launch(11, 1, thread=2),
        kernel(20, 3, 1),
    ]
    assert load_step(written(tmp_path, events), {"mm", "add"}).operators == (operator("add", 20, 3, 1),)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"ts": "soon"}, "ts must be a number up to 1e+18 (got 'soon')"),
        ({"ts": float("nan")}, "ts must be a number up to 1e+18 (got nan)"),
        ({"ts": [1]}, "ts must be a number"),
        ({"ts": 10**400}, "ts must be a number"),
        ({"dur": None}, "dur must be a number up to 1e+18 (got None)"),
        ({"dur": float("inf")}, "dur must be a number"),
        ({"dur": -1}, "dur must be at least 0 (got -1)"),
        ({"args": []}, "args must be a mapping (got [])"),
        ({"args": None}, "args must be a mapping (got None)"),
        ({"args": {"correlation": [1]}}, "args.correlation must be text or a whole number (got [1])"),
        ({"pid": {}}, "pid must be text or a whole number (got {})"),
        ({"tid": [7]}, "tid must be text or a whole number (got [7])"),
        ({"name": 1.5}, "name must be text or a whole number (got 1.5)"),
    ],
)
@pytest.mark.parametrize("position", [0, 1, 2])
def test_odd_events_are_refused_with_their_place(tmp_path: Path, position: int, changes: Event, rule: str) -> None:
    events = [slice_of("cpu_op", "aten::mm", 0, 10), launch(2, 1), kernel(20, 3, 1)]
    events[position] |= changes
    path = written(tmp_path, events)
    with pytest.raises(PerfModelError) as raised:
        load_step(path, {"mm"})
    assert str(raised.value).startswith(f"{path}: traceEvents[{position}].{rule}")


def test_events_that_are_not_used_may_be_odd(tmp_path: Path) -> None:
    odd: list[Any] = [3, None, [], {"ph": "X"}, {"ph": "X", "cat": [], "ts": "", "dur": ""}]
    odd += [slice_of("python_function", "f", float("nan"), -1), {"ph": ["X"], "cat": "kernel", "ts": 1, "dur": 1}]
    events = [*odd, slice_of("cpu_op", "aten::mm", 0, 10), launch(2, 1), kernel(20, 3, 1)]
    assert load_step(written(tmp_path, events), {"mm"}).operators == (operator("mm", 20, 3, 1),)


@pytest.mark.parametrize(
    ("events", "rule"),
    [
        ([kernel(20, 0, 1)], "must hold a step that takes time (got 0 s)"),
        ([slice_of("cpu_op", "aten::mm", 0, 0)], "must hold a step that takes time (got 0 s)"),
    ],
)
def test_a_step_takes_time(tmp_path: Path, events: list[Event], rule: str) -> None:
    with pytest.raises(PerfModelError) as raised:
        load_step(written(tmp_path, events), {"mm"})
    assert rule in str(raised.value)


def test_last_step_that_another_follows(tmp_path: Path) -> None:
    events = [slice_of("cpu_op", "aten::add", 0.0, 1), launch(0.2, 99), kernel(5, 1, 99)]
    for number, start in enumerate((10.0, 20.0, 30.0)):
        events += [
            slice_of("user_annotation", f"ProfilerStep#{number}", start, 10),
            slice_of("cpu_op", "aten::mm", start + 1, 2),
            launch(start + 1.5, number + 1),
            kernel(100 + 50 * number, 10 + number, number + 1),
        ]
    step = load_step(written(tmp_path, events), {"mm"})
    assert step.operators == (operator("mm", 150, 11, 1),)
    assert step.step_s == pytest.approx(50e-6)


def test_without_a_device_the_calls_themselves(tmp_path: Path) -> None:
    events = [
        slice_of("cpu_op", "aten::linear", 0, 10),
        slice_of("cpu_op", "aten::mm", 2, 6),
        slice_of("cpu_op", "aten::view", 12, 1),
        slice_of("cpu_op", "aten::add", 15, 3),
    ]
    step = load_step(written(tmp_path, events), {"mm", "add"})
    assert step.operators == (operator("mm", 2, 6, 1), operator("add", 15, 3, 1))
    assert step.step_s == pytest.approx(16e-6)


def test_what_is_too_large_is_to_be_recorded_smaller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by torch.profiler's export_chrome_trace, which wrote it."""
    monkeypatch.setattr(profiler_trace, "LARGEST_TRACE_BYTES", MIB)
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(b" " * (MIB + 1)))
    with pytest.raises(PerfModelError, match=r"at most 1 MiB \(got more\)\. Record fewer steps, without with_stack"):
        load_step(path, {"mm"})


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "a profiler trace must be whole JSON"),
        (b'{"traceEvents": [', "a profiler trace must be whole JSON"),
        (gzip.compress(b"{}", mtime=0)[:-9], "a profiler trace must be whole gzip"),
        (b"\xff\xfe\x00", "a profiler trace must be whole JSON"),
        (b"3", r"a profiler trace must hold a list traceEvents \(got none\)"),
        (b"{}", r"a profiler trace must hold a list traceEvents \(got none\)"),
        (b"[]", r"a profiler trace must hold operators that ran \(got none\)"),
    ],
)
def test_refused(tmp_path: Path, content: bytes, sentence: str) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(content)
    with pytest.raises(PerfModelError, match=sentence):
        load_step(path, {"mm"})


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(PerfModelError, match=r"must be a readable file \(No such file or directory\)"):
        load_step(tmp_path / "none.json", {"mm"})


def test_a_trace_that_torch_wrote(tmp_path: Path) -> None:
    import torch

    path = tmp_path / "trace.json"
    layer, x = torch.nn.Linear(8, 8), torch.ones(4, 8)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for number in range(3):
            with torch.profiler.record_function(f"ProfilerStep#{number}"):
                layer(x).relu().sum().backward()
    profiler.export_chrome_trace(str(path))
    step = load_step(path, {"addmm", "relu", "sum", "threshold_backward", "mm"})
    names = [found.name for found in step.operators]
    assert names == ["addmm", "relu", "sum", "threshold_backward", "mm", "sum"]
    assert 0 < step.busy_s < step.step_s


def test_of_several_processes_the_rank_s_own_is_read(tmp_path: Path) -> None:
    ranks = [
        [slice_of("cpu_op", name, 0, 10), launch(1, number), kernel(start, 5, number)]
        for number, name, start in ((1, "aten::mm", 20), (2, "aten::add", 90))
    ]
    events = [event | {"pid": rank} for rank, own in enumerate(ranks) for event in own]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events, "distributedInfo": {"rank": 1}}))
    step = load_step(path, {"mm", "add"})
    assert (step.rank, step.operators) == (1, (operator("add", 90, 5, 1),))
    path.write_text(json.dumps({"traceEvents": events, "distributedInfo": {"rank": 2}}))
    with pytest.raises(PerfModelError, match="must hold operators that ran"):
        load_step(path, {"mm", "add"})


def test_nccl_s_kernels_are_no_operators(tmp_path: Path) -> None:
    nccl = slice_of("kernel", "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 0, 500, 20, correlation=9)
    events = [slice_of("cpu_op", "aten::mm", 0, 10), launch(1, 1), kernel(20, 5, 1)]
    assert not load_step(written(tmp_path, events), {"mm"}).communicates
    step = load_step(written(tmp_path, [*events, nccl]), {"mm"})
    assert (step.operators, step.communicates, step.rank) == ((operator("mm", 20, 5, 1),), True, None)
    assert step.step_s == pytest.approx(5e-6)


def test_calls_that_touch_do_not_hold_each_other(tmp_path: Path) -> None:
    """0.1 + 0.2 is more than 0.3."""
    events = [
        slice_of("cpu_op", "aten::mm", 0.1, 0.2),
        slice_of("cuda_runtime", "cudaLaunchKernel", 0.1, 0.2, correlation=1),
        slice_of("cpu_op", "aten::add", 0.3, 0.2),
        slice_of("cuda_runtime", "cudaLaunchKernel", 0.3, 0.2, correlation=2),
        kernel(5, 1, 1),
        kernel(6, 1, 2),
    ]
    step = load_step(written(tmp_path, events), {"mm", "add"})
    assert [each.name for each in step.operators] == ["mm", "add"]
