"""Fitting the cost curves to the measured grid: in relative error, with standard errors and leave-one-out errors.

A form's parameters minimise the robust sum of squared log errors plus a weak pull towards starting values read off the
data (so that few points still give sane numbers). What the form leaves over is then interpolated between the points
(:mod:`perfmodel.cost.kernels.kriging`). The errors reported are those of predicting each point from the others: in ten
folds, each fold's parameters refitted and its leftovers interpolated without its own points.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from perfmodel.cost.kernels.features import FORMS, features_of
from perfmodel.cost.kernels.forms import Array, Calls, Form, form_time_s, parameter_key
from perfmodel.cost.kernels.kriging import fit_correction, no_correction, places_of, to_parameters
from perfmodel.hardware.profile import CurveRecord, Device, KernelRecord
from perfmodel.workload.ops import Operation

FEWEST_POINTS = 4
FOLDS = 10
BEGINNINGS = 4
FIRST_STEPS, LAST_STEPS = 25, 15  # evaluations of the least-squares search: from each beginning, and from the best of them
TARGET_ERROR = 0.03  # log error that weighs as much as one prior deviation; beyond it errors count linearly
SHARED_PRIOR = ("memory_bytes_per_s", "cache_bytes_per_s", "cache_bytes")


def fit_curves(
    kernels: Mapping[str, KernelRecord], operations: Mapping[str, Operation], device: Device
) -> dict[str, CurveRecord]:
    """One curve for each group of calls that has enough points.

    Parameters
    ----------
    kernels
        Measured records by kernel key; those without a time are passed over, and so are a scenario's own
        (a curve must not know the workload it is to predict).
    operations
        The calls behind the keys (those of :func:`calibrate.grid.grid_operations`). A key that ends in ``tf32`` was
        measured with TF32 allowed.
    device
        The device measured.
    """
    rows: dict[str, list[tuple[dict[str, float], dict[str, str], float]]] = {}
    forms: dict[str, str] = {}
    for key, operation in operations.items():
        record = kernels.get(key)
        if record is None or record.time_s is None or record.origin != "grid":
            continue
        features = features_of(operation, device, key.endswith(" tf32"))
        if features is not None:
            forms[features.curve] = features.form
            rows.setdefault(features.curve, []).append((features.numbers, features.labels, record.time_s))
    return {
        curve: fit_curve(
            FORMS[forms[curve]], Calls.of([point[:2] for point in points]), np.array([point[2] for point in points])
        )
        for curve, points in sorted(rows.items())
        if len(points) >= FEWEST_POINTS
    }


def fit_curve(form: Form, calls: Calls, time_s: Array) -> CurveRecord:
    """Fit one form to measured calls. See the module."""
    trend = _fit_trend(form, calls, time_s)
    leftovers = np.log(time_s) - np.log(form_time_s(form, trend.parameters, calls))
    correction, _ = (
        fit_correction(*places_of(form, calls), leftovers) if form.coordinates else (no_correction(), leftovers)
    )
    errors = _held_out_errors(form, calls, time_s, trend)
    return CurveRecord(
        form=form.name,
        parameters=trend.parameters | to_parameters(correction, form),
        standard_errors=trend.standard_errors,
        points=len(calls),
        leave_one_out=_statistics(errors),
    )


@dataclass(frozen=True)
class _Trend:
    parameters: dict[str, float]
    standard_errors: dict[str, float]
    logs: Array


@dataclass(frozen=True)
class _Layout:
    """Where each parameter's logarithm stands in the fitted vector, and what it is pulled to."""

    keys: list[str]
    starts: Array
    priors: Array
    general: list[int]  # index of the general value a label's deviation is added to, or -1


def _layout(form: Form, calls: Calls, time_s: Array) -> _Layout:
    starts = form.starts(calls.numbers, time_s)
    keys: list[str] = []
    values: list[float] = []
    priors: list[float] = []
    general: list[int] = []
    for parameter in form.parameters:
        place = len(keys)
        keys.append(parameter.name)
        values.append(float(np.log(starts[parameter.name])))
        priors.append(parameter.prior)
        general.append(-1)
        if parameter.labelled is not None:
            for label in sorted(set(calls.labels[parameter.labelled])):
                keys.append(parameter_key(parameter.name, label))
                values.append(0.0)
                priors.append(parameter.label_prior)
                general.append(place)
    return _Layout(keys, np.array(values), np.array(priors), general)


def _beginnings(layout: _Layout) -> list[Array]:
    """Where to begin: the starting values, and some way off in random directions, since waves of tiles have local minima."""
    draw = np.random.default_rng(0)
    return [layout.starts, *(layout.starts + draw.normal(0, layout.priors / 2) for _ in range(BEGINNINGS - 1))]


def _parameters(layout: _Layout, logs: Array) -> dict[str, float]:
    return {
        key: float(np.exp(logs[i] + (logs[place] if place >= 0 else 0.0)))
        for i, (key, place) in enumerate(zip(layout.keys, layout.general, strict=True))
    }


def _fit_trend(
    form: Form, calls: Calls, time_s: Array, start: Array | None = None, layout: _Layout | None = None
) -> _Trend:
    from scipy.optimize import least_squares

    layout = _layout(form, calls, time_s) if layout is None else layout
    measured = np.log(time_s)

    def residuals(logs: Array) -> Array:
        predicted = np.log(form_time_s(form, _parameters(layout, logs), calls))
        errors = (predicted - measured) / TARGET_ERROR
        bounded = np.sign(errors) * np.sqrt(2 * (np.sqrt(1 + errors**2) - 1))  # soft L1 of the data, not of the priors
        return np.concatenate([bounded, (logs - layout.starts) / layout.priors])

    if start is None:
        results = [least_squares(residuals, begin, method="trf", max_nfev=FIRST_STEPS) for begin in _beginnings(layout)]
        start = min(results, key=lambda result: float(result.cost)).x
    result = least_squares(residuals, start, method="trf", max_nfev=LAST_STEPS)
    freedom = max(len(time_s) - len(layout.keys), 1)
    scale = max(2 * result.cost / freedom, 1e-12)
    covariance = np.linalg.pinv(result.jac.T @ result.jac) * scale
    absolute = np.eye(len(layout.keys))  # a label's logarithm is the general one plus its deviation
    for i, place in enumerate(layout.general):
        if place >= 0:
            absolute[i, place] = 1.0
    deviations = np.sqrt(np.diag(absolute @ covariance @ absolute.T))
    parameters = _parameters(layout, result.x)
    errors = {key: float(parameters[key] * deviations[i]) for i, key in enumerate(layout.keys)}
    return _Trend(parameters, errors, result.x)


def _held_out_errors(form: Form, calls: Calls, time_s: Array, trend: _Trend) -> Array:
    """log(predicted / measured) of each point, predicted from the folds it is not in."""
    points = len(calls)
    folds = min(FOLDS, points)
    layout = _layout(form, calls, time_s)
    errors = np.zeros(points)
    for fold in range(folds):
        held = np.arange(points) % folds == fold
        known, rest = calls.take(np.flatnonzero(~held)), calls.take(np.flatnonzero(held))
        refitted = _fit_trend(form, known, time_s[~held], trend.logs, layout)
        predicted = np.log(form_time_s(form, refitted.parameters, rest))
        if form.coordinates:
            leftovers = np.log(time_s[~held]) - np.log(form_time_s(form, refitted.parameters, known))
            correction, _ = fit_correction(*places_of(form, known), leftovers)
            predicted = predicted + correction.log_factor(*places_of(form, rest))
        errors[held] = predicted - np.log(time_s[held])
    return errors


def _statistics(errors: Array) -> dict[str, float]:
    """Relative errors: median and 90 % quantile of their size, the worst, and the mean with its sign (bias)."""
    relative = np.expm1(errors)
    sizes = np.abs(relative)
    return {
        "median": round(float(np.median(sizes)), 5),
        "p90": round(float(np.quantile(sizes, 0.9)), 5),
        "worst": round(float(np.max(sizes)), 5),
        "bias": round(float(np.mean(relative)), 5),
    }
