"""Two clocks that time a loop of steps from mark to mark: the device's by CUDA events, and the host's own."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from perfmodel.units import MS


class Clock(Protocol):
    """``mark`` begins a phase and ends the one before; ``stop`` ends the last.

    ``intervals`` gives (phase, micro-batch, seconds) in order. The ``end`` of a step is not marked: a phase lasts until
    the next one starts, so phases add up to steps and steps to the whole loop.
    """

    def mark(self, phase: str, micro_batch: int) -> None: ...

    def stop(self) -> None: ...

    def intervals(self) -> list[tuple[str, int, float]]: ...


class HostClock:
    """The clock of devices that work while the host waits: the CPU."""

    def __init__(self) -> None:
        self.labels: list[tuple[str, int]] = []
        self.times_s: list[float] = []

    def mark(self, phase: str, micro_batch: int) -> None:
        if phase != "end":
            self.labels.append((phase, micro_batch))
            self.times_s.append(time.perf_counter())

    def stop(self) -> None:
        self.times_s.append(time.perf_counter())

    def intervals(self) -> list[tuple[str, int, float]]:
        """Return what was marked, with what the host clock showed in between."""
        ends_s = self.times_s[1:]
        return [
            (phase, micro_batch, end_s - start_s)
            for (phase, micro_batch), start_s, end_s in zip(self.labels, self.times_s, ends_s, strict=False)
        ]


class CudaClock:
    """CUDA events in the current stream: the times are the device's, and the host is not made to wait.

    Parameters
    ----------
    capacity : int
        Marks to come. Their events are made in advance, so that a mark costs one record.
    """

    def __init__(self, capacity: int) -> None:
        self.labels: list[tuple[str, int]] = []
        self.events: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(capacity + 1)]
        for event in self.events:
            event.record()
        self.used = 0

    def mark(self, phase: str, micro_batch: int) -> None:
        if phase != "end":
            self.labels.append((phase, micro_batch))
            self._record()

    def stop(self) -> None:
        self._record()

    def _record(self) -> None:
        self.events[self.used].record()
        self.used += 1

    def intervals(self) -> list[tuple[str, int, float]]:
        """Wait for the device; return what was marked, with its time between each event and the next."""
        torch.cuda.synchronize()
        pairs = zip(self.labels, self.events, self.events[1:], strict=False)
        return [(*label, start.elapsed_time(end) * MS) for label, start, end in pairs]


def steps_of(intervals: Sequence[tuple[str, int, float]]) -> tuple[tuple[float, ...], dict[str, tuple[float, ...]]]:
    """Return seconds of each step, and of each phase in it with its micro-batches added up.

    >>> steps_of([("forward", 0, 1.0), ("backward", 0, 2.0), ("forward", 0, 1.5), ("backward", 0, 2.5)])
    ((3.0, 4.0), {'forward': (1.0, 1.5), 'backward': (2.0, 2.5)})
    """
    steps = list(_split(intervals))
    names = dict.fromkeys(phase for phase, _, _ in intervals)
    phases = {
        name: tuple(sum(seconds for phase, _, seconds in step if phase == name) for step in steps) for name in names
    }
    return tuple(sum(seconds for _, _, seconds in step) for step in steps), phases


def _split(intervals: Sequence[tuple[str, int, float]]) -> Iterator[list[tuple[str, int, float]]]:
    """Split marks into steps: one starts wherever the first mark comes again."""
    step: list[tuple[str, int, float]] = []
    for interval in intervals:
        if step and interval[:2] == intervals[0][:2]:
            yield step
            step = []
        step.append(interval)
    if step:
        yield step
