"""Data parallelism in the forms people write, as a function from one rank's trace to its program.

Every rank runs its program on its own samples; gradients are averaged once a step, in the last micro-batch.

    naive     after backward an all-reduce of each gradient, in the order of the parameters
    flat      after backward one all-reduce of all gradients, copied into one buffer and back
    overlap   an all-reduce of each gradient as soon as it is ready, awaited after backward
    ddp       torch's DistributedDataParallel: buckets, copied into and out of, reduced as they fill
    zero1     ddp, with its optimizer over a share of the parameters (:mod:`perfmodel.program.strategies.zero1`)
    zero2, 3  fully_shard: parameters, gradients and states sharded (:mod:`perfmodel.program.strategies.fsdp.step`)

A synchronous collective runs on the compute stream, an asynchronous one on its communicator's own, which first waits
for the compute stream. NCCL averages while it reduces, so no division follows; DDP divides as it copies in.

Sources: ProcessGroupNCCL.cpp (streams of collectives), torch/_utils.py (``_flatten_dense_tensors``).
"""

from __future__ import annotations

from collections.abc import Callable

from perfmodel.hardware import host_calls
from perfmodel.program.builder import ProgramBuilder, ready_gradients, vector, waits_in_a_row
from perfmodel.program.program import Instruction, Program, single_device_program
from perfmodel.program.sharding import sharing_of
from perfmodel.program.strategies.ddp import ddp
from perfmodel.program.strategies.fsdp.step import fsdp
from perfmodel.program.strategies.zero1 import zero1
from perfmodel.scenario.scenario import Scenario
from perfmodel.trace.operation import Operation
from perfmodel.trace.phases import BACKWARD, REDUCE
from perfmodel.trace.trace import EventKind, Trace


def data_parallel_program(scenario: Scenario, trace: Trace) -> Program:
    """Return the program of one rank of ``scenario``: a single device's, with communication where there are more.

    Examples
    --------
    ``parallelism: {dp: 4, strategy: ddp}`` of a model whose gradients fill three buckets: three collectives inside the
    last backward, and as many waits at its end.
    """
    program = single_device_program(trace, scenario.training.gradient_accumulation)
    section = scenario.parallelism
    if section.dp == 1 or section.strategy == "none" or scenario.mode == "forward":
        return program
    builder = ProgramBuilder(program, sharing_of(section))
    if section.strategy in _BY_HAND:
        return _BY_HAND[section.strategy](builder)
    return _OF_TORCH[section.strategy](builder, scenario)


def _naive(builder: ProgramBuilder) -> Program:
    parameters = builder.trace.parameters
    reductions = [builder.blocking("all_reduce", parameters[index].tensor) for index in builder.gradients]
    builder.add_phase(REDUCE, reductions)
    return builder.finish()


def _flat(builder: ProgramBuilder) -> Program:
    """Return the program with one buffer a dtype, as torch groups them."""
    rows: list[Instruction] = []
    parameters = builder.trace.parameters
    for dtype in dict.fromkeys(parameters[index].tensor.dtype for index in builder.gradients):
        tensors = [parameters[i].tensor for i in builder.gradients if parameters[i].tensor.dtype == dtype]
        flat = vector(sum(tensor.numel for tensor in tensors), dtype)
        storage = builder.new_storage()
        views = tuple(vector(tensor.numel, dtype) for tensor in tensors)
        copy_back = Operation("aten._foreach_copy_.default", (tuple(tensors), tuple(tensors)), outputs=())
        rows += [
            Instruction(EventKind.ALLOC, storage, flat.bytes),
            builder.launch(Operation("aten.cat.default", (views,), outputs=(flat,)), host_calls.FLATTEN),
            builder.blocking("all_reduce", flat),
            builder.launch(copy_back, host_calls.UNFLATTEN),
            Instruction(EventKind.FREE, storage),
        ]
    builder.add_phase(REDUCE, rows)
    return builder.finish()


def _overlap(builder: ProgramBuilder) -> Program:
    run, marks = builder.last(BACKWARD), []
    for index, event in ready_gradients(builder.trace.steady):
        tensor = builder.trace.parameters[index].tensor
        reduction, mark = builder.asynchronous(tensor.dtype, tensor.bytes, host_calls.asynchronous("all_reduce"))
        builder.insert(run, event, *reduction)
        marks.append(mark)
    stop = builder.program.runs[run].segment.stop
    builder.insert(run, stop, *waits_in_a_row(marks))
    return builder.finish()


_BY_HAND: dict[str, Callable[[ProgramBuilder], Program]] = {"naive": _naive, "flat": _flat, "overlap": _overlap}
_OF_TORCH: dict[str, Callable[[ProgramBuilder, Scenario], Program]] = {
    "ddp": ddp,
    "zero1": zero1,
    "zero2": fsdp,
    "zero3": fsdp,
}
