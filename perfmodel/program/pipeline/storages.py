"""Storages that a rank of a pipeline holds for its micro-batches: inputs of all, and those that each makes for itself.

Not modelled: a gradient that is sent stays until torch has waited for the send, and an output, under GPipe and 1F1B,
until the next forward has ended. Each is what one micro-batch has between two stages.
"""

from __future__ import annotations

from dataclasses import replace

from perfmodel.trace.trace import EventKind, Storage, StorageKind, Trace, gradient_storages

TRACED = 2  # micro-batches


def with_all_inputs(trace: Trace, micro_batches: int) -> Trace:
    """Return a stage's trace with the inputs of so many micro-batches.

    Tokens, or labels, lie in one storage; every micro-batch has a buffer of its own to receive into.
    """
    assert trace.boundary is not None
    tables = [each for each in (trace.boundary.takes, trace.boundary.takes_gradient) if each is not None]
    received = {storage for each in tables for storage in each.steady}
    others = [storage for storage in trace.persistent if storage.id not in received]
    scaled = [
        replace(each, bytes=each.bytes * micro_batches // TRACED) if each.kind == StorageKind.INPUT else each
        for each in others
    ]
    next_storage = 1 + max([-1, *(each.id for each in trace.persistent), *trace.storage_kinds])
    buffers: list[Storage] = []
    for each in tables:
        ids = [*each.steady[:micro_batches], *range(next_storage, next_storage + micro_batches - TRACED)]
        next_storage += max(micro_batches - TRACED, 0)
        buffers += [Storage(number, each.tensor.bytes, StorageKind.INPUT) for number in ids]
    return replace(trace, persistent=(*scaled, *buffers))


def in_flight(trace: Trace) -> frozenset[int]:
    """Return the storages that every micro-batch makes for itself: all but gradients, which accumulate."""
    own: set[int] = set()
    for events in (trace.first, trace.steady):
        for segment in events.segments:
            within = slice(segment.start, segment.stop)
            allocates = events.kind[within] == EventKind.ALLOC
            own |= set(events.a[within][allocates].tolist()) if segment.micro_batch >= 0 else set()
        own -= set(gradient_storages(trace, events).values())
    return frozenset(own)
