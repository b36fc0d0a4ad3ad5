"""How large programs are, and the limits on what is simulated."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from perfmodel.errors import PerfModelError
from perfmodel.limits import MOST_BYTES, MOST_OPERATORS, MOST_PARAMETERS
from perfmodel.program.program import Program
from perfmodel.trace.trace import EventKind, Segment, StepEvents


class Size(NamedTuple):
    """Of a steady step without what a strategy inserts. made_bytes: of all tensors, one after another."""

    operators: int
    made_bytes: int


def size_of(program: Program) -> Size:
    """Counted segment by segment of the trace, however often a segment is repeated."""
    sizes: dict[Segment, Size] = {}
    for segment in {run.segment for run in program.runs}:
        sizes[segment] = _size_of(program.trace.steady, segment)
    every = [sizes[run.segment] for run in program.runs]
    return Size(sum(each.operators for each in every), sum(each.made_bytes for each in every))


def _size_of(events: StepEvents, segment: Segment) -> Size:
    part = slice(segment.start, segment.stop)
    kind, made_bytes = events.kind[part], events.b[part].astype(float)  # whose sum may be beyond integers
    return Size(int(np.count_nonzero(kind == EventKind.OP)), int(made_bytes[kind == EventKind.ALLOC].sum()))


def within_limits(programs: Iterable[Program]) -> tuple[Program, ...]:
    """The programs of ranks that differ, refused as soon as they are too much to simulate.

    Raises
    ------
    PerfModelError
        If a program has too many parameters or bytes, or all together too many operators; see
        :mod:`perfmodel.limits`.
    """
    found: list[Program] = []
    operators = 0
    for program in programs:
        found.append(program)
        _check_tensors(program)
        operators += size_of(program).operators
        if operators > MOST_OPERATORS:
            among = f" in the programs of {len(found)} ranks that differ" if len(found) > 1 else ""
            raise PerfModelError(
                f"a step must run at most {MOST_OPERATORS:,} operators to be predicted (got {operators:,}{among}). Ask "
                "for fewer micro-batches, layers or ranks, from which larger numbers follow: each more of them adds "
                "what the last one did."
            )
    return tuple(found)


def _check_tensors(program: Program) -> None:
    parameters = sum(parameter.tensor.numel for parameter in program.trace.parameters)
    if parameters > MOST_PARAMETERS:
        raise PerfModelError(
            f"model: it must have at most {MOST_PARAMETERS:.0e} parameters (got {parameters:.1e}). Make it narrower."
        )
    made_bytes = size_of(program).made_bytes
    if made_bytes > MOST_BYTES:
        raise PerfModelError(
            f"a step must make tensors of at most {MOST_BYTES:.0e} bytes in all (got {made_bytes:.1e}). Make batch.size"
            ", batch.sequence_length or the model smaller."
        )
