"""Hand-made steps, traces, programs and scenarios: what the tests of several packages begin with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from perfmodel.program.program import Program, single_device_program
from perfmodel.scenario.scenario import Scenario
from perfmodel.trace.operation import Operation, TensorSpec
from perfmodel.trace.trace import EventKind, Parameter, Segment, StepEvents, Trace

# Kind and ``a``, and where they matter ``b`` and the bytes that the operator addresses of each storage it touches.
Event = tuple[Any, ...]
# Name, micro-batch and events.
Phase = tuple[str, int, Sequence[Event]]


def ops(*indices: int) -> list[Event]:
    """Return the events of these operators, one after the other."""
    return [(EventKind.OP, index) for index in indices]


def step_events(*phases: Phase) -> StepEvents:
    """Return the step that runs these phases in order; ``b`` is 0 where an event has none."""
    events: list[Event] = []
    segments = []
    for name, micro_batch, rows in phases:
        segments.append(Segment(name, micro_batch, len(events), len(events) + len(rows)))
        events += rows
    columns = np.array([(*event[:3], 0)[:3] for event in events], dtype=np.int64).reshape(-1, 3).T
    touched = [event[3] if len(event) > 3 else {} for event in events]
    offsets = np.concatenate([[0], np.cumsum([len(each) for each in touched])]).astype(np.int64)
    sizes = [row for each in touched for row in each.items()]
    touches, touch_bytes = np.array(sizes, dtype=np.int64).reshape(-1, 2).T
    return StepEvents(columns[0], columns[1], columns[2], tuple(segments), offsets, touches, touch_bytes)


def trace_of(steady: StepEvents, first: StepEvents | None = None, **tables: Any) -> Trace:
    """Return a trace of these steps; its tables are empty unless given, and its operations op0, op1, ... .

    Parameters
    ----------
    steady : StepEvents
        Every step but the first.
    first : StepEvents, optional
        The first step, where it is another.
    **tables : Any
        Fields of :class:`~perfmodel.trace.trace.Trace`.
    """
    used = steady.a[steady.kind == EventKind.OP]
    empty = dict.fromkeys(("modules", "calls", "nodes", "parameters", "persistent"), ())
    known = {
        "workload": {},
        "provenance": {},
        "operations": tuple(Operation(f"aten.op{index}.default") for index in range(int(used.max(initial=0)) + 1)),
    }
    return Trace(**{**empty, **known, **tables, "first": first or steady, "steady": steady})


def program_of(*phases: Phase, accumulation: int = 1, **tables: Any) -> Program:
    """Return the program of one device for a trace whose every step runs these phases."""
    return single_device_program(trace_of(step_events(*phases), **tables), accumulation)


def parameters_of(*sizes: int) -> tuple[Parameter, ...]:
    """Return parameters p0, p1, ... of so many float32 elements each, each in a storage of its number."""
    return tuple(
        Parameter(f"p{number}", TensorSpec.parse(f"float32[{size}]"), number) for number, size in enumerate(sizes)
    )


def backward_of(ready: Sequence[int]) -> list[Event]:
    """Return the events of a backward: operator 1 before each gradient, in the order in which they become ready."""
    return [event for number in ready for event in ((EventKind.OP, 1), (EventKind.GRAD_READY, number))]


def tiny_scenario(**sections: Any) -> Scenario:
    """Return a scenario of the tiny GPT on one sample of eight tokens, with these sections in place of the usual."""
    known = {
        "model": {"family": "gpt", "size": "tiny"},
        "batch": {"size": 1, "sequence_length": 8},
        "hardware": {"profile": "any"},
    }
    return Scenario.model_validate(known | sections)
