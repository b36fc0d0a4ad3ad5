"""Two loops at the same time on two streams of every rank: how often each runs, and which stretch of it counts.

Both loops begin at one point of time. Of the loop that is timed, only iterations that end while the other loop is still
running count.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from calibrate.interconnect.collectives import Wanted, collective_call
from calibrate.timing.cuda_stopwatch import LONGEST_HOLD_S, MARGIN, SLACK_S, CudaStream, Stream

REPEATS = 3
LOOP_S = 0.012  # of what is timed
MOST_LAUNCHES = 350  # device launches of a loop that must be queued whole: both together must fit the launch queue
MOST_FED = 4000  # calls of one whose launches last at least FED_S each: the host queues them faster than they run
FED_S = 20e-6
LONG_S = 1e-3  # a few of such calls give the host enough time to queue the rest
HOST_S = 60e-6  # a launch takes the host at most about so long
LONGER = 2.5  # times as long as the timed loop the other one lasts, were both alone
MARKS = 16  # stretches of the loop that is timed
ATTEMPTS = 4  # at loops that were queued in time and ran at the same time

Run = Callable[[], Any]


class Streams(Stream, Protocol):
    """The current stream of a device, and another one, ``side``."""

    def on_main(self) -> AbstractContextManager[Any]:
        """Queue what follows on the current stream."""

    def on_side(self) -> AbstractContextManager[Any]:
        """Queue what follows on the side stream."""

    def delay_side(self, mark: Any) -> None:
        """Let the side stream go on only when the device has reached the mark."""

    def empty_cache(self) -> None:
        """Return memory that nothing uses to the device."""


class CudaStreams(CudaStream):
    """The current stream and a new one of the current CUDA device."""

    def __init__(self) -> None:
        super().__init__()
        self._side = torch.cuda.Stream()

    def on_main(self) -> AbstractContextManager[Any]:
        on_current: AbstractContextManager[Any] = torch.cuda.stream(torch.cuda.current_stream())
        return on_current

    def on_side(self) -> AbstractContextManager[Any]:
        on_side: AbstractContextManager[Any] = torch.cuda.stream(self._side)
        return on_side

    def delay_side(self, mark: torch.cuda.Event) -> None:
        self._side.wait_event(mark)

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()


class Group(Protocol):
    """The ranks that measure together."""

    rank: int
    size: int

    def meet(self) -> None:
        """Queue what brings the devices of all ranks to one point of time."""

    def reduced(self, values: Sequence[float], largest: bool = False) -> list[float]:
        """Return the sum, or the largest, of what the ranks give, value by value."""

    def collective(self, wanted: Wanted) -> Run:
        """Return a call of the collective, on tensors of its own."""


class CudaGroup:
    """A process group of ranks with a GPU each."""

    def __init__(self, group: Any) -> None:
        self._group, self._flag = group, torch.zeros(1, device="cuda")
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def meet(self) -> None:
        dist.all_reduce(self._flag, group=self._group)

    def reduced(self, values: Sequence[float], largest: bool = False) -> list[float]:
        shared = torch.tensor(values, dtype=torch.float64, device="cuda")
        dist.all_reduce(shared, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=self._group)
        return [float(value) for value in shared.tolist()]

    def collective(self, wanted: Wanted) -> Run:
        return collective_call(wanted, self._group, "cuda")


class Loops(NamedTuple):
    """How often two loops run.

    Parameters
    ----------
    own : int
        Calls of the loop that is timed.
    other : int
        Calls of the loop that runs at the same time.
    stride : int
        Calls between two marks of the timed loop.
    held : int
        Calls of the other loop that are queued before the device goes on.
    """

    own: int
    other: int
    stride: int
    held: int


def loops(own_s: float, other_s: float, own_launches: int = 1, other_launches: int = 1) -> Loops:
    """Return loops of which the other lasts ``LONGER`` times as long as the timed one.

    Where that cannot be had, the timed one is shortened.

    Parameters
    ----------
    own_s, other_s : float
        Seconds of one call alone.
    own_launches, other_launches : int
        Device launches of one call.

    Examples
    --------
    >>> loops(1e-3, 1e-3), loops(8e-3, 25e-6)
    (Loops(own=12, other=30, stride=1, held=12), Loops(own=4, other=3200, stride=1, held=350))
    """
    most_own, most_held = (max(4, MOST_LAUNCHES // launches) for launches in (own_launches, other_launches))
    own = max(4, min(most_own, math.ceil(LOOP_S / own_s - 1e-9)))
    most = MOST_FED if other_s >= FED_S * other_launches else most_held
    other = max(4, min(most, math.ceil(LONGER * own * own_s / other_s - 1e-9)))
    if other == most:
        own = max(3, min(own, int(other * other_s / (LONGER * own_s))))
    stride = max(1, own // MARKS)
    held = most_held if other_s < LONG_S else max(4, math.ceil(LOOP_S / other_s - 1e-9))
    return Loops(own - own % stride, other, stride, min(other, held))


def overlapped_s(marks_s: Sequence[float], stride: int, until_s: float) -> float | None:
    """Return the seconds of one call, from stretches that ended before the other loop did, without the first.

    The first began together with the other loop, which none of a step does. None where fewer than two are left.

    Parameters
    ----------
    marks_s : sequence of float
        When the loop began, and the end of each stretch of ``stride`` calls.
    until_s : float
        When the other loop ended.

    Examples
    --------
    >>> overlapped_s([0.0, 3.0, 5.0, 7.0, 8.0], 2, 7.5)
    1.0
    >>> overlapped_s([0.0, 3.0, 5.0, 7.0, 8.0], 2, 6.0) is None
    True
    """
    inside = [mark for mark in marks_s if mark <= until_s][1:]
    return None if len(inside) < 3 else (inside[-1] - inside[0]) / (stride * (len(inside) - 1))


class LoopTimer:
    """Times loops that all ranks run at the same time.

    Parameters
    ----------
    streams : Streams
        The loops run on.
    group : Group
        The ranks.
    repeats : int
        How often a pair of loops is timed.
    clock : callable
        Returns the host's time in seconds.

    Attributes
    ----------
    is_computing : bool
        Whether this rank is one of those whose times count.
    """

    def __init__(
        self, streams: Streams, group: Group, repeats: int = REPEATS, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.streams, self.group, self.repeats = streams, group, repeats
        self._clock = clock
        self.is_computing = True

    def alone_s(self, run: Run, launches: int = 1) -> float:
        """Return the seconds of one call alone, marked as it is in concurrent loops."""
        return statistics.median(self._averages(self.loops_alone_s(run, launches)))

    def loops_alone_s(self, run: Run, launches: int = 1) -> list[float]:
        """Return this rank's seconds of one call in loops that run alone."""
        run()
        (once_s,) = self._averages([self._loop_s(run, 4)])
        count = loops(once_s, once_s, launches).own
        return [self._loop_s(run, count) for _ in range(REPEATS)]

    def concurrent_s(self, own: Run, other: Run, counts: Loops, is_collective: bool) -> list[float]:
        """Return samples of the seconds of one call of ``own`` while ``other`` runs; fewer where they did not overlap.

        Parameters
        ----------
        is_collective : bool
            Whether ``own`` is the collective, which runs on the side stream.
        """
        samples_s = [self.one_concurrent_s(own, other, counts, is_collective) for _ in range(self.repeats)]
        return [value for value in samples_s if value is not None]

    def one_concurrent_s(self, own: Run, other: Run, counts: Loops, is_collective: bool) -> float | None:
        """Return one sample for :meth:`concurrent_s`; the other loop is made longer until it outlasts the timed one."""
        for _ in range(ATTEMPTS):
            marks_s, until_s = self._both(own, other, counts, is_collective)
            seconds = overlapped_s(marks_s, counts.stride, until_s)
            if self.largest(float(self.is_computing and seconds is None)) == 0:
                return self._averages([seconds or 0.0])[0]
            counts = counts._replace(other=min(2 * counts.other, MOST_FED))
        return None

    def largest(self, value: float) -> float:
        """Return the largest value that any rank gives."""
        return self.group.reduced([value], largest=True)[0]

    def _averages(self, values_s: Sequence[float]) -> list[float]:
        """Return averages over the ranks that compute."""
        weight = float(self.is_computing)
        *sums_s, ranks = self.group.reduced([*(weight * value for value in values_s), weight])
        return [value / ranks for value in sums_s]

    def _loop_s(self, run: Run, count: int) -> float:
        stride = max(1, count // MARKS)
        marks_s, _ = self._both(run, None, Loops(count - count % stride, 0, stride, 0), False)
        return (marks_s[-1] - marks_s[1]) / (stride * (len(marks_s) - 2))

    def _both(self, own: Run, other: Run | None, counts: Loops, is_collective: bool) -> tuple[list[float], float]:
        """Run both loops; return marks of the timed one and the end of the other, in seconds after the timed began."""
        streams = self.streams
        on_own, on_other = (streams.on_side, streams.on_main) if is_collective else (streams.on_main, streams.on_side)
        hold_s = HOST_S * (counts.own + counts.held + 10)
        for _ in range(ATTEMPTS):
            streams.drain()
            streams.hold(min(hold_s, LONGEST_HOLD_S))
            began_s = self._clock()
            self.group.meet()
            gate = streams.mark()
            streams.delay_side(gate)
            marks = self._queue(own, counts.own, counts.stride, on_own)
            ends = [] if other is None else self._queue(other, counts.held, counts.held, on_other)
            late = streams.passed(gate)
            hold_s = MARGIN * (self._clock() - began_s) + SLACK_S
            if other is not None and counts.other > counts.held:
                rest = counts.other - counts.held
                ends = self._queue(other, rest, rest, on_other)
            streams.drain()
            if self.largest(float(late)) == 0:
                break
        first = marks[0]
        until_s = streams.between_s(first, ends[-1]) if ends else math.inf
        return [streams.between_s(first, mark) for mark in marks], until_s

    def _queue(
        self, run: Run, count: int, stride: int, on_stream: Callable[[], AbstractContextManager[Any]]
    ) -> list[Any]:
        with on_stream():
            marks = [self.streams.mark()]
            for index in range(count):
                run()
                if (index + 1) % stride == 0:
                    marks.append(self.streams.mark())
        return marks


def half_range(values: Sequence[float]) -> float:
    """Return half of what lies between the smallest and the largest value, over the median.

    >>> half_range([1.0, 2.0, 3.0])
    0.5
    """
    return (max(values) - min(values)) / (2 * statistics.median(values))
