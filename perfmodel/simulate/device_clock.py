"""The device's side of the engine: a compute stream in numpy passes, and the lanes beside it.

The compute stream is a FIFO of entries, each ready when its launch has arrived; where nothing else happens it is a
max-plus recurrence over many entries at once:

    end = D + maximum.accumulate(ready - (D - d))        D: cumulative device time, d: one entry's

A lane (another stream) runs its items, collectives and kernels, one after another. While one runs, it and the compute
stream slow each other: an entry takes ``compute_factor`` times as long, and the item advances at
1 / ``communication_factor``. Rates are constant between the points where such an item starts or ends; there the pass is
cut and the entry that straddles the point goes on with what is left of it, and, where an item has ended, with the pace
of the blocks that are on. An item of no kind (its contention is not known) neither slows anything nor is slowed: its
end is known as soon as its start is. Messages slow entries, but are slowed by none: one lasts the same from when it
moves, whatever runs beside it on either rank (:mod:`perfmodel.simulate.rendezvous`).

While other streams wait for events, the gap before each kernel of the compute stream grows by
:attr:`~perfmodel.hardware.profile.Launch.waiting_gap_s`, where that was measured. (A recorded step of gpt-large
under zero2 on two H200s shows it: 2.7 us between kernels from the first gather to the last, while two streams wait, and
1.5 us after it, where one waits at most: tests/simulate/test_recorded_step.py.) A collective that runs makes gaps
longer as well (``Slowdown.pause_s``). The two do not add up: in that step, gaps grow by 1.1 us where streams wait, and
by 1.5 where a gather runs besides, which alone makes it 1.3 (h200-sxm-x2). The longer of the two is taken. Items of no
kind are not seen to wait: their start is known ahead.
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
    """Runs entries and items as far as it is asked to, never further: what is issued later may still come between.

    Parameters
    ----------
    launch : Launch
        Constants of its clock.
    slowdowns : sequence of Slowdown
        By kind of item; their columns are those of one step's entries, which repeat.
    entries : int
        Of a step.
    kernels : numpy.ndarray, optional
        Of each entry of a step.
    horizon_s : callable, optional
        Until when what others do is known, for messages.
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
        self.items: list[StreamTask] = []
        self._slowdowns = slowdowns
        self._step_entries = entries
        self._kernels = np.zeros(entries) if kernels is None else kernels
        self._lanes: dict[int, SideStream] = {}
        self._ready_s = np.zeros(0)
        self._left_s = np.zeros(0)
        self._whole_s = np.zeros(0)
        self._issued = 0
        self._waits: dict[int, list[StreamTask]] = {}
        self._cuts: list[int] = []  # entries before which a pass must end, ascending
        self._free_s = 0.0
        self._begun_s: float | None = None  # start of the entry that is on, if a pass was cut inside it
        self._kept_s, self._kept_factor = 0.0, 1.0  # seconds alone of it that take at least so many times as long

    @property
    def issued(self) -> int:
        return self._issued

    @property
    def awaited(self) -> tuple[StreamTask, ...]:
        """What the next entry starts after."""
        return tuple(self._waits.get(self._issued, ()))

    def reserve(self, entries: int) -> None:
        """Make room for so many entries in all."""
        for name in ("start_s", "end_s", "_ready_s", "_left_s", "_whole_s"):
            setattr(self, name, np.zeros(entries))

    def issue(self, issue_s: np.ndarray, duration_s: np.ndarray) -> None:
        """Append entries to the compute stream."""
        part = slice(self._issued, self._issued + len(issue_s))
        self._ready_s[part] = issue_s + self._launch.latency_s
        self._left_s[part] = self._whole_s[part] = duration_s
        self._issued = part.stop

    def wait(self, items: tuple[StreamTask, ...]) -> None:
        """The next entry issued to the compute stream starts after these."""
        self._waits.setdefault(self._issued, []).extend(items)
        self._cut(self._issued)

    def add(self, item: StreamTask) -> None:
        """Append to the item's lane."""
        self.items.append(item)
        self._lanes.setdefault(item.lane, SideStream()).waiting.append(item)
        self._cut(item.after_entry + 1)

    def _cut(self, entry: int) -> None:
        if entry > self.done and (not self._cuts or entry > self._cuts[-1]):
            self._cuts.append(entry)
        elif entry > self.done and entry not in self._cuts:
            self._cuts = sorted({*self._cuts, entry})

    def run_until(self, entry: int) -> Clock:
        """All entries before this one have ended."""
        while self.done < entry:
            for item in self._waits.pop(self.done, []):
                yield from self.finish(item)
                self._free_s = max(self._free_s, item.end_s)
            blocked_s = self._pass(entry)
            if blocked_s is not None:
                yield blocked_s

    def run_all(self) -> Clock:
        """Everything issued has ended."""
        yield from self.run_until(self._issued)
        for item in self.items:
            yield from self.finish(item)

    def finish(self, item: StreamTask) -> Clock:
        """The item has ended, the compute stream standing still meanwhile (it has nothing more to do before that)."""
        while not item.is_done or item.end_s > self._free_s:
            self._start_lanes(self._free_s)
            running = [lane for lane in self._lanes.values() if lane.running is not None]
            ends_s = [self._end_alone_s(lane.running) for lane in running if lane.running is not None]
            own_s = [max(item.end_s, self._free_s)] if item.is_done else []
            event_s = min([*ends_s, *self._known_starts_s(), *self._moves_s(), *own_s], default=np.inf)
            if self._is_blocked(running, event_s):
                yield event_s
                continue
            if event_s == np.inf:
                raise RuntimeError(f"work of stream {item.lane} waits for work that was never issued")
            for lane, end_s in zip(running, ends_s, strict=True):
                self._advance(lane, event_s - self._free_s, event_s, end_s <= event_s)
            self._free_s = event_s

    def _moves_s(self) -> list[float]:
        """From when messages that wait now move, as far as that is known."""
        running = (lane.running for lane in self._lanes.values() if lane.running is not None and lane.running.meetings)
        return [item.moves_s for item in running if self._free_s < item.moves_s < math.inf]

    def _kind(self, item: StreamTask) -> int:
        """Of what it does now."""
        return item.waiting_kind if item.meetings and item.moves_s > self._free_s else item.kind

    def _end_alone_s(self, item: StreamTask) -> float:
        """Of a running item, if the compute stream does nothing."""
        return max(item.met_s, self._free_s) if item.meetings else self._free_s + item.left_s

    def _is_blocked(self, running: list[SideStream], time_s: float) -> bool:
        """Whether a message may change what happens before then."""
        met = (lane.running is None or not lane.running.meetings or lane.running.met_s < math.inf for lane in running)
        return not all(met) and (time_s == math.inf or time_s > self._horizon_s())

    def _advance(self, lane: SideStream, work_s: float, time_s: float, is_over: bool) -> None:
        item = lane.running
        assert item is not None
        item.left_s -= work_s
        if is_over:
            item.end_s = lane.free_s = time_s
            lane.running = None

    def _next_start_s(self, lane: SideStream) -> float | None:
        """When the lane's next item can start, None while that is not known."""
        if lane.running is not None or not lane.waiting:
            return None
        item = lane.waiting[0]
        if item.after_entry >= self.done or any(not each.is_done for each in item.after_items):
            return None
        entry_s = float(self.end_s[item.after_entry]) if item.after_entry >= 0 else 0.0
        return max(item.ready_s, lane.free_s, entry_s, *(each.end_s for each in item.after_items))

    def _known_starts_s(self) -> list[float]:
        found = (self._next_start_s(lane) for lane in self._lanes.values())
        return [start_s for start_s in found if start_s is not None]

    def _start_lanes(self, time_s: float) -> None:
        """Until no lane can start more: what has ended in one may be what another waited for."""
        while any(self._start(lane, time_s) for lane in self._lanes.values()):
            pass

    def _start(self, lane: SideStream, time_s: float) -> bool:
        """Start what the lane can; whether the end of an item became known."""
        has_ended = False
        while (start_s := self._next_start_s(lane)) is not None:
            item, end_s = lane.waiting[0], start_s + lane.waiting[0].duration_s
            is_seen = item.kind >= 0 or bool(item.meetings)
            if is_seen and (start_s > time_s or self._holds(item, time_s)):
                break
            lane.waiting.popleft()
            item.start_s = start_s
            if item.meetings:
                lane.running = item
                for meeting, side in item.meetings:
                    meeting.arrive(side, start_s)
            elif item.kind < 0 or end_s <= time_s:
                item.end_s = lane.free_s = end_s
                has_ended = True
            else:
                item.left_s = item.duration_s - (time_s - start_s)
                lane.running = item
        return has_ended

    def _holds(self, item: StreamTask, time_s: float) -> bool:
        """Whether the entry that is on leaves no room yet; the item is then ready when its tail begins.

        Streams of equal priority: blocks of a later kernel are handed out only after all of an earlier one's.
        """
        if item.has_waited or self._begun_s is None or item.kind < 0:
            return False
        item.has_waited = True
        tail_s = float(self._slowdowns[item.kind].tail_s[self.done % self._step_entries])
        item.ready_s = time_s + max(float(self._left_s[self.done]) - tail_s, 0.0)
        return item.ready_s > time_s

    def _pass(self, entry: int) -> float | None:
        """Entries up to the next cut, or up to where an item starts or ends; if a message may change what they do
        before, nothing but when that would have been.
        """
        self._start_lanes(self._free_s)
        while self._cuts and self._cuts[0] <= self.done:
            self._cuts.pop(0)
        stop = min(entry, self._cuts[0] if self._cuts else entry)
        running = [lane for lane in self._lanes.values() if lane.running is not None]
        starts_s = self._known_starts_s()
        if running or starts_s:
            stop = min(stop, self.done + CHUNK)
        part = slice(self.done, stop)
        factor, gaps = self._compute_factor(running, part), self._gaps(part)
        duration_s = self._left_s[part] * (factor + gaps)
        duration_s[0] += self._kept_s * max(self._kept_factor - factor[0], 0.0)
        total_s = np.cumsum(duration_s)
        ready_s = self._ready_s[part].copy()
        ready_s[0] = max(ready_s[0], self._free_s)
        end_s = total_s + np.maximum.accumulate(ready_s - (total_s - duration_s))
        start_s = end_s - duration_s
        ends_s = [self._end_of(lane, start_s, end_s, part) for lane in running]
        kinds = [lane.running.kind for lane in running if lane.running is not None]
        event_s = min([*starts_s, *ends_s, *self._moves_s(), *self._arrivals_s()], default=np.inf)
        whole = int(np.searchsorted(end_s, event_s, side="right"))
        stop_s = min(event_s, float(end_s[-1]))
        if self._is_blocked(running, stop_s):
            return stop_s
        ended = [kind for kind, over_s in zip(kinds, ends_s, strict=True) if over_s <= stop_s]
        for lane, over_s in zip(running, ends_s, strict=True):
            self._advance(lane, self._work_until(lane, start_s, end_s, part, stop_s), stop_s, over_s <= stop_s)
        self._finish_entries(start_s[:whole], end_s[:whole])
        if whole < len(end_s):
            self._split(float(start_s[whole]), event_s, float(factor[whole]), float(gaps[whole]))
            self._keep_pace(ended)
        return None

    def _finish_entries(self, start_s: np.ndarray, end_s: np.ndarray) -> None:
        if not len(end_s):
            return
        part = slice(self.done, self.done + len(end_s))
        self.start_s[part], self.end_s[part] = start_s, end_s
        if self._begun_s is not None:
            self.start_s[self.done], self._begun_s = self._begun_s, None
            self._kept_s, self._kept_factor = 0.0, 1.0
        self.done = part.stop
        self._free_s = float(end_s[-1])

    def _split(self, start_s: float, event_s: float, factor: float, gap: float) -> None:
        """The entry that is on, or not begun, when the rates change. gap: what waiting streams add to the factor."""
        self._free_s = event_s
        if start_s >= event_s:
            return
        if self._begun_s is None:
            self._begun_s = start_s
        kept_factor = max(self._kept_factor, factor) + gap
        kept_s = min(self._kept_s, (event_s - start_s) / kept_factor)
        self._kept_s -= kept_s
        left_s = self._left_s[self.done] - kept_s - (event_s - start_s - kept_s * kept_factor) / (factor + gap)
        self._left_s[self.done] = max(left_s, 0.0)  # less than nothing by rounding would be all of a wave

    def _keep_pace(self, ended: list[int]) -> None:
        """The wave of blocks that is on stays as slow as items of these kinds made it.

        Waves follow each other without pause, and the last ends with the entry.
        """
        if self._begun_s is None or self._free_s - self._begun_s < MOMENT_S:
            return
        column = self.done % self._step_entries
        for slowdown in (self._slowdowns[kind] for kind in ended if kind >= 0):
            wave_s = 0.0 if slowdown.wave_s is None else float(slowdown.wave_s[column])
            if wave_s > 0:
                on_s = float(self._left_s[self.done]) % wave_s
                self._kept_factor = max(self._kept_factor, float(slowdown.compute_factor[column]))
                self._kept_s = max(self._kept_s, on_s if wave_s - on_s > MOMENT_S else 0.0)

    def _columns(self, part: slice) -> np.ndarray:
        return np.arange(part.start, part.stop) % self._step_entries

    def _compute_factor(self, running: list[SideStream], part: slice) -> np.ndarray:
        factor = np.ones(part.stop - part.start)
        for lane in running:
            if lane.running is not None and (kind := self._kind(lane.running)) >= 0:
                factor = factor * self._slowdowns[kind].compute_factor[self._columns(part)]
        return factor

    def _gaps(self, part: slice) -> np.ndarray:
        """What kernels take more by lanes that wait, over what they take alone."""
        if not self._launch.waiting_gap_s:
            return np.zeros(part.stop - part.start)
        gap_s = self._launch.gap_beside_s(sum(item.ready_s <= self._free_s for item in self._waiting()))
        gap_s = max(gap_s - self._pause_s(), 0.0)
        whole_s, kernels = self._whole_s[part], self._kernels[self._columns(part)]
        return np.asarray(gap_s * np.divide(kernels, whole_s, out=np.zeros(len(whole_s)), where=whole_s > 0))

    def _pause_s(self) -> float:
        """What the items that run have already made of the gaps: the two do not add up."""
        running = (lane.running for lane in self._lanes.values() if lane.running is not None)
        kinds = (self._kind(item) for item in running)
        return max((self._slowdowns[kind].pause_s for kind in kinds if kind >= 0), default=0.0)

    def _waiting(self) -> list[StreamTask]:
        """Of each lane the next item, if it waits for work of another lane or of the compute stream."""
        heads = (lane.waiting[0] for lane in self._lanes.values() if lane.waiting)
        return [head for head in heads if self._waits_for_others(head)]

    def _waits_for_others(self, item: StreamTask) -> bool:
        return item.after_entry >= self.done or any(
            not each.is_done or each.end_s > self._free_s for each in item.after_items
        )

    def _arrivals_s(self) -> list[float]:
        """From when more items wait, or fewer for what is known to end, if that matters."""
        if not self._launch.waiting_gap_s:
            return []
        known = ([item.ready_s, *(each.end_s for each in item.after_items)] for item in self._waiting())
        return [time_s for times_s in known for time_s in times_s if time_s > self._free_s]

    def _rates(self, item: StreamTask, part: slice) -> np.ndarray:
        return np.asarray(1 / self._slowdowns[item.kind].communication_factor[self._columns(part)])

    def _progress(
        self, item: StreamTask, start_s: np.ndarray, end_s: np.ndarray, part: slice
    ) -> tuple[np.ndarray, np.ndarray]:
        """Work of the item done when each entry starts and ends: all of the time in gaps, less beside entries."""
        gaps_s = start_s - np.concatenate([[self._free_s], end_s[:-1]])
        beside_s = (end_s - start_s) * self._rates(item, part)
        at_end_s = np.cumsum(gaps_s + beside_s)
        return at_end_s - beside_s, at_end_s

    def _end_of(self, lane: SideStream, start_s: np.ndarray, end_s: np.ndarray, part: slice) -> float:
        """When the running item ends, if nothing else changes; infinity if not within these entries."""
        item = lane.running
        assert item is not None
        if item.meetings:
            return max(item.met_s, self._free_s)
        at_start_s, at_end_s = self._progress(item, start_s, end_s, part)
        index = int(np.searchsorted(at_end_s, item.left_s))
        if index == len(at_end_s):
            return float(np.inf)
        missing_s = item.left_s - float(at_start_s[index])
        if missing_s <= 0:
            return float(start_s[index]) + missing_s
        return float(start_s[index]) + missing_s / float(self._rates(item, part)[index])

    def _work_until(
        self, lane: SideStream, start_s: np.ndarray, end_s: np.ndarray, part: slice, time_s: float
    ) -> float:
        """Work of the running item done until ``time_s``, where the pass ends."""
        item = lane.running
        assert item is not None
        if item.meetings:
            return 0.0
        at_start_s, _ = self._progress(item, start_s, end_s, part)
        index = min(int(np.searchsorted(end_s, time_s)), len(end_s) - 1)
        beside_s = time_s - float(start_s[index])
        if beside_s <= 0:
            return float(at_start_s[index]) + beside_s
        return float(at_start_s[index]) + beside_s * float(self._rates(item, part)[index])
