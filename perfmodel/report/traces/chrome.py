"""A predicted step as a Chrome trace: opens in Perfetto, chrome://tracing and HolisticTraceAnalysis.

Written as torch.profiler writes one: a process a rank, a thread for the host, one for each stream; an operator call on
the host (``cpu_op``) launches (``cuda_runtime``) a kernel (``kernel``), and an arrow (``ac2g``) joins the two. A
pipeline's ranks are in one file, on the clock that they were simulated on (see :data:`CLOCKS`). Times are microseconds,
as the format wants; several kernels of one operator are one slice.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from perfmodel.errors import PerfModelError
from perfmodel.files.kinds import PREDICTED_BY, PREDICTED_TRACE
from perfmodel.files.writing import check_writable, write_atomically
from perfmodel.prediction.prediction import KernelUse, Prediction
from perfmodel.program.program import PIPELINE, Collective
from perfmodel.report.operators import profiler_name, use_by_operation
from perfmodel.scenario.scenario import Scenario
from perfmodel.simulate.timeline import PhaseSpan, SideKernel, Timeline
from perfmodel.units import DTYPE_BYTES, US

Event = dict[str, Any]

HOST_THREAD = 1
HOST_PHASES_THREAD = 2
DEVICE_PHASES_THREAD = 3
FIRST_STREAM_THREAD = 7  # torch numbers the default stream 7
STEP_TIME = "step_time_s"  # among otherData: the last kernel ends before the step does
CLOCKS = (  # how to read the trace of a pipeline
    "All ranks share one clock and show the same step, and messages synchronise their devices: times of devices can be "
    "compared between ranks. Nothing synchronises hosts, and by how much one leads another depends on how many steps "
    "were simulated: compare times of hosts within a rank only."
)


def save_chrome_trace(prediction: Prediction, path: Path, rank: int = 0) -> None:
    """Write the trace of one rank, or of a pipeline's all, to ``path``, compressed if it ends in ``.gz``.

    Raises
    ------
    PerfModelError
        If ``path`` does not end in .json or .json.gz, is there and no predicted trace, or cannot be written.
    """
    _check_name(path)
    text = json.dumps(chrome_trace(prediction, rank), separators=(",", ":"))
    write_atomically(
        path, gzip.compress(text.encode(), mtime=0) if path.name.endswith(".gz") else text, PREDICTED_TRACE
    )


def check_trace_path(path: Path) -> None:
    """Refuse now what :func:`save_chrome_trace` would refuse after the prediction.

    Raises
    ------
    PerfModelError
        If ``path`` does not end in .json or .json.gz, or no trace can be written there.
    """
    _check_name(path)
    check_writable(path, PREDICTED_TRACE)


def _check_name(path: Path) -> None:
    if not path.name.endswith((".json", ".json.gz")):
        raise PerfModelError(f"{path}: a trace must end in .json or .json.gz (got {path.name!r}). Rename it.")


def chrome_trace(prediction: Prediction, rank: int = 0) -> dict[str, Any]:
    """The trace as plain data."""
    ranks, launches = dict(enumerate(prediction.by_rank, start=rank)), 0
    events: list[Event] = []
    for number, each in ranks.items():
        events += _events(each, number, launches)
        launches += len(each.timeline.operation) + len(each.timeline.side)
    device = prediction.profile.device
    major, minor = device.compute_capability or (0, 0)
    return {
        PREDICTED_BY: "perfmodel",
        "schemaVersion": 1,
        "deviceProperties": [
            {
                "id": number,
                "name": device.name,
                "totalGlobalMem": device.memory_bytes,
                "computeMajor": major,
                "computeMinor": minor,
                "numSms": device.multiprocessors,
            }
            for number in ranks
        ],
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": prediction.scenario.hardware.gpus},
        "otherData": {
            STEP_TIME: prediction.step_time_s,
            **({"clocks": CLOCKS} if prediction.rank_timelines else {}),
        },
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": 0,
        "traceName": f"{prediction.scenario.name} predicted on {prediction.profile.name}",
        "traceEvents": events,
    }


def _events(prediction: Prediction, rank: int, launches: int) -> Iterator[Event]:
    """Make the events of one rank; ``launches`` is how many other ranks have before."""
    on_device = prediction.profile.device.kind == "cuda"
    yield from _names(prediction, rank, on_device)
    yield from _phases(prediction, rank, on_device)
    yield from _modules(prediction, rank, on_device)
    yield from _operators(prediction, rank, launches) if on_device else _operators_of_one_clock(prediction, rank)
    yield from _communications(prediction, rank)


def _names(prediction: Prediction, rank: int, on_device: bool) -> Iterator[Event]:
    threads = {HOST_THREAD: "host", HOST_PHASES_THREAD: "host phases"}
    if on_device:
        timeline = prediction.timeline
        other_streams = {*(each.stream for each in timeline.communications), *(each.stream for each in timeline.side)}
        streams = sorted({*timeline.stream.tolist(), *other_streams})
        threads[DEVICE_PHASES_THREAD] = "device phases"
        threads |= {FIRST_STREAM_THREAD + stream: f"stream {FIRST_STREAM_THREAD + stream}" for stream in streams}
    yield _metadata("process_name", rank, 0, name=f"rank {rank}: {prediction.profile.device.name}")
    yield _metadata("process_sort_index", rank, 0, sort_index=rank)
    for thread, name in threads.items():
        yield _metadata("thread_name", rank, thread, name=name)
        yield _metadata("thread_sort_index", rank, thread, sort_index=thread)


def _metadata(kind: str, rank: int, thread: int, **args: Any) -> Event:
    return {"ph": "M", "name": kind, "pid": rank, "tid": thread, "ts": 0, "args": args}


def _slice(category: str, name: str, rank: int, thread: int, start_s: float, end_s: float, **args: Any) -> Event:
    event = {"ph": "X", "cat": category, "name": name, "pid": rank, "tid": thread}
    start_us, duration_us = start_and_duration_us(start_s, end_s)
    return event | {"ts": start_us, "dur": duration_us, "args": args}


def start_and_duration_us(start_s: float, end_s: float) -> tuple[float, float]:
    """Return start and duration of a slice as the trace says them: in microseconds, to the nanosecond."""
    start_us = _microseconds(start_s)
    return start_us, round(_microseconds(end_s) - start_us, 3)


def _microseconds(seconds: float) -> float:
    """Round to the nanosecond, so that slices that touch still do."""
    return round(seconds / US, 3)


def _phases(prediction: Prediction, rank: int, on_device: bool) -> Iterator[Event]:
    timeline = prediction.timeline
    hosts = timeline.host_spans
    if hosts:
        yield _slice("user_annotation", "ProfilerStep#0", rank, HOST_THREAD, hosts[0].start_s, hosts[-1].end_s)
    for span in hosts:
        yield _slice("user_annotation", _phase_name(span), rank, HOST_PHASES_THREAD, span.start_s, span.end_s)
    for span in timeline.phases if on_device else ():
        yield _slice("gpu_user_annotation", _phase_name(span), rank, DEVICE_PHASES_THREAD, span.start_s, span.end_s)


def _phase_name(span: PhaseSpan) -> str:
    return span.phase if span.micro_batch < 0 else f"{span.phase} {span.micro_batch}"


def _modules(prediction: Prediction, rank: int, on_device: bool) -> Iterator[Event]:
    """The module each stretch of operators belongs to, as slices over them on the host's thread."""
    timeline, modules = prediction.timeline, prediction.program.trace.modules
    if not len(timeline.module):
        return
    begins, ends = (timeline.host_start_s, timeline.issue_s) if on_device else (timeline.start_s, timeline.end_s)
    same = (np.diff(timeline.module) == 0) & (np.diff(timeline.run) == 0)
    starts = np.concatenate([[0], np.flatnonzero(~same) + 1])
    stops = np.append(starts[1:], len(timeline.module))
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        module = int(timeline.module[start])
        if module >= 0:
            name, kind = modules[module]
            label = f"{name or 'root'} ({kind})"
            yield _slice("user_annotation", label, rank, HOST_THREAD, float(begins[start]), float(ends[stop - 1]))


def _operators(prediction: Prediction, rank: int, launches: int) -> Iterator[Event]:
    uses = use_by_operation(prediction)
    for correlation, (each, begins_us, ends_us) in enumerate(host_calls(prediction.timeline), start=launches + 1):
        thread, name = FIRST_STREAM_THREAD + each.stream, profiler_name(prediction.program.operations[each.operation])
        link = {"External id": correlation, "correlation": correlation}
        call = {"ph": "X", "pid": rank, "tid": HOST_THREAD, "ts": begins_us, "dur": round(ends_us - begins_us, 3)}
        yield {**call, "cat": "cpu_op", "name": name, "args": {"External id": correlation}}
        yield {**call, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "args": link}
        details = {"device": rank, "stream": thread, **link, **_details(uses[each.operation])}
        yield _slice("kernel", name, rank, thread, each.start_s, each.end_s, **details)
        arrow = {"cat": "ac2g", "name": "ac2g", "id": correlation, "pid": rank}
        yield {"ph": "s", "tid": HOST_THREAD, "ts": begins_us, **arrow}
        yield {"ph": "f", "bp": "e", "tid": thread, "ts": _microseconds(each.start_s), **arrow}


class HostCall(NamedTuple):
    """The call that launches an operator, on the host's thread from begins_us to ends_us."""

    launched: SideKernel
    begins_us: float
    ends_us: float


def host_calls(timeline: Timeline) -> list[HostCall]:
    """One call for each operator of every stream, in the order in which the host makes them, in whole nanoseconds.

    Notes
    -----
    Each call takes at least one nanosecond and begins when the call before it has ended, since a reader takes a call
    that lies within another for an inner one.
    """
    calls: list[HostCall] = []
    free_us = -math.inf
    for each in sorted(timeline.launches, key=lambda launched: (launched.host_start_s, launched.issue_s)):
        begins_us = max(_microseconds(each.host_start_s), free_us)
        free_us = max(_microseconds(each.issue_s), round(begins_us + 0.001, 3))
        calls.append(HostCall(each, begins_us, free_us))
    return calls


NCCL_NAMES = {
    "all_reduce": "AllReduce_Sum",
    "all_gather": "AllGather",
    "reduce_scatter": "ReduceScatter_Sum",
    "broadcast": "Broadcast",
    "all_to_all": "AllToAll",
    "send_recv": "SendRecv",
    "exchange": "SendRecv",
}


def _communications(prediction: Prediction, rank: int) -> Iterator[Event]:
    """Collectives under the names and with the arguments by which HolisticTraceAnalysis knows NCCL's kernels."""
    for sequence, each in enumerate(prediction.timeline.communications):
        collective = prediction.program.collectives[each.collective]
        thread = FIRST_STREAM_THREAD + each.stream
        elements = collective.size_bytes // DTYPE_BYTES[collective.dtype]
        details: dict[str, Any] = {
            "device": rank,
            "stream": thread,
            "Collective name": collective.kind,
            "In msg nelems": elements,
            "Out msg nelems": elements,
            "Group size": _group_size(prediction.scenario, collective),
            "Process Group Name": collective.group,
            "dtype": collective.dtype,
            "Seq": sequence,
        }
        if each.exchange >= 0:
            messages = prediction.program.exchanges[each.exchange]
            details["Messages"] = [f"{'send' if message.is_send else 'receive'} {message.name}" for message in messages]
        name = f"ncclDevKernel_{NCCL_NAMES[collective.kind]}_{collective.dtype}"
        yield _slice("kernel", name, rank, thread, each.start_s, each.end_s, **details)


def _group_size(scenario: Scenario, collective: Collective) -> int:
    """Return the size of the whole group, in which messages are between two ranks."""
    section = scenario.parallelism.pp
    return section.stages if section is not None and collective.group == PIPELINE else collective.ranks


def _operators_of_one_clock(prediction: Prediction, rank: int) -> Iterator[Event]:
    """Make the operators of a CPU, which the host runs itself."""
    timeline, uses = prediction.timeline, use_by_operation(prediction)
    rows = zip(*(column.tolist() for column in (timeline.operation, timeline.start_s, timeline.end_s)), strict=True)
    for operation, start_s, end_s in rows:
        name = profiler_name(prediction.program.operations[operation])
        yield _slice("cpu_op", name, rank, HOST_THREAD, start_s, end_s, **_details(uses[operation]))


def _details(use: KernelUse) -> dict[str, Any]:
    """Return what a slice shows when it is clicked on: kernel key, source of its time, and the work in it."""
    cost = use.cost
    return {
        "key": use.key,
        "kind": cost.kind,
        "source": cost.source,
        "flops": cost.flops,
        "bytes": cost.bytes,
        "kernels": cost.kernels,
    }
