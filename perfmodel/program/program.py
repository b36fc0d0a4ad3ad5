"""The program of one rank: which segments of a trace its host runs, in which order, and what is put between them.

An instruction is a trace event (:class:`~perfmodel.trace.trace.EventKind`) or one that a strategy inserts:
launches, collectives, and the records and waits by which streams meet. It carries work, never seconds. Repetition is by
reference, so a step of many micro-batches costs no more memory than one of two.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from perfmodel.trace.operation import Operation
from perfmodel.trace.trace import EventKind, Segment, StepEvents, StorageKind, Trace

COMPUTE = 0  # the stream on which operators run
BY_HOST = -1  # in place of a stream that waits: the host itself, which gives nothing to any stream meanwhile

# Kinds of instructions that no trace has. Columns a and b mean:
# COLLECTIVE  a: index into the program's collectives   b: of messages, 1 + index into the program's exchanges; else 0
# RECORD      a: number of the mark                     b: 0. The mark is reached when the stream has done all so far
# WAIT        a: number of the mark                     b: 0. What the stream is given from now on starts after it
# HOST        a: 0                                      b: 0. The host works, and gives nothing to any stream
COLLECTIVE, RECORD, WAIT, HOST = 16, 17, 18, 19

PIPELINE, REPLICATE = "pp", "replicate"  # groups, see Members


@dataclass(frozen=True)
class PhaseRun:
    """One run of a trace segment.

    Attributes
    ----------
    phase : str
    micro_batch : int
        Of the step; -1 where the phase has none.
    segment : Segment
        The events that it repeats.
    stage : int
        Of the whole model, in a pipeline; -1 for what a rank runs once over all its stages, and without a pipeline.
    """

    phase: str
    micro_batch: int
    segment: Segment
    stage: int = -1


class Members(NamedTuple):
    """Ranks that talk to each other, by what they have in common.

    Attributes
    ----------
    group : str
        ``dp``: all ranks. Of fully_shard ``shard``: they share one copy of the model; ``replicate``: they hold the same
        shard; ``reshard``: they share parameters between forward and backward. Of a pipeline a name that begins with
        ``pp``; and ``replicate``: they hold the same stages.
    ranks : int
        How many they are.
    """

    group: str
    ranks: int


class Collective(NamedTuple):
    """A collective in which this rank participates.

    Attributes
    ----------
    kind, dtype : str
    size_bytes : int
        As :func:`~perfmodel.hardware.interconnect.collective_key` counts it.
    ranks : int
    group : str
        See :class:`Members`. One group is one communicator, which runs its collectives in order of issue, on whatever
        streams.
    role : str
        Of messages, whether this rank sends (``send``), receives (``receive``) or does ``both``.
    """

    kind: str
    dtype: str
    size_bytes: int
    ranks: int
    group: str = "dp"
    role: str = ""

    @property
    def members(self) -> Members:
        return Members(self.group, self.ranks)


class Message(NamedTuple):
    """A message between two ranks.

    Attributes
    ----------
    name : str
        The same on both ranks, and no other message's in a step.
    is_send : bool
        Whether this rank sends it.
    peer : int
        The other rank.
    """

    name: str
    is_send: bool
    peer: int


class Instruction(NamedTuple):
    """An instruction that a strategy inserts.

    Attributes
    ----------
    kind, a, b : int
        As in a trace, or as listed at the top of this module.
    stream : int
    call : str
        The host call (:mod:`perfmodel.hardware.host_calls`) by which its host time is looked up; empty for none.
    share : float
        What it takes of that call's time.
    holds : StorageKind
        What is in the storage that it allocates or frees.
    """

    kind: int
    a: int = 0
    b: int = 0
    stream: int = COMPUTE
    call: str = ""
    share: float = 1.0
    holds: StorageKind = StorageKind.GRADIENT


class Insertion(NamedTuple):
    """Instructions put into a run before its trace event ``event`` (the segment's stop: at its end)."""

    run: int
    event: int
    instructions: tuple[Instruction, ...]


class Rebuild(NamedTuple):
    """Memory that a strategy replaces once.

    Attributes
    ----------
    step : int
        The step in which it does, counted from 1.
    made : tuple of Insertion
        Allocations, and where they stand in the steady step's runs, in order.
    replaced : tuple of Instruction
        What is freed in exchange, at some time until that step has ended.
    """

    step: int
    made: tuple[Insertion, ...]
    replaced: tuple[Instruction, ...]


@dataclass(frozen=True)
class Program:
    """A rank's work in a steady step and in its first one, which makes the optimizer states.

    Attributes
    ----------
    trace : Trace
    runs, first_runs : tuple of PhaseRun
        Of the steady and of the first step, in order.
    insertions, first_insertions : tuple of Insertion
        Of the steady and of the first step, in order.
    extra_operations : tuple of Operation
        What inserted launches run, numbered after the trace's operations.
    collectives : tuple of Collective
        The table that COLLECTIVE instructions point into.
    setup : tuple of Instruction
        Memory that the strategy allocates and frees when it wraps the model.
    rebuild : Rebuild, optional
        Memory that it replaces later.
    exchanges : tuple of tuple of Message
        Messages that are sent and received together.
    in_flight : frozenset of int
        Storages of which every micro-batch has its own, since others may run between its forward and its backward. A
        phase of no micro-batch that frees one of them frees it for all micro-batches.
    stage_blocks : tuple of int
        Repeated blocks of every stage of the model, in order; empty without a pipeline.
    """

    trace: Trace
    runs: tuple[PhaseRun, ...]
    first_runs: tuple[PhaseRun, ...]
    insertions: tuple[Insertion, ...] = ()
    first_insertions: tuple[Insertion, ...] = ()
    extra_operations: tuple[Operation, ...] = ()
    collectives: tuple[Collective, ...] = ()
    setup: tuple[Instruction, ...] = ()
    rebuild: Rebuild | None = None
    exchanges: tuple[tuple[Message, ...], ...] = ()
    in_flight: frozenset[int] = frozenset()
    stage_blocks: tuple[int, ...] = ()

    @cached_property
    def operations(self) -> tuple[Operation, ...]:
        return self.trace.operations + self.extra_operations

    @cached_property
    def instructions(self) -> Instructions:
        """Return the steady step's columns."""
        return _columns(self.trace.steady, self.runs, self.insertions)

    @cached_property
    def first_instructions(self) -> Instructions:
        """Return the first step's columns."""
        return _columns(self.trace.first, self.first_runs, self.first_insertions)

    @cached_property
    def modules(self) -> np.ndarray:
        """Return for each instruction the innermost module it runs in: an index into the trace's modules, or -1."""
        columns = self.instructions
        inside = np.full(len(columns.kind), -1, dtype=np.int64)
        borders = np.flatnonzero((columns.kind == EventKind.MODULE_ENTER) | (columns.kind == EventKind.MODULE_EXIT))
        stack: list[int] = []
        for here, following in zip(borders, [*borders[1:], len(columns.kind)], strict=False):
            if columns.kind[here] == EventKind.MODULE_ENTER:
                stack.append(int(columns.a[here]))
            elif stack:
                stack.pop()
            inside[here:following] = stack[-1] if stack else -1
        return inside


@dataclass(frozen=True)
class Instructions:
    """The instructions of a step as equally long columns.

    Attributes
    ----------
    kind, a, b : ndarray of int
        As in the trace, or as inserted.
    run : ndarray of int
        Index into the program's runs.
    event : ndarray of int
        Index into the trace's events; -1 for what was inserted.
    stream : ndarray of int
    call : ndarray of int
        Index into ``calls``; -1 for none.
    share : ndarray of float
        What the instruction takes of that call's time.
    calls : tuple of str
    """

    kind: np.ndarray
    a: np.ndarray
    b: np.ndarray
    run: np.ndarray
    event: np.ndarray
    stream: np.ndarray
    call: np.ndarray
    share: np.ndarray
    calls: tuple[str, ...] = ()

    @cached_property
    def launches(self) -> np.ndarray:
        """Return the positions of the operators (OP), host-only ones included."""
        return np.flatnonzero(self.kind == EventKind.OP)


def _columns(events: StepEvents, runs: tuple[PhaseRun, ...], insertions: tuple[Insertion, ...]) -> Instructions:
    by_run: dict[int, list[Insertion]] = {}
    for insertion in insertions:
        by_run.setdefault(insertion.run, []).append(insertion)
    calls = dict.fromkeys(row.call for insertion in insertions for row in insertion.instructions if row.call)
    numbers = {call: index for index, call in enumerate(calls)}
    pieces: list[tuple[np.ndarray, ...]] = []
    for index, run in enumerate(runs):
        start = run.segment.start
        for insertion in by_run.get(index, []):
            pieces.append(_traced(events, start, insertion.event, index))
            pieces.append(_inserted(insertion.instructions, index, numbers))
            start = insertion.event
        pieces.append(_traced(events, start, run.segment.stop, index))
    if not pieces:
        pieces = [_traced(events, 0, 0, 0)]
    kind, a, b, run_of, event, stream, call, share = (np.concatenate(column) for column in zip(*pieces, strict=True))
    return Instructions(kind, a, b, run_of, event, stream, call, share, tuple(numbers))


def _traced(events: StepEvents, start: int, stop: int, run: int) -> tuple[np.ndarray, ...]:
    within, count = slice(start, stop), stop - start
    nothing = np.full(count, -1, dtype=np.int64)
    return (
        events.kind[within],
        events.a[within],
        events.b[within],
        np.full(count, run, dtype=np.int64),
        np.arange(start, stop, dtype=np.int64),
        np.zeros(count, dtype=np.int64),
        nothing,
        np.ones(count),
    )


def _inserted(rows: tuple[Instruction, ...], run: int, calls: dict[str, int]) -> tuple[np.ndarray, ...]:
    def column(values: list[int]) -> np.ndarray:
        return np.array(values, dtype=np.int64)

    return (
        column([row.kind for row in rows]),
        column([row.a for row in rows]),
        column([row.b for row in rows]),
        np.full(len(rows), run, dtype=np.int64),
        np.full(len(rows), -1, dtype=np.int64),
        column([row.stream for row in rows]),
        column([calls.get(row.call, -1) for row in rows]),
        np.array([row.share for row in rows]),
    )


def single_device_program(trace: Trace, gradient_accumulation: int = 1) -> Program:
    """Return the program of a rank that talks to nobody: the trace's segments, its last micro-batch repeated.

    ``gradient_accumulation`` is the number of micro-batches, of which the trace holds the first two at most.
    """
    return Program(
        trace,
        _with_micro_batches(trace.steady.segments, gradient_accumulation),
        _with_micro_batches(trace.first.segments, gradient_accumulation),
    )


def _with_micro_batches(segments: tuple[Segment, ...], micro_batches: int) -> tuple[PhaseRun, ...]:
    last = max((segment.micro_batch for segment in segments), default=-1)
    repeated = [segment for segment in segments if segment.micro_batch == last >= 0]
    runs = []
    for segment in segments:
        runs.append(PhaseRun(segment.phase, segment.micro_batch, segment))
        if repeated and segment is repeated[-1]:
            for micro_batch in range(last + 1, micro_batches):
                runs += [PhaseRun(segment.phase, micro_batch, segment) for segment in repeated]
    return tuple(runs)
