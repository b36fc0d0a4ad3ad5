"""Communication of ranks that hold shards of the gradients, before they step over them.

The operators are the trace's (:func:`perfmodel.tracing.optimizer.trace_optimizer`). Clipping adds squares of
norms up over the ranks: what the first power made. A gradient scaler looks for infinities in the rank's own gradients,
and all skip the step if one found some.

    flat shards  one number, on the compute stream
    DTensors     one for each parameter and one for infinities, by functional collectives: each copies what it sends,
                 runs on the communicator's own stream, and is awaited at once

Sources: torch/distributed/tensor/_ops/_math_ops.py (``_NormPartial``), torch/distributed/tensor/_dispatch.py
(``found_inf_reduce_handler``), torch/csrc/distributed/c10d/Functional.cpp (``all_reduce``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from perfmodel.hardware import host_calls
from perfmodel.program.builder import ProgramBuilder
from perfmodel.program.program import WAIT, Instruction
from perfmodel.program.strategies.fsdp.dtensor_overhead import add_dtensor_calls
from perfmodel.trace.operation import Operation, TensorSpec
from perfmodel.trace.phases import CLIP, OPTIMIZER
from perfmodel.trace.trace import EventKind, Segment, StepEvents, StorageKind, Trace

POWER = "aten.pow.Tensor_Scalar"
UNSCALE = "aten._amp_foreach_non_finite_check_and_unscale_.default"
FOUND_INFINITY = TensorSpec((), (), "float32")

Put = Callable[..., None]


def clip_flat_shards(builder: ProgramBuilder) -> None:
    """Put the all-reduce of one number into the clip phase, if there is one."""
    for put, squares in _powers(builder):
        put(builder.blocking("all_reduce", squares))


def clip_dtensors(builder: ProgramBuilder) -> None:
    """Put an all-reduce of one number a parameter into the clip phase, if there is one, and the cost of DTensors."""
    powers = _powers(builder)
    for put, squares in powers:
        rows = _functional(builder, squares)
        put(*(row._replace(call="") for row in rows))  # their host time is part of the call that is added
    if powers:
        add_dtensor_calls(builder, CLIP, CLIP)


def share_infinities(builder: ProgramBuilder) -> None:
    """Put an all-reduce of what a gradient scaler found behind each operator that looks for infinities."""
    copy_back = Operation("aten.copy_.default", (FOUND_INFINITY, FOUND_INFINITY), outputs=(FOUND_INFINITY,))
    for put, trace, events, segment in _phases(builder, (CLIP, OPTIMIZER)):
        for event in _calls(trace, events, segment, UNSCALE):
            put(event + 1, *_functional(builder, FOUND_INFINITY, (builder.launch(copy_back, host_calls.LAUNCH),)))


def _functional(builder: ProgramBuilder, tensor: TensorSpec, use: tuple[Instruction, ...] = ()) -> list[Instruction]:
    """Return a functional all-reduce of the tensor, the wait for it, and the instructions that use its result."""
    storage, kind = builder.new_storage(), StorageKind.TEMPORARY
    rows, mark = builder.asynchronous(tensor.dtype, tensor.bytes, host_calls.asynchronous("all_reduce"))
    return [
        builder.launch(Operation("aten.clone.default", (tensor,), outputs=(tensor,)), host_calls.LAUNCH),
        Instruction(EventKind.ALLOC, storage, tensor.bytes, holds=kind),
        *rows,
        Instruction(WAIT, mark, call=host_calls.WAIT),
        *use,
        Instruction(EventKind.FREE, storage, holds=kind),
    ]


def _powers(builder: ProgramBuilder) -> list[tuple[Put, TensorSpec]]:
    """Return for each clip phase the squares that its first power makes, and what inserts behind their allocation."""
    powers: list[tuple[Put, TensorSpec]] = []
    for put, trace, events, segment in _phases(builder, (CLIP,)):
        first = _calls(trace, events, segment, POWER)[0]
        (squares,) = trace.operations[events.a[first]].outputs
        powers.append((partial(put, first + 2), squares))
    return powers


def _phases(builder: ProgramBuilder, phases: tuple[str, ...]) -> Iterator[tuple[Put, Trace, StepEvents, Segment]]:
    """Yield these phases of the first step and of the steady one, with what puts instructions into them."""
    program, trace = builder.program, builder.trace
    steps = ((program.first_runs, trace.first, builder.insert_first), (program.runs, trace.steady, builder.insert))
    for runs, events, insertion in steps:
        for number, run in enumerate(runs):
            if run.phase in phases:
                yield partial(insertion, number), trace, events, run.segment


def _calls(trace: Trace, events: StepEvents, segment: Segment, name: str) -> list[int]:
    """Return the segment's events that call an operator of that name."""
    kinds = events.kind[segment.start : segment.stop]
    at = (segment.start + np.flatnonzero(kinds == EventKind.OP)).tolist()
    return [event for event in at if trace.operations[events.a[event]].name == name]
