"""Time of a call in a busy stream: the device is held while the host enqueues, so only kernels and their gaps count.

In a step a kernel follows other kernels, and a stream that changes kernels loses about a microsecond more than one that
repeats the same. So calls alternate with a small kernel of another kind, the separator, whose own time is taken off.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import combinations
from typing import Any, NamedTuple, Protocol

import torch

from calibrate.timing.samples import CUDA_LIMITS, Limits, Samples, calls_per_sample, is_enough

FIRST_HOLDS_S = (2e-3, 20e-3, 200e-3)  # tried in turn for the first look at a call
MARGIN = 1.3  # hold this much longer than enqueueing took
SLACK_S = 3e-4
LONGEST_HOLD_S = 0.2
MOST_MISSES = 12
SPIN_CYCLES = 20_000_000
SEPARATOR_NUMEL = 1024
SEPARATOR_KERNELS = (torch.lgamma, torch.digamma, torch.erfinv)


class SynchronizesError(Exception):
    """The call waits for the device, so it cannot be enqueued behind a held stream."""


class Stream(Protocol):
    """A device's stream as the stopwatch needs it."""

    def hold(self, seconds: float) -> None:
        """Keep the stream busy that long."""

    def mark(self) -> Any:
        """Return a point in the stream."""

    def passed(self, mark: Any) -> bool:
        """Return whether the device has reached it."""

    def between_s(self, first: Any, last: Any) -> float:
        """Return seconds from mark to mark; waits for the last."""

    def drain(self) -> None:
        """Wait until the stream is idle."""


class CudaStream:
    """The current CUDA stream. Its hold is a kernel that spins; how fast it spins is measured once."""

    def __init__(self) -> None:
        self._cycles_per_s = 1e9
        for _ in range(3):  # the first ones load the kernel and raise the clock
            first = self.mark()
            torch.cuda._sleep(SPIN_CYCLES)
            self._cycles_per_s = SPIN_CYCLES / self.between_s(first, self.mark())

    def hold(self, seconds: float) -> None:
        torch.cuda._sleep(int(seconds * self._cycles_per_s))

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def passed(self, mark: torch.cuda.Event) -> bool:
        return bool(mark.query())

    def between_s(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        last.synchronize()
        return float(first.elapsed_time(last)) * 1e-3

    def drain(self) -> None:
        torch.cuda.synchronize()


class Separator(Protocol):
    """A small kernel that runs between calls; ``time_s`` is what it adds to a stream of changing kernels."""

    time_s: float

    def __call__(self) -> None: ...


class CudaSeparator:
    """lgamma of a few numbers: a kernel no model launches.

    Its time follows from what it, digamma and erfinv take in turns, two by two: (ld + le - de) / 2.
    """

    def __init__(self, stream: Stream) -> None:
        self._numbers = torch.rand(SEPARATOR_NUMEL, device="cuda") * 0.9
        self._result = torch.empty_like(self._numbers)
        watch = CudaStopwatch(stream)
        self.time_s = separate_s(
            *(watch.measure(partial(self._in_turns, *pair)).median_s for pair in combinations(SEPARATOR_KERNELS, 2))
        )

    def __call__(self) -> None:
        SEPARATOR_KERNELS[0](self._numbers, out=self._result)

    def _in_turns(self, *kernels: Callable[..., object]) -> None:
        for kernel in kernels:
            kernel(self._numbers, out=self._result)


def separate_s(first_second_s: float, first_third_s: float, second_third_s: float) -> float:
    """Return the time of the first of three kernels from the times of each two.

    >>> separate_s(1.0 + 2.0, 1.0 + 5.0, 2.0 + 5.0)
    1.0
    """
    return (first_second_s + first_third_s - second_third_s) / 2


class _Sample(NamedTuple):
    call_s: float
    enqueue_s: float
    held: bool


class CudaStopwatch:
    """Samples of one call: N calls enqueued behind a held stream, from event to event.

    A sample counts only if the device had not started when the host was done; otherwise the stream is held longer, or,
    where the launch queue was full, fewer calls are enqueued. separator: runs after each call; without one, calls
    follow each other.
    """

    def __init__(
        self,
        stream: Stream,
        limits: Limits = CUDA_LIMITS,
        clock: Callable[[], float] = time.perf_counter,
        separator: Separator | None = None,
    ) -> None:
        self.stream = stream
        self._limits = limits
        self._clock = clock
        self._separator = separator

    def limited(self, limits: Limits) -> CudaStopwatch:
        """Return the same stopwatch with other limits."""
        return CudaStopwatch(self.stream, limits, self._clock, self._separator)

    def measure(self, call: Callable[[], object]) -> Samples:
        """Return samples of ``call``.

        Raises
        ------
        SynchronizesError
            If the call waits for the device.
        """
        call()
        look = self._first_look(call)
        calls = calls_per_sample(look.call_s, self._limits)
        hold_s = self._hold_for(calls * look.enqueue_s)
        values: list[float] = []
        misses, began_s = 0, self._clock()
        while not is_enough(values, self._clock() - began_s, self._limits):
            sample = self._sample(call, calls, hold_s)
            if sample.held:
                values.append(sample.call_s)
                hold_s = self._hold_for(sample.enqueue_s)
                continue
            misses += 1
            if misses > MOST_MISSES:
                raise SynchronizesError
            queue_full = calls > 1 and calls * look.enqueue_s < 0.7 * hold_s
            calls, hold_s = (calls // 2, hold_s) if queue_full else (calls, self._hold_for(2 * sample.enqueue_s))
        return Samples(tuple(values), calls)

    def _hold_for(self, enqueue_s: float) -> float:
        return min(MARGIN * enqueue_s + SLACK_S, LONGEST_HOLD_S)

    def _first_look(self, call: Callable[[], object]) -> _Sample:
        for hold_s in FIRST_HOLDS_S:
            sample = self._sample(call, 1, hold_s)
            if sample.held:
                return sample
        raise SynchronizesError

    def _sample(self, call: Callable[[], object], calls: int, hold_s: float) -> _Sample:
        self.stream.drain()
        began_s = self._clock()
        self.stream.hold(hold_s)
        first = self.stream.mark()
        for _ in range(calls):
            call()
            if self._separator is not None:
                self._separator()
        last = self.stream.mark()
        enqueue_s = self._clock() - began_s
        held = not self.stream.passed(first)
        between_s = 0.0 if self._separator is None else self._separator.time_s
        return _Sample(self.stream.between_s(first, last) / calls - between_s, enqueue_s, held)
