"""The order in which each rank of a pipeline computes: forwards and backwards of its stages, as in torch's schedules.

GPipe and 1F1B are not here: their computing is interwoven with their messages (see
:mod:`perfmodel.program.pipeline.schedules`). The other five are lists, from which their messages follow; a new schedule
that is a list is added to :func:`turns_of`.

Sources: torch/distributed/pipelining/schedules.py and _utils.py; GPipe, arXiv 1811.06965; 1F1B, arXiv 2006.09503
(PipeDream-flush); interleaved 1F1B, arXiv 2104.04473; looped breadth first, arXiv 2211.05953; zero bubble and its V,
arXiv 2401.10241; DualPipe, arXiv 2412.19437, and DualPipeV, github.com/deepseek-ai/DualPipe.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from typing import NamedTuple

from perfmodel.scenario.rules import rounds_of
from perfmodel.scenario.scenario import THERE_AND_BACK, Schedule


class Compute(NamedTuple):
    """A call that computes.

    Attributes
    ----------
    kind : str
        F is forward (with the loss, in the last stage), B all of backward, I backward for the stage's inputs, W for its
        weights. In stage 0, whose inputs need no gradient, torch computes nothing in I and all of backward in W.
    stage : int
        Of the whole model.
    micro_batch : int
    """

    kind: str
    stage: int
    micro_batch: int


Turn = tuple[Compute, ...]
"""What a rank computes before anything that it made is sent: one, or a forward and a backward that DualPipeV pairs
(torch runs them one after the other)."""


def stages_of(schedule: Schedule, ranks: int, virtual_stages: int = 1) -> tuple[tuple[int, ...], ...]:
    """Return the stages of each rank, ascending: assigned in turns, or there and back, so that the first rank has the
    first and the last stage.
    """
    if schedule in THERE_AND_BACK:
        return tuple((rank, 2 * ranks - 1 - rank) for rank in range(ranks))
    return tuple(tuple(range(rank, ranks * virtual_stages, ranks)) for rank in range(ranks))


def turns_of(schedule: Schedule, rank: int, ranks: int, micro_batches: int, virtual_stages: int) -> Iterator[Turn]:
    """Return what the rank computes, in order, by a schedule of which torch has a list.

    The numbers are such as :func:`~perfmodel.scenario.rules.check_schedule` lets pass.
    """
    match schedule:
        case "looped-bfs":
            return _breadth_first(rank, ranks, micro_batches, virtual_stages)
        case "interleaved-1f1b":
            return _interleaved(rank, ranks, micro_batches, virtual_stages)
        case "interleaved-zero-bubble":
            return _interleaved_zero_bubble(rank, ranks, micro_batches, virtual_stages)
        case "zbv-zero-bubble":
            return _zero_bubble_v(rank, ranks, micro_batches)
        case "dualpipev":
            return _DualPipeV(rank, ranks, micro_batches).turns()
    raise AssertionError(f"{schedule} is no list")


def _breadth_first(rank: int, ranks: int, micro_batches: int, virtual_stages: int) -> Iterator[Turn]:
    stages = range(rank, ranks * virtual_stages, ranks)
    for stage in stages:
        for micro_batch in range(micro_batches):
            yield (Compute("F", stage, micro_batch),)
    for stage in reversed(stages):
        for micro_batch in reversed(range(micro_batches)):
            yield (Compute("B", stage, micro_batch),)


class _Rounds(NamedTuple):
    """A rank's order of an interleaved schedule.

    Attributes
    ----------
    forwards, backwards : list of (int, int)
        Stage and micro-batch; a round runs through one of the rank's stages after the other.
    warm_up : int
        Forwards before the first backward.
    """

    forwards: list[tuple[int, int]]
    backwards: list[tuple[int, int]]
    warm_up: int


def _in_rounds(rank: int, ranks: int, micro_batches: int, virtual_stages: int, a_hop: int) -> _Rounds:
    """Return the order of a rank, which runs ``a_hop`` more warm-up forwards than the next one."""
    in_round = micro_batches // rounds_of(ranks, micro_batches)
    firsts = range(0, micro_batches, in_round)
    there = [rank + ranks * turn for turn in range(virtual_stages)]
    back = there[::-1]
    forwards, backwards = (
        [(stage, first + index) for first in firsts for stage in stages for index in range(in_round)]
        for stages in (there, back)
    )
    warm_up = (virtual_stages - 1) * in_round + a_hop * (ranks - 1 - rank)
    return _Rounds(forwards, backwards, min(warm_up, len(forwards)))


def _interleaved(rank: int, ranks: int, micro_batches: int, virtual_stages: int) -> Iterator[Turn]:
    forwards, backwards, warm_up = _in_rounds(rank, ranks, micro_batches, virtual_stages, 2)
    for index in range(len(forwards) + warm_up):
        if index < len(forwards):
            yield (Compute("F", *forwards[index]),)
        if index >= warm_up:
            yield (Compute("B", *backwards[index - warm_up]),)


def _interleaved_zero_bubble(rank: int, ranks: int, micro_batches: int, virtual_stages: int) -> Iterator[Turn]:
    """Run backwards of weights later than those of inputs, by one more turn in each rank."""
    forwards, backwards, warm_up = _in_rounds(rank, ranks, micro_batches, virtual_stages, 1)
    for index in range(len(forwards) + warm_up):
        if index < len(forwards):
            yield (Compute("F", *forwards[index]),)
        if index >= warm_up:
            yield (Compute("I", *backwards[index - warm_up]),)
        if index >= warm_up + rank:
            yield (Compute("W", *backwards[index - warm_up - rank]),)
    for stage, micro_batch in backwards[max(0, len(backwards) - rank) :]:
        yield (Compute("W", stage, micro_batch),)


def _zero_bubble_v(rank: int, ranks: int, micro_batches: int) -> Iterator[Turn]:
    """Run the schedule of enough micro-batches to fill the pipeline, and leave out those that there are not."""
    there, back = rank, 2 * ranks - 1 - rank
    enough = max(2 * ranks - 1, micro_batches)
    begun: Counter[tuple[str, int]] = Counter()

    def of_kinds(kinds: str, stage: int) -> Iterator[Turn]:
        for kind in kinds:
            micro_batch = begun[kind, stage]
            begun[kind, stage] += 1
            if micro_batch < micro_batches:
                yield (Compute(kind, stage, micro_batch),)

    yield from of_kinds("F" * (2 * (ranks - rank) - 1), there)
    for _ in range(rank):
        yield from of_kinds("F", back)
        yield from of_kinds("F", there)
    for _ in range(ranks - rank):
        yield from of_kinds("FIW", back)
    while begun["F", back] < enough:
        if begun["F", there] < enough:
            yield from of_kinds("F", there)
        yield from of_kinds("IW", there)
        yield from of_kinds("FIW", back)
    for _ in range(rank):
        yield from of_kinds("I", there)
        yield from of_kinds("I", back)
    for _ in range(ranks - rank):
        yield from of_kinds("IW", there)
    for stage in (back, there):
        yield from of_kinds("W" * (begun["I", stage] - begun["W", stage]), stage)


class _DualPipeV:
    """The order of one rank, whose stages are ``there`` and ``back``."""

    def __init__(self, rank: int, ranks: int, micro_batches: int) -> None:
        self.there, self.back = rank, 2 * ranks - 1 - rank
        self._rank, self._hops, self._micro_batches = rank, ranks - 1 - rank, micro_batches
        self._is_last = rank == ranks - 1
        self._paired = micro_batches - 2 * ranks + rank + 1
        self._begun: Counter[tuple[bool, int]] = Counter()
        self._without_weights: deque[tuple[int, int]] = deque()

    def turns(self) -> Iterator[Turn]:
        yield from self._fill()
        for index in range(self._paired):
            if index == 0 and self._is_last:
                yield (self._next("F", self.there),)
                yield (self._next("B", self.back),)
            else:
                yield self._next("F", self.there), self._next("B", self.back)
            yield self._next("F", self.back), self._next("B", self.there)
        for _ in range(self._hops):
            yield (self._next("B", self.back),)
            yield self._next("F", self.back), self._next("B", self.there)
        yield from self._drain()

    def _fill(self) -> Iterator[Turn]:
        for _ in range(2 * self._hops):
            yield (self._next("F", self.there),)
        for _ in range(self._rank + 1):
            yield (self._next("F", self.there),)
            yield (self._next("F", self.back),)
        for _ in range(self._hops):
            yield (self._next("I", self.back),)
            yield from self._weights()
            yield (self._next("F", self.back),)

    def _drain(self) -> Iterator[Turn]:
        """The second half of the backwards there and back, counted over both, leaves weights for the end."""
        last = 2 * (self._rank + 1)
        for index in range(last):
            kind = "B" if index <= self._rank else "I"
            yield (self._next(kind, self.there if index % 2 else self.back),)
        for _ in range(self._hops):
            yield from self._weights()
            yield (self._next("I", self.there),)
        for _ in range(self._rank + 1):
            yield from self._weights()

    def _next(self, kind: str, stage: int) -> Compute:
        key = (kind == "F", stage)
        micro_batch = self._begun[key]
        self._begun[key] += 1
        if kind == "I":
            self._without_weights.append((stage, micro_batch))
        return Compute(kind, stage, micro_batch)

    def _weights(self) -> Iterator[Turn]:
        if self._without_weights:
            yield (Compute("W", *self._without_weights.popleft()),)
