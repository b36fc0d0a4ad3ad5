"""What :class:`perfmodel.simulate.device_clock.DeviceClock` computes, event by event: slow, and short enough to check by reading."""

from __future__ import annotations

import math
from dataclasses import dataclass

from perfmodel.cost.contention import Slowdown
from perfmodel.hardware.profile import Launch
from perfmodel.simulate.device_clock import MOMENT_S
from perfmodel.simulate.tasks import StreamTask


@dataclass(frozen=True)
class Entry:
    """Of the compute stream. awaited: numbers of the items that must have ended before it starts."""

    ready_s: float
    duration_s: float
    kernels: int
    awaited: tuple[int, ...] = ()


class NaiveDevice:
    """Steps from one event to the next; between them all rates are constant. It fills in the items' start and end.

    An item of no kind must be the first of its lane and wait for nothing.
    """

    def __init__(
        self, launch: Launch, slowdowns: list[Slowdown], entries: list[Entry], items: list[StreamTask]
    ) -> None:
        self.entry_end_s: list[float] = []
        self._launch, self._slowdowns, self._entries, self._items = launch, slowdowns, entries, items
        self._time_s = 0.0
        self._begun_s: float | None = None  # start of the entry that is on
        self._left_s = 0.0  # of it, alone
        self._kept_s, self._kept_factor = 0.0, 1.0

    def run(self) -> None:
        while len(self.entry_end_s) < len(self._entries) or not all(item.is_done for item in self._items):
            while self._end_items() or self._end_entry() or self._start_items() or self._begin_entry():
                pass
            self._go_on()

    @property
    def _entry(self) -> int:
        """The one that is on or comes next."""
        return len(self.entry_end_s)

    def _running(self) -> list[StreamTask]:
        return [item for item in self._items if item.start_s >= 0 and not item.is_done]

    def _heads(self) -> list[StreamTask]:
        """Of each lane the first item that has not started."""
        first: dict[int, StreamTask] = {}
        for item in self._items:
            if item.start_s < 0:
                first.setdefault(item.stream, item)
        return list(first.values())

    def _waits_for_others(self, item: StreamTask) -> bool:
        return item.after_entry >= self._entry or not all(each.is_done for each in item.after_tasks)

    def _end_items(self) -> bool:
        over = [item for item in self._running() if item.left_s <= MOMENT_S]
        for item in over:
            item.end_s = self._time_s
            is_well_on = self._begun_s is not None and self._time_s - self._begun_s >= MOMENT_S
            if item.slowdown >= 0 and item.duration_s > 0 and is_well_on:
                self._keep_pace(self._slowdowns[item.slowdown])
        return bool(over)

    def _keep_pace(self, slowdown: Slowdown) -> None:
        wave_s = 0.0 if slowdown.wave_s is None else slowdown.wave_s[self._entry]
        if wave_s > 0:
            on_s = self._left_s % wave_s
            self._kept_s = max(self._kept_s, 0.0 if wave_s - on_s <= MOMENT_S else on_s)
            self._kept_factor = max(self._kept_factor, slowdown.compute_factor[self._entry])

    def _end_entry(self) -> bool:
        if self._begun_s is None or self._left_s > MOMENT_S:
            return False
        self.entry_end_s.append(self._time_s)
        self._begun_s = None
        return True

    def _start_items(self) -> bool:
        busy = {item.stream for item in self._running()}
        free = [item for item in self._heads() if item.stream not in busy and not self._waits_for_others(item)]
        started = [item for item in free if self._has_arrived(item) and not self._holds(item)]
        for item in started:
            item.start_s, item.left_s = self._time_s, item.duration_s
        return bool(started)

    def _has_arrived(self, work: StreamTask | Entry) -> bool:
        return work.ready_s <= self._time_s + MOMENT_S

    def _holds(self, item: StreamTask) -> bool:
        """The entry that is on holds an item back once, until its tail."""
        if item.slowdown < 0 or item.has_waited or self._begun_s is None:
            return False
        item.has_waited = True
        item.ready_s = self._time_s + max(self._left_s - self._slowdowns[item.slowdown].tail_s[self._entry], 0.0)
        return not self._has_arrived(item)

    def _begin_entry(self) -> bool:
        if self._begun_s is not None or self._entry == len(self._entries):
            return False
        entry = self._entries[self._entry]
        if not self._has_arrived(entry) or not all(self._items[number].is_done for number in entry.awaited):
            return False
        self._begun_s, self._left_s = self._time_s, entry.duration_s
        self._kept_s, self._kept_factor = 0.0, 1.0
        return True

    def _pace(self) -> float:
        """Seconds that a second of the entry that is on takes."""
        entry = self._entries[self._entry]
        kinds = [item.slowdown for item in self._running() if item.slowdown >= 0]
        factor = math.prod(float(self._slowdowns[kind].compute_factor[self._entry]) for kind in kinds)
        waiting = sum(self._has_arrived(item) and self._waits_for_others(item) for item in self._heads())
        gap = self._launch.gap_beside_s(waiting) * entry.kernels / entry.duration_s
        return (max(self._kept_factor, factor) if self._kept_s > 0 else factor) + gap

    def _rate(self, item: StreamTask) -> float:
        """Seconds of the item that a second completes."""
        is_slowed = self._begun_s is not None and item.slowdown >= 0
        return 1 / float(self._slowdowns[item.slowdown].communication_factor[self._entry]) if is_slowed else 1.0

    def _go_on(self) -> None:
        """To the next event, at the rates of now."""
        passed_s = [item.left_s / self._rate(item) for item in self._running()]
        works: list[StreamTask | Entry] = [*self._items, *self._entries]
        passed_s += [work.ready_s - self._time_s for work in works if not self._has_arrived(work)]
        if self._begun_s is not None:
            pace = self._pace()
            passed_s.append((self._kept_s or self._left_s) * pace)
        step_s = min(passed_s, default=0.0)
        for item in self._running():
            item.left_s -= step_s * self._rate(item)
        if self._begun_s is not None:
            self._left_s -= step_s / pace
            self._kept_s = _positive(self._kept_s - step_s / pace)
        self._time_s += step_s


def _positive(left_s: float) -> float:
    return left_s if left_s > MOMENT_S else 0.0
