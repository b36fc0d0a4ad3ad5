"""What the memory walk writes down: requests in order, and what is held after each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from perfmodel.simulate.memory.requests import Actions
from perfmodel.trace.trace import StorageKind


class MemoryColumns(NamedTuple):
    """A history of allocations and frees, with one entry for each.

    Attributes
    ----------
    event : numpy.ndarray
        Index into the step's instructions; -1 while the model is built.
    request_bytes : numpy.ndarray
        What was asked for; 0 for a free.
    address : numpy.ndarray
        Of the block.
    kind : numpy.ndarray
        :class:`StorageKind` of what it holds.
    stream : numpy.ndarray
        Current stream of an allocation, to whose pool the block belongs; without meaning for a free.
    allocated_bytes, reserved_bytes : numpy.ndarray
        What the allocator holds after it.
    """

    event: np.ndarray
    request_bytes: np.ndarray
    address: np.ndarray
    kind: np.ndarray
    stream: np.ndarray
    allocated_bytes: np.ndarray
    reserved_bytes: np.ndarray


class MemoryLog:
    """Columns while they grow; the request that fails leaves no entry."""

    def __init__(self) -> None:
        self.address: list[int] = []
        self.allocated_bytes: list[int] = []
        self.reserved_bytes: list[int] = []
        self._parts: list[tuple[int, Actions, int]] = []

    def note(self, actions: Actions, start: int) -> None:
        done = len(self.address) - sum(count for _, _, count in self._parts)
        self._parts.append((start, actions, done))

    def columns(self) -> MemoryColumns:
        def joined(name: str) -> np.ndarray:
            parts = [np.array(getattr(actions, name)[:count], dtype=np.int64) for _, actions, count in self._parts]
            return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)

        starts = np.repeat([start for start, _, _ in self._parts], [count for _, _, count in self._parts])
        starts = starts.astype(np.int64)
        return MemoryColumns(
            np.maximum(joined("event") + starts, np.minimum(starts, 0)),  # before a step's first event: that event
            joined("request_bytes"),
            np.array(self.address, dtype=np.int64),
            joined("kind"),
            joined("stream"),
            np.array(self.allocated_bytes, dtype=np.int64),
            np.array(self.reserved_bytes, dtype=np.int64),
        )


def held_after(history: Sequence[tuple[str, MemoryColumns]]) -> tuple[np.ndarray, int]:
    """Allocated bytes by kind, and reserved bytes, after these parts."""
    held = np.zeros(len(StorageKind), dtype=np.int64)
    reserved_bytes = 0
    for _, columns in history:
        block_bytes = np.diff(columns.allocated_bytes, prepend=held.sum())
        np.add.at(held, columns.kind, block_bytes)
        if len(columns.reserved_bytes):
            reserved_bytes = int(columns.reserved_bytes[-1])
    return held, reserved_bytes
