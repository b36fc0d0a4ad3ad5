"""Storages that get other names when segments of a trace are repeated."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from perfmodel.trace.trace import EventKind, Segment, StepEvents


def renamed_on_repeat(events: StepEvents, segments: Iterable[Segment], sizes: dict[int, int]) -> list[tuple[int, int]]:
    """Return what a second run of these segments frees that the first made under another name: (freed, made) pairs.

    A run frees what its predecessor left (gradients, the loss) and leaves its own; equal sizes correspond, in order of
    their numbers, which is the order of allocation.
    """
    within = np.concatenate([np.arange(segment.start, segment.stop) for segment in segments])
    kind, storage = events.kind[within], events.a[within]
    made, freed = storage[kind == EventKind.ALLOC], storage[kind == EventKind.FREE]
    left: dict[int, list[int]] = defaultdict(list)
    for storage in np.setdiff1d(made, freed).tolist():
        left[sizes.get(storage, 0)].append(storage)
    pairs = []
    for inherited in np.setdiff1d(freed, made).tolist():
        candidates = left[sizes.get(inherited, 0)]
        if candidates:
            pairs.append((inherited, candidates.pop(0)))
    return pairs
