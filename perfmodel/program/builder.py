"""What strategies write programs with: instructions put between those of a single device's step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from perfmodel.hardware import host_calls
from perfmodel.program.program import (
    COLLECTIVE,
    COMPUTE,
    RECORD,
    WAIT,
    Collective,
    Insertion,
    Instruction,
    Members,
    PhaseRun,
    Program,
)
from perfmodel.trace.operation import Operation, TensorSpec, contiguous_stride
from perfmodel.trace.trace import EventKind, Segment, StepEvents

COMMUNICATION = 1  # the stream of the data-parallel communicator, or of a pipeline's
REDUCE = "reduce"  # the phase of what reduces gradients after backward


class ProgramBuilder:
    """Collects what is put into a program, beside what is there already. among: the ranks that collectives are of,
    unless others are given; ranks: how many these are. stream: of their communicator.
    """

    def __init__(self, program: Program, among: Members, stream: int = COMMUNICATION) -> None:
        self.program, self.trace, self.among, self.ranks = program, program.trace, among, among.ranks
        self.gradients = [index for index, parameter in enumerate(program.trace.parameters) if parameter.requires_grad]
        self._stream = stream
        self._operations = {operation: number for number, operation in enumerate(program.extra_operations)}
        self._collectives = {collective: number for number, collective in enumerate(program.collectives)}
        self._insertions = list(program.insertions)
        rows = (row for insertion in self._insertions for row in insertion.instructions)
        self._marks = 1 + max((row.a for row in rows if row.kind == RECORD), default=-1)
        self._next_storage = 1 + max(
            [storage.id for storage in program.trace.persistent] + list(program.trace.storage_kinds), default=0
        )

    def last(self, phase: str) -> int:
        """Index of the last such phase among the runs."""
        return max(index for index, run in enumerate(self.program.runs) if run.phase == phase)

    def launch(self, operation: Operation, call: str, share: float = 1.0, stream: int = COMPUTE) -> Instruction:
        number = self._operations.setdefault(operation, len(self._operations))
        return Instruction(EventKind.OP, len(self.trace.operations) + number, -1, stream, call, share)

    def blocking(
        self,
        kind: str,
        tensor: TensorSpec,
        stream: int = COMPUTE,
        call: str | None = None,
        among: Members | None = None,
    ) -> Instruction:
        """A synchronous collective, which runs on the stream it is called on. tensor: what its size is that of. call:
        by default its kind.
        """
        name = kind if call is None else call
        return Instruction(COLLECTIVE, self._number(tensor.dtype, tensor.bytes, kind, among), stream=stream, call=name)

    def beside(
        self, dtype: str, size_bytes: int, call: str, kind: str = "all_reduce"
    ) -> tuple[tuple[Instruction, ...], int]:
        """Asynchronous, on the communicator's stream after what the compute stream was given so far; and the mark of
        its end.
        """
        before, after = self.mark(), self.mark()
        rows = (
            Instruction(RECORD, before),
            Instruction(WAIT, before, stream=self._stream),
            Instruction(COLLECTIVE, self._number(dtype, size_bytes, kind), stream=self._stream, call=call),
            Instruction(RECORD, after, stream=self._stream),
        )
        return rows, after

    def _number(self, dtype: str, size_bytes: int, kind: str = "all_reduce", among: Members | None = None) -> int:
        group, ranks = among or self.among
        collective = Collective(kind, dtype, size_bytes, ranks, group)
        return self._collectives.setdefault(collective, len(self._collectives))

    def mark(self) -> int:
        """A new one."""
        self._marks += 1
        return self._marks - 1

    def new_storage(self) -> int:
        self._next_storage += 1
        return self._next_storage - 1

    def insert(self, run: int, event: int, *instructions: Instruction) -> None:
        if instructions:
            self._insertions.append(Insertion(run, event, instructions))

    def add_phase(
        self, phase: str, instructions: Sequence[Instruction], first: Sequence[Instruction] | None = None
    ) -> None:
        """A phase of inserted instructions alone, after the last backward of the steady and of the first step.

        first: those of the first step, where they differ. Runs after it are numbered anew, so insert these later.
        """
        runs, insertion = _with_phase(self.program.runs, phase, tuple(instructions))
        first_runs, first_insertion = _with_phase(
            self.program.first_runs, phase, tuple(instructions if first is None else first)
        )
        self.program = replace(self.program, runs=runs, first_runs=first_runs, first_insertions=(first_insertion,))
        self._insertions.append(insertion)

    def insert_first(self, run: int, event: int, *instructions: Instruction) -> None:
        """The same for the first step, of which only memory is simulated."""
        more = (*self.program.first_insertions, Insertion(run, event, instructions))
        self.program = replace(self.program, first_insertions=more)

    def finish(self) -> Program:
        return replace(
            self.program,
            insertions=_in_order(self._insertions),
            first_insertions=_in_order(self.program.first_insertions),
            extra_operations=tuple(self._operations),
            collectives=tuple(self._collectives),
        )


def _in_order(insertions: Iterable[Insertion]) -> tuple[Insertion, ...]:
    """Those at the same place as they were made."""
    return tuple(sorted(insertions, key=lambda insertion: (insertion.run, insertion.event)))


def _with_phase(
    runs: tuple[PhaseRun, ...], phase: str, instructions: tuple[Instruction, ...]
) -> tuple[tuple[PhaseRun, ...], Insertion]:
    at = 1 + max(index for index, run in enumerate(runs) if run.phase == "backward")
    event = runs[at - 1].segment.stop
    run = PhaseRun(phase, -1, Segment(phase, -1, event, event))
    return (*runs[:at], run, *runs[at:]), Insertion(at, event, instructions)


def ready_gradients(events: StepEvents, backward: Segment | None = None) -> list[tuple[int, int]]:
    """Parameters as their gradients become ready in a backward, by default the last, each with the event after it."""
    segment = backward or [each for each in events.segments if each.phase == "backward"][-1]
    ready = segment.start + np.flatnonzero(events.kind[segment.start : segment.stop] == EventKind.GRAD_READY)
    return [(int(events.a[event]), event + 1) for event in ready.tolist()]


def waits_in_a_row(marks: Sequence[int]) -> list[Instruction]:
    """Of the host for collectives that it began, one after the other."""
    return [
        Instruction(WAIT, mark, call=host_calls.repeated(host_calls.WAIT) if index else host_calls.WAIT)
        for index, mark in enumerate(marks)
    ]


def vector(count: int, dtype: str) -> TensorSpec:
    """A flat tensor of so many elements."""
    return TensorSpec((count,), contiguous_stride((count,)), dtype)
