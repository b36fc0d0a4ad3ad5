"""The host time of DTensors in a phase of a step that runs over parameters."""

from __future__ import annotations

import numpy as np

from perfmodel.hardware import host_calls
from perfmodel.program.builder import ProgramBuilder
from perfmodel.program.program import HOST, Instruction
from perfmodel.trace.trace import EventKind


def add_dtensor_calls(builder: ProgramBuilder, phase: str, loop: str) -> None:
    """Spread the phase's extra host time over DTensors evenly over its operators; each share precedes its operator.

    seconds = a + b n, with ``dtensor <loop>`` for a, ``dtensor <loop> parameter`` for b, and n parameters of this rank
    (all of them, where the trace has no share).
    """
    trace = builder.trace
    parameters = trace.parameters if trace.optimized is None else trace.optimized
    count = sum(parameter.requires_grad for parameter in parameters)
    number = builder.last(phase)
    segment = builder.program.runs[number].segment
    operators = segment.start + np.flatnonzero(trace.steady.kind[segment.start : segment.stop] == EventKind.OP)
    call = host_calls.over_dtensors(loop)
    share = 1 / max(len(operators), 1)
    rows = (
        Instruction(HOST, call=call, share=share),
        Instruction(HOST, call=host_calls.per_parameter(call), share=count * share),
    )
    for event in operators.tolist() if len(operators) else [segment.stop]:
        builder.insert(number, event, *rows)
