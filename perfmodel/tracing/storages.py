"""Device storages of a trace: who was allocated, who is freed when, and what each holds."""

from __future__ import annotations

import math
import weakref
from array import array
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from perfmodel.trace.trace import EventKind, Storage, StorageKind

Emit = Callable[[EventKind, int, int], None]

# Where an operator allocates its outputs in another order than it returns them: indices of what it returns, in order of
# allocation.
ALLOCATION_ORDER: dict[str, tuple[int, ...]] = {
    "native_dropout": (1, 0),
    "_scaled_dot_product_cudnn_attention": (6, 7, 0, 1),
}


class StorageLedger:
    """Numbers storages as they appear and emits ALLOC and FREE.

    A storage's death is seen by a weak reference to its Python object, which lives as long as the storage itself; so
    the garbage collector must be off and nobody may keep tensors. Host storages get no number.
    """

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._ids: dict[int, int] = {}
        self._watchers: dict[int, weakref.ref[Any]] = {}
        self._born_in_forward: set[int] = set()
        self._count = 0
        self.kinds: dict[int, StorageKind] = {}
        self.persistent: list[Storage] = []

    def add_persistent(self, tensor: torch.Tensor, kind: StorageKind) -> int:
        """Number a storage that exists before the first step; a second tensor of the same storage adds nothing."""
        storage = tensor.untyped_storage()
        known = self._ids.get(storage._cdata)
        if known is not None:
            return known
        number = self._number(storage)
        self.persistent.append(Storage(number, storage.nbytes(), kind))
        return number

    def find(self, tensor: torch.Tensor) -> int | None:
        return self._ids.get(tensor.untyped_storage()._cdata)

    def note_output(self, tensor: torch.Tensor, in_forward: bool) -> None:
        """Emit an ALLOC if the tensor's storage is new and holds anything."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._ids:
            return
        size = storage.nbytes()
        if size == 0:
            return
        number = self._number(storage)
        self.kinds[number] = StorageKind.TEMPORARY
        if in_forward:
            self._born_in_forward.add(number)
        self._emit(EventKind.ALLOC, number, size)

    def end_forward(self) -> None:
        """Take what forward made and is still held as saved for backward."""
        for number in self._born_in_forward:
            self.kinds[number] = StorageKind.ACTIVATION
        self._born_in_forward.clear()

    def mark(self, tensor: torch.Tensor, kind: StorageKind) -> None:
        """Say what a storage that the step allocated turned out to hold."""
        number = self.find(tensor)
        if number is not None and number in self.kinds:
            self.kinds[number] = kind

    def _number(self, storage: Any) -> int:
        number, address = self._count, storage._cdata
        self._count += 1
        self._ids[address] = number

        def forget(_: Any) -> None:
            del self._ids[address], self._watchers[address]
            self._born_in_forward.discard(number)
            self._emit(EventKind.FREE, number, 0)

        self._watchers[address] = weakref.ref(storage, forget)
        return number

    def close(self) -> None:
        """Stop watching: nothing that dies after this is an event."""
        self._watchers.clear()
        self._ids.clear()


class Touches:
    """Which storages the operators of a step touch, and how many bytes of each."""

    def __init__(self) -> None:
        self._events, self._counts = array("q"), array("q")
        self._ids, self._bytes = array("q"), array("q")

    def add(self, event: int, touched: dict[int, int]) -> None:
        self._events.append(event)
        self._counts.append(len(touched))
        self._ids.extend(touched)
        self._bytes.extend(touched.values())

    def columns(self, events: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return touch_offsets, touches and touch_bytes of a step of so many events."""
        counts = np.zeros(events, dtype=np.int64)
        counts[np.array(self._events, dtype=np.int64)] = self._counts
        offsets = np.concatenate([[0], np.cumsum(counts)])
        return offsets, np.array(self._ids, dtype=np.int64), np.array(self._bytes, dtype=np.int64)


def touched_bytes(tensors: Iterable[torch.Tensor], find: Callable[[torch.Tensor], int | None]) -> dict[int, int]:
    """Return the bytes that tensors address in each numbered storage, by appearance; views of one storage add up."""
    found: dict[int, int] = {}
    seen: set[tuple[int, int, int]] = set()
    for tensor in tensors:
        number = find(tensor)
        if number is None:
            continue
        size = min(_distinct_elements(tensor) * tensor.element_size(), tensor.untyped_storage().nbytes())
        view = (number, tensor.storage_offset(), size)
        if view not in seen:
            seen.add(view)
            found[number] = min(found.get(number, 0) + size, tensor.untyped_storage().nbytes())
    return found


def _distinct_elements(tensor: torch.Tensor) -> int:
    if not tensor.numel():
        return 0
    return math.prod(n for n, s in zip(tensor.shape, tensor.stride(), strict=True) if s)


def has_one_owner(tensor: torch.Tensor) -> bool:
    """Whether exactly one tensor uses the storage (its own Python object counts as a second user)."""
    storage = tensor.untyped_storage()
    return bool(torch._C._storage_Use_Count(storage._cdata) == 2)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill a contiguous stretch of memory, each once, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(
        (stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True
