"""Prediction of one call's time from a profile's fitted curves; numpy only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from perfmodel.cost.kernels.features import FORMS, Features, features_of
from perfmodel.cost.kernels.forms import Array, Calls, form_time_s
from perfmodel.cost.kernels.kriging import Correction, from_parameters, places_of
from perfmodel.hardware.profile import CurveRecord, Device
from perfmodel.workload.ops import Operation

NORMAL_P90 = 1.645  # 90 % of a normal distribution lie within so many standard deviations
LEAST_SPREAD = 0.01


def predict_time_s(
    operation: Operation, device: Device, curves: Mapping[str, CurveRecord], tf32: bool
) -> tuple[float, float] | None:
    """Seconds and relative standard deviation by the fitted curves, or None where no curve covers the call.

    The spread is the 90 % quantile of the curve's leave-one-out errors, as the deviation of a normal distribution.
    """
    return predict_times_s([operation], device, curves, tf32)[0]


def predict_times_s(
    operations: Sequence[Operation], device: Device, curves: Mapping[str, CurveRecord], tf32: bool
) -> list[tuple[float, float] | None]:
    """:func:`predict_time_s` of many calls; calls of one curve are evaluated together."""
    grouped: dict[str, list[tuple[int, Features]]] = {}
    for i, operation in enumerate(operations):
        features = features_of(operation, device, tf32)
        if features is not None and features.curve in curves:
            grouped.setdefault(features.curve, []).append((i, features))
    found: list[tuple[float, float] | None] = [None] * len(operations)
    for curve, members in grouped.items():
        record = curves[curve]
        times = curve_time_s(record, Calls.of([(features.numbers, features.labels) for _, features in members]))
        for (i, _), time in zip(members, times, strict=True):
            found[i] = float(time), curve_spread(record)
    return found


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
