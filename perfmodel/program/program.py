"""The program of one rank: which segments of a trace its host runs, in which order, as one list of instructions.

An instruction is a trace event (:class:`~perfmodel.workload.trace_file.EventKind`); repetition is by reference, so a
step of many micro-batches costs no more memory than one of two.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from perfmodel.workload.trace_file import EventKind, Segment, StepEvents, Trace


@dataclass(frozen=True)
class PhaseRun:
    """One run of a trace segment: its phase, which micro-batch of the step it is, and the events it repeats."""

    phase: str
    micro_batch: int
    segment: Segment


@dataclass(frozen=True)
class Program:
    """What one rank does in a steady step (``runs``) and in its first (``first_runs``: it makes optimizer states)."""

    trace: Trace
    runs: tuple[PhaseRun, ...]
    first_runs: tuple[PhaseRun, ...]

    @cached_property
    def instructions(self) -> Instructions:
        """Columns of the steady step."""
        return _columns(self.trace.steady, self.runs)

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
    """Equally long columns: kind, a, b as in the trace; run: index into the program's runs; event: into the trace's."""

    kind: np.ndarray
    a: np.ndarray
    b: np.ndarray
    run: np.ndarray
    event: np.ndarray

    @cached_property
    def launches(self) -> np.ndarray:
        """Positions of the operators (OP), host-only ones included."""
        return np.flatnonzero(self.kind == EventKind.OP)


def _columns(events: StepEvents, runs: tuple[PhaseRun, ...]) -> Instructions:
    if not runs:
        empty = np.zeros(0, dtype=np.int64)
        return Instructions(empty, empty, empty, empty, empty)
    slices = [slice(run.segment.start, run.segment.stop) for run in runs]
    lengths = [part.stop - part.start for part in slices]
    return Instructions(
        np.concatenate([events.kind[part] for part in slices]),
        np.concatenate([events.a[part] for part in slices]),
        np.concatenate([events.b[part] for part in slices]),
        np.repeat(np.arange(len(runs)), lengths),
        np.concatenate([np.arange(part.start, part.stop) for part in slices]),
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
