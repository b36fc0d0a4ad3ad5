"""What a rank of a pipeline holds of its micro-batches: inputs of all of them, and what each has for itself.

Not modelled: a gradient that is sent stays until torch has waited for the send, and an output, under GPipe and 1F1B,
until the next forward has ended. Each is what one micro-batch has between two stages.
"""

from __future__ import annotations

from dataclasses import replace

from perfmodel.trace.trace import EventKind, Storage, StorageKind, Trace, gradient_storages

TRACED = 2  # micro-batches


def with_all_inputs(trace: Trace, micro_batches: int) -> Trace:
    """A part's trace with the inputs of so many micro-batches: tokens, or labels, in one storage, and buffers to
    receive into, one for each.
    """
    assert trace.boundary is not None
    tables = [each for each in (trace.boundary.takes, trace.boundary.takes_gradient) if each is not None]
    received = {storage for each in tables for storage in each.steady}
    own = [each for each in trace.persistent if each.id not in received]
    scaled = [
        replace(each, bytes=each.bytes * micro_batches // TRACED) if each.kind == StorageKind.INPUT else each
        for each in own
    ]
    next_storage = 1 + max([-1, *(each.id for each in trace.persistent), *trace.storage_kinds])
    buffers: list[Storage] = []
    for each in tables:
        ids = [*each.steady[:micro_batches], *range(next_storage, next_storage + micro_batches - TRACED)]
        next_storage += max(micro_batches - TRACED, 0)
        buffers += [Storage(number, each.tensor.bytes, StorageKind.INPUT) for number in ids]
    return replace(trace, persistent=(*scaled, *buffers))


def in_flight(trace: Trace) -> frozenset[int]:
    """What micro-batches make for themselves: all but the gradients, to which they add."""
    found: set[int] = set()
    for events in (trace.first, trace.steady):
        for segment in events.segments:
            part = slice(segment.start, segment.stop)
            made = events.kind[part] == EventKind.ALLOC
            found |= set(events.a[part][made].tolist()) if segment.micro_batch >= 0 else set()
        found -= set(gradient_storages(trace, events).values())
    return frozenset(found)
