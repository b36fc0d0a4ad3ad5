"""How much a kernel of another stream and the operators beside it slow each other: both draw on the device's memory.

    factor = max(1, b_i + b_j)        b = min(1, bytes / time / bandwidth): share that each draws alone

bandwidth: what copies reach, :data:`~perfmodel.cost.kernels.roofline.MEMORY_EFFICIENCY` of the peak. So a large copy
beside operators that wait for memory takes as long as if all ran one after another, and one beside a GEMM
costs next to nothing. Copies between host and device take no multiprocessors and little of the bandwidth: they are left
out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from perfmodel.cost.contention import Slowdown
from perfmodel.cost.kernels.kernel_cost import KernelCost
from perfmodel.cost.kernels.roofline import MEMORY_EFFICIENCY
from perfmodel.cost.transfers import pinned_copy
from perfmodel.hardware.profile import Device
from perfmodel.trace.operation import Operation


def memory_sharing(
    operations: Sequence[Operation],
    costs: list[KernelCost],
    operation: np.ndarray,
    duration_s: np.ndarray,
    beside: Iterable[int],
    device: Device,
    tail_s: np.ndarray | None = None,
) -> dict[int, Slowdown]:
    """Return the slowdown of each operation that runs on a side stream, with a column for each launch.

    It is empty where the peak bandwidth is not known.

    Parameters
    ----------
    operations, costs
        Distinct ones of the program.
    operation, duration_s
        By launch, its distinct operation and its seconds alone.
    beside
        Distinct operations of other streams.
    device
        Whose memory it is.
    tail_s
        See :class:`~perfmodel.cost.contention.Slowdown`; if left out, no launch makes another stream's wait.

    Notes
    -----
    Assumes: bytes are those that an operator must move at least; what the cache saves is not told apart. Operators that
    last no time or move nothing neither slow nor are slowed. Kernels wait for the tail of what runs as collectives do.
    """
    if device.peak_memory_bytes_per_s is None:
        return {}
    bandwidth = MEMORY_EFFICIENCY * device.peak_memory_bytes_per_s
    moved = np.array([cost.bytes for cost in costs])[operation]
    rate = np.divide(moved, duration_s, out=np.zeros(len(moved)), where=duration_s > 0)
    drawn = np.minimum(rate / bandwidth, 1.0)
    tails_s = np.full(len(moved), np.inf) if tail_s is None else tail_s
    found = {}
    for number in beside:
        cost = costs[number]
        if cost.time_s <= 0 or cost.bytes <= 0 or pinned_copy(operations[number]) is not None:
            continue
        factor = np.maximum(drawn + min(cost.bytes / cost.time_s / bandwidth, 1.0), 1.0)
        found[number] = Slowdown(factor, factor, tails_s)
    return found
