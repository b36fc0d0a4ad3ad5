"""How much of a real step's communication is hidden, from the profiler traces of its ranks.

    overlap ratio = |communication ∩ computation| / |communication|

over the unions of intervals, as HolisticTraceAnalysis has it: copies and fills of memory are neither. A rank that
comes early to a collective waits in it, so its time is also taken from the arrival of the last rank. Clocks of ranks
are aligned by the ends of collectives, which all ranks reach together.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfmodel.files.reading import read_foreign_json
from perfmodel.hardware.measurement import RankCommunication
from perfmodel.limits import LARGEST_TRACE_BYTES
from perfmodel.units import US

Interval = tuple[float, float]

TRACED_STEPS = 4  # of several ranks
LEAD_IN_STEPS = 1  # of them, left out: the host has not run ahead yet

PAUSE_S = 50e-6  # between two kernels is theirs: a profiler makes such pauses longer

ON_HOST = ("gloo:", "aten::")  # where no device has kernels: collectives, and operators


@dataclass(frozen=True)
class RankTrace:
    """Collectives in the order in which they ran, and the union of the other kernels; seconds on the rank's clock."""

    collectives: tuple[Interval, ...]
    computation: tuple[Interval, ...]


def load_rank_trace(path: Path) -> RankTrace:
    """Read what torch.profiler wrote: kernels of a device, or a CPU's operators and gloo's collectives."""
    data = read_foreign_json(path, "a profiler trace", "Record it again.", LARGEST_TRACE_BYTES)
    events = [event for event in data["traceEvents"] if event.get("ph") == "X" and "dur" in event]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    if kernels:
        collectives = [event for event in kernels if "nccl" in event["name"].lower()]
        others = [event for event in kernels if "nccl" not in event["name"].lower()]
    else:
        collectives = [event for event in events if event["name"].startswith(ON_HOST[0])]
        others = [event for event in events if event.get("cat") == "cpu_op" and event["name"].startswith(ON_HOST[1])]
    return RankTrace(tuple(sorted(map(_interval, collectives))), union(map(_interval, others)))


def _interval(event: dict[str, Any]) -> Interval:
    start_s = float(event["ts"]) * US
    return start_s, start_s + float(event["dur"]) * US


def union(intervals: Iterable[Interval]) -> tuple[Interval, ...]:
    """Return the same stretch of time as intervals that do not touch, ascending.

    >>> union([(3, 4), (0, 1), (0.5, 2), (2, 2.5)])
    ((0, 2.5), (3, 4))
    """
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return tuple(merged)


def without_pauses(intervals: Sequence[Interval], pause_s: float = PAUSE_S) -> tuple[Interval, ...]:
    """Return a union in which what lies less than ``pause_s`` apart touches.

    >>> without_pauses([(0, 1), (1.25, 2), (3, 4)], 0.5)
    ((0, 2), (3, 4))
    """
    merged: list[Interval] = []
    for start, end in intervals:
        if merged and start - merged[-1][1] < pause_s:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return tuple(merged)


def common(first: Sequence[Interval], second: Sequence[Interval]) -> float:
    """Return the length of what two unions share.

    >>> common([(0, 2), (3, 5)], [(1, 4)])
    2.0
    """
    total, i, j = 0.0, 0, 0
    while i < len(first) and j < len(second):
        total += max(min(first[i][1], second[j][1]) - max(first[i][0], second[j][0]), 0)
        if first[i][1] <= second[j][1]:
            i += 1
        else:
            j += 1
    return total


def communication_of(traces: Sequence[RankTrace], steps: int, skipped: int) -> tuple[RankCommunication, ...]:
    """Return for each rank the communication of a step: medians over steps.

    Parameters
    ----------
    traces : sequence of RankTrace
        By rank, of the same steps.
    steps : int
        Steps in each trace; every one has as many collectives.
    skipped : int
        How many of the first are left out.

    Returns
    -------
    tuple of RankCommunication
        Empty if a trace has no collectives or their number is no multiple of the steps.
    """
    if any(not trace.collectives or len(trace.collectives) % steps for trace in traces):
        return ()
    late = since_last_arrival([trace.collectives for trace in traces])
    return tuple(_of_rank(trace, late[rank] if late else None, steps, skipped) for rank, trace in enumerate(traces))


def _of_rank(trace: RankTrace, late: Sequence[Interval] | None, steps: int, skipped: int) -> RankCommunication:
    whole, exposed, hidden = _medians(trace.collectives, trace.computation, steps, skipped)
    late_whole, late_exposed, _ = _medians(late, trace.computation, steps, skipped) if late else (None, None, None)
    closed = without_pauses(trace.computation)
    beyond = _medians(late, closed, steps, skipped)[1] if late else None
    return RankCommunication(
        communication_s=whole,
        exposed_s=exposed,
        overlap_ratio=hidden,
        since_last_arrival_s=late_whole,
        exposed_since_last_arrival_s=late_exposed,
        exposed_beyond_pauses_s=beyond,
    )


def _medians(
    collectives: Sequence[Interval], computation: Sequence[Interval], steps: int, skipped: int
) -> tuple[float, float, float]:
    """Return seconds of communication, seconds of it exposed, and the ratio hidden."""
    each = len(collectives) // steps
    rows = []
    for step in range(skipped, steps):
        busy = union(collectives[step * each : (step + 1) * each])
        whole = sum(end - start for start, end in busy)
        hidden = common(busy, computation)
        rows.append((whole, whole - hidden, hidden / whole if whole else 0.0))
    whole, exposed, ratio = (statistics.median(column) for column in zip(*rows, strict=True))
    return whole, exposed, ratio


def since_last_arrival(collectives: Sequence[Sequence[Interval]]) -> list[tuple[Interval, ...]] | None:
    """Return each rank's collectives, on its clock, from the moment when the last rank has begun the same one.

    A rank's clock is ahead of rank 0's by the median difference of the ends. None if numbers differ.

    Examples
    --------
    Rank 1's clock is 10 s ahead, and it comes 1 s later:

    >>> since_last_arrival([[(0, 3)], [(11, 13)]])
    [((1.0, 3),), ((11.0, 13),)]
    """
    if len({len(of_rank) for of_rank in collectives}) != 1:
        return None
    ahead_s = [
        statistics.median(mine[1] - first[1] for mine, first in zip(of_rank, collectives[0], strict=True))
        for of_rank in collectives
    ]
    arrivals_s = [
        max(interval[0] - ahead for interval, ahead in zip(same, ahead_s, strict=True))
        for same in zip(*collectives, strict=True)
    ]
    return [
        tuple((float(min(at + ahead, end)), end) for at, (_, end) in zip(arrivals_s, of_rank, strict=True))
        for ahead, of_rank in zip(ahead_s, collectives, strict=True)
    ]
