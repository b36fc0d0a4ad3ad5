"""What one operator call costs on the device, and how we know."""

from __future__ import annotations

from typing import Literal, NamedTuple

CurveSource = Literal["curve", "extrapolated", "estimated"]
Source = Literal["exact", "roofline", "none"] | CurveSource


class ScaledTime(NamedTuple):
    """A time that was scaled to another datasheet. before_s: it as measured. following_s: those of its seconds that
    follow the datasheet. log_ratio: how many times as long the roofline takes by the new datasheet, the logarithm.
    """

    before_s: float
    following_s: float
    log_ratio: float


class Scaling(NamedTuple):
    """How the two times of a cost were scaled: the one of a call that is repeated, and the one with an empty cache."""

    warm: ScaledTime
    cold: ScaledTime


class KernelCost(NamedTuple):
    """time_s: seconds it adds to a busy stream when it is repeated alone. spread: relative standard deviation of that,
    and of its logarithm where it is not small. source: exact key, fitted curve, a curve outside the shapes that it was
    fitted on (extrapolated), estimated because no operator of its kind was measured, roofline, or none (nothing runs on
    the device). kind: cost class (``gemm``,
    ``pointwise``, ...). flops and bytes: the work it must do at least. arithmetic: fp32, tf32, bf16 or fp16, the unit
    that does the FLOPs. kernels: device launches. cold_time_s: seconds when it finds nothing in the cache. scaling: how
    both times were scaled to another datasheet (:mod:`perfmodel.cost.kernels.scaling`); None where they were not.
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
    scaling: Scaling | None = None
