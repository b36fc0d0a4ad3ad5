"""Buckets: the gradients that torch's DistributedDataParallel reduces together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from perfmodel.trace.operation import TensorSpec
from perfmodel.units import MIB

FIRST_BUCKET_BYTES = MIB  # only where no cap is given
DEFAULT_CAP_BYTES = 25 * MIB
UNLIMITED = (2**63, 2**63)  # of the first step, before DDP knows in which order gradients become ready


@dataclass(frozen=True)
class Bucket:
    """Parameters (indices) in the order in which they lie in a buffer, and the buffer's size."""

    parameters: tuple[int, ...]
    dtype: str
    size_bytes: int


def bucket_limits(bucket_cap_mb: float | None) -> tuple[int, int]:
    """Return the bytes at which the first bucket and each later one is closed.

    >>> bucket_limits(None), bucket_limits(25)
    ((1048576, 26214400), (26214400, 26214400))
    """
    if bucket_cap_mb is None:
        return FIRST_BUCKET_BYTES, DEFAULT_CAP_BYTES
    cap_bytes = int(bucket_cap_mb * MIB)
    return cap_bytes, cap_bytes


def assign_buckets(tensors: Sequence[TensorSpec], order: Iterable[int], limits: tuple[int, int]) -> tuple[Bucket, ...]:
    """Return buckets in the order in which they are reduced, once DDP has rebuilt them after the first step.

    Gradients are taken as they become ready; each joins the open bucket of its dtype, which closes as soon as it has
    reached its limit, so that it overshoots and no gradient is split. Each dtype starts with the first limit. What is
    open at the end closes in the order in which it was opened.

    Parameters
    ----------
    tensors : sequence of TensorSpec
        By parameter.
    order : iterable of int
        Parameters as their gradients become ready.
    limits : (int, int)
        Bytes: the first bucket's of a dtype, and every later one's.

    Notes
    -----
    Source: ``compute_bucket_assignment_by_size`` in torch/csrc/distributed/c10d/reducer.cpp. Assumes dense gradients on
    one device.
    """
    open_: dict[str, list[int]] = {}
    sizes: dict[str, int] = {}
    closed: dict[str, int] = {}
    buckets: list[Bucket] = []
    for index in order:
        dtype = tensors[index].dtype
        open_.setdefault(dtype, []).append(index)
        sizes[dtype] = sizes.get(dtype, 0) + tensors[index].bytes
        if sizes[dtype] >= limits[min(closed.get(dtype, 0), 1)]:
            buckets.append(Bucket(tuple(open_.pop(dtype)), dtype, sizes.pop(dtype)))
            closed[dtype] = closed.get(dtype, 0) + 1
    return (*buckets, *(Bucket(tuple(parameters), dtype, sizes[dtype]) for dtype, parameters in open_.items()))
