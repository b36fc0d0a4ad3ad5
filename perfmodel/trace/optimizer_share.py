"""A trace in which the optimizer steps over a share of the parameters: what a rank of sharded data parallelism runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from perfmodel.trace.operation import TensorSpec
from perfmodel.trace.phases import OPTIMIZER
from perfmodel.trace.trace import (
    OPERATION_EVENTS,
    STORAGE_EVENTS,
    EventKind,
    Parameter,
    Segment,
    StepEvents,
    Storage,
    StorageKind,
    Trace,
    gradient_storages,
)

SCALER_UPDATE = "aten._amp_update_scale_.default"


class OptimizerShare(NamedTuple):
    """The work of ranks that hold shards of the gradients before the optimizer steps over these.

    They clip the gradients to the scenario's norm, if it has one.

    Attributes
    ----------
    are_dtensors : bool
        Whether they add up a norm of each parameter, or else one of all.
    absent : int
        Parameters of which this rank has no row, but an entry among the norms.
    are_scaled : bool
        Whether a gradient scaler undoes its scaling first.
    """

    are_dtensors: bool
    absent: int = 0
    are_scaled: bool = False


def with_optimizer(trace: Trace, share: Trace, owners: Sequence[int | None]) -> Trace:
    """Return ``trace`` with the optimizer's phase of ``share`` in place of its own, and its clipping, if it has that.

    A gradient scaler of the trace stays where the share has none: it works on all gradients before and after.

    Parameters
    ----------
    trace : Trace
        Of a whole training step.
    share : Trace
        Of an optimizer alone (:func:`perfmodel.tracing.optimizer.trace_optimizer`): its persistent storages
        are the parameters and then their gradients.
    owners : sequence of int or None
        For each of the share's parameters the parameter of ``trace`` that it is; None for one of the share's own.

    Returns
    -------
    Trace
        Its ``optimized`` are the share's parameters. Storages of the share's own parameters and gradients are numbered
        after the trace's, and nothing allocates them.
    """
    known = [storage.id for storage in trace.persistent] + list(trace.storage_kinds)
    offset = 1 + max(known, default=-1)
    shift = len(trace.operations)
    kinds = {number: kind for number, kind in trace.storage_kinds.items() if kind != StorageKind.OPTIMIZER_STATE}
    steps = []
    for events, own in ((trace.first, share.first), (trace.steady, share.steady)):
        place = _place(trace, events, share, own)
        steps.append(_spliced(events, own, shift, _storages(trace, events, share, owners, offset), place))
    first, steady = steps
    return replace(
        trace,
        workload=trace.workload | {"optimizer": share.workload["optimizer"]},
        operations=trace.operations + share.operations,
        first=first,
        steady=steady,
        storage_kinds=kinds | {number + offset: kind for number, kind in share.storage_kinds.items()},
        optimized=share.parameters,
    )


def optimizer_on_host(trace: Trace, shards: Mapping[int, TensorSpec]) -> Trace:
    """Return a trace for :func:`with_optimizer` of an optimizer that runs on the host.

    ``shards`` are this rank's, by parameter of ``trace``, whose names they bear; they live in the host's memory.
    """
    parameters = [
        Parameter(trace.parameters[index].name, shard._replace(device="cpu"), number)
        for number, (index, shard) in enumerate(shards.items())
    ]
    kinds = [StorageKind.PARAMETER] * len(parameters) + [StorageKind.GRADIENT] * len(parameters)
    nothing = np.zeros(0, dtype=np.int64)
    step = StepEvents(nothing, nothing, nothing, (Segment(OPTIMIZER, -1, 0, 0),))
    return replace(
        trace,
        operations=(),
        parameters=tuple(parameters),
        persistent=tuple(Storage(number, 0, kind) for number, kind in enumerate(kinds)),
        first=step,
        steady=step,
        storage_kinds={},
    )


def _storages(trace: Trace, events: StepEvents, share: Trace, owners: Sequence[int | None], offset: int) -> np.ndarray:
    """Return the number in the trace of each storage of the share."""
    own_numbers = [storage.id for storage in share.persistent] + list(share.storage_kinds)
    numbers = np.arange(1 + max(own_numbers, default=-1)) + offset
    gradients = gradient_storages(trace, events)
    own_gradients = [storage.id for storage in share.persistent[len(share.parameters) :]]
    for parameter, gradient, owner in zip(share.parameters, own_gradients, owners, strict=True):
        if owner is not None:
            numbers[parameter.storage] = trace.parameters[owner].storage
            numbers[gradient] = gradients.get(owner, numbers[gradient])
    return numbers


class _Place(NamedTuple):
    """The events that are replaced, start to stop, and the indices of the first and last phase among them."""

    start: int
    stop: int
    first: int
    last: int


def _place(trace: Trace, events: StepEvents, share: Trace, own: StepEvents) -> _Place:
    phases = [segment.phase for segment in events.segments]
    first, last = phases.index(own.segments[0].phase), phases.index(own.segments[-1].phase)
    start, stop = events.segments[first].start, events.segments[last].stop
    updates = _scaler_updates(trace, events, slice(start, stop))
    if updates and not _scaler_updates(share, own, slice(0, len(own.kind))):
        reads = start + np.flatnonzero(events.kind[start:stop] == EventKind.SYNC)
        start, stop = int(reads[-1]) + 1, updates[-1]
    return _Place(start, stop, first, last)


def _scaler_updates(trace: Trace, events: StepEvents, within: slice) -> list[int]:
    """Return the events that update a gradient scaler."""
    at = (within.start + np.flatnonzero(events.kind[within] == EventKind.OP)).tolist()
    return [event for event in at if trace.operations[events.a[event]].name == SCALER_UPDATE]


def _spliced(events: StepEvents, share: StepEvents, shift: int, storages: np.ndarray, place: _Place) -> StepEvents:
    """Return the step with the share's phases, which follow each other in it too, in place of its own."""
    start, stop = place.start, place.stop
    before, after = slice(0, start), slice(stop, len(events.kind))
    operand = share.a.copy()
    is_call, is_storage = np.isin(share.kind, OPERATION_EVENTS), np.isin(share.kind, STORAGE_EVENTS)
    operand[is_call] += shift
    operand[is_storage] = storages[operand[is_storage]]
    grown = len(share.kind) - (stop - start)
    touched = np.diff(events.touch_offsets)
    counts = np.concatenate([touched[before], np.diff(share.touch_offsets), touched[after]])
    begin, end = (int(events.touch_offsets[border]) for border in (start, stop))

    def joined(own: np.ndarray, other: np.ndarray, head: slice, tail: slice) -> np.ndarray:
        return np.concatenate([own[head], other, own[tail]])

    return StepEvents(
        joined(events.kind, share.kind, before, after),
        joined(events.a, operand, before, after),
        joined(events.b, share.b, before, after),
        tuple(_segments(events, share, place, grown)),
        np.concatenate([[0], np.cumsum(counts)]),
        joined(events.touches, storages[share.touches], slice(0, begin), slice(end, None)),
        joined(events.touch_bytes, share.touch_bytes, slice(0, begin), slice(end, None)),
    )


def _segments(events: StepEvents, share: StepEvents, place: _Place, grown: int) -> Iterator[Segment]:
    """The first of the share's begins where its namesake did, the last ends behind what that had left."""
    own = events.segments
    yield from own[: place.first]
    for segment in share.segments:
        start, stop = segment.start + place.start, segment.stop + place.start
        yield replace(
            segment,
            start=own[place.first].start if segment is share.segments[0] else start,
            stop=own[place.last].stop + grown if segment is share.segments[-1] else stop,
        )
    for segment in own[place.last + 1 :]:
        yield replace(segment, start=segment.start + grown, stop=segment.stop + grown)
