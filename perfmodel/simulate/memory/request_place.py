"""Which operator of which step asks for a piece of memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from perfmodel.program.program import PhaseRun, Program
from perfmodel.trace.trace import EventKind, StepEvents, StorageKind, Trace

OUTSIDE_STEPS = ("model", "wrapping")  # sections of the memory walk that run no operators


class Caller(NamedTuple):
    """The operator that the host called last at an event, and the autograd node or module that called it.

    Both are empty before the segment's first operator.
    """

    operator: str
    module: str


@dataclass(frozen=True)
class RequestPlace:
    """The place in a step at which a request is made.

    Attributes
    ----------
    step : int
        Counted from 1; 0 before the first step, and after a step for what is asked for between two.
    phase : str
        As of :class:`~perfmodel.trace.trace.Segment`; empty outside of steps.
    micro_batch : int
        From 0; -1 where the phase has none.
    operator, module : str
        As of :class:`Caller`.
    holds : StorageKind
        What the memory is for.
    is_inserted : bool
        Whether the strategy asks, after that operator, rather than the operator itself.
    """

    step: int
    phase: str
    micro_batch: int
    operator: str
    module: str
    holds: StorageKind
    is_inserted: bool


def request_place(
    program: Program, section: str, event: int, step: int, holds: StorageKind, is_inserted: bool
) -> RequestPlace:
    """The place of a request of the memory walk.

    Parameters
    ----------
    program : Program
        Of the rank.
    section : str
        Of the walk, see :class:`~perfmodel.simulate.memory.walk.MemoryTimeline`.
    event : int
        Index into the events that the section's step runs.
    step, holds, is_inserted
        As of :class:`RequestPlace`.
    """
    if section in OUTSIDE_STEPS:
        return RequestPlace(step, "", -1, "", "", holds, is_inserted)
    events, runs = step_of(program, section)
    run, at = _run_at(runs, event)
    segment = slice(run.segment.start, run.segment.start + at + 1)
    *_, caller = callers(program.trace, events.kind[segment], events.a[segment])
    return RequestPlace(step, run.phase, run.micro_batch, *caller, holds, is_inserted)


def step_of(program: Program, section: str) -> tuple[StepEvents, Sequence[PhaseRun]]:
    """The events and runs of the step that this section of the memory walk runs."""
    if section == "first":
        return program.trace.first, program.first_runs
    return program.trace.steady, program.runs


def _run_at(runs: Sequence[PhaseRun], event: int) -> tuple[PhaseRun, int]:
    """The run that event belongs to, and its index in there."""
    for run in runs:
        length = run.segment.stop - run.segment.start
        if event < length:
            return run, event
        event -= length
    raise IndexError(f"a step of {len(runs)} runs ends {event} events before this one")


def callers(trace: Trace, kinds: np.ndarray, numbers: np.ndarray) -> Iterator[Caller]:
    """Yield what the host is doing at each event of a segment.

    kinds, numbers: columns ``kind`` and ``a`` of the events.
    """
    modules: list[str] = []
    node = ""
    caller = Caller("", "")
    for kind, number in zip(kinds.tolist(), numbers.tolist(), strict=True):
        if kind == EventKind.MODULE_ENTER:
            modules.append(trace.modules[number][0])
        elif kind == EventKind.MODULE_EXIT and modules:
            modules.pop()
        elif kind == EventKind.NODE:
            node = trace.nodes[number]
        elif kind == EventKind.OP:
            caller = Caller(trace.operations[number].name, node or (modules[-1] if modules else ""))
        yield caller
