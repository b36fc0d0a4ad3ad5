"""Fitting the cost curves to the measured grid: in relative error, with standard errors and leave-one-out errors.

A form's parameters minimise the robust sum of squared log errors plus a pull towards starting values (so that few
points still give sane numbers). The device's memory is the same for all kernels: its bandwidths are fitted on the
pointwise kernels, which do little else, and the other curves start from there and are held close. What a form leaves
over is interpolated between the points (:mod:`perfmodel.cost.kernels.kriging`).

The errors reported are those of predicting each point from the others, in ten folds: each fold's parameters are fitted
and its leftovers interpolated without its own points.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from calibrate.fit.corrections import fit_correction, to_parameters
from perfmodel.cost.kernels.features import FORMS, features_of
from perfmodel.cost.kernels.forms import Array, Calls, Form, form_time_s, parameter_key
from perfmodel.cost.kernels.kriging import Correction, no_correction, places_of
from perfmodel.hardware.profile import CurveRecord, Device, KernelRecord
from perfmodel.trace.operation import Operation

FEWEST_POINTS = 4
FOLDS = 10
BEGINNINGS = 4
FIRST_STEPS, LAST_STEPS, FOLD_STEPS = 14, 12, 5  # of the search: from each beginning, from the best, in folds
TARGET_ERROR = 0.03  # log error that weighs as much as one prior deviation; beyond it errors count linearly
MEMORY_CURVE = "pointwise"  # the curve that knows the memory best, and its best-behaved label
MEMORY_LABEL = "vectorised"
ANCHORED = ("memory_bytes_per_s", "cache_bytes_per_s", "cache_bytes", "ramp_s")
ANCHORED_PRIOR = 0.1
ARITHMETIC_FORMS = ("gemm", "convolution", "attention")  # what they move is small and uncertain; not anchored

Anchors = Mapping[str, float]
Positions = NDArray[np.intp]


def fit_curves(
    kernels: Mapping[str, KernelRecord],
    operations: Mapping[str, Operation],
    device: Device,
    known: Mapping[str, CurveRecord] | None = None,
    changed: Iterable[str] = (),
) -> dict[str, CurveRecord]:
    """Fit one curve to each group of calls that has enough points, and keep the range of what it was fitted on.

    Parameters
    ----------
    kernels
        Measured records by kernel key; those without a time are passed over, and so are a scenario's own
        (a curve must not know the workload it is to predict).
    operations
        The calls behind the keys. ``tf32`` after the call in a key says that TF32 was allowed.
    device
        The device measured.
    known
        Curves fitted before. One stays as it is where its points are as many and none was measured again.
    changed
        Keys that were measured since then.
    """
    points = _points(kernels, operations, device)
    known, again = known or {}, set(changed)
    curves: dict[str, CurveRecord] = {}
    anchors: Anchors = {}
    for name in sorted(points, key=lambda name: (name != MEMORY_CURVE, name)):
        keys, form, calls, time_s = points[name]
        if len(calls) < FEWEST_POINTS:
            continue
        before, own_anchors = known.get(name), {} if form.name in ARITHMETIC_FORMS else anchors
        if before is not None and before.points == len(calls) and again.isdisjoint(keys):
            curves[name] = before.model_copy(update={"ranges": fitted_ranges(form, calls)})
        else:
            curves[name] = fit_curve(form, calls, time_s, own_anchors)
            again |= set(operations) if name == MEMORY_CURVE else set()  # all others are held to it
        if name == MEMORY_CURVE:
            anchors = _anchors(curves[name])
    return dict(sorted(curves.items()))


def fitted_ranges(form: Form, calls: Calls) -> dict[str, tuple[float, float]]:
    """Return least and most of each coordinate of the form among the calls."""
    columns = {name: calls.numbers[name] for name in form.coordinates}
    return {name: (float(column.min()), float(column.max())) for name, column in columns.items()}


def _points(
    kernels: Mapping[str, KernelRecord], operations: Mapping[str, Operation], device: Device
) -> dict[str, tuple[list[str], Form, Calls, Array]]:
    keys: dict[str, list[str]] = {}
    rows: dict[str, list[tuple[dict[str, float], dict[str, str]]]] = {}
    times: dict[str, list[float]] = {}
    forms: dict[str, Form] = {}
    for key, operation in operations.items():
        record = kernels.get(key)
        if record is None or record.time_s is None or record.origin != "grid":
            continue
        features = features_of(operation, device, " tf32" in key.rpartition(")")[2])
        if features is not None:
            forms[features.curve] = FORMS[features.form]
            rows.setdefault(features.curve, []).append((features.numbers, features.labels))
            times.setdefault(features.curve, []).append(record.time_s)
            keys.setdefault(features.curve, []).append(key)
    return {name: (keys[name], forms[name], Calls.of(rows[name]), np.array(times[name])) for name in rows}


def _anchors(memory: CurveRecord | None) -> Anchors:
    """Return what is known of the device's memory from the curve that knows it best."""
    if memory is None:
        return {}
    found = memory.parameters
    return {name: found.get(parameter_key(name, MEMORY_LABEL), found[name]) for name in ANCHORED if name in found}


def fit_curve(form: Form, calls: Calls, time_s: Array, anchors: Anchors | None = None) -> CurveRecord:
    """Fit one form to measured calls; anchors: parameters whose values are known already. See the module."""
    problem = _Problem.of(form, calls, time_s, anchors or {})
    logs, jacobian, cost = problem.solve()
    parameters = problem.parameters(logs)
    correction, _ = _leftover_correction(form, calls, time_s, parameters)
    deviations = problem.deviations(jacobian, cost)
    return CurveRecord(
        form=form.name,
        parameters=parameters | to_parameters(correction, form),
        standard_errors={
            key: parameters[key] * float(deviation) for key, deviation in zip(problem.keys, deviations, strict=True)
        },
        points=len(calls),
        ranges=fitted_ranges(form, calls),
        leave_one_out=_statistics(held_out_errors(problem, logs)),
    )


@dataclass(frozen=True)
class _Problem:
    """A least-squares problem in the logarithms of a form's parameters.

    Parameters
    ----------
    keys : list of str
        Names of the parameters.
    starts, priors : array
        What each logarithm is pulled to, and how weakly.
    general : list of int
        Position of the general value that a label's logarithm is a deviation from, or -1.
    """

    form: Form
    calls: Calls
    time_s: Array
    keys: list[str]
    starts: Array
    priors: Array
    general: list[int]

    @classmethod
    def of(cls, form: Form, calls: Calls, time_s: Array, anchors: Anchors) -> _Problem:
        starts = form.starts(calls.numbers, time_s) | dict(anchors)
        keys: list[str] = []
        values: list[float] = []
        priors: list[float] = []
        general: list[int] = []
        for parameter in form.parameters:
            place = len(keys)
            keys.append(parameter.name)
            values.append(float(np.log(starts[parameter.name])))
            priors.append(ANCHORED_PRIOR if parameter.name in anchors else parameter.prior)
            general.append(-1)
            for label in sorted(set(calls.labels[parameter.labelled])) if parameter.labelled else ():
                keys.append(parameter_key(parameter.name, label))
                values.append(0.0)
                priors.append(parameter.label_prior)
                general.append(place)
        return cls(form, calls, time_s, keys, np.array(values), np.array(priors), general)

    def of_points(self, chosen: Positions) -> _Problem:
        """Return the same problem with some of the points."""
        return _Problem(
            self.form, self.calls.take(chosen), self.time_s[chosen], self.keys, self.starts, self.priors, self.general
        )

    def parameters(self, logs: Array) -> dict[str, float]:
        return {
            key: float(np.exp(logs[i] + (logs[place] if place >= 0 else 0.0)))
            for i, (key, place) in enumerate(zip(self.keys, self.general, strict=True))
        }

    def residuals(self, logs: Array) -> Array:
        """Return residuals of the points, bounded as by a soft L1 loss, then those of the pulls."""
        predicted = form_time_s(self.form, self.parameters(logs), self.calls)
        errors = np.log(predicted / self.time_s) / TARGET_ERROR
        bounded = np.sign(errors) * np.sqrt(2 * (np.sqrt(1 + errors**2) - 1))
        return np.concatenate([bounded, (logs - self.starts) / self.priors])

    def solve(self, start: Array | None = None) -> tuple[Array, Array, float]:
        """Best logarithms, Jacobian and cost there; from several beginnings unless a start is given."""
        from scipy.optimize import least_squares

        steps = FOLD_STEPS
        if start is None:
            tried = [least_squares(self.residuals, begin, max_nfev=FIRST_STEPS) for begin in self._beginnings()]
            start, steps = min(tried, key=lambda result: float(result.cost)).x, LAST_STEPS
        result = least_squares(self.residuals, start, max_nfev=steps)
        return result.x, result.jac, float(result.cost)

    def _beginnings(self) -> list[Array]:
        """Return the starting values, and some way off in random directions: waves of tiles have local minima."""
        draw = np.random.default_rng(0)
        return [self.starts, *(self.starts + draw.normal(0, self.priors / 2) for _ in range(BEGINNINGS - 1))]

    def deviations(self, jacobian: Array, cost: float) -> Array:
        """Return the standard error of each parameter's logarithm, sqrt(A C A^T)_ii.

        C = s^2 (J^T J)^-1 is the covariance of the logarithms that were fitted; J has full rank, since every parameter
        is pulled to its start. A adds a label's deviation to the general logarithm.
        """
        from scipy.linalg import cholesky, solve_triangular

        freedom = max(len(self.time_s) - len(self.keys), 1)
        absolute = np.eye(len(self.keys))
        for i, place in enumerate(self.general):
            if place >= 0:
                absolute[i, place] = 1.0
        factor = cholesky(jacobian.T @ jacobian, lower=True)
        variances = np.square(solve_triangular(factor, absolute.T, lower=True)).sum(axis=0)
        return np.asarray(np.sqrt(variances * max(2 * cost / freedom, 1e-12)))


def _leftover_correction(
    form: Form, calls: Calls, time_s: Array, parameters: Mapping[str, float]
) -> tuple[Correction, Array]:
    """Return the interpolation of what the form leaves over, and its leave-one-out errors."""
    leftovers = np.log(time_s / form_time_s(form, parameters, calls))
    if not form.coordinates:
        return no_correction(), leftovers
    return fit_correction(*places_of(form, calls), leftovers)


def held_out_errors(problem: _Problem, logs: Array) -> Array:
    """Return log(predicted / measured) of each point, predicted from the folds it is not in."""
    form, points = problem.form, len(problem.calls)
    folds = min(FOLDS, points)
    errors = np.zeros(points)
    for fold in range(folds):
        held = np.arange(points) % folds == fold
        known, rest = problem.of_points(np.flatnonzero(~held)), problem.of_points(np.flatnonzero(held))
        parameters = problem.parameters(known.solve(logs)[0])
        predicted = np.log(form_time_s(form, parameters, rest.calls))
        correction, _ = _leftover_correction(form, known.calls, known.time_s, parameters)
        if form.coordinates:
            predicted = predicted + correction.log_factor(*places_of(form, rest.calls))
        errors[held] = predicted - np.log(rest.time_s)
    return errors


def _statistics(errors: Array) -> dict[str, float]:
    """Return relative errors: median and 90 % quantile of their size, the worst, and the mean with its sign (bias)."""
    relative = np.expm1(errors)
    sizes = np.abs(relative)
    return {
        "median": round(float(np.median(sizes)), 5),
        "p90": round(float(np.quantile(sizes, 0.9)), 5),
        "worst": round(float(np.max(sizes)), 5),
        "bias": round(float(np.mean(relative)), 5),
    }
