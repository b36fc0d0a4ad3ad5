"""A trace: what one rank's host does in a training step, as integer columns over tables of distinct things.

It carries work (operators, bytes, modules), never seconds, and loads without torch. ``tracing`` writes it.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from perfmodel.errors import PerfModelError
from perfmodel.files.reading import read_json
from perfmodel.files.versions import check_version
from perfmodel.files.writing import write_atomically
from perfmodel.limits import LARGEST_TRACE_BYTES
from perfmodel.trace.operation import Operation, TensorSpec, decode_operation, encode_operation

# Format history
# 1  first
# 2  where the backward of repeated blocks begins and ends
# 3  what a stage of a pipeline receives and sends
TRACE_VERSION = 3
OLDEST_VERSION = 2  # a file without a boundary is read as it is
REMEDY = "Delete it to trace again."
MALFORMED = (KeyError, IndexError, TypeError, ValueError, AttributeError, ArithmeticError, PerfModelError)


class EventKind(IntEnum):
    """An event on the host. Columns a and b mean, by kind:

    OP            a: index into operations          b: index into nodes (backward) or -1
    ALLOC         a: storage id                     b: requested bytes (device storages only)
    FREE          a: storage id                     b: 0
    SYNC          a: index into operations          b: 0. The host waits until the device has finished that operator
    MODULE_ENTER  a: index into modules             b: 0
    MODULE_EXIT   a: index into modules             b: 0
    CALL_ENTER    a: index into calls               b: 0. A function called from Python, which runs the OPs inside it
    CALL_EXIT     a: index into calls               b: 0
    NODE          a: index into nodes               b: 0. The autograd engine starts this node; its OPs follow
    GRAD_READY    a: index into parameters          b: 0. The parameter's gradient is accumulated
    BLOCK_ENTER   a: index into modules             b: 0. The gradient of an output of a repeated block, or of the
                                                    whole model, is complete
    BLOCK_EXIT    a: index into modules             b: 0. The gradient of a block's input is complete
    """

    OP = 0
    ALLOC = 1
    FREE = 2
    SYNC = 3
    MODULE_ENTER = 4
    MODULE_EXIT = 5
    CALL_ENTER = 6
    CALL_EXIT = 7
    NODE = 8
    GRAD_READY = 9
    BLOCK_ENTER = 10
    BLOCK_EXIT = 11


# Kinds of events by the table that column a points into.
OPERATION_EVENTS = (EventKind.OP, EventKind.SYNC)
STORAGE_EVENTS = (EventKind.ALLOC, EventKind.FREE)
MODULE_EVENTS = (EventKind.MODULE_ENTER, EventKind.MODULE_EXIT, EventKind.BLOCK_ENTER, EventKind.BLOCK_EXIT)
CALL_EVENTS = (EventKind.CALL_ENTER, EventKind.CALL_EXIT)


class StorageKind(IntEnum):
    """The use of a storage, for the memory picture."""

    PARAMETER = 0
    BUFFER = 1
    INPUT = 2
    GRADIENT = 3
    OPTIMIZER_STATE = 4
    ACTIVATION = 5  # made in forward, still held when forward ends
    TEMPORARY = 6


@dataclass(frozen=True)
class Segment:
    """Events ``start`` (inclusive) to ``stop`` (exclusive) of one phase.

    Attributes
    ----------
    phase : str
        zero_grad, forward, backward, clip or optimizer; in stages of a pipeline also scale, and backward_input and
        backward_weight in place of backward.
    micro_batch : int
        0 is the first of a step, -1 stands for none. A trace holds at most two: all later ones run what the second
        runs.
    start, stop : int
    """

    phase: str
    micro_batch: int
    start: int
    stop: int


def _no_numbers() -> np.ndarray:
    return np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class StepEvents:
    """One step: equally long columns of events, and the segments that cover them in order.

    Attributes
    ----------
    kind, a, b : ndarray of int64
        See :class:`EventKind`.
    segments : tuple of Segment
    touch_offsets : ndarray of int64
        Event i touches the storages from touch_offsets[i] to touch_offsets[i + 1] (one longer than the columns).
    touches : ndarray of int64
        Ids of the storages that launching operators read or write, each once an operator, inputs before outputs.
    touch_bytes : ndarray of int64
        How many bytes of each storage the operator's tensors address.
    """

    kind: np.ndarray
    a: np.ndarray
    b: np.ndarray
    segments: tuple[Segment, ...]
    touch_offsets: np.ndarray = field(default_factory=_no_numbers)
    touches: np.ndarray = field(default_factory=_no_numbers)
    touch_bytes: np.ndarray = field(default_factory=_no_numbers)

    def __post_init__(self) -> None:
        if len(self.touch_offsets) == 0:
            object.__setattr__(self, "touch_offsets", np.zeros(len(self.kind) + 1, dtype=np.int64))


@dataclass(frozen=True)
class Parameter:
    name: str
    tensor: TensorSpec
    storage: int
    requires_grad: bool = True


@dataclass(frozen=True)
class Storage:
    """A storage that exists before the first step, in order of allocation."""

    id: int
    bytes: int
    kind: StorageKind


class BoundaryTensor(NamedTuple):
    """A tensor that a stage of a pipeline exchanges with its neighbour for each micro-batch.

    Attributes
    ----------
    tensor : TensorSpec
    first, steady : tuple of int
        Its storage ids in micro-batch 0 and 1 of the first step, and of later ones.
    """

    tensor: TensorSpec
    first: tuple[int, ...]
    steady: tuple[int, ...]


class Boundary(NamedTuple):
    """The tensors with which messages of a stage begin and end. What is received lies in persistent storages.

    Attributes
    ----------
    takes : BoundaryTensor, optional
        The activation that it receives; None in the first stage.
    gives : BoundaryTensor, optional
        Its output, sent on; None in the last stage.
    takes_gradient : BoundaryTensor, optional
        The gradient of the output, received; None in the last stage.
    gives_gradient : BoundaryTensor, optional
        The gradient of the received activation, sent back; None in the first stage.
    output : BoundaryTensor
        What forward returns: ``gives``, or the last stage's logits.
    """

    takes: BoundaryTensor | None
    gives: BoundaryTensor | None
    takes_gradient: BoundaryTensor | None
    gives_gradient: BoundaryTensor | None
    output: BoundaryTensor


@dataclass(frozen=True)
class Trace:
    """One rank's training step, and its first one.

    Attributes
    ----------
    workload : dict
        The keys of the scenario that decide the operators (:func:`perfmodel.scenario.scenario.workload_of`).
    provenance : dict
        Versions of torch and transformers that were traced.
    operations, modules, calls, nodes, parameters : tuple
        Tables that the events point into. Modules are pairs of name and class, calls function names, and nodes names
        of autograd nodes.
    persistent : tuple of Storage
        Storages made before the first step.
    first, steady : StepEvents
        The first step, which creates optimizer states, and every later one.
    storage_kinds : dict
        The kind of every storage id that any event allocates.
    optimized : tuple of Parameter, optional
        What the optimizer steps over, where that is not the parameters (not in files).
    boundary : Boundary, optional
        Of a stage of a pipeline, else None.
    """

    workload: dict[str, Any]
    provenance: dict[str, str]
    operations: tuple[Operation, ...]
    modules: tuple[tuple[str, str], ...]
    calls: tuple[str, ...]
    nodes: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    persistent: tuple[Storage, ...]
    first: StepEvents
    steady: StepEvents
    storage_kinds: dict[int, StorageKind] = field(default_factory=dict)
    optimized: tuple[Parameter, ...] | None = None
    boundary: Boundary | None = None

    def segment(self, phase: str, micro_batch: int = -1) -> Segment | None:
        """Return the steady step's segment of that phase, or None."""
        for segment in self.steady.segments:
            if segment.phase == phase and segment.micro_batch == micro_batch:
                return segment
        return None


def gradient_storages(trace: Trace, events: StepEvents) -> dict[int, int]:
    """Return the storages that gradients are accumulated in, by parameter.

    A parameter's is the last storage of the gradient's size that was made before the gradient was first ready. One that
    is used in several places may have none.
    """
    storage_of: dict[int, int] = {}
    made: dict[int, list[int]] = {}
    at = np.flatnonzero((events.kind == EventKind.ALLOC) | (events.kind == EventKind.GRAD_READY))
    columns = (events.kind[at].tolist(), events.a[at].tolist(), events.b[at].tolist())  # numpy is slow one by one
    for kind, number, size_bytes in zip(*columns, strict=True):
        if kind == EventKind.ALLOC:
            if trace.storage_kinds.get(number) == StorageKind.GRADIENT:
                made.setdefault(size_bytes, []).append(number)
        elif number not in storage_of:
            as_large = made.get(trace.parameters[number].tensor.bytes, [])
            if as_large:
                storage_of[number] = as_large.pop()
    return storage_of


def _encode_events(events: StepEvents) -> dict[str, Any]:
    return {
        "kind": events.kind.tolist(),
        "a": events.a.tolist(),
        "b": events.b.tolist(),
        "segments": [[s.phase, s.micro_batch, s.start, s.stop] for s in events.segments],
        "touch_counts": np.diff(events.touch_offsets).tolist(),
        "touches": events.touches.tolist(),
        "touch_bytes": events.touch_bytes.tolist(),
    }


def _decode_events(data: dict[str, Any]) -> StepEvents:
    names = ("kind", "a", "b", "touch_counts", "touches", "touch_bytes")
    kind, a, b, counts, touches, touch_bytes = [np.asarray(data[name], dtype=np.int64) for name in names]
    offsets = np.concatenate([[0], np.cumsum(counts)])
    segments = tuple(Segment(*row) for row in data["segments"])
    return StepEvents(kind, a, b, segments, offsets, touches, touch_bytes)


def _encode_boundary(boundary: Boundary | None) -> list[Any] | None:
    if boundary is None:
        return None
    return [None if end is None else [end.tensor.text, end.first, end.steady] for end in boundary]


def _decode_boundary(rows: list[Any] | None) -> Boundary | None:
    if rows is None:
        return None
    ends = [
        None if row is None else BoundaryTensor(TensorSpec.parse(row[0]), tuple(row[1]), tuple(row[2])) for row in rows
    ]
    return Boundary(*ends)  # type: ignore[arg-type]


def save_trace(trace: Trace, path: Path) -> None:
    """Write ``path`` (gzip JSON) atomically; equal traces give equal bytes."""
    data = {
        "version": TRACE_VERSION,
        "workload": trace.workload,
        "provenance": trace.provenance,
        "operations": [encode_operation(operation) for operation in trace.operations],
        "modules": [list(module) for module in trace.modules],
        "calls": list(trace.calls),
        "nodes": list(trace.nodes),
        "parameters": [[p.name, p.tensor.text, p.storage, p.requires_grad] for p in trace.parameters],
        "persistent": [[s.id, s.bytes, int(s.kind)] for s in trace.persistent],
        "first": _encode_events(trace.first),
        "steady": _encode_events(trace.steady),
        "storage_kinds": [list(trace.storage_kinds), [int(kind) for kind in trace.storage_kinds.values()]],
        "boundary": _encode_boundary(trace.boundary),
    }
    text = json.dumps(data, separators=(",", ":"))
    write_atomically(path, gzip.compress(text.encode(), mtime=0), None)


def load_trace(path: Path) -> Trace:
    """Read a trace file.

    Raises
    ------
    PerfModelError
        If the file is unreadable, truncated, or of another version: traces are made again, not upgraded.
    """
    from perfmodel.trace.rules import broken_rule  # which is about traces, and so imports this module

    data = read_json(path, "a trace", REMEDY, LARGEST_TRACE_BYTES)
    if (version := check_version(path, data, TRACE_VERSION, REMEDY)) < OLDEST_VERSION:
        raise PerfModelError(f"{path}: version must be {OLDEST_VERSION} to {TRACE_VERSION} (got {version}). {REMEDY}")
    try:
        trace = Trace(
            workload=data["workload"],
            provenance=data["provenance"],
            operations=tuple(decode_operation(row) for row in data["operations"]),
            modules=tuple((name, kind) for name, kind in data["modules"]),
            calls=tuple(data["calls"]),
            nodes=tuple(data["nodes"]),
            parameters=tuple(Parameter(n, TensorSpec.parse(t), s, r) for n, t, s, r in data["parameters"]),
            persistent=tuple(Storage(i, size, StorageKind(kind)) for i, size, kind in data["persistent"]),
            first=_decode_events(data["first"]),
            steady=_decode_events(data["steady"]),
            storage_kinds={i: StorageKind(kind) for i, kind in zip(*data["storage_kinds"], strict=True)},
            boundary=_decode_boundary(data.get("boundary")),
        )
        rule = broken_rule(trace)
    except MALFORMED as error:
        raise PerfModelError(f"{path}: must hold a whole trace ({str(error)[:120]!r} is wrong). {REMEDY}") from error
    if rule is not None:
        raise PerfModelError(f"{path}: a trace must {rule}. {REMEDY}")
    return trace
