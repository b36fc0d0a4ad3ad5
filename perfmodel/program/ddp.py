"""torch's DistributedDataParallel: gradients copied into buckets, reduced as they fill, and copied back.

A static graph is recorded in the first step, whose gradients are all copied and reduced at the end of backward; the
order in which they become ready, which the rebuilt buckets follow, is then noted in the second.

Sources: torch/csrc/distributed/c10d/reducer.cpp (``autograd_hook``, ``delay_all_reduce``,
``mark_variable_ready_dense``, ``finalize_bucket_dense``, ``rebuild_buckets``), comm.cpp (``broadcast_coalesced``),
torch/nn/parallel/distributed.py.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from perfmodel.program.buckets import UNLIMITED, Bucket, assign_buckets, bucket_limits
from perfmodel.program.editor import Editor, ready_gradients, vector
from perfmodel.program.program import HOST, WAIT, Edit, Inserted, PhaseRun, Program, Rebuild
from perfmodel.units import MIB
from perfmodel.workload.ops import Operation, TensorSpec
from perfmodel.workload.scenario import Scenario
from perfmodel.workload.trace_file import EventKind, StorageKind, Trace, gradient_storages

SHARED_BYTES, SHARED_AT_ONCE = 250 * MIB, 2  # flat copies in which a wrapped model's state is sent
COPY_SHARE = 0.5  # of "ddp parameter", which was measured where gradients are copied in and out
REBUILD_STEP, REBUILD_STEP_OF_STATIC_GRAPH = 2, 3


def ddp_buckets(scenario: Scenario, trace: Trace) -> tuple[Bucket, ...]:
    """The buckets of the steady step, in the order in which they are reduced."""
    tensors = [parameter.tensor for parameter in trace.parameters]
    limits = bucket_limits(scenario.parallelism.bucket_cap_mb)
    return assign_buckets(tensors, [index for index, _ in ready_gradients(trace.steady)], limits)


def ddp(editor: Editor, scenario: Scenario) -> Program:
    """The form ``ddp`` of :mod:`perfmodel.program.data_parallel`."""
    as_view, is_static = scenario.parallelism.gradient_as_bucket_view, scenario.parallelism.static_graph
    buckets = ddp_buckets(scenario, editor.trace)
    bucket_of = {index: number for number, bucket in enumerate(buckets) for index in bucket.parameters}
    missing = [len(bucket.parameters) for bucket in buckets]
    tensors = [parameter.tensor for parameter in editor.trace.parameters]
    for number, run in enumerate(editor.program.runs):
        if run.phase == "forward":
            editor.edit(number, run.segment.start, Inserted(HOST, call="ddp forward"), *_share_buffers(editor, run))
    run_number = editor.last("backward")
    own = gradient_storages(editor.trace, editor.trace.steady) if as_view else {}
    marks: list[int] = []
    for index, event in ready_gradients(editor.trace.steady):
        missing[bucket_of[index]] -= 1
        rows = [editor.launch(_copy_in(tensors[index]), "ddp parameter", COPY_SHARE)]
        if index in own:
            rows.append(Inserted(EventKind.FREE, own[index]))
        while len(marks) < len(buckets) and missing[len(marks)] == 0:  # strictly in order
            bucket = buckets[len(marks)]
            more, mark = editor.beside(bucket.dtype, bucket.size_bytes, "ddp bucket")
            rows += more
            marks.append(mark)
        editor.edit(run_number, event, *rows)
    editor.edit(run_number, editor.program.runs[run_number].segment.stop, *_ddp_end(editor, buckets, marks, as_view))
    if as_view:
        _free_first_gradients(editor, is_static)
    initial = _buffers(editor, assign_buckets(tensors, editor.gradients, UNLIMITED))
    used = _map_of_used(editor) if is_static else ()
    return replace(
        editor.finish(),
        setup=(*_share_state(editor), *initial, *used),
        rebuild=_rebuild(editor, is_static, initial, _buffers(editor, buckets)),
    )


def _rebuild(editor: Editor, is_static: bool, old: tuple[Inserted, ...], new: tuple[Inserted, ...]) -> Rebuild:
    """Before the first forward after the step in which the order of the gradients was noted."""
    run = next(index for index, each in enumerate(editor.program.runs) if each.phase == "forward")
    made = Edit(run, editor.program.runs[run].segment.start, new)
    step = REBUILD_STEP_OF_STATIC_GRAPH if is_static else REBUILD_STEP
    return Rebuild(step, made, tuple(Inserted(EventKind.FREE, row.a) for row in old))


def _map_of_used(editor: Editor) -> tuple[Inserted, ...]:
    """An int32 for each parameter, reduced in a static graph's first step: which of them are used on any rank."""
    return (Inserted(EventKind.ALLOC, editor.new_storage(), vector(len(editor.gradients), "int32").bytes),)


def _buffers(editor: Editor, buckets: tuple[Bucket, ...]) -> tuple[Inserted, ...]:
    return tuple(Inserted(EventKind.ALLOC, editor.new_storage(), each.size_bytes) for each in buckets)


def _share_state(editor: Editor) -> list[Inserted]:
    """When a model is wrapped, rank 0 sends its parameters and buffers in flat copies, at most two of them at a time.

    Source: ``broadcast_coalesced`` in torch/csrc/distributed/c10d/comm.cpp. What a trace knows of a buffer is its size;
    it is taken to be of float32.
    """
    tensors = [parameter.tensor for parameter in editor.trace.parameters]
    tensors += [vector(max(size_bytes // 4, 1), "float32") for size_bytes in _buffer_bytes(editor.trace)]
    rows: list[Inserted] = []
    there: deque[int] = deque()
    for row in _buffers(editor, assign_buckets(tensors, range(len(tensors)), (SHARED_BYTES, SHARED_BYTES))):
        if len(there) == SHARED_AT_ONCE:
            rows.append(Inserted(EventKind.FREE, there.popleft()))
        rows.append(row)
        there.append(row.a)
    return [*rows, *(Inserted(EventKind.FREE, storage) for storage in there)]


def _buffer_bytes(trace: Trace) -> list[int]:
    return [storage.bytes for storage in trace.persistent if storage.kind == StorageKind.BUFFER]


def _free_first_gradients(editor: Editor, is_static: bool) -> None:
    """In the first step too, a gradient that was copied into its bucket becomes a view of it."""
    first = editor.trace.first
    run = max(index for index, each in enumerate(editor.program.first_runs) if each.phase == "backward")
    own = gradient_storages(editor.trace, first)
    if is_static:
        stop = editor.program.first_runs[run].segment.stop
        editor.edit_first(run, stop, *(Inserted(EventKind.FREE, own[index]) for index in sorted(own)))
        return
    for index, event in ready_gradients(first):
        if index in own:
            editor.edit_first(run, event, Inserted(EventKind.FREE, own[index]))


def _share_buffers(editor: Editor, run: PhaseRun) -> list[Inserted]:
    """Before the first forward of a step every rank takes the buffers of rank 0: copied into one, sent, copied back.

    What a trace knows of a buffer is its size; the copies are taken to be of float32.
    """
    sizes = _buffer_bytes(editor.trace)
    if not sizes or run.micro_batch != 0:
        return []
    tensors = tuple(vector(max(size_bytes // 4, 1), "float32") for size_bytes in sizes)
    whole = vector(sum(tensor.numel for tensor in tensors), "float32")
    storage = editor.new_storage()
    rows, mark = editor.beside("float32", whole.bytes, "all_reduce async", "broadcast")
    return [
        Inserted(EventKind.ALLOC, storage, whole.bytes),
        editor.launch(Operation("aten.cat.default", (tensors,), outputs=(whole,)), "flatten"),
        *rows,
        Inserted(WAIT, mark, call="wait"),
        *(editor.launch(_copy_out(tensor), "copy") for tensor in tensors),
        Inserted(EventKind.FREE, storage),
    ]


def _ddp_end(editor: Editor, buckets: tuple[Bucket, ...], marks: list[int], as_view: bool) -> list[Inserted]:
    """Each bucket is awaited, and, where gradients are not views of it, copied out before the next is."""
    rows: list[Inserted] = []
    for bucket, mark in zip(buckets, marks, strict=True):
        rows.append(Inserted(WAIT, mark, call="wait"))
        if not as_view:
            tensors = [editor.trace.parameters[index].tensor for index in bucket.parameters]
            rows += [editor.launch(_copy_out(tensor), "ddp parameter", COPY_SHARE) for tensor in tensors]
    return rows


def _copy_in(gradient: TensorSpec) -> Operation:
    """bucket view = gradient x (1 / ranks)."""
    scalar = TensorSpec((), (), "float32", "cpu")
    return Operation("aten.mul.out", (gradient, scalar), (("out", gradient),), (gradient,))


def _copy_out(gradient: TensorSpec) -> Operation:
    return Operation("aten.copy_.default", (gradient, gradient), (), (gradient,))
