"""How much a kernel of another stream and the operators beside it slow each other: both draw on the device's memory.

    factor = max(1, b_i + b_j)        b: share of the memory's bandwidth that each draws alone

What strategies put on other streams are copies, which draw all of it (b_j = 1) and so show how much that is; an
operator draws what it moves in its time, at most all:

    b_i = min(1, (bytes_i / t_i) / (bytes_j / t_j))

So a copy beside operators that wait for memory takes as long as if all ran one after another, and one beside a matrix
product costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from perfmodel.cost.contention import Slowdown
from perfmodel.cost.kernels.cost import KernelCost


def memory_sharing(
    costs: list[KernelCost],
    operation: np.ndarray,
    duration_s: np.ndarray,
    beside: Iterable[int],
    tail_s: np.ndarray | None = None,
) -> dict[int, Slowdown]:
    """By operation that runs on another stream, with a column a launch.

    Parameters
    ----------
    costs
        By distinct operation.
    operation, duration_s
        By launch, its distinct operation and its seconds alone.
    beside
        Distinct operations of other streams.
    tail_s
        See :class:`~perfmodel.cost.contention.Slowdown`; if left out, no launch makes a copy wait.

    Notes
    -----
    Assumes: bytes are those that an operator must move at least; what the cache saves is not told apart. Operators that
    last no time or move nothing neither slow nor are slowed.
    """
    moved = np.array([cost.bytes for cost in costs])[operation]
    rate = np.divide(moved, duration_s, out=np.zeros(len(moved)), where=duration_s > 0)
    tails_s = np.full(len(moved), np.inf) if tail_s is None else tail_s
    found = {}
    for number in beside:
        cost = costs[number]
        if cost.time_s <= 0 or cost.bytes <= 0:
            continue
        drawn = np.minimum(rate / (cost.bytes / cost.time_s), 1.0)
        found[number] = Slowdown(1 + drawn, 1 + drawn, tails_s)
    return found
