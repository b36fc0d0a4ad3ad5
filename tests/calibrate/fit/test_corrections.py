"""Leftovers of a form, interpolated between calls."""

import numpy as np
import pytest

from calibrate.fit.corrections import NOISES, fit_correction, to_parameters
from perfmodel.cost.kernels.features import FORMS
from perfmodel.cost.kernels.kriging import from_parameters, kernel, no_correction

FORM = FORMS["rows"]
PLACES = np.array([[float(rows), float(length)] for rows in range(6, 14) for length in range(6, 12)])
LABELS = [["4"]] * len(PLACES)
BUMP = 0.2 * np.sin(PLACES[:, 0] / 2) * np.cos(PLACES[:, 1] / 3)


def test_a_smooth_leftover_is_interpolated():
    correction, errors = fit_correction(PLACES, LABELS, BUMP)
    assert np.max(np.abs(errors)) < 0.05
    between = np.array([[9.5, 8.5]])
    truth = 0.2 * np.sin(9.5 / 2) * np.cos(8.5 / 3)
    assert correction.log_factor(between, [["4"]])[0] == pytest.approx(truth, abs=0.01)


def test_far_away_nothing_is_corrected():
    correction, _ = fit_correction(PLACES, LABELS, BUMP)
    assert abs(correction.log_factor(np.array([[80.0, 80.0]]), [["4"]])[0]) < 1e-6


def test_another_label_is_told_less():
    correction, _ = fit_correction(PLACES, LABELS, BUMP)
    here = np.array([[8.0, 8.0]])
    same, other = (correction.log_factor(here, [[label]])[0] for label in ("4", "2"))
    assert other == pytest.approx(correction.sharing * same)


def test_noise_is_not_interpolated():
    noise = np.random.default_rng(1).normal(0, 0.1, len(PLACES))
    _, errors = fit_correction(PLACES, LABELS, noise)
    assert np.mean(np.abs(errors)) <= np.mean(np.abs(noise)) * (1 + 1e-9)


def test_parameters_round_trip():
    correction, _ = fit_correction(PLACES, LABELS, BUMP)
    again = from_parameters(to_parameters(correction, FORM), FORM)
    here = PLACES[:5] + 0.3
    assert again.log_factor(here, LABELS[:5]) == pytest.approx(correction.log_factor(here, LABELS[:5]), abs=1e-3)
    assert from_parameters({}, FORM).log_factor(here, LABELS[:5]).tolist() == [0.0] * 5
    assert to_parameters(no_correction(2), FORM) == {}


def test_leave_one_out_errors_are_those_of_solving_without_the_call():
    """The constants that were chosen, the noise among them, without a call and solved anew."""
    rng = np.random.default_rng(3)
    leftovers = BUMP + rng.normal(0, 0.01, len(BUMP))
    correction, errors = fit_correction(PLACES, LABELS, leftovers)
    covariance = kernel(PLACES, PLACES, LABELS, LABELS, correction.length, correction.sharing)
    (noise,) = (n for n in NOISES if np.allclose((covariance + n * np.eye(48)) @ correction.weights, leftovers))
    for i in (0, 17, 47):
        rest = np.arange(len(PLACES)) != i
        weights = np.linalg.solve(covariance[np.ix_(rest, rest)] + noise * np.eye(47), leftovers[rest])
        assert leftovers[i] - covariance[i, rest] @ weights == pytest.approx(errors[i], rel=1e-9)
