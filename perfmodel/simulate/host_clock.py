"""The host's clock: what the host of a rank issues, step after step, and where it waits for the device.

The host walks the program and pays its costs; a launch is issued when the host gets there, and the device runs it when
it has arrived, its stream is free and what it waits for has happened. The host's clock is a max-plus recurrence,

    issue = C + maximum.accumulate(held - C)             C: cumulative host cost

and so is the compute stream's (:mod:`perfmodel.simulate.device_clock`). They meet where the host
waits for the device (SYNC, a WAIT of the host's) and where it may not run further ahead (the launch queue is full). The
device is run no further than the host needs to know, so that whatever is issued later still finds its place.

Every other stream is a side stream of tasks. Its kernels (copies into communication buffers) have a place in the launch
queue until the compute stream has come by. The collectives of one group are one communicator's, which runs them in the
order in which the host issued them, whatever their streams.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np

from perfmodel.hardware.profile import Launch
from perfmodel.program.program import BY_HOST, COMPUTE, RECORD, WAIT, Program
from perfmodel.simulate.device_clock import DeviceClock
from perfmodel.simulate.rendezvous import RECEIVER, SENDER, Clock, RankScheduler, Rendezvous
from perfmodel.simulate.tasks import StreamTask
from perfmodel.simulate.timed_step import TimedStep
from perfmodel.trace.trace import EventKind


class _Mark(NamedTuple):
    """An entry of the compute stream (-1: none) and tasks of other streams that must have ended."""

    entry: int
    tasks: tuple[StreamTask, ...]


def _both(*marks: _Mark) -> _Mark:
    """Join marks into one: all their tasks, and of the compute stream, which is in order, the last entry."""
    entry = max((mark.entry for mark in marks), default=-1)
    return _Mark(entry, tuple({id(task): task for mark in marks for task in mark.tasks}.values()))


class HostClock:
    """Simulates consecutive steps on one rank's host clock.

    Parameters
    ----------
    program : Program
        The rank's step.
    work : TimedStep
        Its times, the same for every step.
    launch : Launch
        Latency of launches, depth of the launch queue, cost of waiting for the device.
    steps : int
        Steps that are simulated.
    scheduler : RankScheduler, optional
        Of ranks that send each other messages; by default this rank is alone.
    rank : int
        Its number among these.
    trailing_steps : int
        Steps simulated after the one that is reported.

    Attributes
    ----------
    device : DeviceClock
        The device that runs what this host issues.
    issue_s : numpy.ndarray
        When the host issued each entry of the compute stream, over all steps.
    host_s : float
        Where the host's clock stands.
    """

    def __init__(
        self,
        program: Program,
        work: TimedStep,
        launch: Launch,
        steps: int,
        scheduler: RankScheduler | None = None,
        rank: int = 0,
        trailing_steps: int = 0,
    ) -> None:
        columns = program.instructions
        self._kind, self._a, self._stream = columns.kind.tolist(), columns.a.tolist(), columns.stream.tolist()
        self._b, self._exchanges = columns.b.tolist(), program.exchanges
        self._scheduler, self._rank = scheduler or RankScheduler(1), rank
        self._step, self._trailing_steps = 0, trailing_steps
        self._group = [collective.group for collective in program.collectives]
        self.work, self.launch = work, launch
        entries = len(work.position)
        horizon_s = partial(self._scheduler.horizon_s, rank)
        self.device = DeviceClock(launch, list(work.slowdowns), entries, work.kernels, horizon_s)
        self.device.reserve(steps * entries)
        self.issue_s = np.zeros(steps * entries)
        before = np.arange(steps) * work.launched_kernels
        self._queued_until = (before[:, None] + np.cumsum(work.queued)).reshape(-1)
        self._side = {position: index for index, position in enumerate(work.side.position.tolist())}
        launches = np.tile(work.kernels > 0, steps)
        self._launch_before = np.maximum.accumulate(np.where(launches, np.arange(len(launches)), -1))
        self._held_by = self._holding(self._queued_until)
        self.host_s = 0.0
        self._reached_s = 0.0  # of this step's host costs, what the host's clock contains
        self._marks: dict[int, _Mark] = {}
        self._gates: dict[int, list[_Mark]] = {}  # by stream: what its next work waits for
        self._last: dict[int, StreamTask] = {}  # by stream
        self._last_of_group: dict[str, _Mark] = {}
        self._queued_before = 0  # launches of the steps before
        self._side_work: list[list[tuple[int, float, StreamTask]]] = []  # by step: position, issue, task

    def step(self) -> Clock:
        """Simulate one step: entries in stretches between the instructions at which clocks or streams meet."""
        self._reached_s, self._marks = 0.0, {}
        self._side_work.append([])
        done = 0
        for position in self.work.actions:
            before = int(np.searchsorted(self.work.order, 2 * position + 1))
            yield from self._issue(done, before)
            self._work_until(float(self.work.host_until_s[position + 1]))
            yield from self._act(position)
            done = before
        yield from self._issue(done, len(self.work.position))
        self._work_until(float(self.work.host_until_s[-1]))
        self._queued_before += self.work.launched_kernels
        self._step += 1

    @property
    def reported(self) -> slice:
        """Entries of the reported step."""
        stop = self.device.issued - self._trailing_steps * len(self.work.position)
        return slice(stop - len(self.work.position), stop)

    @property
    def side_work(self) -> list[tuple[int, float, StreamTask]]:
        """Position, issue time and task of everything that the reported step ran on side streams."""
        return self._side_work[-1 - self._trailing_steps]

    @property
    def began_s(self) -> float:
        """Time at which the host began the reported step."""
        return float(self.issue_s[self.reported.start + self.work.marks[0]])

    @property
    def step_s(self) -> float:
        """Seconds from the device's reaching the reported step to its reaching the next."""
        first, *_, last = self.device.end_s[self.reported][self.work.marks].tolist()
        return float(last - first)

    def wait(self) -> Clock:
        """Let the host wait until everything issued is done."""
        yield from self._synchronize(tuple(self._last.values()))

    def _synchronize(self, tasks: tuple[StreamTask, ...]) -> Clock:
        """Let the host wait for all that the compute stream was given, and for these tasks."""
        issued = self.device.issued
        yield from self.device.run_until(issued)
        for task in tasks:
            yield from self.device.finish(task)
        ends_s = [*self.device.end_s[max(issued - 1, 0) : issued].tolist(), *(task.end_s for task in tasks)]
        self.host_s = max([self.host_s, *ends_s]) + self.launch.synchronize_s

    def _work_until(self, reached_s: float) -> None:
        """Let the host work until so many of the step's host seconds have passed."""
        self.host_s += reached_s - self._reached_s
        self._reached_s = reached_s

    def _issue(self, start: int, stop: int) -> Clock:
        """Issue entries of this step, in blocks that cannot fill the launch queue by themselves."""
        work, depth = self.work, self.launch.queue_depth
        while start < stop:
            room = int(np.searchsorted(np.cumsum(work.queued[start:stop]), depth, side="right"))
            block = slice(start, min(stop, start + max(1, room)))
            count = block.stop - block.start
            window = slice(self.device.issued, self.device.issued + count)
            free = self._held_by[window]
            if free[-1] >= 0:
                yield from self.device.run_until(int(free[-1]) + 1)
            cumulative_s = work.entry_host_s[block] - self._reached_s
            held_s = np.where(free >= 0, self.device.start_s[free], -np.inf)
            held_s[0] = max(held_s[0], self.host_s + cumulative_s[0])
            issue_s = cumulative_s + np.maximum.accumulate(held_s - cumulative_s)
            self.issue_s[window] = issue_s
            self.device.issue(issue_s, work.duration_s[block])
            self.host_s, self._reached_s = float(issue_s[-1]), float(work.entry_host_s[block][-1])
            start = block.stop

    def _holding(self, queued_until: np.ndarray) -> np.ndarray:
        """Return the entries that must have started before the launch queue holds so many launches; -1 for none."""
        full = np.searchsorted(self._queued_until, queued_until - self.launch.queue_depth, side="right") - 1
        return np.where(full >= 0, self._launch_before[full], -1)

    def _act(self, position: int) -> Clock:
        kind, stream, number = self._kind[position], self._stream[position], self._a[position]
        if kind == EventKind.SYNC:
            yield from self._synchronize(self.device.awaited)
        elif kind == RECORD:
            self._marks[number] = self._mark(stream)
        elif kind == WAIT and stream == BY_HOST:
            yield from self._await(self._marks[number])
        elif kind == WAIT:
            self._wait(stream, self._marks[number])
        elif kind == EventKind.OP:
            yield from self._launch_side_kernel(position, stream)
        elif stream == COMPUTE:
            self._order_blocking_collective(self._group[number])
        else:
            self._launch_side_collective(position, stream, number)

    def _mark(self, stream: int) -> _Mark:
        """All that the stream was given so far, and what it was given to wait for."""
        if stream == COMPUTE:
            return _Mark(self.device.issued - 1, self.device.awaited)
        last = [_Mark(-1, (self._last[stream],))] if stream in self._last else []
        return _both(*last, *self._gates.get(stream, []))

    def _wait(self, stream: int, mark: _Mark) -> None:
        if stream == COMPUTE:
            self.device.wait(mark.tasks)
        else:
            self._gates.setdefault(stream, []).append(mark)

    def _await(self, mark: _Mark) -> Clock:
        """Let the host wait for the mark, unless it has happened, while the compute stream runs what it was given."""
        yield from self.device.run_until(self.device.issued)
        for task in mark.tasks:
            yield from self.device.finish(task)
        ends_s = [*self.device.end_s[mark.entry : mark.entry + 1].tolist(), *(task.end_s for task in mark.tasks)]
        if (end_s := max(ends_s, default=0.0)) > self.host_s:
            self.host_s = end_s + self.launch.synchronize_s

    def _launch_side_kernel(self, position: int, stream: int) -> Clock:
        """Issue a kernel of a side stream, once the launch queue has room for it."""
        side, index = self.work.side, self._side[position]
        held_by = int(self._holding(self._queued_before + self.work.queued_until_side[index : index + 1])[0])
        if held_by >= 0:
            yield from self.device.run_until(held_by + 1)
            self.host_s = max(self.host_s, float(self.device.start_s[held_by]))
        self._add(position, stream, float(side.duration_s[index]), int(side.slowdown[index]))

    def _launch_side_collective(self, position: int, stream: int, number: int) -> None:
        group = self._group[number]
        if group in self._last_of_group:
            self._wait(stream, self._last_of_group[group])
        slowdown, first_waiting = number if self.work.contends else -1, self.work.first_waiting_slowdown
        messages = self._messages_of(position, number)
        task = self._add(position, stream, float(self.work.collective_s[number]), slowdown, messages)
        task.waiting_slowdown = slowdown if first_waiting is None else first_waiting + number
        self._last_of_group[group] = _Mark(-1, (task,))

    def _messages_of(self, position: int, number: int) -> tuple[tuple[Rendezvous, int], ...]:
        """Return the messages of a collective that consists of them, each with this rank's side; empty for others."""
        exchange = self._b[position]
        if exchange == 0:
            return ()
        duration_s, share, found = float(self.work.collective_s[number]), float(self.work.eager_share[number]), []
        for message in self._exchanges[exchange - 1]:
            name = (self._step, message.name)
            if message.is_send:
                pair = (self._group[number], self._rank, message.peer)
                found.append((self._scheduler.send(name, self._rank, duration_s, pair, share), SENDER))
            else:
                found.append((self._scheduler.receive(name, self._rank, duration_s), RECEIVER))
        return tuple(found)

    def _order_blocking_collective(self, group: str) -> None:
        """Order the next entry of the compute stream, a collective, after the last one of its group."""
        if group in self._last_of_group:
            self._wait(COMPUTE, self._last_of_group[group])
        self._last_of_group[group] = _Mark(self.device.issued, ())

    def _add(
        self,
        position: int,
        stream: int,
        duration_s: float,
        slowdown: int,
        messages: tuple[tuple[Rendezvous, int], ...] = (),
    ) -> StreamTask:
        gate = _both(*self._gates.pop(stream, []))
        task = StreamTask(
            stream, duration_s, slowdown, self.host_s + self.launch.latency_s, gate.entry, gate.tasks, messages
        )
        self.device.add(task)
        self._last[stream] = task
        self._side_work[-1].append((position, self.host_s, task))
        return task
