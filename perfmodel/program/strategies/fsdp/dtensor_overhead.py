"""What DTensors cost the host in a phase of a step that runs over parameters."""

from __future__ import annotations

import numpy as np

from perfmodel.program.builder import ProgramBuilder
from perfmodel.program.program import HOST, Instruction
from perfmodel.trace.trace import EventKind


def add_dtensor_calls(builder: ProgramBuilder, phase: str, what: str) -> None:
    """Spread what the phase takes more over DTensors evenly over its operators, each of which it comes before.

    seconds = a + b n, with ``dtensor <what>`` for a, ``dtensor <what> parameter`` for b, and n parameters of this rank
    (all of them, where the trace has no share).
    """
    trace = builder.trace
    parameters = trace.parameters if trace.optimized is None else trace.optimized
    count = sum(parameter.requires_grad for parameter in parameters)
    number = builder.last(phase)
    segment = builder.program.runs[number].segment
    operators = segment.start + np.flatnonzero(trace.steady.kind[segment.start : segment.stop] == EventKind.OP)
    each = 1 / max(len(operators), 1)
    rows = (
        Instruction(HOST, call=f"dtensor {what}", share=each),
        Instruction(HOST, call=f"dtensor {what} parameter", share=count * each),
    )
    for event in operators.tolist() if len(operators) else [segment.stop]:
        builder.insert(number, event, *rows)
