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
    """Ranks that talk to each other. group: what they have in common: ``dp``, all of them; or of fully_shard ``shard``,
    which share one copy of the model, ``replicate``, which hold the same shard, and ``reshard``, which share parameters
    between forward and backward; of a pipeline names that begin with ``pp``, and ``replicate``, which hold the same
    stages.
    """

    group: str
    ranks: int


class Collective(NamedTuple):
    """A collective in which this rank takes part.

    size_bytes: as :func:`~perfmodel.hardware.interconnect.collective_key` counts it. group: see
    :class:`Members`; one group is one communicator, which runs its collectives in order of issue, on whatever streams.
    role: of messages, whether this rank sends (``send``), receives (``receive``) or does ``both``.
    """

    kind: str
    dtype: str
    size_bytes: int
    ranks: int
    group: str = "dp"
    role: str = ""

    @property
    def among(self) -> Members:
        return Members(self.group, self.ranks)


class Message(NamedTuple):
    """What one rank sends to another. name: the same for both, and no other's in a step. peer: the other rank."""

    name: str
    is_send: bool
    peer: int


class Instruction(NamedTuple):
    """An instruction of a strategy. kind, a, b: as in a trace, or as above. call: what its host time is looked up by
    among an interconnect's calls, or ``launch`` for an operator called from C++; empty for none. share: of that call.
    holds: what is allocated or freed.
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
    """Memory that a strategy replaces once. step: in which, counted from 1. made: what it asks for, and where in the
    steady step's runs, in order. replaced: what it gives up for that, at some time until the step has ended.
    """

    step: int
    made: tuple[Insertion, ...]
    replaced: tuple[Instruction, ...]


@dataclass(frozen=True)
class Program:
    """What one rank does in a steady step (``runs``) and in its first (``first_runs``: it makes optimizer states).

    insertions, first_insertions: of the steady and the first step, in order. extra_operations:
    what inserted launches run,
    numbered after the trace's. setup: memory that the strategy asks for and gives up when it wraps the model; rebuild:
    what it replaces later. exchanges: messages that are sent and received together. in_flight: storages of which every
    micro-batch has its own, since others may run between its forward and its backward; what a phase of no micro-batch
    frees of them it frees of all. stage_blocks: repeated blocks of every stage of the model, in order; empty without a
    pipeline.
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
        """Columns of the steady step."""
        return _columns(self.trace.steady, self.runs, self.insertions)

    @cached_property
    def first_instructions(self) -> Instructions:
        """Columns of the first step."""
        return _columns(self.trace.first, self.first_runs, self.first_insertions)

    @cached_property
    def modules(self) -> np.ndarray:
        """For each instruction the innermost module it runs in (index into the trace's modules), -1 outside."""
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
    """Equally long columns: kind, a, b as in the trace or as inserted; run: index into the program's runs; event: into
    the trace's, -1 for what was inserted; stream; call: index into calls, -1 for none; share: of that call.
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
        """Positions of the operators (OP), host-only ones included."""
        return np.flatnonzero(self.kind == EventKind.OP)


def _columns(events: StepEvents, runs: tuple[PhaseRun, ...], insertions: tuple[Insertion, ...]) -> Instructions:
    by_run: dict[int, list[Insertion]] = {}
    for insertion in insertions:
        by_run.setdefault(insertion.run, []).append(insertion)
    calls = dict.fromkeys(row.call for insertion in insertions for row in insertion.instructions if row.call)
    numbers = {call: index for index, call in enumerate(calls)}
    parts: list[tuple[np.ndarray, ...]] = []
    for index, run in enumerate(runs):
        start = run.segment.start
        for insertion in by_run.get(index, []):
            parts.append(_traced(events, start, insertion.event, index))
            parts.append(_inserted(insertion.instructions, index, numbers))
            start = insertion.event
        parts.append(_traced(events, start, run.segment.stop, index))
    if not parts:
        parts = [_traced(events, 0, 0, 0)]
    kind, a, b, run_of, event, stream, call, share = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Instructions(kind, a, b, run_of, event, stream, call, share, tuple(numbers))


def _traced(events: StepEvents, start: int, stop: int, run: int) -> tuple[np.ndarray, ...]:
    part, count = slice(start, stop), stop - start
    nothing = np.full(count, -1, dtype=np.int64)
    return (
        events.kind[part],
        events.a[part],
        events.b[part],
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
    """The step of one rank that talks to nobody: the trace's segments, its last micro-batch repeated as often as asked.

    gradient_accumulation: micro-batches a step; the trace holds min(2, that many).
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
                runs += [PhaseRun(again.phase, micro_batch, again) for again in repeated]
    return tuple(runs)
