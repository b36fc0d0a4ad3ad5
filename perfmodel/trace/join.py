"""Several traces joined into one: those of a rank that has several stages of a model, or one stage in several forms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from perfmodel.trace.operation import Operation
from perfmodel.trace.trace import (
    CALL_EVENTS,
    MODULE_EVENTS,
    OPERATION_EVENTS,
    STORAGE_EVENTS,
    EventKind,
    Parameter,
    Segment,
    StepEvents,
    Storage,
    StorageKind,
    Trace,
)


class Renumbering(NamedTuple):
    """How the numbers of one trace become those of the joined one.

    Attributes
    ----------
    operations, storages : ndarray of int
        The joined number, by the trace's own.
    modules, calls, nodes, parameters : int
        What is added to the trace's own number.
    """

    operations: np.ndarray
    storages: np.ndarray
    modules: int
    calls: int
    nodes: int
    parameters: int


@dataclass
class _Tables:
    """The tables of the traces that were added so far."""

    operations: dict[Operation, int]
    modules: list[tuple[str, str]]
    calls: list[str]
    nodes: list[str]
    parameters: list[Parameter]
    persistent: list[Storage]
    storage_kinds: dict[int, StorageKind]
    storages: int = 0

    def add(self, trace: Trace, same: tuple[Trace, Renumbering] | None) -> Renumbering:
        """Add the tables of a trace.

        same: a trace of the same stage that was added before; it has the same persistent storages.
        """
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
        renumbered = Renumbering(
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
        return renumbered


def join(traces: Sequence[Trace], same_as: Sequence[int]) -> tuple[Trace, tuple[Renumbering, ...]]:
    """Join traces: events, segments and tables of the first, then of the second, and so on.

    Parameters
    ----------
    traces : sequence of Trace
    same_as : sequence of int
        For each, the index of the first trace of the same stage: they share parameters and all else that exists before
        the first step.

    Returns
    -------
    tuple of Trace and of Renumbering
        The joined trace, and the renumbering of each. A single trace keeps its numbers.
    """
    tables = _Tables({}, [], [], [], [], [], {})
    renumberings: list[Renumbering] = []
    for number, (trace, same) in enumerate(zip(traces, same_as, strict=True)):
        renumberings.append(tables.add(trace, None if same == number else (traces[same], renumberings[same])))
    joined = replace(
        traces[0],
        operations=tuple(tables.operations),
        modules=tuple(tables.modules),
        calls=tuple(tables.calls),
        nodes=tuple(tables.nodes),
        parameters=tuple(tables.parameters),
        persistent=tuple(tables.persistent),
        first=_events([trace.first for trace in traces], renumberings),
        steady=_events([trace.steady for trace in traces], renumberings),
        storage_kinds=tables.storage_kinds,
    )
    return joined, tuple(renumberings)


def _events(steps: Sequence[StepEvents], renumberings: Sequence[Renumbering]) -> StepEvents:
    columns = [_renumbered(events, by) for events, by in zip(steps, renumberings, strict=True)]
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
        np.concatenate([by.storages[events.touches] for events, by in zip(steps, renumberings, strict=True)]),
        np.concatenate([events.touch_bytes for events in steps]),
    )


def _renumbered(events: StepEvents, by: Renumbering) -> tuple[np.ndarray, np.ndarray]:
    kind, a, b = events.kind, events.a.copy(), events.b.copy()
    for kinds, numbers in ((OPERATION_EVENTS, by.operations), (STORAGE_EVENTS, by.storages)):
        points = np.isin(kind, kinds)
        a[points] = numbers[a[points]]
    a[np.isin(kind, MODULE_EVENTS)] += by.modules
    a[np.isin(kind, CALL_EVENTS)] += by.calls
    a[kind == EventKind.NODE] += by.nodes
    a[kind == EventKind.GRAD_READY] += by.parameters
    b[(kind == EventKind.OP) & (b >= 0)] += by.nodes
    return a, b
