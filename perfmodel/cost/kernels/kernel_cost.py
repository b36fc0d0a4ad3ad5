"""What one operator call costs on the device, and how we know."""

from __future__ import annotations

from typing import Literal, NamedTuple

CurveSource = Literal["curve", "extrapolated", "estimated"]
Source = Literal["exact", "roofline", "none"] | CurveSource


class KernelCost(NamedTuple):
    """time_s: seconds it adds to a busy stream when it is repeated alone. spread: relative standard deviation of that,
    and of its logarithm where it is not small. source: exact key, fitted curve, a curve outside the shapes that it was
    fitted on (extrapolated), estimated because no operator of its kind was measured, roofline, or none (nothing runs on
    the device). kind: cost class (``gemm``,
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
