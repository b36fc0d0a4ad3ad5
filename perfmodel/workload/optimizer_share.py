"""A trace in which the optimizer steps over a share of the parameters: what a rank of sharded data parallelism runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from perfmodel.workload.trace_file import EventKind, Segment, StepEvents, StorageKind, Trace, gradient_storages

OPTIMIZER = "optimizer"
OF_OPERATIONS = (EventKind.OP, EventKind.SYNC)
OF_STORAGES = (EventKind.ALLOC, EventKind.FREE)


def with_optimizer(trace: Trace, share: Trace, owners: Sequence[int | None]) -> Trace:
    """``trace`` with the optimizer's phase of ``share`` in place of its own.

    Parameters
    ----------
    trace : Trace
        Of a whole training step.
    share : Trace
        Of an optimizer alone (:func:`perfmodel.workload.trace.optimizer.trace_optimizer`): one phase; its persistent
        storages are the parameters and then their gradients.
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
    kinds = {number: kind for number, kind in trace.storage_kinds.items() if number not in _states(trace)}
    first = _spliced(trace.first, share.first, shift, _storages(trace, trace.first, share, owners, offset))
    steady = _spliced(trace.steady, share.steady, shift, _storages(trace, trace.steady, share, owners, offset))
    return replace(
        trace,
        operations=trace.operations + share.operations,
        first=first,
        steady=steady,
        storage_kinds=kinds | {number + offset: kind for number, kind in share.storage_kinds.items()},
        optimized=share.parameters,
    )


def _states(trace: Trace) -> set[int]:
    return {number for number, kind in trace.storage_kinds.items() if kind == StorageKind.OPTIMIZER_STATE}


def _storages(trace: Trace, events: StepEvents, share: Trace, owners: Sequence[int | None], offset: int) -> np.ndarray:
    """What each storage of the share is called in the trace."""
    numbers = [storage.id for storage in share.persistent] + list(share.storage_kinds)
    found = np.arange(1 + max(numbers, default=-1)) + offset
    gradients = gradient_storages(trace, events)
    own_gradients = [storage.id for storage in share.persistent[len(share.parameters) :]]
    for parameter, gradient, owner in zip(share.parameters, own_gradients, owners, strict=True):
        if owner is not None:
            found[parameter.storage] = trace.parameters[owner].storage
            found[gradient] = gradients.get(owner, found[gradient])
    return found


def _spliced(events: StepEvents, share: StepEvents, shift: int, storages: np.ndarray) -> StepEvents:
    at = next(segment for segment in events.segments if segment.phase == OPTIMIZER)
    before, after = slice(0, at.start), slice(at.stop, len(events.kind))
    operand = share.a.copy()
    is_call, is_storage = np.isin(share.kind, OF_OPERATIONS), np.isin(share.kind, OF_STORAGES)
    operand[is_call] += shift
    operand[is_storage] = storages[operand[is_storage]]
    grown = len(share.kind) - (at.stop - at.start)
    touched = np.diff(events.touch_offsets)
    counts = np.concatenate([touched[before], np.diff(share.touch_offsets), touched[after]])
    begin, end = (int(events.touch_offsets[border]) for border in (at.start, at.stop))

    def joined(own: np.ndarray, other: np.ndarray, part: slice, rest: slice) -> np.ndarray:
        return np.concatenate([own[part], other, own[rest]])

    return StepEvents(
        joined(events.kind, share.kind, before, after),
        joined(events.a, operand, before, after),
        joined(events.b, share.b, before, after),
        tuple(_moved(segment, at, grown) for segment in events.segments),
        np.concatenate([[0], np.cumsum(counts)]),
        joined(events.touches, storages[share.touches], slice(0, begin), slice(end, None)),
        joined(events.touch_bytes, share.touch_bytes, slice(0, begin), slice(end, None)),
    )


def _moved(segment: Segment, optimizer: Segment, grown: int) -> Segment:
    if segment is optimizer:
        return replace(segment, stop=segment.stop + grown)
    if segment.start >= optimizer.stop:
        return replace(segment, start=segment.start + grown, stop=segment.stop + grown)
    return segment
