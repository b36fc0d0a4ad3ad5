"""What DTensors cost the host in a phase of a step that runs over parameters."""

from __future__ import annotations

import numpy as np

from perfmodel.program.builder import Editor
from perfmodel.program.program import HOST, Inserted
from perfmodel.trace.trace import EventKind


def add_dtensor_calls(editor: Editor, phase: str, what: str) -> None:
    """Spread what the phase takes more over DTensors evenly over its operators, each of which it comes before.

    seconds = a + b n, with ``dtensor <what>`` for a, ``dtensor <what> parameter`` for b, and n parameters of this rank
    (all of them, where the trace has no share).
    """
    trace = editor.trace
    parameters = trace.parameters if trace.optimized is None else trace.optimized
    count = sum(parameter.requires_grad for parameter in parameters)
    number = editor.last(phase)
    segment = editor.program.runs[number].segment
    operators = segment.start + np.flatnonzero(trace.steady.kind[segment.start : segment.stop] == EventKind.OP)
    each = 1 / max(len(operators), 1)
    rows = (
        Inserted(HOST, call=f"dtensor {what}", share=each),
        Inserted(HOST, call=f"dtensor {what} parameter", share=count * each),
    )
    for event in operators.tolist() if len(operators) else [segment.stop]:
        editor.edit(number, event, *rows)
