"""How sure: the 90 % interval of a step time, by quadrature of independent relative errors.

    sigma^2 = (1 + b)^2 (keys^2 + classes^2 + scaled^2 + clock^2) + host^2 + wire^2
    keys^2 = sum over keys (n t s)^2      classes^2 = sum over classes (T_class sigma_class)^2      scaled = sum n t g

The half width is 1.645 sigma. Times that are extrapolated or estimated are known to a factor f = exp(1.645 s) at best,
and stand in neither sum: below the step the half width holds (n t (1 - 1 / f))^2 more, above it (n t (f - 1))^2.

n t: a key's total, s: its spread (repeats if exact, leave-one-out error if from a curve), T_class: all time of a class.
The second term is what kernels of a class do in a step that they do not do alone (warmth of caches, clocks), shared by
the whole class. g: what scaling a key's time to another datasheet leaves open, a share of the logarithm of how much
its roofline changes (:data:`~perfmodel.cost.kernels.scaling.SCALED_SPREAD`); all keys err alike, so these add up as
they are. b: of a rank of a pipeline, its bubbles over its busy time. What it waits for there are, where devices
decide, kernels of other ranks, on the step's critical path as its own are.

Assumes: other ranks' kernels are of the same keys and classes, in the same proportions, so that their errors are the
same and add up; bubbles are then as wrong, relatively, as busy time. Where hosts decide, a rank waits for other ranks'
hosts; those bubbles count in b and their error in host^2 as well, so that the interval is too wide. Where the error h
is over half of the step t, a normal one would take the low end to zero: t - h is continued by t^2 / 4h, which is as
steep at that point and stays above. Not yet calibrated against held-out measurements, and reports say so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import groupby

from perfmodel.cost.kernels.estimates import factor_of_spread
from perfmodel.cost.kernels.scaling import scaling_spread
from perfmodel.prediction.prediction import KernelUse

NORMAL_90 = 1.645  # two-sided 90 % of a normal distribution

# Relative standard deviation of a class in a step against alone; prior, see the module.
IN_SITU = {"gemm": 0.01, "attention": 0.01, "convolution": 0.02, "optimizer": 0.01}
IN_SITU_OTHER = 0.02
ROUGH = ("extrapolated", "estimated")  # sources of which a factor is known at best


def step_interval_s(
    step_time_s: float,
    kernels: Iterable[KernelUse],
    host_s: float,
    wire_s: float = 0.0,
    clock_s: float = 0.0,
    bubbles: float = 0.0,
) -> tuple[float, float]:
    """Return the 5th and the 95th percentile of the step.

    Parameters
    ----------
    step_time_s : float
        The prediction.
    kernels : iterable of KernelUse
        Kernels of the step, each with its spread.
    host_s : float
        By how much the step grows when the host is slower by one standard deviation of its speed.
    wire_s : float
        Likewise when collectives take longer.
    clock_s : float
        Likewise when kernels do, at a clock that the power limit has lowered.
    bubbles : float
        Seconds of waiting for other ranks' kernels for each second of the rank's own.
    """
    kernels = list(kernels)
    rough = [(use.total_s, factor_of_spread(use.cost.spread)) for use in kernels if use.cost.source in ROUGH]
    uses = sorted((use for use in kernels if use.cost.source not in ROUGH), key=lambda use: _family(use.cost.kind))
    keys = sum((use.total_s * use.cost.spread) ** 2 for use in uses)
    classes = 0.0
    for family, members in groupby(uses, key=lambda use: _family(use.cost.kind)):
        classes += (sum(use.total_s for use in members) * IN_SITU.get(family, IN_SITU_OTHER)) ** 2
    scaled_s = sum(use.total_s * scaling_spread(use.cost, use.mean_s) for use in kernels)
    on_path = (1 + bubbles) ** 2 * (keys + classes + scaled_s**2 + clock_s**2)
    half_s = NORMAL_90 * math.sqrt(on_path + host_s**2 + wire_s**2)
    below_s = (1 + bubbles) * math.hypot(*(total_s * (1 - 1 / factor) for total_s, factor in rough))
    above_s = (1 + bubbles) * math.hypot(*(total_s * (factor - 1) for total_s, factor in rough))
    return _low_s(step_time_s, math.hypot(half_s, below_s)), step_time_s + math.hypot(half_s, above_s)


def _low_s(step_time_s: float, half_s: float) -> float:
    """Return the low end of the interval, which is above zero however large the error is."""
    return step_time_s - half_s if 2 * half_s <= step_time_s else step_time_s**2 / (4 * half_s)


def _family(kind: str) -> str:
    return kind.split("_", maxsplit=1)[0]
