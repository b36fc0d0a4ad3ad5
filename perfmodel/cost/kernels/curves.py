"""Prediction of one call's time from a profile's fitted curves; numpy only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from perfmodel.cost.kernels.estimates import Estimate, estimate_of
from perfmodel.cost.kernels.extrapolation import MARGIN_OCTAVES, extrapolated_spread, octaves_beyond
from perfmodel.cost.kernels.features import FORMS, Features, features_of
from perfmodel.cost.kernels.forms import Array, Calls, form_time_s
from perfmodel.cost.kernels.kernel_cost import CurveSource
from perfmodel.cost.kernels.kriging import Correction, from_parameters, places_of
from perfmodel.hardware.profile import CurveRecord, Device
from perfmodel.trace.operation import Operation

NORMAL_P90 = 1.645  # 90 % of a normal distribution lie within so many standard deviations
LEAST_SPREAD = 0.01
# Where a class has no curve of its own: that of kernels of the same template, whose numbers it has too.
STAND_INS = {"full_reduction": "column"}


class CurveTime(NamedTuple):
    """A time by a fitted curve.

    Attributes
    ----------
    time_s : float
        Seconds of one call.
    spread : float
        Relative standard deviation; of the logarithm where it is not small.
    source : str
        ``curve`` where the call lies among the shapes of the fit, ``extrapolated`` outside of them, ``estimated`` where
        its kind was not measured.
    """

    time_s: float
    spread: float
    source: CurveSource


def predict_times_s(
    operations: Sequence[Operation], device: Device, curves: Mapping[str, CurveRecord], tf32: bool
) -> list[CurveTime | None]:
    """Return the seconds of each call by the fitted curves, None where no curve covers it.

    Notes
    -----
    Calls of one curve are evaluated together. The spread is the 90 % quantile of the curve's leave-one-out errors, as
    the deviation of a normal distribution. For each octave by which the call lies outside the shapes of the fit, less
    one, its square grows by that of 0.1; of a kind that was not measured it is at least that of
    :mod:`perfmodel.cost.kernels.estimates`.
    """
    grouped: dict[str, list[tuple[int, Features]]] = {}
    for i, operation in enumerate(operations):
        features = features_of(operation, device, tf32)
        if features is None:
            continue
        curve = features.curve if features.curve in curves else STAND_INS.get(features.curve, "")
        if curve in curves:
            grouped.setdefault(curve, []).append((i, features))
    found: list[CurveTime | None] = [None] * len(operations)
    for curve, members in grouped.items():
        record = curves[curve]
        calls = Calls.of([(features.numbers, features.labels) for _, features in members])
        times = curve_time_s(record, calls)
        outside = octaves_outside(record, calls)
        for (i, features), time, octaves in zip(members, times, outside, strict=True):
            estimate = estimate_of(operations[i], features, record, device, is_stand_in=features.curve != curve)
            found[i] = _curve_time(record, float(time), float(octaves), estimate)
    return found


def _curve_time(record: CurveRecord, time_s: float, octaves: float, estimate: Estimate | None) -> CurveTime:
    spread = extrapolated_spread(curve_spread(record), octaves)
    if estimate is not None:
        return CurveTime(estimate.time_s(time_s), max(spread, estimate.spread), "estimated")
    return CurveTime(time_s, spread, "extrapolated" if octaves > 0 else "curve")


def octaves_outside(record: CurveRecord, calls: Calls) -> Array:
    """Return by how many factors of two each call lies outside the shapes of the fit.

    All coordinates count together, less the margin that still counts as inside; 0 where the curve's range is not known.
    """
    outside = [
        octaves_beyond(np.maximum(calls.numbers[name], 1.0), max(least, 1.0), max(most, 1.0))
        for name, (least, most) in record.ranges.items()
    ]
    return np.maximum(np.sqrt(sum((each**2 for each in outside), np.zeros(len(calls)))) - MARGIN_OCTAVES, 0.0)


def curve_time_s(record: CurveRecord, calls: Calls, correction: Correction | None = None) -> Array:
    """Seconds of calls of one curve: its form times the correction of what the form left over."""
    form = FORMS[record.form]
    time = form_time_s(form, record.parameters, calls)
    if not form.coordinates:
        return time
    if correction is None:
        correction = from_parameters(record.parameters, form)
    return np.asarray(time * np.exp(correction.log_factor(*places_of(form, calls))))


def curve_spread(record: CurveRecord) -> float:
    """Relative standard deviation of a prediction by this curve."""
    return max(record.leave_one_out.get("p90", 0.0) / NORMAL_P90, LEAST_SPREAD)
