"""What a form leaves over, interpolated between the measured calls (kriging, Gaussian-process regression).

The correction of log time is sum_i w_i k(x, x_i) over the fitted calls; far from all of them it fades to none.
x: base-2 logarithms of a form's coordinates; k(x, y) = (1 + r) exp(-r), r = sqrt(3) |x - y| / length (Matern 3/2),
times ``sharing`` for each label in which the two differ.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from perfmodel.cost.kernels.forms import Array, Calls, Form

LENGTHS = (0.7, 1.5, 3.0, 6.0)  # octaves over which leftovers stay alike
SHARINGS = (0.3, 0.8)  # how much calls of another label tell
NOISES = (0.003, 0.03, 0.3)  # variance of what cannot be interpolated, over that of what can
_KEY = re.compile(r"point (\d+) (.+)")


@dataclass(frozen=True)
class Correction:
    """Places (calls x coordinates) and labels of the fitted calls, their weights, and the kernel's constants."""

    places: Array
    labels: list[list[str]]
    weights: Array
    length: float
    sharing: float

    def log_factor(self, places: Array, labels: list[list[str]]) -> Array:
        """The correction of log time of other calls."""
        if len(self.weights) == 0:
            return np.zeros(len(places))
        return np.asarray(kernel(places, self.places, labels, self.labels, self.length, self.sharing) @ self.weights)


def places_of(form: Form, calls: Calls) -> tuple[Array, list[list[str]]]:
    """Where calls lie: logarithms of the form's coordinates, and the labels of each call."""
    columns = [np.log2(np.maximum(calls.numbers[name], 1.0)) for name in form.coordinates]
    places = np.stack(columns, axis=1) if columns else np.zeros((len(calls), 0))
    return places, [[calls.labels[name][i] for name in form.places] for i in range(len(calls))]


def kernel(
    x: Array, y: Array, x_labels: list[list[str]], y_labels: list[list[str]], length: float, sharing: float
) -> Array:
    """Covariance of the leftovers at x and y, 1 at equal places and labels."""
    distance = np.sqrt(3 * ((x[:, None, :] - y[None, :, :]) ** 2).sum(axis=2)) / length
    differing = np.zeros(distance.shape)
    for position in range(len(x_labels[0]) if x_labels else 0):
        ours = np.array([labels[position] for labels in x_labels])
        theirs = np.array([labels[position] for labels in y_labels])
        differing += ours[:, None] != theirs[None, :]
    return np.asarray((1 + distance) * np.exp(-distance) * sharing**differing)


def fit_correction(places: Array, labels: list[list[str]], leftovers: Array) -> tuple[Correction, Array]:
    """The correction with the constants that predict each call best from the others, and those predictions' log errors.

    Leave-one-out errors in closed form: e_i = (K^-1 y)_i / (K^-1)_ii.
    """
    best: tuple[float, Correction, Array] | None = None
    for length in LENGTHS:
        for sharing in SHARINGS:
            covariance = kernel(places, places, labels, labels, length, sharing)
            for noise in NOISES:
                inverse = np.linalg.inv(covariance + noise * np.eye(len(places)))
                weights = inverse @ leftovers
                errors = weights / np.diag(inverse)
                score = float(np.mean(np.abs(errors)))
                if best is None or score < best[0]:
                    best = score, Correction(places, labels, weights, length, sharing), errors
    assert best is not None
    if best[0] >= float(np.mean(np.abs(leftovers))):
        return no_correction(places.shape[1]), leftovers
    return best[1], best[2]


def no_correction(coordinates: int = 0) -> Correction:
    """One that changes nothing."""
    return Correction(np.zeros((0, coordinates)), [], np.zeros(0), 1.0, 1.0)


def to_parameters(correction: Correction, form: Form) -> dict[str, float]:
    """As flat parameters of a profile: ``point 3 m``, and ``point 3 weight [TN, mm]`` with the labels."""
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


def from_parameters(parameters: Mapping[str, float], form: Form) -> Correction:
    """The inverse of :func:`to_parameters`."""
    points: dict[int, dict[str, float]] = {}
    labels: dict[int, list[str]] = {}
    for key, value in parameters.items():
        match = _KEY.fullmatch(key)
        if match is None:
            continue
        index, name = int(match[1]), match[2]
        if name.startswith("weight ["):
            labels[index] = name[len("weight [") : -1].split(", ") if form.places else []
            name = "weight"
        points.setdefault(index, {})[name] = value
    if not points:
        return no_correction(len(form.coordinates))
    order = sorted(points)
    places = np.array([[points[i][name] for name in form.coordinates] for i in order])
    weights = np.array([points[i]["weight"] for i in order])
    return Correction(
        places, [labels[i] for i in order], weights, parameters["correction length"], parameters["correction sharing"]
    )
