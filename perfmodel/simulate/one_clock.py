"""The engine where host and device are one processor: only communication runs concurrently with its one clock.

Operators of every stream run on it in the order of the program. Before an operator of a side stream the host waits for
the collectives that this stream runs or waits for.
"""

from __future__ import annotations

import numpy as np

from perfmodel.program.program import BY_HOST, COLLECTIVE, COMPUTE, RECORD, WAIT, Program
from perfmodel.simulate.timed_step import BLOCKING, TimedStep
from perfmodel.simulate.timeline import Communication, Timeline, spans
from perfmodel.trace.trace import EventKind


def simulate_one_clock(program: Program, work: TimedStep) -> Timeline:
    """Simulate a step in which operators and host costs add up.

    Collectives of side streams start when they are issued, one after another on each stream and in each
    group, and take what they take alone; the host waits for those that the compute stream waits for.
    """
    columns = program.instructions
    lasts_s = np.zeros(len(work.host_s))
    is_work = work.kernels > 0
    lasts_s[work.position[is_work]] = work.duration_s[is_work]
    lasts_s[work.side.position] = work.side.duration_s
    waited_s, communications = _communicate(program, work, np.cumsum(work.host_s + lasts_s), lasts_s)
    until_s = np.cumsum(work.host_s + lasts_s + waited_s)
    boundaries_s = np.concatenate([[0.0], until_s])
    position = np.sort(np.concatenate([work.position[work.launches], work.side.position]))
    end_s, duration_s = until_s[position], lasts_s[position]
    blocking = np.flatnonzero(work.source == BLOCKING)
    for entry in blocking.tolist():
        at = int(work.position[entry])
        end, start = float(until_s[at]), float(until_s[at] - work.duration_s[entry])
        communications.append(Communication(int(columns.a[at]), int(columns.run[at]), COMPUTE, start, start, end))
    marks_s = boundaries_s[work.position[work.marks]].tolist()
    return Timeline(
        operation=columns.a[position],
        run=columns.run[position],
        module=program.modules[position],
        stream=columns.stream[position],
        host_start_s=end_s - duration_s - work.host_s[position],
        issue_s=end_s - duration_s,
        start_s=end_s - duration_s,
        end_s=end_s,
        phases=spans(program, marks_s),
        host_spans=spans(program, marks_s),
        step_time_s=float(boundaries_s[-1]),
        synced_step_time_s=float(boundaries_s[-1]),
        host_busy_s=float(work.host_s.sum()),
        communications=tuple(sorted(communications, key=lambda each: each.start_s)),
    )


def _communicate(
    program: Program, work: TimedStep, until_s: np.ndarray, lasts_s: np.ndarray
) -> tuple[np.ndarray, list[Communication]]:
    """Return the seconds that the host waits at each instruction, and the communications of side streams.

    Parameters
    ----------
    program, work
        The step.
    until_s : numpy.ndarray
        When each instruction would end if the host never waited.
    lasts_s : numpy.ndarray
        Seconds of each instruction's operator or blocking collective.
    """
    columns = program.instructions
    waits_s = np.zeros(len(until_s))
    found: list[Communication] = []
    ends_s: dict[int, float] = {}  # by stream: of what it was given so far
    free_s: dict[str, float] = {}  # by group
    marks_s: dict[int, float] = {}
    late_s = 0.0
    for at in work.actions:
        kind, stream, number = int(columns.kind[at]), int(columns.stream[at]), int(columns.a[at])
        now_s = float(until_s[at]) + late_s
        if kind == RECORD:
            marks_s[number] = now_s if stream == COMPUTE else ends_s.get(stream, 0.0)
        elif kind == COLLECTIVE and stream != COMPUTE:
            group = program.collectives[number].group
            start_s = max(now_s, ends_s.get(stream, 0.0), free_s.get(group, 0.0))
            ends_s[stream] = free_s[group] = start_s + float(work.collective_s[number])
            found.append(Communication(number, int(columns.run[at]), stream, now_s, start_s, ends_s[stream]))
        elif kind == EventKind.OP or (kind == WAIT and stream in (COMPUTE, BY_HOST)):
            awaited_s = marks_s[number] if kind == WAIT else ends_s.get(stream, 0.0)
            waits_s[at] = max(awaited_s - (now_s - float(lasts_s[at])), 0.0)
            late_s += float(waits_s[at])
        elif kind == WAIT:
            ends_s[stream] = max(ends_s.get(stream, 0.0), marks_s[number])
    return waits_s, found
