"""Fitting what a form leaves over, for :mod:`perfmodel.cost.kernels.kriging` to interpolate."""

from __future__ import annotations

import numpy as np

from perfmodel.cost.kernels.forms import Array, Form
from perfmodel.cost.kernels.kriging import Correction, kernel, no_correction

LENGTHS = (0.7, 1.5, 3.0, 6.0)  # octaves over which leftovers stay similar
SHARINGS = (0.3, 0.8)  # how much calls of another label tell
NOISES = (0.003, 0.03, 0.3)  # variance of what cannot be interpolated, over that of what can


def fit_correction(places: Array, labels: list[list[str]], leftovers: Array) -> tuple[Correction, Array]:
    """Fit the correction whose constants predict each call best from the others.

    Leave-one-out errors in closed form: e_i = (K^-1 y)_i / (K^-1)_ii, with K = L L^T and so
    (K^-1)_ii = sum_j (L^-1)_ji^2.

    Parameters
    ----------
    places : array, calls x coordinates
        Where the calls lie, see :func:`~perfmodel.cost.kernels.kriging.places_of`.
    labels : list of list of str
        Labels of each call.
    leftovers : array
        log(measured / form) of each call.

    Returns
    -------
    Correction
        One that changes nothing where interpolating predicts no better than the form alone.
    array
        Log error of predicting each call from the others.
    """
    from scipy.linalg import cho_solve, cholesky, solve_triangular

    best: tuple[float, Correction, Array] | None = None
    identity = np.eye(len(places))
    for length in LENGTHS:
        for sharing in SHARINGS:
            covariance = kernel(places, places, labels, labels, length, sharing)
            for noise in NOISES:
                factor = cholesky(covariance + noise * identity, lower=True)
                weights = cho_solve((factor, True), leftovers)
                precisions = np.square(solve_triangular(factor, identity, lower=True)).sum(axis=0)
                errors = weights / precisions
                score = float(np.mean(np.abs(errors)))
                if best is None or score < best[0]:
                    best = score, Correction(places, labels, weights, length, sharing), errors
    assert best is not None
    if best[0] >= float(np.mean(np.abs(leftovers))):
        return no_correction(places.shape[1]), leftovers
    return best[1], best[2]


def to_parameters(correction: Correction, form: Form) -> dict[str, float]:
    """Spell a correction as flat parameters of a profile: ``point 3 m``, and ``point 3 weight [TN, mm]`` with labels.

    :func:`perfmodel.cost.kernels.kriging.from_parameters` is the inverse.
    """
    if len(correction.weights) == 0:
        return {}
    found = {"correction length": correction.length, "correction sharing": correction.sharing}
    for i, (place, labels, weight) in enumerate(
        zip(correction.places, correction.labels, correction.weights, strict=True)
    ):
        found |= {
            f"point {i} {name}": round(float(value), 4) for name, value in zip(form.coordinates, place, strict=True)
        }
        found[f"point {i} weight [{', '.join(labels)}]"] = float(f"{weight:.5g}")
    return found
