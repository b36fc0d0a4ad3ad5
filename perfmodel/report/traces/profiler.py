"""Reading a Chrome trace of torch.profiler: which operators ran on the device in a step, in order, and for how long."""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from perfmodel.errors import PerfModelError
from perfmodel.files.kinds import PREDICTED_BY
from perfmodel.files.reading import read_foreign_json
from perfmodel.limits import LARGEST_TRACE_BYTES
from perfmodel.report.traces.chrome import STEP_TIME
from perfmodel.report.traces.events import ANNOTATIONS, CALLS, DEVICE_WORK, LAUNCHES, REMEDY, checked_slices
from perfmodel.simulate.timeline import merged
from perfmodel.units import US

RECORD_LESS = "Record fewer steps, without with_stack, record_shapes and profile_memory."
HALF_A_NANOSECOND_US = 0.0005
COMMUNICATION = ("ncclDevKernel", "ncclKernel")  # begins the names of NCCL's kernels


@dataclass(frozen=True)
class RecordedOperator:
    """One operator call: its name without namespace, when its first kernel starts, and the seconds its kernels take."""

    name: str
    start_s: float
    busy_s: float
    kernels: int


@dataclass(frozen=True)
class RecordedStep:
    """One step of a profiler trace.

    Attributes
    ----------
    operators
        In the order in which the host launched them, without NCCL's kernels, which run concurrently with others and for
        as long as another rank lets them wait.
    step_s : float
        Seconds to the start of the next step if that was recorded too; else as long as the file says that the step
        took; else to the end of the last kernel.
    covered_s : float
        Seconds in which at least one of the operators ran, on any stream.
    on_device : bool
        Whether operators are kernels of a device, or a CPU's own calls.
    rank : int or None
        The rank that ran the step; None if the file does not say.
    communicates : bool
        Whether NCCL's kernels are in the trace.
    is_predicted : bool
        Whether perfmodel wrote the file, so that no profiler slowed the step.
    """

    operators: tuple[RecordedOperator, ...]
    step_s: float
    covered_s: float
    on_device: bool
    rank: int | None = None
    communicates: bool = False
    is_predicted: bool = False

    @property
    def busy_s(self) -> float:
        return sum(operator.busy_s for operator in self.operators)


def load_step(path: Path, known: Collection[str]) -> RecordedStep:
    """The last whole step in a trace file, of the rank that its ``distributedInfo`` names where it holds several.

    Parameters
    ----------
    path : Path
        ``.json`` or ``.json.gz``, as torch.profiler exports it.
    known : collection of str
        Operator names (without namespace) to look for. A kernel belongs to the outermost call around its launch that
        has one of these names, or to the innermost call if none has.

    Raises
    ------
    PerfModelError
        If the file is not such a trace, or no operator runs in it, or none of the rank that it names.
    """
    data = read_foreign_json(path, "a profiler trace", REMEDY, LARGEST_TRACE_BYTES, RECORD_LESS)
    rank, slices = _rank(data), checked_slices(path, data)
    events = [event for event in _of_one_rank(slices, rank) if not _is_communication(event)]
    on_device = _on_device(events, known)
    operators = on_device or _on_host(events, known)
    if not operators:
        raise PerfModelError(f"{path}: a profiler trace must hold operators that ran (got none). {REMEDY}")
    chosen, step_s = _last_step(operators, _step_starts(events), _stated_step_s(data))
    covered_s = float(np.sum(np.diff(merged(stretch for placed in chosen for stretch in placed.ran_s))))
    if not (step_s > 0 and covered_s > 0):
        raise PerfModelError(f"{path}: a profiler trace must hold a step that takes time (got {step_s:g} s). {REMEDY}")
    communicates = any(map(_is_communication, slices))
    return RecordedStep(
        tuple(placed.operator for placed in chosen),
        step_s,
        covered_s,
        bool(on_device),
        rank,
        communicates,
        is_predicted=isinstance(data, dict) and PREDICTED_BY in data,
    )


def _rank(data: Any) -> int | None:
    """Return the rank that torch's profiler writes if torch.distributed is in use."""
    info = data.get("distributedInfo") if isinstance(data, dict) else None
    rank = info.get("rank") if isinstance(info, dict) else None
    return rank if type(rank) is int else None


def _stated_step_s(data: Any) -> float | None:
    """Return the step time that perfmodel writes into the trace of a prediction."""
    other = data.get("otherData") if isinstance(data, dict) else None
    step_s = other.get(STEP_TIME) if isinstance(other, dict) else None
    return step_s if type(step_s) is float and 0 < step_s < math.inf else None


def _of_one_rank(events: list[dict[str, Any]], rank: int | None) -> list[dict[str, Any]]:
    """torch's profiler records one process, and numbers it as the system does; where several are in the file, as
    perfmodel writes a pipeline's, each has its rank's number.
    """
    if len({event.get("pid") for event in _of(events, CALLS)}) < 2:
        return events
    return [event for event in events if event.get("pid") == rank]


def _is_communication(event: dict[str, Any]) -> bool:
    return event.get("cat") == "kernel" and str(event.get("name", "")).startswith(COMMUNICATION)


@dataclass(frozen=True)
class _Placed:
    """An operator, when the host launched it, which decides the step it belongs to, and when its kernels ran."""

    launched_us: float
    operator: RecordedOperator
    ran_s: tuple[tuple[float, float], ...]


def _on_device(events: list[dict[str, Any]], known: Collection[str]) -> list[_Placed]:
    """Kernels gathered by the operator call whose launch they follow (by correlation id)."""
    launches = {
        event["args"]["correlation"]: event for event in _of(events, LAUNCHES) if "correlation" in event.get("args", {})
    }
    owner = _owners(events, list(launches.values()), known)
    kernels: dict[object, list[dict[str, Any]]] = defaultdict(list)
    names: dict[object, tuple[str, float]] = {}
    for kernel in _of(events, DEVICE_WORK):
        launch = launches.get(kernel.get("args", {}).get("correlation"))
        call = owner.get(id(launch)) if launch else None
        group: object = id(call or kernel)
        kernels[group].append(kernel)
        names[group] = (
            _bare(call or kernel),
            float((launch or kernel)["ts"]) if group not in names else names[group][1],
        )
    return sorted(
        (_placed(*names[group], members) for group, members in kernels.items()),
        key=lambda placed: (placed.launched_us, placed.operator.start_s),
    )


def _placed(name: str, launched_us: float, kernels: list[dict[str, Any]]) -> _Placed:
    start_us = min(float(kernel["ts"]) for kernel in kernels)
    busy_us = sum(float(kernel["dur"]) for kernel in kernels)
    ran_s = tuple((float(kernel["ts"]) * US, (float(kernel["ts"]) + float(kernel["dur"])) * US) for kernel in kernels)
    return _Placed(launched_us, RecordedOperator(name, start_us * US, busy_us * US, len(kernels)), ran_s)


def _on_host(events: list[dict[str, Any]], known: Collection[str]) -> list[_Placed]:
    """Return the outermost known calls themselves, for a trace in which nothing was launched (a CPU)."""
    calls = _of(events, CALLS)
    owner = _owners(events, calls, known)
    outermost = {id(owner[id(call)]): owner[id(call)] for call in calls if _bare(owner[id(call)]) in known}
    placed = [_placed(_bare(call), float(call["ts"]), [call]) for call in outermost.values()]
    return sorted(placed, key=lambda found: found.operator.start_s)


def _owners(
    events: list[dict[str, Any]], inner: list[dict[str, Any]], known: Collection[str]
) -> dict[int, dict[str, Any]]:
    """Return for each of ``inner``, by id, the operator call it counts for: see :func:`load_step`."""
    threads: dict[object, list[dict[str, Any]]] = defaultdict(list)
    wanted = {id(event) for event in inner}
    for event in [*_of(events, CALLS), *(event for event in inner if event["cat"] != "cpu_op")]:
        threads[(event.get("pid"), event.get("tid"))].append(event)
    owners = {}
    for members in threads.values():
        members.sort(key=lambda event: (float(event["ts"]), -float(event["dur"]), event["cat"] != "cpu_op"))
        open_calls: list[dict[str, Any]] = []
        for event in members:
            while open_calls and _ends_before(open_calls[-1], float(event["ts"])):
                open_calls.pop()
            if event["cat"] == "cpu_op":
                open_calls.append(event)
            if id(event) in wanted and open_calls:
                owners[id(event)] = next((call for call in open_calls if _bare(call) in known), open_calls[-1])
    return owners


def _ends_before(call: dict[str, Any], time_us: float) -> bool:
    """Or as it is reached: times are whole nanoseconds, but for the rounding of their sum."""
    return float(call["ts"]) + float(call["dur"]) < time_us + HALF_A_NANOSECOND_US


def _step_starts(events: list[dict[str, Any]]) -> list[float]:
    """Return when the host began each profiler step, in microseconds."""
    return sorted(
        float(event["ts"])
        for event in _of(events, ANNOTATIONS)
        if str(event.get("name", "")).startswith("ProfilerStep#")
    )


def _last_step(placed: list[_Placed], starts_us: list[float], stated_s: float | None) -> tuple[list[_Placed], float]:
    """Return operators and seconds of the last step that is followed by another, or else of the last.

    A step that no other follows takes ``stated_s``, as the file says.
    """
    steps: dict[int, list[_Placed]] = defaultdict(list)
    for found in placed:
        steps[bisect.bisect_right(starts_us, found.launched_us)].append(found)
    if len(steps) > 1:
        steps.pop(0, None)  # what ran before the first step began
    numbers = sorted(steps)
    if len(numbers) > 1:
        return steps[numbers[-2]], _start_s(steps[numbers[-1]]) - _start_s(steps[numbers[-2]])
    chosen = steps[numbers[0]]
    end_s = max(found.operator.start_s + found.operator.busy_s for found in chosen)
    return chosen, end_s - _start_s(chosen) if stated_s is None else stated_s


def _start_s(placed: list[_Placed]) -> float:
    return min(found.operator.start_s for found in placed)


def _of(events: list[dict[str, Any]], categories: set[str]) -> list[dict[str, Any]]:
    return [event for event in events if event.get("cat") in categories]


def _bare(event: dict[str, Any]) -> str:
    """The name without its namespace: ``mm`` of ``aten::mm``."""
    name = str(event.get("name", ""))
    return name.rpartition("::")[2] if "<" not in name and " " not in name else name
