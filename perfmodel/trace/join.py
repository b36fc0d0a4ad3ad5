"""Several traces as one: what a rank runs that has several parts of a model, or one part in several ways."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from perfmodel.trace.operation import Operation
from perfmodel.trace.trace import EventKind, Parameter, Segment, StepEvents, Storage, StorageKind, Trace

OF_OPERATIONS = (EventKind.OP, EventKind.SYNC)
OF_STORAGES = (EventKind.ALLOC, EventKind.FREE)
OF_MODULES = (EventKind.MODULE_ENTER, EventKind.MODULE_EXIT, EventKind.BLOCK_ENTER, EventKind.BLOCK_EXIT)
OF_CALLS = (EventKind.CALL_ENTER, EventKind.CALL_EXIT)


class Renumbering(NamedTuple):
    """How what one of the traces counts is counted among all. operations, storages: by its own numbers. The others grow
    by so much.
    """

    operations: np.ndarray
    storages: np.ndarray
    modules: int
    calls: int
    nodes: int
    parameters: int


@dataclass
class _Tables:
    """What all traces count, so far."""

    operations: dict[Operation, int]
    modules: list[tuple[str, str]]
    calls: list[str]
    nodes: list[str]
    parameters: list[Parameter]
    persistent: list[Storage]
    storage_kinds: dict[int, StorageKind]
    storages: int = 0

    def add(self, trace: Trace, same: tuple[Trace, Renumbering] | None) -> Renumbering:
        """same: a trace of the same part of the model that was added before; it has the same persistent storages."""
        known = [storage.id for storage in trace.persistent] + list(trace.storage_kinds)
        storages = np.arange(1 + max(known, default=-1)) + self.storages
        self.storages += len(storages)
        parameters = len(self.parameters)
        if same is None:
            self.persistent += [replace(each, id=int(storages[each.id])) for each in trace.persistent]
            self.parameters += [replace(each, storage=int(storages[each.storage])) for each in trace.parameters]
        else:
            before, renumbering = same
            parameters = renumbering.parameters
            for own, its in zip(trace.persistent, before.persistent, strict=True):
                storages[own.id] = renumbering.storages[its.id]
        operations = [self.operations.setdefault(each, len(self.operations)) for each in trace.operations]
        made = Renumbering(
            np.array(operations, dtype=np.int64),
            storages,
            len(self.modules),
            len(self.calls),
            len(self.nodes),
            parameters,
        )
        self.storage_kinds |= {int(storages[number]): kind for number, kind in trace.storage_kinds.items()}
        self.modules += trace.modules
        self.calls += trace.calls
        self.nodes += trace.nodes
        return made


def join(traces: Sequence[Trace], same_as: Sequence[int]) -> tuple[Trace, tuple[Renumbering, ...]]:
    """The traces after each other: events, segments and tables of the first, then of the second, ...

    Parameters
    ----------
    traces : sequence of Trace
    same_as : sequence of int
        For each, the first of them that is of the same part of the model: they share parameters and all else that is
        there before the first step.

    Returns
    -------
    tuple of Trace and of Renumbering
        The latter by trace. One trace alone stays as it is, renumbered as it was.
    """
    tables = _Tables({}, [], [], [], [], [], {})
    made: list[Renumbering] = []
    for number, (trace, same) in enumerate(zip(traces, same_as, strict=True)):
        made.append(tables.add(trace, None if same == number else (traces[same], made[same])))
    joined = replace(
        traces[0],
        operations=tuple(tables.operations),
        modules=tuple(tables.modules),
        calls=tuple(tables.calls),
        nodes=tuple(tables.nodes),
        parameters=tuple(tables.parameters),
        persistent=tuple(tables.persistent),
        first=_events([trace.first for trace in traces], made),
        steady=_events([trace.steady for trace in traces], made),
        storage_kinds=tables.storage_kinds,
    )
    return joined, tuple(made)


def _events(steps: Sequence[StepEvents], made: Sequence[Renumbering]) -> StepEvents:
    columns = [_renumbered(events, each) for events, each in zip(steps, made, strict=True)]
    segments: list[Segment] = []
    start = 0
    for events in steps:
        segments += [replace(each, start=each.start + start, stop=each.stop + start) for each in events.segments]
        start += len(events.kind)
    touched = np.concatenate([np.diff(events.touch_offsets) for events in steps])
    return StepEvents(
        np.concatenate([events.kind for events in steps]),
        np.concatenate([a for a, _ in columns]),
        np.concatenate([b for _, b in columns]),
        tuple(segments),
        np.concatenate([[0], np.cumsum(touched)]),
        np.concatenate([each.storages[events.touches] for events, each in zip(steps, made, strict=True)]),
        np.concatenate([events.touch_bytes for events in steps]),
    )


def _renumbered(events: StepEvents, by: Renumbering) -> tuple[np.ndarray, np.ndarray]:
    kind, a, b = events.kind, events.a.copy(), events.b.copy()
    for kinds, numbers in ((OF_OPERATIONS, by.operations), (OF_STORAGES, by.storages)):
        found = np.isin(kind, kinds)
        a[found] = numbers[a[found]]
    a[np.isin(kind, OF_MODULES)] += by.modules
    a[np.isin(kind, OF_CALLS)] += by.calls
    a[kind == EventKind.NODE] += by.nodes
    a[kind == EventKind.GRAD_READY] += by.parameters
    b[(kind == EventKind.OP) & (b >= 0)] += by.nodes
    return a, b
