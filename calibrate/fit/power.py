"""Kinds of work of :mod:`perfmodel.cost.power` from readings of loops: what each draws, how it follows the clock.

    phi    least squares of t / t_full - 1 = phi (full clock / clock - 1) over a kind's loops
    P      of a kind alone: P_0 + (draw - P_0) / (1 - phi + phi r^3) at the clock ratio r it kept
    P      of GEMMs:   that with which the model, which knows clocks from draws only, gives the loops' times best

A loop's clock and draw are of moments; times are not. t_full: of a kind that alone keeps the full clock, what it takes
there, hot; else as kernel keys are timed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from perfmodel.cost.power import PRODUCT, Load, clock_ratio, draw_share, lengthening
from perfmodel.hardware.power import Power, PowerKind, PowerLoop, PowerReading

FULL = 0.995  # of the full clock: not lowered
MOST_DRAW = 3.0  # times the limit
TRIALS = 150


class _Point(NamedTuple):
    """A kind's time in a loop: the clock's full over its own less one, and times as long as at full clock."""

    kind: str
    slower: float
    longer: float


def fit_power(
    readings: Mapping[str, PowerReading], idle_w: float, limit_w: float, full_clock_hz: float
) -> tuple[dict[str, PowerKind], float]:
    """Return the kinds of work, and the root mean square by which times of loops differ from the fit, relative.

    Without readings of :data:`~perfmodel.cost.power.PRODUCT` alone there is nothing to fit to: no kinds.
    """
    if PRODUCT not in readings or not _alone(readings[PRODUCT]):
        return {}, 0.0
    full_s = full_times_s(readings, full_clock_hz)
    shares = _clock_shares(readings, full_s, full_clock_hz)
    kinds: dict[str, PowerKind] = {}
    for name, reading in readings.items():
        alone = _alone(reading)
        if alone is not None and alone.draw_w is not None:
            ratio = min(alone.clock_hz / full_clock_hz, 1.0)
            draw_w = idle_w + max(alone.draw_w - idle_w, 1.0) / draw_share(shares[name], ratio)
            kinds[name] = PowerKind(
                draw_w=draw_w,
                clock_share=shares[name],
                flops_per_s=None if reading.flops is None else reading.flops / full_s[name],
                arithmetic=reading.arithmetic,
            )
    if PRODUCT not in kinds:
        return {}, 0.0

    def with_draw(draw_w: float) -> dict[str, PowerKind]:
        return kinds | {PRODUCT: kinds[PRODUCT].model_copy(update={"draw_w": draw_w})}

    trials = np.geomspace(min(kinds[PRODUCT].draw_w, limit_w), MOST_DRAW * limit_w, TRIALS).tolist()
    best = min(trials, key=lambda draw_w: loop_error(readings, with_draw(draw_w), full_s, idle_w, limit_w))
    return with_draw(best), loop_error(readings, with_draw(best), full_s, idle_w, limit_w)


def fitted(power: Power) -> Power:
    """Return the same readings with kinds fitted to them; as it is where limit or full clock are not known."""
    if power.limit_w is None or power.full_clock_hz is None:
        return power
    kinds, spread = fit_power(power.readings, power.idle_w, power.limit_w, power.full_clock_hz)
    return power.model_copy(update={"kinds": kinds, "spread": spread})


def loop_error(
    readings: Mapping[str, PowerReading],
    kinds: Mapping[str, PowerKind],
    full_s: Mapping[str, float],
    idle_w: float,
    limit_w: float,
) -> float:
    """Root mean square of log(time as modelled / as read) over the loops of these readings."""
    errors = [
        math.log(modelled / read)
        for name, reading in readings.items()
        if name in kinds
        for loop in reading.loops
        for modelled, read in _times_s(name, loop, kinds, full_s, idle_w, limit_w)
    ]
    return math.sqrt(sum(error**2 for error in errors) / max(len(errors), 1))


def _times_s(
    name: str,
    loop: PowerLoop,
    kinds: Mapping[str, PowerKind],
    full_s: Mapping[str, float],
    idle_w: float,
    limit_w: float,
) -> Iterator[tuple[float, float]]:
    """Yield the seconds as modelled and as read, of the kind and of the GEMMs in its loop."""
    counts = [(name, loop.calls), *([(PRODUCT, loop.products)] if loop.products else [])]
    loads = [
        Load(count * full_s[each], count * full_s[each] * (kinds[each].draw_w - idle_w), kinds[each].clock_share)
        for each, count in counts
    ]
    ratio = clock_ratio(loads, idle_w, limit_w)
    for (each, _), read_s in zip(counts, (loop.time_s, loop.product_s), strict=False):
        if read_s is not None:
            yield full_s[each] * lengthening(kinds[each].clock_share, ratio), read_s


def _alone(reading: PowerReading) -> PowerLoop | None:
    return next((loop for loop in reading.loops if loop.products == 0), None)


def full_times_s(readings: Mapping[str, PowerReading], full_clock_hz: float) -> dict[str, float]:
    """Return, by kind, what a call takes at the full clock: see the module."""
    return {name: _full_s(name, reading, full_clock_hz) for name, reading in readings.items()}


def _full_s(name: str, reading: PowerReading, full_clock_hz: float) -> float:
    alone = _alone(reading)
    keeps = alone is not None and alone.clock_hz >= FULL * full_clock_hz
    return alone.time_s if keeps and alone is not None and name != PRODUCT else reading.alone_s


def _clock_shares(
    readings: Mapping[str, PowerReading], full_s: Mapping[str, float], full_clock_hz: float
) -> dict[str, float]:
    """Return shares by kind; 0 for one that was never seen at a lowered clock."""
    points = list(_points(readings, full_s, full_clock_hz))
    found = {}
    for name in readings:
        own = [point for point in points if point.kind == name and point.slower > 0]
        weight = sum(point.slower**2 for point in own)
        slope = sum(point.slower * point.longer for point in own) / weight if weight else 0.0
        found[name] = min(max(slope, 0.0), 1.0)
    return found


def _points(
    readings: Mapping[str, PowerReading], full_s: Mapping[str, float], full_clock_hz: float
) -> Iterator[_Point]:
    for name, reading in readings.items():
        for loop in reading.loops:
            slower = full_clock_hz / loop.clock_hz - 1
            yield _Point(name, slower, loop.time_s / full_s[name] - 1)
            if loop.product_s is not None:
                yield _Point(PRODUCT, slower, loop.product_s / full_s[PRODUCT] - 1)
