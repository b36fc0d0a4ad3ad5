"""Hand-made programs for the interpreters' tests."""

from __future__ import annotations

import numpy as np

from perfmodel.program.program import Program, single_device_program
from perfmodel.trace.operation import Operation
from perfmodel.trace.trace import EventKind, Segment, StepEvents, Trace


def program_of(*phases: tuple[str, int, list[tuple[EventKind, int]]], accumulation: int = 1) -> Program:
    """A program whose trace runs the given (phase, micro_batch, [(kind, a), ...]) in order; operations are op0, op1, ..."""
    events: list[tuple[EventKind, int]] = []
    segments = []
    for phase, micro_batch, part in phases:
        segments.append(Segment(phase, micro_batch, len(events), len(events) + len(part)))
        events += part
    kind = np.array([kind for kind, _ in events], dtype=np.int64)
    a = np.array([a for _, a in events], dtype=np.int64)
    step = StepEvents(kind, a, np.zeros_like(a), tuple(segments))
    operations = tuple(Operation(f"aten.op{i}.default") for i in range(int(a.max(initial=0)) + 1))
    trace = Trace({}, {}, operations, (), (), (), (), (), step, step)
    return single_device_program(trace, accumulation)


def ops(*indices: int) -> list[tuple[EventKind, int]]:
    return [(EventKind.OP, index) for index in indices]
