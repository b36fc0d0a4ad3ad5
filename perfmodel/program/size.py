"""The size of programs, and the limits on what is simulated."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from perfmodel.errors import PerfModelError
from perfmodel.limits import MOST_BYTES, MOST_OPERATORS, MOST_PARAMETERS
from perfmodel.program.program import Program
from perfmodel.trace.trace import EventKind, Segment, StepEvents


class Size(NamedTuple):
    """The size of a steady step, without what a strategy inserts.

    Attributes
    ----------
    operators : int
    allocated_bytes : int
        The sum over all allocations of the step.
    """

    operators: int
    allocated_bytes: int


def size_of(program: Program) -> Size:
    """Return the size of a program; each segment of the trace is counted once, however often it is repeated."""
    sizes: dict[Segment, Size] = {}
    for segment in {run.segment for run in program.runs}:
        sizes[segment] = _size_of(program.trace.steady, segment)
    of_runs = [sizes[run.segment] for run in program.runs]
    return Size(sum(size.operators for size in of_runs), sum(size.allocated_bytes for size in of_runs))


def _size_of(events: StepEvents, segment: Segment) -> Size:
    within = slice(segment.start, segment.stop)
    kind, size_bytes = events.kind[within], events.b[within].astype(float)  # whose sum may be beyond integers
    return Size(int(np.count_nonzero(kind == EventKind.OP)), int(size_bytes[kind == EventKind.ALLOC].sum()))


def within_limits(programs: Iterable[Program]) -> tuple[Program, ...]:
    """Return the programs of ranks that differ; refuse them as soon as they are too much to simulate.

    Raises
    ------
    PerfModelError
        If a program has too many parameters or bytes, or all together too many operators; see
        :mod:`perfmodel.limits`.
    """
    distinct: list[Program] = []
    operators = 0
    for program in programs:
        distinct.append(program)
        _check_tensors(program)
        operators += size_of(program).operators
        if operators > MOST_OPERATORS:
            where = f" in the programs of {len(distinct)} ranks that differ" if len(distinct) > 1 else ""
            raise PerfModelError(
                f"a step must run at most {MOST_OPERATORS:,} operators to be predicted (got {operators:,}{where}). Ask "
                "for fewer micro-batches, layers or ranks, from which larger numbers follow: each more of them adds "
                "what the last one did."
            )
    return tuple(distinct)


def _check_tensors(program: Program) -> None:
    parameters = sum(parameter.tensor.numel for parameter in program.trace.parameters)
    if parameters > MOST_PARAMETERS:
        raise PerfModelError(
            f"model: it must have at most {MOST_PARAMETERS:.0e} parameters (got {parameters:.1e}). Make it narrower."
        )
    allocated_bytes = size_of(program).allocated_bytes
    if allocated_bytes > MOST_BYTES:
        raise PerfModelError(
            f"a step must make tensors of at most {MOST_BYTES:.0e} bytes in all (got {allocated_bytes:.1e}). Make "
            "batch.size, batch.sequence_length or the model smaller."
        )
