"""What one call asks the caching allocator for: read from the allocator's own history, between marker allocations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

# No operator asks for these two sizes one after the other.
OPENING_BYTES = (10_007, 10_009)
CLOSING_BYTES = (10_009, 10_007)


def scripts(history: Sequence[Mapping[str, Any]]) -> list[tuple[int, ...]]:
    """Return the memory script of every marked call, in order.

    history: entries with ``action``, ``addr`` and ``size`` (bytes asked for), as in ``device_traces`` of torch's memory
    snapshot. A script lists +n for an allocation of n bytes and -k for the end of the script's k-th allocation.

    >>> def alloc(size, addr=0): return {"action": "alloc", "size": size, "addr": addr}
    >>> scripts([alloc(10_007), alloc(10_009), alloc(64, 1), alloc(8, 2), {"action": "free_requested", "addr": 1},
    ...          alloc(10_009), alloc(10_007)])
    [(64, 8, -1)]
    """
    found: list[tuple[int, ...]] = []
    events = [entry for entry in history if entry["action"] in ("alloc", "free_requested")]
    sizes = [entry["size"] if entry["action"] == "alloc" else None for entry in events]
    position = 0
    while (opening := _find(sizes, OPENING_BYTES, position)) is not None:
        closing = _find(sizes, CLOSING_BYTES, opening + 2)
        if closing is None:
            break
        found.append(_script(events[opening + 2 : closing]))
        position = closing + 2
    return found


def _find(sizes: list[int | None], pair: tuple[int, int], start: int) -> int | None:
    for i in range(start, len(sizes) - 1):
        if sizes[i] == pair[0] and sizes[i + 1] == pair[1]:
            return i
    return None


def _script(events: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
    script: list[int] = []
    live: dict[int, int] = {}
    allocations = 0
    for event in events:
        if event["action"] == "alloc":
            allocations += 1
            live[event["addr"]] = allocations
            script.append(int(event["size"]))
        elif event["addr"] in live:
            script.append(-live.pop(event["addr"]))
    return tuple(script)


@contextmanager
def recorded_history() -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """Record the allocator's history inside the block; the function given returns it."""
    device = torch.cuda.current_device()
    torch.cuda.memory._record_memory_history(enabled="all", context=None, stacks="python")
    try:
        yield lambda: torch.cuda.memory._snapshot()["device_traces"][device]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def run_marked(call: Callable[[], object]) -> object:
    """Run ``call`` once between markers; its results live until after the closing one."""
    markers = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in OPENING_BYTES]
    try:
        return call()
    finally:
        markers += [torch.empty(size, dtype=torch.uint8, device="cuda") for size in CLOSING_BYTES]
