"""The general collectives of a group, and messages of a pair: which kinds, and in which sizes."""

from __future__ import annotations

from collections.abc import Iterator

from perfmodel.hardware.interconnect import COLLECTIVES, MESSAGES
from perfmodel.units import GIB, KIB, MIB

NAMED = "all_reduce"  # the kind whose ladder is the finest
MOST_BYTES = {"cuda": GIB, "cpu": 64 * MIB}
MOST_MESSAGE_BYTES = 256 * MIB


def ladder(most_bytes: int) -> list[int]:
    """Return sizes from 1 KiB up by factors of two, and between them where protocols switch.

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
    """Yield kinds and sizes of the collectives that a group is measured with: sizes that divide among the ranks.

    Small sizes of all kinds come first, so that what there is no time for is the largest ones.
    """
    for size_bytes in ladder(most_bytes):
        for kind in COLLECTIVES:
            is_whole = kind in ("all_reduce", "broadcast")
            if kind in MESSAGES:
                continue
            if (is_whole or size_bytes % (4 * ranks) == 0) and (_is_power(size_bytes) or kind == NAMED):
                yield kind, size_bytes


def message_grid(most_bytes: int) -> Iterator[tuple[str, int]]:
    """Yield kinds and sizes of the messages that a pair of ranks is measured with, small sizes first.

    >>> list(message_grid(2048))
    [('send_recv', 1024), ('exchange', 1024), ('send_recv', 2048), ('exchange', 2048)]
    """
    for size_bytes in filter(_is_power, ladder(min(most_bytes, MOST_MESSAGE_BYTES))):
        for kind in MESSAGES:
            yield kind, size_bytes


def _is_power(size_bytes: int) -> bool:
    return size_bytes & (size_bytes - 1) == 0
