"""Interpreter 1: the clocks of one rank.

The host walks the program and pays its costs; a launch is issued when the host gets there, and the device runs it when
it has arrived, its stream is free and what it waits for has happened. The host's clock is a max-plus recurrence,

    issue = C + maximum.accumulate(held - C)             C: cumulative host cost

and so is the compute stream's (:mod:`perfmodel.simulate.device`). They meet where the host waits for the device (SYNC)
and where it may not run further ahead (the launch queue is full). The device is run no further than the host needs to
know, so that whatever is issued later still finds its place. On a CPU there is one clock
(:mod:`perfmodel.simulate.one_clock`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from perfmodel.hardware.profile import Launch
from perfmodel.program.program import COMPUTE, RECORD, WAIT, Program
from perfmodel.simulate.device import Device, Item
from perfmodel.simulate.step_work import BLOCKING, StepWork
from perfmodel.simulate.timeline import Communication, PhaseSpan, Timeline
from perfmodel.workload.trace_file import EventKind


class _Mark(NamedTuple):
    """What must have ended: an entry of the compute stream (-1: none), and items."""

    entry: int
    items: tuple[Item, ...]


class _Rank:
    """Issues steps one after another."""

    def __init__(self, program: Program, work: StepWork, launch: Launch, steps: int) -> None:
        columns = program.instructions
        self._kind, self._a, self._stream = columns.kind.tolist(), columns.a.tolist(), columns.stream.tolist()
        self.work, self.launch = work, launch
        entries = len(work.position)
        self.device = Device(launch.latency_s, list(work.slowdowns), entries)
        self.device.reserve(steps * entries)
        self.issue_s = np.zeros(steps * entries)
        before = np.arange(steps) * int(work.kernels.sum())
        self._kernels_until = (before[:, None] + np.cumsum(work.kernels)).reshape(-1)
        launches = np.tile(work.kernels > 0, steps)
        self._launch_before = np.maximum.accumulate(np.where(launches, np.arange(len(launches)), -1))
        self._host_s = 0.0
        self._reached_s = 0.0  # of this step's host costs, what the host's clock contains
        self._marks: dict[int, _Mark] = {}
        self._gates: dict[int, list[_Mark]] = {}  # by stream: what its next work waits for
        self._last: dict[int, Item] = {}  # by stream
        self.communications: list[tuple[int, float, Item]] = []  # of this step: position, issue, item

    def step(self) -> None:
        """One step: entries in stretches between the instructions at which something else happens."""
        self._reached_s, self._marks, self.communications = 0.0, {}, []
        done = 0
        for position in self.work.actions:
            before = int(np.searchsorted(self.work.order, 2 * position + 1))
            self._issue(done, before)
            self._work_until(float(self.work.host_until_s[position + 1]))
            self._act(position)
            done = before
        self._issue(done, len(self.work.position))
        self._work_until(float(self.work.host_until_s[-1]))

    def wait(self) -> float:
        """The host waits until everything issued is done; returns its clock."""
        self.device.run_all()
        ends_s = [each.end_s for each in self.device.items[-1:]]
        if self.device.issued:
            ends_s.append(float(self.device.end_s[self.device.issued - 1]))
        self._host_s = max([self._host_s, *ends_s]) + self.launch.synchronize_s
        return self._host_s

    def _work_until(self, reached_s: float) -> None:
        self._host_s += reached_s - self._reached_s
        self._reached_s = reached_s

    def _issue(self, start: int, stop: int) -> None:
        """Entries of this step, in blocks that cannot fill the launch queue by themselves."""
        work, depth = self.work, self.launch.queue_depth
        while start < stop:
            room = int(np.searchsorted(np.cumsum(work.kernels[start:stop]), depth, side="right"))
            block = slice(start, min(stop, start + max(1, room)))
            count = block.stop - block.start
            part = slice(self.device.issued, self.device.issued + count)
            free = self._held_by(part)
            if free[-1] >= 0:
                self.device.run_until(int(free[-1]) + 1)
            cumulative_s = work.entry_host_s[block] - self._reached_s
            held_s = np.where(free >= 0, self.device.start_s[free], -np.inf)
            held_s[0] = max(held_s[0], self._host_s + cumulative_s[0])
            issue_s = cumulative_s + np.maximum.accumulate(held_s - cumulative_s)
            self.issue_s[part] = issue_s
            self.device.issue(issue_s, work.duration_s[block])
            self._host_s, self._reached_s = float(issue_s[-1]), float(work.entry_host_s[block][-1])
            start = block.stop

    def _held_by(self, part: slice) -> np.ndarray:
        """By entry, the one that must have started before the launch queue has room for it; -1 for none."""
        room = self._kernels_until[part] - self.launch.queue_depth
        full = np.searchsorted(self._kernels_until, room, side="right") - 1
        return np.where(full >= 0, self._launch_before[full], -1)

    def _act(self, position: int) -> None:
        kind, stream, number = self._kind[position], self._stream[position], self._a[position]
        if kind == EventKind.SYNC:
            self.device.run_until(self.device.issued)
            end_s = float(self.device.end_s[self.device.issued - 1]) if self.device.issued else 0.0
            self._host_s = max(self._host_s, end_s) + self.launch.synchronize_s
        elif kind == RECORD:
            self._marks[number] = self._mark(stream)
        elif kind == WAIT:
            self._wait(stream, self._marks[number])
        else:
            self._communicate(position, stream, number)

    def _mark(self, stream: int) -> _Mark:
        """All that the stream was given so far."""
        gates = [item for mark in self._gates.get(stream, []) for item in mark.items]
        if stream == COMPUTE:
            return _Mark(self.device.issued - 1, ())
        last = [self._last[stream]] if stream in self._last else []
        return _Mark(max([mark.entry for mark in self._gates.get(stream, [])], default=-1), (*last, *gates))

    def _wait(self, stream: int, mark: _Mark) -> None:
        if stream == COMPUTE:
            self.device.wait(list(mark.items))
        else:
            self._gates.setdefault(stream, []).append(mark)

    def _communicate(self, position: int, stream: int, number: int) -> None:
        gates = self._gates.pop(stream, [])
        item = Item(
            number,
            stream,
            float(self.work.collective_s[number]),
            number if self.work.slowdowns else -1,
            self._host_s + self.launch.latency_s,
            tuple({mark.entry for mark in gates if mark.entry >= 0}),
            tuple(item for mark in gates for item in mark.items),
        )
        self.device.add(item)
        self._last[stream] = item
        self.communications.append((position, self._host_s, item))


def simulate(program: Program, work: StepWork, launch: Launch) -> Timeline:
    """The steady step of a device with its own clock.

    Steps follow each other without synchronisation until the launch queue has filled; the last one is returned. The
    synchronised step starts with both clocks idle and ends when the host knows that the device is done.

    Assumes: every rank reaches a collective when this one does. Source of the recurrences: max-plus algebra of a FIFO
    queue.
    """
    alone = _Rank(program, work, launch, 1)
    alone.step()
    synced_step_s = alone.wait()
    steps = math.ceil(launch.queue_depth / max(int(work.kernels.sum()), 1)) + 2
    rank = _Rank(program, work, launch, steps)
    for _ in range(steps):
        rank.step()
    rank.device.run_all()
    return _timeline(program, work, rank, synced_step_s)


def _timeline(program: Program, work: StepWork, rank: _Rank, synced_step_s: float) -> Timeline:
    columns, entries = program.instructions, len(work.position)
    last = slice(rank.device.issued - entries, rank.device.issued)
    issue_s, start_s, end_s = rank.issue_s[last], rank.device.start_s[last], rank.device.end_s[last]
    origin_s = float(issue_s[work.marks[0]])
    launches = work.launches
    position = work.position[launches]
    marks_s = end_s[work.marks] - origin_s
    return Timeline(
        operation=columns.a[position],
        run=columns.run[position],
        module=program.modules[position],
        stream=columns.stream[position],
        host_start_s=issue_s[launches] - work.host_s[position] - origin_s,
        issue_s=issue_s[launches] - origin_s,
        start_s=start_s[launches] - origin_s,
        end_s=end_s[launches] - origin_s,
        phases=spans(program, marks_s.tolist()),
        host_spans=spans(program, (issue_s[work.marks] - origin_s).tolist()),
        step_time_s=float(marks_s[-1] - marks_s[0]),
        synced_step_time_s=synced_step_s,
        host_busy_s=float(work.host_s.sum()),
        communications=_communications(program, work, rank, issue_s, start_s, end_s, origin_s),
    )


def _communications(
    program: Program,
    work: StepWork,
    rank: _Rank,
    issue_s: np.ndarray,
    start_s: np.ndarray,
    end_s: np.ndarray,
    origin_s: float,
) -> tuple[Communication, ...]:
    """Those beside the compute stream and those on it, by start."""
    columns = program.instructions
    found = [
        Communication(item.number, int(columns.run[at]), item.lane, issued_s, item.start_s, item.end_s)
        for at, issued_s, item in rank.communications
    ]
    for entry in np.flatnonzero(work.source == BLOCKING).tolist():
        at = int(work.position[entry])
        times_s = (float(issue_s[entry]), float(start_s[entry]), float(end_s[entry]))
        found.append(Communication(int(columns.a[at]), int(columns.run[at]), COMPUTE, *times_s))
    return tuple(sorted((each.shifted(-origin_s) for each in found), key=lambda each: each.start_s))


def spans(program: Program, marks_s: list[float]) -> tuple[PhaseSpan, ...]:
    """Phases from the times of their starts and of the step's end."""
    return tuple(
        PhaseSpan(run.phase, run.micro_batch, start, end)
        for run, start, end in zip(program.runs, marks_s[:-1], marks_s[1:], strict=True)
    )
