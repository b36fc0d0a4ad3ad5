"""The rules that must hold between the tables and the events of a trace, checked once when it is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from perfmodel.trace.trace import EventKind, StepEvents, Trace

MOST_BYTES = 2**60
_PAIRS = ((EventKind.MODULE_ENTER, EventKind.MODULE_EXIT), (EventKind.CALL_ENTER, EventKind.CALL_EXIT))


def broken_rule(trace: Trace) -> str | None:
    """Return the first rule that the trace breaks, as a sentence goes on after 'must'; None where it is whole.

    Names are text; columns are equally long; segments cover the events in order; an event points into its table; a
    storage that is used exists, and is allocated and freed in turn; modules and calls that are left were entered.
    """
    return next(_broken(trace), None)


def _broken(trace: Trace) -> Iterator[str]:
    if not isinstance(trace.workload, dict) or not _are_texts(trace.provenance.values()):
        yield "hold a workload, and versions as text"
    if not _are_texts([*trace.calls, *trace.nodes, *(name for pair in trace.modules for name in pair)]):
        yield "name its modules, calls and nodes by text"
    known = np.array(sorted({*trace.storage_kinds, *(storage.id for storage in trace.persistent)}), dtype=np.int64)
    if any(not 0 <= storage.bytes <= MOST_BYTES for storage in trace.persistent):
        yield f"hold storages of 0 to {MOST_BYTES} bytes"
    if not _all_in([parameter.storage for parameter in trace.parameters], known):
        yield "hold the storage of each parameter"
    for tensor in trace.boundary or ():
        if tensor is not None and not _all_in([*tensor.first, *tensor.steady], known):
            yield "hold the storages of its boundary"
    for step, events in (("first", trace.first), ("steady", trace.steady)):
        for rule in _broken_by(events, trace, known):
            yield f"{rule} in the {step} step"


def _broken_by(events: StepEvents, trace: Trace, known: np.ndarray) -> Iterator[str]:
    count = len(events.kind)
    columns = (events.kind, events.a, events.b, events.touches, events.touch_bytes)
    if any(column.ndim != 1 for column in columns) or not len(events.a) == len(events.b) == count:
        yield "have equally long columns"
        return
    if len(events.touch_offsets) != count + 1 or (np.diff(events.touch_offsets) < 0).any():
        yield "count what each event touches"
        return
    if not len(events.touches) == len(events.touch_bytes) == events.touch_offsets[-1]:
        yield "touch as much as is counted"
    if [0, *(segment.stop for segment in events.segments)] != [*(each.start for each in events.segments), count]:
        yield "have segments that cover the events in order"
    if not _all_in(events.touches, known) or (np.abs(events.touch_bytes) > MOST_BYTES).any():
        yield "touch storages that it holds"
    for kind, size in _table_sizes(trace).items():
        chosen = events.a[events.kind == kind]
        if ((chosen < 0) | (chosen >= size)).any():
            yield f"point into its table with each {kind.name}"
    at_node = events.b[events.kind == EventKind.OP]
    if ((at_node < -1) | (at_node >= len(trace.nodes))).any():
        yield "point into its nodes with each OP"
    yield from _broken_by_storages(events, known)
    for enter, leave in _PAIRS:
        inside = np.cumsum((events.kind == enter).astype(int) - (events.kind == leave))
        if count and (inside.min() < 0 or inside[-1] != 0):
            yield f"have an {enter.name} for each {leave.name}"


def _broken_by_storages(events: StepEvents, known: np.ndarray) -> Iterator[str]:
    at = np.flatnonzero((events.kind == EventKind.ALLOC) | (events.kind == EventKind.FREE))
    if not np.isin(events.kind, list(EventKind)).all() or not _all_in(events.a[at], known):
        yield "have events of known kinds, of storages that it holds"
    sizes = events.b[at]
    if ((sizes < 0) | (sizes > MOST_BYTES)).any():
        yield f"allocate 0 to {MOST_BYTES} bytes"
    order = at[np.argsort(events.a[at], kind="stable")]
    is_twice = (np.diff(events.a[order]) == 0) & (np.diff(events.kind[order]) == 0)
    if is_twice.any():
        yield "allocate and free each storage in turn"


def _table_sizes(trace: Trace) -> dict[EventKind, int]:
    operations, modules, calls = len(trace.operations), len(trace.modules), len(trace.calls)
    return {
        EventKind.OP: operations,
        EventKind.SYNC: operations,
        EventKind.MODULE_ENTER: modules,
        EventKind.MODULE_EXIT: modules,
        EventKind.CALL_ENTER: calls,
        EventKind.CALL_EXIT: calls,
        EventKind.NODE: len(trace.nodes),
        EventKind.GRAD_READY: len(trace.parameters),
        EventKind.BLOCK_ENTER: modules,
        EventKind.BLOCK_EXIT: modules,
    }


def _all_in(ids: Iterable[int] | np.ndarray, known: np.ndarray) -> bool:
    return bool(np.isin(np.asarray(ids, dtype=np.int64), known).all())


def _are_texts(values: Iterable[object]) -> bool:
    return all(isinstance(value, str) for value in values)
