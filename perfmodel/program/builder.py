"""The builder with which strategies write programs: it inserts instructions into a single device's step."""

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
from perfmodel.trace.phases import BACKWARD
from perfmodel.trace.trace import EventKind, Segment, StepEvents

COMMUNICATION = 1  # the stream of the data-parallel communicator, or of a pipeline's


class ProgramBuilder:
    """Collects instructions to insert into a program, after those that it has already.

    Parameters
    ----------
    program : Program
    members : Members
        The ranks of collectives for which no others are given.
    stream : int
        The stream of their communicator.

    Attributes
    ----------
    ranks : int
        How many members there are.
    gradients : list of int
        Indices of the parameters that require a gradient.
    """

    def __init__(self, program: Program, members: Members, stream: int = COMMUNICATION) -> None:
        self.program, self.trace, self.members, self.ranks = program, program.trace, members, members.ranks
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
        """Return the index of the last run of this phase."""
        return max(index for index, run in enumerate(self.program.runs) if run.phase == phase)

    def launch(self, operation: Operation, call: str, share: float = 1.0, stream: int = COMPUTE) -> Instruction:
        """Return the launch of an operator; ``share`` is what it takes of the call's host time."""
        number = self._operations.setdefault(operation, len(self._operations))
        return Instruction(EventKind.OP, len(self.trace.operations) + number, -1, stream, call, share)

    def blocking(
        self,
        kind: str,
        tensor: TensorSpec,
        stream: int = COMPUTE,
        call: str | None = None,
        members: Members | None = None,
    ) -> Instruction:
        """Return a synchronous collective, which runs on the stream it is called on.

        Parameters
        ----------
        kind : str
            Such as ``all_reduce``.
        tensor : TensorSpec
            Its size is the collective's.
        stream : int
        call : str, optional
            The host call that it is looked up by; by default its kind.
        members : Members, optional
            By default the builder's.
        """
        name = kind if call is None else call
        return Instruction(
            COLLECTIVE, self._number(tensor.dtype, tensor.bytes, kind, members), stream=stream, call=name
        )

    def asynchronous(
        self, dtype: str, size_bytes: int, call: str, kind: str = "all_reduce"
    ) -> tuple[tuple[Instruction, ...], int]:
        """Return an asynchronous collective's instructions, and the mark that is reached at its end.

        It runs on the communicator's stream, after what the compute stream was given so far.
        """
        before, after = self.mark(), self.mark()
        rows = (
            Instruction(RECORD, before),
            Instruction(WAIT, before, stream=self._stream),
            Instruction(COLLECTIVE, self._number(dtype, size_bytes, kind), stream=self._stream, call=call),
            Instruction(RECORD, after, stream=self._stream),
        )
        return rows, after

    def _number(self, dtype: str, size_bytes: int, kind: str = "all_reduce", members: Members | None = None) -> int:
        group, ranks = members or self.members
        collective = Collective(kind, dtype, size_bytes, ranks, group)
        return self._collectives.setdefault(collective, len(self._collectives))

    def mark(self) -> int:
        """Return the number of a new mark."""
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
        """Add a phase of inserted instructions alone, after the last backward of the steady and of the first step.

        Runs after it are numbered anew, so insert into these later.

        Parameters
        ----------
        phase : str
        instructions : sequence of Instruction
        first : sequence of Instruction, optional
            Those of the first step, where they differ.
        """
        runs, insertion = _with_phase(self.program.runs, phase, tuple(instructions))
        first_runs, first_insertion = _with_phase(
            self.program.first_runs, phase, tuple(instructions if first is None else first)
        )
        self.program = replace(self.program, runs=runs, first_runs=first_runs, first_insertions=(first_insertion,))
        self._insertions.append(insertion)

    def insert_first(self, run: int, event: int, *instructions: Instruction) -> None:
        """Insert into the first step, of which only memory is simulated."""
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
    """Sort by place; insertions at the same place keep their order."""
    return tuple(sorted(insertions, key=lambda insertion: (insertion.run, insertion.event)))


def _with_phase(
    runs: tuple[PhaseRun, ...], phase: str, instructions: tuple[Instruction, ...]
) -> tuple[tuple[PhaseRun, ...], Insertion]:
    at = 1 + max(index for index, run in enumerate(runs) if run.phase == BACKWARD)
    event = runs[at - 1].segment.stop
    run = PhaseRun(phase, -1, Segment(phase, -1, event, event))
    return (*runs[:at], run, *runs[at:]), Insertion(at, event, instructions)


def ready_gradients(events: StepEvents, backward: Segment | None = None) -> list[tuple[int, int]]:
    """Return parameters in the order in which a backward completes their gradients, each with the event after it.

    Without a ``backward`` it is the last of the step.
    """
    segment = backward or [each for each in events.segments if each.phase == BACKWARD][-1]
    ready = segment.start + np.flatnonzero(events.kind[segment.start : segment.stop] == EventKind.GRAD_READY)
    return [(int(events.a[event]), event + 1) for event in ready.tolist()]


def waits_in_a_row(marks: Sequence[int]) -> list[Instruction]:
    """Return the host's waits for collectives in order; a wait after another has a host cost of its own."""
    return [
        Instruction(WAIT, mark, call=host_calls.repeated(host_calls.WAIT) if index else host_calls.WAIT)
        for index, mark in enumerate(marks)
    ]


def vector(count: int, dtype: str) -> TensorSpec:
    """Return a flat tensor of ``count`` elements."""
    return TensorSpec((count,), contiguous_stride((count,)), dtype)
