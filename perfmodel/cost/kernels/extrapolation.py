"""How far a call lies outside what a curve was fitted on, and how much less sure the curve is of it there."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

MARGIN_OCTAVES = 1.0  # a factor of two beyond the shapes of a fit still counts as among them
OCTAVE_SPREAD = 0.1  # relative standard deviation for each octave beyond that


def octaves_beyond(values: ArrayLike, least: float, most: float) -> NDArray[np.float64]:
    """Factors of two between each positive value and the range; 0 inside.

    >>> octaves_beyond([1.0, 4.0, 64.0], 2.0, 16.0).tolist()
    [1.0, 0.0, 2.0]
    """
    place = np.log2(np.asarray(values, dtype=np.float64))
    return np.maximum(np.maximum(math.log2(least) - place, place - math.log2(most)), 0.0)


def extrapolated_spread(spread: float, octaves: float) -> float:
    """A curve's spread for a call so many octaves outside: sqrt(spread^2 + (0.1 octaves)^2)."""
    return math.hypot(spread, OCTAVE_SPREAD * octaves)
