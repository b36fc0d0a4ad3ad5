"""What one operator call costs on the device, and how we know."""

from __future__ import annotations

from typing import Literal, NamedTuple

CurveSource = Literal["curve", "extrapolated", "estimated"]
Source = Literal["exact", "roofline", "none"] | CurveSource


class ScaledTime(NamedTuple):
    """A time that was scaled to another datasheet.

    Attributes
    ----------
    before_s : float
        The time as measured.
    following_s : float
        Those of its seconds that follow the datasheet.
    log_ratio : float
        Logarithm of how many times as long the roofline takes by the new datasheet.
    """

    before_s: float
    following_s: float
    log_ratio: float


class Scaling(NamedTuple):
    """The scaling of a cost's two times: of a call that is repeated, and of one that finds an empty cache."""

    warm: ScaledTime
    cold: ScaledTime


class KernelCost(NamedTuple):
    """Seconds of one call on the device, the work behind them, and where they come from.

    Attributes
    ----------
    time_s : float
        Seconds that it adds to a busy stream when it is repeated alone.
    spread : float
        Relative standard deviation of that time, and of its logarithm where it is not small.
    source : str
        ``exact`` key, fitted ``curve``, ``extrapolated`` from a curve, ``estimated`` because no operator of its kind
        was measured, ``roofline``, or ``none`` (nothing runs on the device).
    kind : str
        Cost class: ``gemm``, ``pointwise``, ...
    flops, bytes : float
        The work that it must do at least.
    arithmetic : str
        Unit that does the FLOPs: fp32, tf32, bf16 or fp16.
    kernels : int
        Device launches.
    cold_time_s : float
        Seconds when it finds nothing in the cache.
    scaling : Scaling or None
        How both times were scaled to another datasheet (:mod:`perfmodel.cost.kernels.scaling`); None if they were not.
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
