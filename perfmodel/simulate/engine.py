"""Interpreter 1: the two clocks of one rank.

The host walks the program and pays its costs; a launch is issued when the host gets there, and the device runs it
when it has arrived and the stream is free. Between the points where host and device wait for each other both clocks
are max-plus recurrences, which numpy evaluates in one pass over many launches:

    issue = C + maximum.accumulate(held - C)                      C: cumulative host cost
    end   = D + maximum.accumulate(issue + latency - (D - d))     D: cumulative device time, d: one launch's

They meet where the host waits for the device (SYNC) and where it may not run further ahead (the launch queue is full).
On a CPU there is one clock: operators and what lies between them simply add up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from perfmodel.hardware.profile import Launch
from perfmodel.program.program import Program
from perfmodel.simulate.timeline import PhaseSpan, Timeline
from perfmodel.workload.trace_file import EventKind


@dataclass(frozen=True)
class StepWork:
    """A step's launches and host costs, in program order; the same for every step.

    position: where each launch stands among the instructions. duration_s: device seconds of each. kernels: device
    launches of each. host_s: host seconds of every instruction. waits: launch count before which the host waits,
    ascending. wait_position: the instruction of each wait.
    """

    position: np.ndarray
    duration_s: np.ndarray
    kernels: np.ndarray
    host_s: np.ndarray
    waits: np.ndarray
    wait_position: np.ndarray


def launched_positions(program: Program, kernels: np.ndarray) -> np.ndarray:
    """Where the launches stand among the instructions. kernels: by distinct operation, 0 where nothing is launched."""
    columns = program.instructions
    positions = columns.launches
    return np.asarray(positions[kernels[columns.a[positions]] > 0])


def step_work(program: Program, duration_s: np.ndarray, kernels: np.ndarray, host_s: np.ndarray) -> StepWork:
    """Columns of a step.

    duration_s: by launch, in order of :func:`launched_positions`. kernels: by distinct operation. host_s: by
    instruction.
    """
    columns = program.instructions
    launched = launched_positions(program, kernels)
    wait_position = np.flatnonzero(columns.kind == EventKind.SYNC)
    waits = np.searchsorted(launched, wait_position)
    return StepWork(launched, duration_s, kernels[columns.a[launched]], host_s, waits, wait_position)


@dataclass
class _Clocks:
    """State carried from block to block and from step to step."""

    host_s: float = 0.0
    device_s: float = 0.0


class _Device:
    """Runs blocks of launches on both clocks and remembers enough of the past to hold the host back."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.clocks = _Clocks()
        self.started_s = np.zeros(0)
        self.kernels_until = np.zeros(0)

    def run(
        self, host_cost_s: np.ndarray, duration_s: np.ndarray, kernels: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Issue and end of launches that are too few to fill the queue on their own.

        host_cost_s: what the host does since the launch before (the first: since the clock stands where it stands).
        """
        offset = self.kernels_until[-1] if len(self.kernels_until) else 0
        until = offset + np.cumsum(kernels)
        free = np.searchsorted(self.kernels_until, until - self.launch.queue_depth, side="right") - 1
        held_s = np.where(free >= 0, self.started_s[free] if len(self.started_s) else 0.0, -np.inf)
        cumulative = np.cumsum(host_cost_s)
        held_s[0] = max(held_s[0], self.clocks.host_s + host_cost_s[0])
        issue_s = cumulative + np.maximum.accumulate(held_s - cumulative)
        device = np.cumsum(duration_s)
        ready_s = issue_s + self.launch.latency_s
        ready_s[0] = max(ready_s[0], self.clocks.device_s)
        end_s = device + np.maximum.accumulate(ready_s - (device - duration_s))
        self.clocks = _Clocks(float(issue_s[-1]), float(end_s[-1]))
        self.started_s = np.concatenate([self.started_s, end_s - duration_s])
        self.kernels_until = np.concatenate([self.kernels_until, until])
        self._forget()
        return issue_s, end_s

    def _forget(self) -> None:
        keep = np.searchsorted(self.kernels_until, self.kernels_until[-1] - 2 * self.launch.queue_depth)
        self.started_s, self.kernels_until = self.started_s[keep:], self.kernels_until[keep:]

    def host_works(self, seconds: float) -> None:
        self.clocks.host_s += seconds

    def host_waits(self) -> None:
        self.clocks.host_s = max(self.clocks.host_s, self.clocks.device_s) + self.launch.synchronize_s

    def mark_s(self) -> float:
        """When an event recorded now is reached by the device."""
        return max(self.clocks.host_s + self.launch.latency_s, self.clocks.device_s)


def _blocks(work: StepWork, queue_depth: int, marks: np.ndarray) -> list[int]:
    """Launch counts at which to stop: waits, phase marks, and before the queue could fill within a block."""
    cuts = {0, len(work.position), *work.waits.tolist(), *np.searchsorted(work.position, marks).tolist()}
    stops: list[int] = []
    for cut in sorted(cuts):
        while stops and work.kernels[stops[-1] : cut].sum() > queue_depth and cut - stops[-1] > 1:
            room = np.searchsorted(np.cumsum(work.kernels[stops[-1] : cut]), queue_depth, side="right")
            stops.append(stops[-1] + max(1, int(room)))
        if not stops or cut > stops[-1]:
            stops.append(cut)
    return stops


@dataclass
class _StepTimes:
    issue_s: np.ndarray
    end_s: np.ndarray
    marks_s: list[float]
    host_marks_s: list[float]


def _run_step(device: _Device, work: StepWork, marks: np.ndarray, stops: list[int]) -> _StepTimes:
    """One step on both clocks. marks: instruction positions at which the device's and the host's clock are read."""
    issue_s, end_s = np.zeros(len(work.position)), np.zeros(len(work.position))
    cumulative = np.concatenate([[0.0], np.cumsum(work.host_s)])
    actions = sorted([(int(p), 0) for p in marks] + [(int(p), 1) for p in work.wait_position])
    times = _StepTimes(issue_s, end_s, [], [])
    here, start, next_action = 0, 0, 0
    for stop in [*stops[1:], len(work.position) + 1]:
        reached = work.position[start] if start < len(work.position) else len(work.host_s)
        while next_action < len(actions) and actions[next_action][0] <= reached:
            position, waits = actions[next_action]
            done = position + waits
            device.host_works(float(cumulative[done] - cumulative[here]))
            here, next_action = done, next_action + 1
            if waits:
                device.host_waits()
            else:
                times.marks_s.append(device.mark_s())
                times.host_marks_s.append(device.clocks.host_s)
        if start >= len(work.position):
            break
        part = slice(start, stop)
        until = cumulative[work.position[part] + 1]
        issue_s[part], end_s[part] = device.run(
            np.diff(until, prepend=cumulative[here]), work.duration_s[part], work.kernels[part]
        )
        here, start = int(work.position[stop - 1]) + 1, stop
    return times


def simulate(program: Program, work: StepWork, launch: Launch) -> Timeline:
    """The steady step of a device with its own clock.

    Steps follow each other without synchronisation until the launch queue has filled; the last one is returned. The
    synchronised step starts with both clocks idle and ends when the host knows that the device is done.

    Assumes: one compute stream; steps are alike. Source of the recurrences: max-plus algebra of a FIFO queue.
    """
    starts = _run_starts(program)
    marks = np.append(starts, len(work.host_s))
    stops = _blocks(work, launch.queue_depth, marks)
    synced_step_s = _synced(work, launch, marks, stops)
    device = _Device(launch)
    total_kernels = max(int(work.kernels.sum()), 1)
    times = None
    for _ in range(math.ceil(launch.queue_depth / total_kernels) + 2):
        times = _run_step(device, work, marks, stops)
    assert times is not None
    return _timeline(program, work, times, synced_step_s)


def _synced(work: StepWork, launch: Launch, marks: np.ndarray, stops: list[int]) -> float:
    device = _Device(launch)
    _run_step(device, work, marks, stops)
    device.host_waits()
    return device.clocks.host_s


def simulate_one_clock(program: Program, work: StepWork) -> Timeline:
    """The step where host and device are the same processor: every duration is host time too."""
    host_s = work.host_s.copy()
    host_s[work.position] += work.duration_s
    until = np.cumsum(host_s)
    boundaries = np.concatenate([[0.0], until])
    end_s = until[work.position]
    marks = boundaries[np.append(_run_starts(program), len(host_s))].tolist()
    times = _StepTimes(end_s - work.duration_s, end_s, marks, marks)
    return _timeline(program, work, times, float(boundaries[-1]))


def _run_starts(program: Program) -> np.ndarray:
    """Instruction position at which each run of the program begins."""
    lengths = [run.segment.stop - run.segment.start for run in program.runs]
    return np.concatenate([[0], np.cumsum(lengths[:-1])]).astype(np.int64) if lengths else np.zeros(0, dtype=np.int64)


def _timeline(program: Program, work: StepWork, times: _StepTimes, synced_step_s: float) -> Timeline:
    columns = program.instructions
    origin = times.host_marks_s[0]
    return Timeline(
        operation=columns.a[work.position],
        run=columns.run[work.position],
        module=program.modules[work.position],
        stream=np.zeros(len(work.position), dtype=np.int64),
        host_start_s=times.issue_s - work.host_s[work.position] - origin,
        issue_s=times.issue_s - origin,
        start_s=times.end_s - work.duration_s - origin,
        end_s=times.end_s - origin,
        phases=_spans(program, times.marks_s, origin),
        host_spans=_spans(program, times.host_marks_s, origin),
        step_time_s=times.marks_s[-1] - times.marks_s[0],
        synced_step_time_s=synced_step_s,
        host_busy_s=float(work.host_s.sum()),
    )


def _spans(program: Program, marks_s: list[float], origin_s: float) -> tuple[PhaseSpan, ...]:
    return tuple(
        PhaseSpan(run.phase, run.micro_batch, start - origin_s, end - origin_s)
        for run, start, end in zip(program.runs, marks_s[:-1], marks_s[1:], strict=True)
    )
