"""What one operator call costs on the device, and how we know."""

from __future__ import annotations

from typing import Literal, NamedTuple

Source = Literal["exact", "curve", "roofline", "none"]


class KernelCost(NamedTuple):
    """time_s: seconds it adds to a busy stream when it is repeated alone. spread: relative standard deviation of that.
    source: exact key, fitted curve, roofline, or none (nothing runs on the device). kind: cost class (``gemm``,
    ``pointwise``, ...). flops and bytes: the work it must do at least. arithmetic: fp32, tf32, bf16 or fp16, the unit
    that does the FLOPs. kernels: device launches. cold_time_s: seconds when it finds nothing in the cache. unscaled_s,
    unscaled_cold_s: both times before they were scaled to another datasheet (:mod:`perfmodel.cost.kernels.scaling`);
    None where they were not.
    """

    time_s: float
    spread: float
    source: Source
    kind: str
    flops: float
    bytes: float
    arithmetic: str
    kernels: int
    cold_time_s: float
    unscaled_s: float | None = None
    unscaled_cold_s: float | None = None
