"""The section of a profile on power: what work draws, and what the power limit does to the device's clock."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from perfmodel.files.sections import Section
from perfmodel.hardware.quantities import Count, Flops, PerSecond, PositiveCount, Seconds, Share, Spread, Watts


class PowerLoop(Section):
    """One kind of work repeated without pause, or in turns with GEMMs that make the device hot.

    Attributes
    ----------
    products, calls : int
        GEMMs and calls of one round.
    time_s : float
        Seconds of a call.
    product_s : float or None
        Seconds of a GEMM.
    clock_hz, draw_w : float
        Clock and power once they have settled.
    """

    products: Count = 0
    calls: PositiveCount = 1
    time_s: Seconds
    product_s: Seconds | None = None
    clock_hz: PerSecond
    draw_w: Watts | None = None


class PowerReading(Section):
    """Readings of one kind of work.

    Attributes
    ----------
    alone_s : float
        Seconds of a call as kernel keys are timed.
    flops : float or None
        FLOPs of a call, for kinds that compute.
    arithmetic : str or None
        The arithmetic of these FLOPs.
    loops : tuple of PowerLoop
        The measured loops.
    """

    alone_s: Seconds
    flops: Flops | None = None
    arithmetic: str | None = None
    loops: tuple[PowerLoop, ...]


class PowerKind(Section):
    """A kind of work as :mod:`perfmodel.cost.power` takes it.

    Attributes
    ----------
    draw_w : float
        Power at full clock, hot.
    clock_share : float
        Share of its time that follows the clock.
    flops_per_s : float or None
        FLOP/s at which it draws that, for kinds that compute.
    arithmetic : str or None
        The arithmetic of these FLOPs.
    """

    draw_w: Watts
    clock_share: Share
    flops_per_s: PerSecond | None = None
    arithmetic: str | None = None


class Power(Section):
    """The power that work draws, and the device's clock at its power limit; empty if unread.

    Attributes
    ----------
    idle_w : float
        Power between kernels.
    limit_w, full_clock_hz : float or None
        Power limit and full clock when this was measured.
    kinds : dict of str to PowerKind
        By kind of work (:func:`perfmodel.cost.power.power_kind`), fitted to the readings.
    spread : float
        Relative root mean square of the times of the loops against the fit.
    readings : dict of str to PowerReading
        What the kinds were fitted to.
    draw_w, clock_hz : dict of str to float
        Sustained values by kind of work, in profiles without readings.
    """

    draw_w: dict[str, Watts] = {}
    clock_hz: dict[str, PerSecond] = {}
    idle_w: Watts = 0.0
    limit_w: Annotated[Watts, Field(gt=0)] | None = None
    full_clock_hz: PerSecond | None = None
    kinds: dict[str, PowerKind] = {}
    spread: Spread = 0.0
    readings: dict[str, PowerReading] = {}
