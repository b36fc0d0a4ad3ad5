"""The exported trace: its events in full, as torch.profiler would write them."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perfmodel.errors import PerfModelError
from perfmodel.report.traces.chrome import CLOCKS, chrome_trace, host_calls, save_chrome_trace
from perfmodel.simulate.timeline import SideKernel
from perfmodel.trace.operation import Operation
from perfmodel.units import US
from tests.report.pipelines import pipeline
from tests.report.synthetic import prediction


def rows(trace: dict[str, Any], category: str) -> list[tuple[Any, ...]]:
    """(name, thread, start, duration) of every slice of a category, microseconds."""
    events = [event for event in trace["traceEvents"] if event.get("cat") == category and event["ph"] == "X"]
    return [(event["name"], event["tid"], event["ts"], event["dur"]) for event in events]


def test_every_slice() -> None:
    trace = chrome_trace(prediction())
    host = [("mm", 0, 3), ("add", 3, 3), ("mm", 6, 3), ("mm", 9, 3), ("_foreach_add_", 12, 3)]
    device = [("mm", 4, 10), ("add", 14, 2), ("mm", 16, 10), ("mm", 26, 10), ("_foreach_add_", 36, 5)]
    assert rows(trace, "cpu_op") == [(f"aten::{name}", 1, start, duration) for name, start, duration in host]
    assert rows(trace, "cuda_runtime") == [("cudaLaunchKernel", 1, start, duration) for _, start, duration in host]
    assert rows(trace, "kernel") == [(f"aten::{name}", 7, start, duration) for name, start, duration in device]
    assert rows(trace, "gpu_user_annotation") == [
        ("forward 0", 3, 4, 12),
        ("backward 0", 3, 16, 20),
        ("optimizer", 3, 36, 6),
    ]
    assert rows(trace, "user_annotation") == [
        ("ProfilerStep#0", 1, 0, 16),
        ("forward 0", 2, 0, 6),
        ("backward 0", 2, 6, 6),
        ("optimizer", 2, 12, 4),
        ("root (GPT)", 1, 0, 3),
        ("head (Linear)", 1, 3, 3),
        ("head (Linear)", 1, 6, 3),
        ("root (GPT)", 1, 9, 3),
    ]


def test_launches_and_kernels_are_joined() -> None:
    events = chrome_trace(prediction())["traceEvents"]
    launches = {event["args"]["correlation"]: event for event in events if event.get("cat") == "cuda_runtime"}
    kernels = {event["args"]["correlation"]: event for event in events if event.get("cat") == "kernel"}
    tails = {event["id"]: event for event in events if event["ph"] == "s"}
    heads = {event["id"]: event for event in events if event["ph"] == "f"}
    assert set(launches) == set(kernels) == set(tails) == set(heads) == {1, 2, 3, 4, 5}
    for number, kernel in kernels.items():
        assert (tails[number]["tid"], tails[number]["ts"]) == (launches[number]["tid"], launches[number]["ts"])
        assert (heads[number]["tid"], heads[number]["ts"]) == (kernel["tid"], kernel["ts"])


def test_a_kernel_of_another_stream_has_its_own_row() -> None:
    shown = prediction()
    side = tuple(
        SideKernel(operation, 1, 2, start * US, (start + 3) * US, 20 * US, 27 * US)
        for operation, start in ((1, 15), (3, 18))
    )
    program = replace(shown.program, extra_operations=(Operation("aten.split_with_sizes_copy.out"),))
    kernels = (*shown.kernels, replace(shown.kernels[1], key="aten.split_with_sizes_copy.out()"))
    trace = chrome_trace(replace(shown, program=program, kernels=kernels, timeline=replace(shown.timeline, side=side)))
    assert rows(trace, "cpu_op")[5:] == [("aten::add", 1, 15, 3), ("aten::split_with_sizes_copy", 1, 18, 3)]
    assert rows(trace, "kernel")[5:] == [("aten::add", 9, 20, 7), ("aten::split_with_sizes_copy", 9, 20, 7)]
    names = {each["tid"]: each["args"].get("name") for each in trace["traceEvents"] if each["name"] == "thread_name"}
    assert names[9] == "stream 9"


def test_a_kernel_tells_where_its_time_comes_from() -> None:
    kernels = [event for event in chrome_trace(prediction())["traceEvents"] if event.get("cat") == "kernel"]
    assert kernels[1]["args"] == {
        "device": 0,
        "stream": 7,
        "External id": 2,
        "correlation": 2,
        "key": "aten.add.Tensor(float32[8,8], float32[8,8])",
        "kind": "pointwise",
        "source": "curve",
        "flops": 64.0,
        "bytes": 768.0,
        "kernels": 1,
    }


def test_one_process_a_rank() -> None:
    trace = chrome_trace(prediction(), rank=3)
    assert {event["pid"] for event in trace["traceEvents"]} == {3}
    assert trace["distributedInfo"]["rank"] == 3


def test_on_a_cpu_operators_run_on_the_host() -> None:
    trace = chrome_trace(prediction("cpu"))
    names = [(name, start, duration) for name, _, start, duration in rows(trace, "cpu_op")]
    assert names[:2] == [("aten::mm", 4, 10), ("aten::add", 14, 2)]
    assert rows(trace, "kernel") == rows(trace, "cuda_runtime") == []


def test_files(tmp_path: Path) -> None:
    plain, packed = tmp_path / "t.json", tmp_path / "t.json.gz"
    save_chrome_trace(prediction(), plain)
    save_chrome_trace(prediction(), packed)
    assert (
        json.loads(plain.read_text()) == json.loads(gzip.decompress(packed.read_bytes())) == chrome_trace(prediction())
    )
    with pytest.raises(PerfModelError, match=r"a trace must end in \.json or \.json\.gz \(got 't\.txt'\)"):
        save_chrome_trace(prediction(), tmp_path / "t.txt")


def test_all_ranks_of_a_pipeline_on_one_clock() -> None:
    trace = chrome_trace(pipeline())
    events = trace["traceEvents"]
    computed = [each for each in events if each.get("cat") == "kernel" and each["tid"] == 7]
    assert [(each["pid"], each["ts"]) for each in computed if each["args"]["External id"] in (1, 8)] == [(0, 4), (1, 8)]
    assert len({each["id"] for each in events if each["ph"] == "s"}) == len(computed) == 12
    names = {each["args"]["name"] for each in events if each["name"] == "process_name"}
    assert names == {"rank 0: Toy GPU", "rank 1: Toy GPU"}
    assert [each["id"] for each in trace["deviceProperties"]] == [0, 1]
    assert trace["otherData"] == {"step_time_s": pytest.approx(25e-6), "clocks": CLOCKS}
    assert chrome_trace(prediction())["otherData"] == {"step_time_s": pytest.approx(38e-6)}


def test_messages_have_names() -> None:
    events = chrome_trace(pipeline())["traceEvents"]
    found = [each for each in events if each["name"] == "ncclDevKernel_SendRecv_float32"]
    assert [(each["pid"], each["ts"], each["dur"], each["args"]["Messages"]) for each in found] == [
        (0, 9, 1, ["send F0 0"]),
        (0, 10, 5, ["receive B0 0", "send F1 0"]),
        (1, 2, 5, ["receive F0 0"]),
        (1, 22, 2, ["send B0 0", "receive F1 0"]),
    ]


def test_messages_name_the_size_of_their_group() -> None:
    """Three ranks of a pipeline, of which two exchange messages: over the communicator of all, or their own."""
    known = pipeline(stages=3)
    among_two = tuple(
        replace(each, collectives=(each.collectives[0]._replace(group="pp 0-1"),)) for each in known.rank_programs
    )
    for shown, size in ((known, 3), (replace(known, rank_programs=among_two), 2)):
        sizes = [
            each["args"]["Group size"]
            for each in chrome_trace(shown)["traceEvents"]
            if "Messages" in each.get("args", {})
        ]
        assert sizes == [size] * 4


def test_calls_of_the_host_do_not_lie_within_each_other() -> None:
    """The first two calls take no time, or less than a trace can say, and the third begins with them."""
    column = np.array
    times = {
        "host_start_s": column([0.0, 0.0, 0.0, 9e-6, 12e-6]),
        "issue_s": column([0.0, 1e-10, 3e-6, 12e-6, 16e-6]),
    }
    calls = host_calls(replace(prediction().timeline, **times))
    assert [(each.begins_us, each.ends_us) for each in calls] == [
        (0, 0.001),
        (0.001, 0.002),
        (0.002, 3),
        (9, 12),
        (12, 16),
    ]
