"""Data parallelism in the forms people write, as a function from one rank's trace to its program.

Every rank runs the same program on its own samples; gradients are averaged once a step, in the last micro-batch.

    naive     after backward an all-reduce of each gradient, in the order of the parameters
    flat      after backward one all-reduce of all gradients, copied into one buffer and back
    overlap   an all-reduce of each gradient as soon as it is ready, awaited after backward
    ddp       torch's DistributedDataParallel: buckets, copied into and out of, reduced as they fill

A synchronous collective runs on the compute stream, an asynchronous one on its communicator's own, which first waits
for the compute stream. NCCL averages while it reduces, so no division follows; DDP divides as it copies in.

Sources: torch/csrc/distributed/c10d/reducer.cpp (``mark_variable_ready_dense``, ``finalize_bucket_dense``),
ProcessGroupNCCL.cpp (streams of collectives), torch/_utils.py (``_flatten_dense_tensors``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from perfmodel.program.buckets import Bucket, assign_buckets, bucket_limits
from perfmodel.program.program import (
    COLLECTIVE,
    HOST,
    RECORD,
    WAIT,
    Collective,
    Edit,
    Inserted,
    PhaseRun,
    Program,
    single_device_program,
)
from perfmodel.workload.ops import Operation, TensorSpec, contiguous_stride
from perfmodel.workload.scenario import Scenario
from perfmodel.workload.trace_file import EventKind, Segment, Storage, StorageKind, Trace

COMMUNICATION = 1  # the stream of the data-parallel communicator
REDUCE = "reduce"  # the phase of naive and flat


def data_parallel_program(scenario: Scenario, trace: Trace) -> Program:
    """The program of one rank of ``scenario``: that of a single device, with communication where there are more.

    Examples
    --------
    ``parallelism: {dp: 4, strategy: ddp}`` of a model whose gradients fill three buckets: three collectives inside the
    last backward, and as many waits at its end.
    """
    program = single_device_program(trace, scenario.training.gradient_accumulation)
    section = scenario.parallelism
    if section.dp == 1 or section.strategy == "none" or scenario.mode == "forward":
        return program
    return _FORMS[section.strategy](_Editor(program, section.dp), scenario)


def ddp_buckets(scenario: Scenario, trace: Trace) -> tuple[Bucket, ...]:
    """The buckets of the steady step, in the order in which they are reduced."""
    tensors = [parameter.tensor for parameter in trace.parameters]
    limits = bucket_limits(scenario.parallelism.bucket_cap_mb)
    return assign_buckets(tensors, [index for index, _ in _ready(trace)], limits)


def _ready(trace: Trace) -> list[tuple[int, int]]:
    """Parameters as their gradients become ready in the last micro-batch, each with the event after it."""
    segment = [each for each in trace.steady.segments if each.phase == "backward"][-1]
    events = np.arange(segment.start, segment.stop)
    ready = events[trace.steady.kind[segment.start : segment.stop] == EventKind.GRAD_READY]
    return [(int(trace.steady.a[event]), int(event) + 1) for event in ready]


class _Editor:
    """Collects what is put into a program."""

    def __init__(self, program: Program, ranks: int) -> None:
        self.program, self.trace, self.ranks = program, program.trace, ranks
        self.gradients = [index for index, parameter in enumerate(program.trace.parameters) if parameter.requires_grad]
        self._operations: dict[Operation, int] = {}
        self._collectives: dict[Collective, int] = {}
        self._marks = 0
        self._edits: list[Edit] = []
        self._next_storage = 1 + max(
            [storage.id for storage in program.trace.persistent] + list(program.trace.storage_kinds), default=0
        )

    @property
    def last_backward(self) -> int:
        """Index of the last backward among the runs."""
        return max(index for index, run in enumerate(self.program.runs) if run.phase == "backward")

    def launch(self, operation: Operation, call: str, share: float = 1.0) -> Inserted:
        number = self._operations.setdefault(operation, len(self._operations))
        return Inserted(EventKind.OP, len(self.trace.operations) + number, -1, call=call, share=share)

    def all_reduce(self, tensor: TensorSpec) -> Inserted:
        """Synchronous, on the compute stream."""
        return Inserted(COLLECTIVE, self._number(tensor.dtype, tensor.bytes), call="all_reduce")

    def beside(
        self, dtype: str, size_bytes: int, call: str, kind: str = "all_reduce"
    ) -> tuple[tuple[Inserted, ...], int]:
        """Asynchronous, on the communicator's stream after what the compute stream was given so far; and the mark of
        its end.
        """
        before, after = self._mark(), self._mark()
        rows = (
            Inserted(RECORD, before),
            Inserted(WAIT, before, stream=COMMUNICATION),
            Inserted(COLLECTIVE, self._number(dtype, size_bytes, kind), stream=COMMUNICATION, call=call),
            Inserted(RECORD, after, stream=COMMUNICATION),
        )
        return rows, after

    def _number(self, dtype: str, size_bytes: int, kind: str = "all_reduce") -> int:
        collective = Collective(kind, dtype, size_bytes, self.ranks)
        return self._collectives.setdefault(collective, len(self._collectives))

    def _mark(self) -> int:
        self._marks += 1
        return self._marks - 1

    def new_storage(self) -> int:
        self._next_storage += 1
        return self._next_storage - 1

    def edit(self, run: int, event: int, *instructions: Inserted) -> None:
        if instructions:
            self._edits.append(Edit(run, event, instructions))

    def add_phase(self, phase: str, *instructions: Inserted) -> None:
        """A phase of inserted instructions alone, after the last backward of the steady and of the first step."""
        runs, edit = _with_phase(self.program.runs, phase, instructions)
        first_runs, first_edit = _with_phase(self.program.first_runs, phase, instructions)
        self.program = replace(self.program, runs=runs, first_runs=first_runs, first_edits=(first_edit,))
        self._edits.append(edit)

    def finish(self, persistent: tuple[Storage, ...] = ()) -> Program:
        return replace(
            self.program,
            edits=tuple(sorted(self._edits, key=lambda edit: (edit.run, edit.event))),
            extra_operations=tuple(self._operations),
            collectives=tuple(self._collectives),
            persistent=persistent,
        )


def _with_phase(
    runs: tuple[PhaseRun, ...], phase: str, instructions: tuple[Inserted, ...]
) -> tuple[tuple[PhaseRun, ...], Edit]:
    at = 1 + max(index for index, run in enumerate(runs) if run.phase == "backward")
    event = runs[at - 1].segment.stop
    run = PhaseRun(phase, -1, Segment(phase, -1, event, event))
    return (*runs[:at], run, *runs[at:]), Edit(at, event, instructions)


def _naive(editor: _Editor, scenario: Scenario) -> Program:
    parameters = editor.trace.parameters
    editor.add_phase(REDUCE, *(editor.all_reduce(parameters[index].tensor) for index in editor.gradients))
    return editor.finish()


def _flat(editor: _Editor, scenario: Scenario) -> Program:
    """One buffer a dtype, as torch groups them."""
    rows: list[Inserted] = []
    parameters = editor.trace.parameters
    for dtype in dict.fromkeys(parameters[index].tensor.dtype for index in editor.gradients):
        tensors = [parameters[i].tensor for i in editor.gradients if parameters[i].tensor.dtype == dtype]
        flat = _vector(sum(tensor.numel for tensor in tensors), dtype)
        storage = editor.new_storage()
        views = tuple(_vector(tensor.numel, dtype) for tensor in tensors)
        copy_back = Operation("aten._foreach_copy_.default", (tuple(tensors), tuple(tensors)), outputs=())
        rows += [
            Inserted(EventKind.ALLOC, storage, flat.bytes),
            editor.launch(Operation("aten.cat.default", (views,), outputs=(flat,)), "flatten"),
            editor.all_reduce(flat),
            editor.launch(copy_back, "unflatten"),
            Inserted(EventKind.FREE, storage),
        ]
    editor.add_phase(REDUCE, *rows)
    return editor.finish()


def _overlap(editor: _Editor, scenario: Scenario) -> Program:
    run, marks = editor.last_backward, []
    for index, event in _ready(editor.trace):
        tensor = editor.trace.parameters[index].tensor
        rows, mark = editor.beside(tensor.dtype, tensor.bytes, "all_reduce async")
        editor.edit(run, event, *rows)
        marks.append(mark)
    stop = editor.program.runs[run].segment.stop
    editor.edit(run, stop, *(Inserted(WAIT, mark, call="wait") for mark in marks))
    return editor.finish()


def _ddp(editor: _Editor, scenario: Scenario) -> Program:
    as_view = scenario.parallelism.gradient_as_bucket_view
    buckets = ddp_buckets(scenario, editor.trace)
    bucket_of = {index: number for number, bucket in enumerate(buckets) for index in bucket.parameters}
    missing = [len(bucket.parameters) for bucket in buckets]
    tensors = [parameter.tensor for parameter in editor.trace.parameters]
    share = 1.0 if as_view else 0.5  # of a parameter's host time; the other half is spent on copying out
    for number, run in enumerate(editor.program.runs):
        if run.phase == "forward":
            editor.edit(number, run.segment.start, Inserted(HOST, call="ddp forward"), *_share_buffers(editor, run))
    run_number = editor.last_backward
    marks: list[int] = []
    for index, event in _ready(editor.trace):
        missing[bucket_of[index]] -= 1
        rows = [editor.launch(_copy_in(tensors[index]), "ddp parameter", share)]
        while len(marks) < len(buckets) and missing[len(marks)] == 0:  # strictly in order
            bucket = buckets[len(marks)]
            more, mark = editor.beside(bucket.dtype, bucket.size_bytes, "ddp bucket")
            rows += more
            marks.append(mark)
        editor.edit(run_number, event, *rows)
    editor.edit(run_number, editor.program.runs[run_number].segment.stop, *_ddp_end(editor, buckets, marks, as_view))
    persistent = tuple(Storage(editor.new_storage(), each.size_bytes, StorageKind.GRADIENT) for each in buckets)
    return editor.finish(persistent)


def _share_buffers(editor: _Editor, run: PhaseRun) -> list[Inserted]:
    """Before the first forward of a step every rank takes the buffers of rank 0: copied into one, sent, copied back.

    What a trace knows of a buffer is its size; the copies are taken to be of float32.
    """
    sizes = [storage.bytes for storage in editor.trace.persistent if storage.kind == StorageKind.BUFFER]
    if not sizes or run.micro_batch != 0:
        return []
    tensors = tuple(_vector(max(size_bytes // 4, 1), "float32") for size_bytes in sizes)
    whole = _vector(sum(tensor.numel for tensor in tensors), "float32")
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


def _ddp_end(editor: _Editor, buckets: tuple[Bucket, ...], marks: list[int], as_view: bool) -> list[Inserted]:
    """Each bucket is awaited, and, where gradients are not views of it, copied out before the next is."""
    rows: list[Inserted] = []
    for bucket, mark in zip(buckets, marks, strict=True):
        rows.append(Inserted(WAIT, mark, call="wait"))
        if not as_view:
            tensors = [editor.trace.parameters[index].tensor for index in bucket.parameters]
            rows += [editor.launch(_copy_out(tensor), "ddp parameter", 0.5) for tensor in tensors]
    return rows


def _copy_in(gradient: TensorSpec) -> Operation:
    """bucket view = gradient x (1 / ranks)."""
    scalar = TensorSpec((), (), "float32", "cpu")
    return Operation("aten.mul.out", (gradient, scalar), (("out", gradient),), (gradient,))


def _copy_out(gradient: TensorSpec) -> Operation:
    return Operation("aten.copy_.default", (gradient, gradient), (), (gradient,))


def _vector(count: int, dtype: str) -> TensorSpec:
    return TensorSpec((count,), contiguous_stride((count,)), dtype)


_FORMS: dict[str, Callable[[_Editor, Scenario], Program]] = {
    "naive": _naive,
    "flat": _flat,
    "overlap": _overlap,
    "ddp": _ddp,
}
