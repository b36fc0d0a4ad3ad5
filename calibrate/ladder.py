"""The general collectives of a group: which kinds, and in which sizes."""

from __future__ import annotations

from collections.abc import Iterator

from perfmodel.hardware.interconnect import COLLECTIVES
from perfmodel.units import GIB, KIB, MIB

NAMED = "all_reduce"  # the kind whose ladder is the finest
MOST_BYTES = {"cuda": GIB, "cpu": 64 * MIB}


def ladder(most_bytes: int) -> list[int]:
    """Sizes from 1 KiB up by factors of two, and between them where protocols switch.

    >>> ladder(4096)
    [1024, 2048, 4096]
    """
    sizes = []
    size_bytes = KIB
    while size_bytes <= most_bytes:
        sizes.append(size_bytes)
        if MIB // 4 <= size_bytes < 64 * MIB:
            sizes.append(size_bytes * 3 // 2)
        size_bytes *= 2
    return sizes


def grid(ranks: int, most_bytes: int) -> Iterator[tuple[str, int]]:
    """Kinds and sizes that a group is measured with: sizes that divide among the ranks; messages between two.

    Small sizes of all kinds come first, so that what there is no time for is the largest ones.
    """
    for size_bytes in ladder(most_bytes):
        for kind in COLLECTIVES:
            is_whole = kind in ("all_reduce", "broadcast", "send_recv")
            is_power = size_bytes & (size_bytes - 1) == 0
            if kind == "send_recv" and ranks != 2:
                continue
            if (is_whole or size_bytes % (4 * ranks) == 0) and (is_power or kind == NAMED):
                yield kind, size_bytes
