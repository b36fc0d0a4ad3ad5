"""The device's clock: the compute stream in numpy passes, and the side streams that slow it and are slowed by it.

The compute stream runs entries (kernels, collectives on that stream, marks of phases) first in, first out. An entry is
ready when its launch has arrived; where nothing else happens, its end is a max-plus recurrence over many entries at
once:

    end = D + maximum.accumulate(ready - (D - d))        D: cumulative device time, d: one entry's

A side stream runs its tasks, collectives and kernels, one after another. While one runs, it and the compute stream slow
each other: an entry takes ``compute_factor`` times as long, and the task advances at 1 / ``communication_factor``::

    time                   1           2   3         4
    launches        a b c                      d
    compute stream  aaaaabbBBBBBCCCCCCCccc     DDDDDDdd
    side stream            TTTTTTTTTTTT....MMMMMMMMMM

    first in, first out   b arrives early and starts when a has ended; d starts when it arrives
    slowdown              from 1 to 2 the task T runs: entries take longer (capitals), and T longer than alone
    waiting               from 2 to 3 the message M, which has started, waits for the other rank; then it moves
    to its end            from 3 to 4 M slows d, while M takes as long as alone

Rates are constant between such points. One pass evaluates entries up to the next point and cuts the entry that
straddles it, which goes on with what is left of it. An entry of 6 s, and a task of factor 2 from 2 s to 6 s::

    time    0    2         6    8
    entry   eeeeeEEEEEEEEEEeeeee        2 s at full speed, 2 s of work at half speed, 2 s at full speed

Where the task has ended, the blocks of threads that run keep the slower pace to the end of their wave
(``Slowdown.wave_s``). Where a task could start while an entry runs, it waits for that entry's tail
(``Slowdown.tail_s``), when the entry's last blocks leave multiprocessors free.

A task without a slowdown (its contention is not known) neither slows anything nor is slowed: its end is known as soon
as its start is. Messages slow entries, but nothing slows them: one lasts the same from when it moves, whatever runs on
either rank (:mod:`perfmodel.simulate.rendezvous`).

While other streams wait for events, the gap before each kernel of the compute stream grows by
:attr:`~perfmodel.hardware.profile.Launch.waiting_gap_s`, where that was measured. (A recorded step of gpt-large
under zero2 on two H200s shows it: 2.7 us between kernels from the first gather to the last, while two streams wait, and
1.5 us after it, where one waits at most: tests/simulate/test_recorded_step.py.) A collective that runs makes gaps
longer as well (``Slowdown.pause_s``). The two do not add up: in that step, gaps grow by 1.1 us where streams wait, and
by 1.5 where a gather runs besides, which alone makes it 1.3 (h200-sxm-x2). The longer of the two is taken. Tasks
without a slowdown are not seen to wait: their start is known before the clock reaches it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from perfmodel.cost.contention import Slowdown
from perfmodel.hardware.profile import Launch
from perfmodel.simulate.rendezvous import Clock
from perfmodel.simulate.tasks import SideStream, StreamTask

CHUNK = 512  # entries of one pass while communication is near
MOMENT_S = 1e-9  # less is rounding: what begins as something ends


class DeviceClock:
    """Runs entries and tasks as far as it is asked to, never further: what is issued later may still come between.

    Parameters
    ----------
    launch : Launch
        Latency of launches and gaps between kernels.
    slowdowns : list of Slowdown
        What tasks refer to by :attr:`StreamTask.slowdown`; their columns are those of one step's entries, which repeat.
    entries : int
        Entries of a step.
    kernels : numpy.ndarray, optional
        Device launches of each entry of a step.
    horizon_s : callable, optional
        Returns until when it is known what other ranks do, for messages.

    Attributes
    ----------
    start_s, end_s : numpy.ndarray
        By entry, of those before ``done``.
    done : int
        Entries that have ended.
    tasks : list of StreamTask
        Tasks of all side streams, in the order in which they were issued.
    """

    def __init__(
        self,
        launch: Launch,
        slowdowns: list[Slowdown],
        entries: int,
        kernels: np.ndarray | None = None,
        horizon_s: Callable[[], float] = lambda: math.inf,
    ) -> None:
        self._launch, self._horizon_s = launch, horizon_s
        self.start_s = np.zeros(0)
        self.end_s = np.zeros(0)
        self.done = 0
        self.tasks: list[StreamTask] = []
        self._slowdowns = slowdowns
        self._step_entries = entries
        self._kernels = np.zeros(entries) if kernels is None else kernels
        self._streams: dict[int, SideStream] = {}
        self._ready_s = np.zeros(0)
        self._left_s = np.zeros(0)  # seconds alone of each entry that are left
        self._whole_s = np.zeros(0)
        self._issued = 0
        self._waits: dict[int, list[StreamTask]] = {}  # by entry: what must have ended before it starts
        self._cuts: list[int] = []  # entries before which a pass must end, ascending
        self._free_s = 0.0  # where the clock stands
        self._begun_s: float | None = None  # start of the running entry, if a pass was cut inside it
        self._slowed_s, self._slowed_factor = 0.0, 1.0  # seconds alone of it that take at least so many times as long

    @property
    def issued(self) -> int:
        """Number of entries that the compute stream was given."""
        return self._issued

    @property
    def awaited(self) -> tuple[StreamTask, ...]:
        """Tasks after which the next entry starts."""
        return tuple(self._waits.get(self._issued, ()))

    def reserve(self, entries: int) -> None:
        """Allocate columns for so many entries in all."""
        for name in ("start_s", "end_s", "_ready_s", "_left_s", "_whole_s"):
            setattr(self, name, np.zeros(entries))

    def issue(self, issue_s: np.ndarray, duration_s: np.ndarray) -> None:
        """Append entries to the compute stream."""
        window = slice(self._issued, self._issued + len(issue_s))
        self._ready_s[window] = issue_s + self._launch.latency_s
        self._left_s[window] = self._whole_s[window] = duration_s
        self._issued = window.stop

    def wait(self, tasks: tuple[StreamTask, ...]) -> None:
        """Start the next entry that is issued after these tasks."""
        self._waits.setdefault(self._issued, []).extend(tasks)
        self._cut(self._issued)

    def add(self, task: StreamTask) -> None:
        """Append a task to its stream."""
        self.tasks.append(task)
        self._streams.setdefault(task.stream, SideStream()).waiting.append(task)
        self._cut(task.after_entry + 1)

    def _cut(self, entry: int) -> None:
        """End a pass before this entry, since what happens there depends on a task, or a task on it."""
        if entry > self.done and (not self._cuts or entry > self._cuts[-1]):
            self._cuts.append(entry)
        elif entry > self.done and entry not in self._cuts:
            self._cuts = sorted({*self._cuts, entry})

    def run_until(self, entry: int) -> Clock:
        """Run until all entries before this one have ended."""
        while self.done < entry:
            for task in self._waits.pop(self.done, []):
                yield from self.finish(task)
                self._free_s = max(self._free_s, task.end_s)
            blocked_s = self._pass(entry)
            if blocked_s is not None:
                yield blocked_s

    def run_all(self) -> Clock:
        """Run until everything issued has ended."""
        yield from self.run_until(self._issued)
        for task in self.tasks:
            yield from self.finish(task)

    def finish(self, task: StreamTask) -> Clock:
        """Run until the task has ended, while the compute stream, which has nothing to do before that, stands still."""
        while not task.is_done or task.end_s > self._free_s:
            self._start_tasks(self._free_s)
            running = [stream for stream in self._streams.values() if stream.running is not None]
            ends_s = [self._end_alone_s(stream.running) for stream in running if stream.running is not None]
            own_s = [max(task.end_s, self._free_s)] if task.is_done else []
            event_s = min([*ends_s, *self._known_starts_s(), *self._message_starts_s(), *own_s], default=np.inf)
            if self._is_blocked(running, event_s):
                yield event_s
                continue
            if event_s == np.inf:
                raise RuntimeError(f"work of stream {task.stream} waits for work that was never issued")
            for stream, end_s in zip(running, ends_s, strict=True):
                self._advance(stream, event_s - self._free_s, event_s, end_s <= event_s)
            self._free_s = event_s

    def _message_starts_s(self) -> list[float]:
        """Return when the messages that wait now will move, as far as that is known."""
        return [task.moves_s for task in self._running() if task.messages and self._free_s < task.moves_s < math.inf]

    def _running(self) -> list[StreamTask]:
        """Return the task that runs on each side stream, of those where one does."""
        return [stream.running for stream in self._streams.values() if stream.running is not None]

    def _slowdown_now(self, task: StreamTask) -> int:
        """Return the index of the slowdown in the task's current state, waiting or moving."""
        return task.waiting_slowdown if task.messages and task.moves_s > self._free_s else task.slowdown

    def _end_alone_s(self, task: StreamTask) -> float:
        """Return when a running task ends if the compute stream does nothing."""
        return max(task.messages_end_s, self._free_s) if task.messages else self._free_s + task.left_s

    def _is_blocked(self, running: list[SideStream], time_s: float) -> bool:
        """Return whether a message may still change what happens before ``time_s``."""
        tasks = (stream.running for stream in running if stream.running is not None and stream.running.messages)
        is_unknown = any(task.messages_end_s == math.inf for task in tasks)
        return is_unknown and (time_s == math.inf or time_s > self._horizon_s())

    def _advance(self, stream: SideStream, work_s: float, time_s: float, is_over: bool) -> None:
        """Take ``work_s`` off the stream's running task, and end it at ``time_s`` if it is over."""
        task = stream.running
        assert task is not None
        task.left_s -= work_s
        if is_over:
            task.end_s = stream.free_s = time_s
            stream.running = None

    def _next_start_s(self, stream: SideStream) -> float | None:
        """Return when the stream's next task can start; None while that is not known."""
        if stream.running is not None or not stream.waiting:
            return None
        task = stream.waiting[0]
        if task.after_entry >= self.done or any(not each.is_done for each in task.after_tasks):
            return None
        entry_s = float(self.end_s[task.after_entry]) if task.after_entry >= 0 else 0.0
        return max(task.ready_s, stream.free_s, entry_s, *(each.end_s for each in task.after_tasks))

    def _known_starts_s(self) -> list[float]:
        starts_s = (self._next_start_s(stream) for stream in self._streams.values())
        return [start_s for start_s in starts_s if start_s is not None]

    def _start_tasks(self, time_s: float) -> None:
        """Start tasks until no stream can start another: one that ends at once may be what another waits for."""
        while any(self._start(stream, time_s) for stream in self._streams.values()):
            pass

    def _start(self, stream: SideStream, time_s: float) -> bool:
        """Start what the stream can; return whether the end of a task became known."""
        has_ended = False
        while (start_s := self._next_start_s(stream)) is not None:
            task, end_s = stream.waiting[0], start_s + stream.waiting[0].duration_s
            affects_others = task.slowdown >= 0 or bool(task.messages)
            if affects_others and (start_s > time_s or self._waits_for_tail(task, time_s)):
                break
            stream.waiting.popleft()
            task.start_s = start_s
            if task.messages:
                stream.running = task
                for message, side in task.messages:
                    message.arrive(side, start_s)
            elif task.slowdown < 0 or end_s <= time_s:
                task.end_s = stream.free_s = end_s
                has_ended = True
            else:
                task.left_s = task.duration_s - (time_s - start_s)
                stream.running = task
        return has_ended

    def _waits_for_tail(self, task: StreamTask, time_s: float) -> bool:
        """Return whether the running entry occupies the device, and make the task ready when the entry's tail begins.

        Streams have equal priority: blocks of a later kernel are scheduled only after all of an earlier one's.
        """
        if task.has_waited or self._begun_s is None or task.slowdown < 0:
            return False
        task.has_waited = True
        tail_s = float(self._slowdowns[task.slowdown].tail_s[self.done % self._step_entries])
        task.ready_s = time_s + max(float(self._left_s[self.done]) - tail_s, 0.0)
        return task.ready_s > time_s

    def _pass(self, entry: int) -> float | None:
        """Run entries up to the next cut, or up to where a task starts or ends and rates change.

        If a message may change them before that, run nothing and return until when they would have run.
        """
        self._start_tasks(self._free_s)
        while self._cuts and self._cuts[0] <= self.done:
            self._cuts.pop(0)
        stop = min(entry, self._cuts[0] if self._cuts else entry)
        running = [stream for stream in self._streams.values() if stream.running is not None]
        starts_s = self._known_starts_s()
        if running or starts_s:
            stop = min(stop, self.done + CHUNK)
        window = slice(self.done, stop)
        factor, gaps = self._compute_factor(running, window), self._gaps(window)
        duration_s = self._left_s[window] * (factor + gaps)
        duration_s[0] += self._slowed_s * max(self._slowed_factor - factor[0], 0.0)
        total_s = np.cumsum(duration_s)
        ready_s = self._ready_s[window].copy()
        ready_s[0] = max(ready_s[0], self._free_s)
        end_s = total_s + np.maximum.accumulate(ready_s - (total_s - duration_s))
        start_s = end_s - duration_s
        ends_s = [self._end_of(stream, start_s, end_s, window) for stream in running]
        slowdowns = [stream.running.slowdown for stream in running if stream.running is not None]
        event_s = min([*starts_s, *ends_s, *self._message_starts_s(), *self._waiting_changes_s()], default=np.inf)
        whole = int(np.searchsorted(end_s, event_s, side="right"))
        stop_s = min(event_s, float(end_s[-1]))
        if self._is_blocked(running, stop_s):
            return stop_s
        ended = [slowdown for slowdown, over_s in zip(slowdowns, ends_s, strict=True) if over_s <= stop_s]
        for stream, over_s in zip(running, ends_s, strict=True):
            self._advance(stream, self._work_until(stream, start_s, end_s, window, stop_s), stop_s, over_s <= stop_s)
        self._finish_entries(start_s[:whole], end_s[:whole])
        if whole < len(end_s):
            self._split(float(start_s[whole]), event_s, float(factor[whole]), float(gaps[whole]))
            self._keep_pace(ended)
        return None

    def _finish_entries(self, start_s: np.ndarray, end_s: np.ndarray) -> None:
        if not len(end_s):
            return
        window = slice(self.done, self.done + len(end_s))
        self.start_s[window], self.end_s[window] = start_s, end_s
        if self._begun_s is not None:
            self.start_s[self.done], self._begun_s = self._begun_s, None
            self._slowed_s, self._slowed_factor = 0.0, 1.0
        self.done = window.stop
        self._free_s = float(end_s[-1])

    def _split(self, start_s: float, event_s: float, factor: float, gap: float) -> None:
        """Cut the entry that runs, if one has begun, at the time at which the rates change.

        Parameters
        ----------
        start_s : float
            Its start, or where it went on after an earlier cut.
        event_s : float
            When the rates change.
        factor, gap : float
            How many times as long as alone it takes, and what waiting streams add to that.
        """
        self._free_s = event_s
        if start_s >= event_s:
            return
        if self._begun_s is None:
            self._begun_s = start_s
        slowed_factor = max(self._slowed_factor, factor) + gap
        slowed_s = min(self._slowed_s, (event_s - start_s) / slowed_factor)
        self._slowed_s -= slowed_s
        left_s = self._left_s[self.done] - slowed_s - (event_s - start_s - slowed_s * slowed_factor) / (factor + gap)
        self._left_s[self.done] = max(left_s, 0.0)  # less than nothing by rounding would be all of a wave

    def _keep_pace(self, ended: list[int]) -> None:
        """Keep the running wave of blocks as slow as it was under tasks of these slowdowns, which have ended.

        Waves follow each other without pause, and the last ends with the entry.
        """
        if self._begun_s is None or self._free_s - self._begun_s < MOMENT_S:
            return
        column = self.done % self._step_entries
        for slowdown in (self._slowdowns[number] for number in ended if number >= 0):
            wave_s = 0.0 if slowdown.wave_s is None else float(slowdown.wave_s[column])
            if wave_s > 0:
                on_s = float(self._left_s[self.done]) % wave_s
                self._slowed_factor = max(self._slowed_factor, float(slowdown.compute_factor[column]))
                self._slowed_s = max(self._slowed_s, on_s if wave_s - on_s > MOMENT_S else 0.0)

    def _columns(self, window: slice) -> np.ndarray:
        return np.arange(window.start, window.stop) % self._step_entries

    def _compute_factor(self, running: list[SideStream], window: slice) -> np.ndarray:
        factor = np.ones(window.stop - window.start)
        for stream in running:
            if stream.running is not None and (number := self._slowdown_now(stream.running)) >= 0:
                factor = factor * self._slowdowns[number].compute_factor[self._columns(window)]
        return factor

    def _gaps(self, window: slice) -> np.ndarray:
        """Return what waiting streams add to each entry's time, over its time alone."""
        if not self._launch.waiting_gap_s:
            return np.zeros(window.stop - window.start)
        gap_s = self._launch.gap_beside_s(sum(task.ready_s <= self._free_s for task in self._waiting()))
        gap_s = max(gap_s - self._pause_s(), 0.0)
        whole_s, kernels = self._whole_s[window], self._kernels[self._columns(window)]
        return np.asarray(gap_s * np.divide(kernels, whole_s, out=np.zeros(len(whole_s)), where=whole_s > 0))

    def _pause_s(self) -> float:
        """Return by how much running tasks already lengthen gaps, to which waiting streams do not add."""
        numbers = (self._slowdown_now(task) for task in self._running())
        return max((self._slowdowns[number].pause_s for number in numbers if number >= 0), default=0.0)

    def _waiting(self) -> list[StreamTask]:
        """Return the next task of each stream that waits for work of another stream or of the compute stream."""
        heads = (stream.waiting[0] for stream in self._streams.values() if stream.waiting)
        return [head for head in heads if self._waits_for_others(head)]

    def _waits_for_others(self, task: StreamTask) -> bool:
        return task.after_entry >= self.done or any(
            not each.is_done or each.end_s > self._free_s for each in task.after_tasks
        )

    def _waiting_changes_s(self) -> list[float]:
        """Return when more tasks will wait, or fewer because what they wait for ends, if that matters."""
        if not self._launch.waiting_gap_s:
            return []
        known = ([task.ready_s, *(each.end_s for each in task.after_tasks)] for task in self._waiting())
        return [time_s for times_s in known for time_s in times_s if time_s > self._free_s]

    def _rates(self, task: StreamTask, window: slice) -> np.ndarray:
        return np.asarray(1 / self._slowdowns[task.slowdown].communication_factor[self._columns(window)])

    def _progress(
        self, task: StreamTask, start_s: np.ndarray, end_s: np.ndarray, window: slice
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the task's work done when each entry starts and ends.

        It advances at full speed in gaps, and more slowly during entries.
        """
        gaps_s = start_s - np.concatenate([[self._free_s], end_s[:-1]])
        during_s = (end_s - start_s) * self._rates(task, window)
        at_end_s = np.cumsum(gaps_s + during_s)
        return at_end_s - during_s, at_end_s

    def _end_of(self, stream: SideStream, start_s: np.ndarray, end_s: np.ndarray, window: slice) -> float:
        """Return when the running task ends if nothing else changes; infinity if not within these entries."""
        task = stream.running
        assert task is not None
        if task.messages:
            return max(task.messages_end_s, self._free_s)
        at_start_s, at_end_s = self._progress(task, start_s, end_s, window)
        index = int(np.searchsorted(at_end_s, task.left_s))
        if index == len(at_end_s):
            return float(np.inf)
        missing_s = task.left_s - float(at_start_s[index])
        if missing_s <= 0:
            return float(start_s[index]) + missing_s
        return float(start_s[index]) + missing_s / float(self._rates(task, window)[index])

    def _work_until(
        self, stream: SideStream, start_s: np.ndarray, end_s: np.ndarray, window: slice, time_s: float
    ) -> float:
        """Return the running task's work done until ``time_s``, where the pass ends."""
        task = stream.running
        assert task is not None
        if task.messages:
            return 0.0
        at_start_s, _ = self._progress(task, start_s, end_s, window)
        index = min(int(np.searchsorted(end_s, time_s)), len(end_s) - 1)
        during_s = time_s - float(start_s[index])
        if during_s <= 0:
            return float(at_start_s[index]) + during_s
        return float(at_start_s[index]) + during_s * float(self._rates(task, window)[index])
