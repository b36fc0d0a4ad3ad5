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
    """Return where calls lie: logarithms of the form's coordinates, and the labels of each call."""
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


def no_correction(coordinates: int = 0) -> Correction:
    """One that changes nothing."""
    return Correction(np.zeros((0, coordinates)), [], np.zeros(0), 1.0, 1.0)


def from_parameters(parameters: Mapping[str, float], form: Form) -> Correction:
    """Read a correction from flat parameters, ``point 3 m`` and, with the labels, ``point 3 weight [TN, mm]``."""
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
