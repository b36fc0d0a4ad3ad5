"""torch's DistributedDataParallel: gradients copied into buckets, reduced as they fill, and copied back.

A static graph is recorded in the first step, whose gradients are all copied and reduced at the end of backward; the
order in which they become ready, which the rebuilt buckets follow, is then noted in the second.

In a pipeline each stage is a module of its own, with buckets of its own, reduced in the last of its backwards.

Sources: torch/csrc/distributed/c10d/reducer.cpp (``autograd_hook``, ``delay_all_reduce``,
``mark_variable_ready_dense``, ``finalize_bucket_dense``, ``rebuild_buckets``), comm.cpp (``broadcast_coalesced``),
torch/nn/parallel/distributed.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from perfmodel.hardware import host_calls
from perfmodel.program.builder import ProgramBuilder, ready_gradients, vector
from perfmodel.program.program import HOST, WAIT, Insertion, Instruction, PhaseRun, Program, Rebuild
from perfmodel.program.strategies.buckets import UNLIMITED, Bucket, assign_buckets, bucket_limits
from perfmodel.scenario.scenario import Scenario
from perfmodel.trace.operation import Operation, TensorSpec
from perfmodel.trace.phases import BACKWARD, FORWARD
from perfmodel.trace.trace import EventKind, Segment, StorageKind, Trace, gradient_storages
from perfmodel.units import MIB

SHARED_BYTES, SHARED_AT_ONCE = 250 * MIB, 2  # of the flat copies in which a wrapped model's state is sent
COPY_SHARE = 0.5  # of DDP_PARAMETER, which was measured where gradients are copied in and out
REBUILD_STEP, REBUILD_STEP_OF_STATIC_GRAPH = 2, 3


@dataclass(frozen=True)
class WrappedModule:
    """A module that is wrapped, and where a program runs it.

    Attributes
    ----------
    parameters : range
        Indices.
    buffer_bytes : tuple of int
        Bytes of each buffer.
    forwards : tuple of int
        Runs, in order.
    backward, first_backward : int
        The run whose gradients are reduced, in the steady and in the first step.
    shares_buffers : bool
        Whether its first forward takes rank 0's buffers, which DDP does after a forward that was not under no_sync.
    """

    parameters: range
    buffer_bytes: tuple[int, ...]
    forwards: tuple[int, ...]
    backward: int
    first_backward: int
    shares_buffers: bool


@dataclass(frozen=True)
class _Memory:
    """Memory of a wrapped module.

    Attributes
    ----------
    setup : tuple of Instruction
        Allocated when it is wrapped, the initial buckets included.
    initial : tuple of Instruction
        Allocations of the initial buckets, which are freed when they are rebuilt.
    rebuilt : Insertion
        Allocations of the rebuilt buckets, and where they stand in the steady step's runs.
    """

    setup: tuple[Instruction, ...]
    initial: tuple[Instruction, ...]
    rebuilt: Insertion


def ddp_buckets(scenario: Scenario, trace: Trace, backward: Segment | None = None) -> tuple[Bucket, ...]:
    """Return the buckets of the steady step, in the order in which they are reduced.

    ``backward`` is the segment whose gradients are reduced; by default the trace's last.
    """
    tensors = [parameter.tensor for parameter in trace.parameters]
    limits = bucket_limits(scenario.parallelism.bucket_cap_mb)
    return assign_buckets(tensors, [index for index, _ in ready_gradients(trace.steady, backward)], limits)


def ddp(builder: ProgramBuilder, scenario: Scenario, modules: Sequence[WrappedModule] = ()) -> Program:
    """Return the program of strategy ``ddp``, see :mod:`perfmodel.program.strategies.data_parallel`.

    Each of ``modules`` is wrapped; by default the whole model is.
    """
    is_static = scenario.parallelism.static_graph
    memory = [_wrap(builder, scenario, module) for module in modules or (_whole_model(builder),)]
    rebuild = Rebuild(
        REBUILD_STEP_OF_STATIC_GRAPH if is_static else REBUILD_STEP,
        tuple(sorted((each.rebuilt for each in memory), key=lambda insertion: insertion.run)),
        tuple(Instruction(EventKind.FREE, row.a) for each in memory for row in each.initial),
    )
    return replace(builder.finish(), setup=tuple(row for each in memory for row in each.setup), rebuild=rebuild)


def _whole_model(builder: ProgramBuilder) -> WrappedModule:
    runs, first_runs = builder.program.runs, builder.program.first_runs
    return WrappedModule(
        range(len(builder.trace.parameters)),
        buffer_sizes(builder.trace),
        tuple(number for number, run in enumerate(runs) if run.phase == FORWARD),
        builder.last(BACKWARD),
        max(number for number, run in enumerate(first_runs) if run.phase == BACKWARD),
        shares_buffers=True,
    )


def buffer_sizes(trace: Trace) -> tuple[int, ...]:
    """Return the bytes of each buffer."""
    return tuple(storage.bytes for storage in trace.persistent if storage.kind == StorageKind.BUFFER)


def _wrap(builder: ProgramBuilder, scenario: Scenario, module: WrappedModule) -> _Memory:
    as_view, is_static = scenario.parallelism.gradient_as_bucket_view, scenario.parallelism.static_graph
    runs = builder.program.runs
    for number in module.forwards:
        shared = _share_buffers(builder, module, runs[number])
        builder.insert(number, runs[number].segment.start, Instruction(HOST, call=host_calls.DDP_FORWARD), *shared)
    buckets = ddp_buckets(scenario, builder.trace, runs[module.backward].segment)
    marks = _reduce(builder, module, buckets, as_view)
    stop = runs[module.backward].segment.stop
    builder.insert(module.backward, stop, *_ddp_end(builder, buckets, marks, as_view))
    if as_view:
        _free_first_gradients(builder, module, is_static)
    tensors = [parameter.tensor for parameter in builder.trace.parameters]
    trained = [index for index in builder.gradients if index in module.parameters]
    initial = _buffers(builder, assign_buckets(tensors, trained, UNLIMITED))
    used = _map_of_used(builder, len(trained)) if is_static else ()
    first = module.forwards[0]
    rebuilt = Insertion(first, runs[first].segment.start, _buffers(builder, buckets))
    return _Memory((*_share_state(builder, module), *initial, *used), initial, rebuilt)


def _reduce(builder: ProgramBuilder, module: WrappedModule, buckets: Sequence[Bucket], as_view: bool) -> list[int]:
    """Copy each gradient into its bucket when it is ready, reduce buckets as they fill, and return the marks of the
    reductions' ends. Buckets are reduced strictly in order.
    """
    trace, segment = builder.trace, builder.program.runs[module.backward].segment
    own = gradient_storages(trace, trace.steady) if as_view else {}
    bucket_of = {index: number for number, bucket in enumerate(buckets) for index in bucket.parameters}
    missing = [len(bucket.parameters) for bucket in buckets]
    marks: list[int] = []
    for index, event in ready_gradients(trace.steady, segment):
        missing[bucket_of[index]] -= 1
        rows = [builder.launch(_copy_in(trace.parameters[index].tensor), host_calls.DDP_PARAMETER, COPY_SHARE)]
        if index in own:
            rows.append(Instruction(EventKind.FREE, own[index]))
        while len(marks) < len(buckets) and missing[len(marks)] == 0:
            bucket = buckets[len(marks)]
            reduction, mark = builder.asynchronous(bucket.dtype, bucket.size_bytes, host_calls.DDP_BUCKET)
            rows += reduction
            marks.append(mark)
        builder.insert(module.backward, event, *rows)
    return marks


def _map_of_used(builder: ProgramBuilder, parameters: int) -> tuple[Instruction, ...]:
    """Allocate an int32 a parameter, reduced in a static graph's first step: which ones are used on any rank."""
    return (Instruction(EventKind.ALLOC, builder.new_storage(), vector(parameters, "int32").bytes),)


def _buffers(builder: ProgramBuilder, buckets: tuple[Bucket, ...]) -> tuple[Instruction, ...]:
    return tuple(Instruction(EventKind.ALLOC, builder.new_storage(), each.size_bytes) for each in buckets)


def _share_state(builder: ProgramBuilder, module: WrappedModule) -> list[Instruction]:
    """Return the flat copies in which rank 0 sends parameters and buffers when a model is wrapped, two at a time.

    Source: ``broadcast_coalesced`` in torch/csrc/distributed/c10d/comm.cpp. What a trace knows of a buffer is its size;
    it is taken to be of float32.
    """
    tensors = [builder.trace.parameters[index].tensor for index in module.parameters]
    tensors += [vector(max(size_bytes // 4, 1), "float32") for size_bytes in module.buffer_bytes]
    rows: list[Instruction] = []
    live: deque[int] = deque()
    for row in _buffers(builder, assign_buckets(tensors, range(len(tensors)), (SHARED_BYTES, SHARED_BYTES))):
        if len(live) == SHARED_AT_ONCE:
            rows.append(Instruction(EventKind.FREE, live.popleft()))
        rows.append(row)
        live.append(row.a)
    return [*rows, *(Instruction(EventKind.FREE, storage) for storage in live)]


def _free_first_gradients(builder: ProgramBuilder, module: WrappedModule, is_static: bool) -> None:
    """Free, in the first step too, each gradient that is copied into its bucket and becomes a view of it."""
    first, run = builder.trace.first, module.first_backward
    segment = builder.program.first_runs[run].segment
    own = gradient_storages(builder.trace, first)
    if is_static:
        builder.insert_first(run, segment.stop, *(Instruction(EventKind.FREE, own[index]) for index in sorted(own)))
        return
    for index, event in ready_gradients(first, segment):
        if index in own:
            builder.insert_first(run, event, Instruction(EventKind.FREE, own[index]))


def _share_buffers(builder: ProgramBuilder, module: WrappedModule, run: PhaseRun) -> list[Instruction]:
    """Return the broadcast of rank 0's buffers before the first forward of a step: copied into one, sent, copied back.

    What a trace knows of a buffer is its size; the copies are taken to be of float32, and the broadcast's call to take
    the host as long as that of an asynchronous all-reduce.
    """
    sizes = module.buffer_bytes
    if not sizes or not module.shares_buffers or run.micro_batch != 0:
        return []
    tensors = tuple(vector(max(size_bytes // 4, 1), "float32") for size_bytes in sizes)
    whole = vector(sum(tensor.numel for tensor in tensors), "float32")
    storage = builder.new_storage()
    rows, mark = builder.asynchronous("float32", whole.bytes, host_calls.asynchronous("all_reduce"), "broadcast")
    return [
        Instruction(EventKind.ALLOC, storage, whole.bytes),
        builder.launch(Operation("aten.cat.default", (tensors,), outputs=(whole,)), host_calls.FLATTEN),
        *rows,
        Instruction(WAIT, mark, call=host_calls.WAIT),
        *(builder.launch(_copy_out(tensor), host_calls.COPY) for tensor in tensors),
        Instruction(EventKind.FREE, storage),
    ]


def _ddp_end(
    builder: ProgramBuilder, buckets: tuple[Bucket, ...], marks: list[int], as_view: bool
) -> list[Instruction]:
    """Wait for each bucket and, where gradients are not views of it, copy it out before the next wait."""
    rows: list[Instruction] = []
    for bucket, mark in zip(buckets, marks, strict=True):
        rows.append(Instruction(WAIT, mark, call=host_calls.WAIT))
        if not as_view:
            tensors = [builder.trace.parameters[index].tensor for index in bucket.parameters]
            rows += [builder.launch(_copy_out(tensor), host_calls.DDP_PARAMETER, COPY_SHARE) for tensor in tensors]
    return rows


def _copy_in(gradient: TensorSpec) -> Operation:
    """Return the copy into a bucket: bucket view = gradient x (1 / ranks)."""
    scalar = TensorSpec((), (), "float32", "cpu")
    return Operation("aten.mul.out", (gradient, scalar), (("out", gradient),), (gradient,))


def _copy_out(gradient: TensorSpec) -> Operation:
    return Operation("aten.copy_.default", (gradient, gradient), (), (gradient,))
