"""Piecewise alpha-beta curves: seconds = alpha + beta x bytes on each stretch of sizes that one protocol serves.

The function that is fitted is the function that predicts. Where one stretch ends and the next begins lies somewhere
between two measured sizes; there the time is read off the straight line that joins both in logarithms. The next stretch
is never taken below the end of the one before, so that more bytes are never faster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import log
from typing import NamedTuple

import numpy as np

from perfmodel.hardware.interconnect import CollectiveRecord, CollectiveSegment

LEAST_POINTS = 3  # of a segment
MOST_SEGMENTS = 5
OUTLIER = 3.0  # times the median relative error of its stretch, beyond which a point counts less
LEAST_OUTLIER = 1e-3  # relative error that is never too large
ROUNDS = 3  # of fitting, each with the weights that the errors of the one before suggest
NOISE = 0.005  # relative error that no further segment is spent on
ALIKE = 0.1  # spreads well below this count the same: the repeats of one run vary less than runs do
WIDEST = 0.3  # a larger spread is one stray repeat, which the median does not feel


class Point(NamedTuple):
    """One measured size: its bytes, its seconds, and the relative spread of its repeats."""

    size_bytes: int
    time_s: float
    spread: float = 0.0


class Line(NamedTuple):
    """seconds = alpha_s + beta_s_per_byte x bytes, from least_bytes to most_bytes."""

    least_bytes: int
    most_bytes: int
    alpha_s: float
    beta_s_per_byte: float


Curve = Sequence[Line] | Sequence[CollectiveSegment]


def segment_time_s(curve: Curve, size_bytes: float) -> float:
    """Seconds of a size; the first stretch also serves smaller ones, the last larger ones.

    Raises
    ------
    ValueError
        If there are no stretches.

    Examples
    --------
    >>> curve = [Line(1, 100, 10.0, 0.0), Line(400, 1000, 0.0, 0.1)]
    >>> [round(segment_time_s(curve, size), 6) for size in (1, 100, 200, 400, 2000)]
    [10.0, 10.0, 20.0, 40.0, 200.0]
    """
    if not curve:
        raise ValueError("a curve needs segments")
    end_s, end_bytes = 0.0, 0
    for line in curve:
        if size_bytes < line.least_bytes and end_bytes:
            start_s = max(line.alpha_s + line.beta_s_per_byte * line.least_bytes, end_s)
            return _between(size_bytes, (end_bytes, end_s), (line.least_bytes, start_s))
        if size_bytes <= line.most_bytes:
            return max(line.alpha_s + line.beta_s_per_byte * size_bytes, end_s)
        before_s = end_s
        end_s = max(line.alpha_s + line.beta_s_per_byte * line.most_bytes, end_s)
        end_bytes = line.most_bytes
    return max(line.alpha_s + line.beta_s_per_byte * size_bytes, before_s)


def _between(size_bytes: float, end: tuple[int, float], start: tuple[int, float]) -> float:
    (end_bytes, end_s), (start_bytes, start_s) = end, start
    if end_s <= 0:  # the limit; no fitted stretch ends there
        return 0.0
    share = log(size_bytes / end_bytes) / log(start_bytes / end_bytes)
    return end_s * float((start_s / end_s) ** share)


def fit_segments(points: Sequence[tuple[float, ...]]) -> tuple[CollectiveSegment, ...]:
    """Segments of measured points, by weighted least squares of the relative error on each stretch.

    All divisions into at most five stretches of at least three sizes are compared by dynamic programming, and the
    Bayesian information criterion says how many are worth their parameters (two a stretch, and each border). beta is
    never negative; alpha only where a stretch has another before it, whose end it is not taken below. Fewer than three
    sizes make one stretch, whose errors nothing tells.

    One point far off its neighbours (1.8 times them was seen) does not bend a curve: after each of three rounds, one
    off by more than three times the median error of its stretch counts only as much as one that is off by just that,
    which holds for the choice of the borders too. It takes three such points in a row to earn a stretch of their own.

    Parameters
    ----------
    points : sequence of (int, float) or (int, float, float)
        Bytes, seconds and, where known, the relative spread of the repeats; in any order, one a size. Weights are
        1 / (time x sqrt(0.1^2 + spread^2)).

    Raises
    ------
    ValueError
        If there are no points.
    """
    rows = _sorted(points)
    if not rows:
        raise ValueError("a curve needs points")
    fits = _Fits(rows)
    return tuple(fits.segment(start, stop) for start, stop in pairwise(fits.cuts()))


def leave_one_out(points: Sequence[tuple[float, ...]]) -> dict[str, float]:
    """Relative errors of predicting each inner point from the others: median, p90, worst (of their sizes), bias (their
    mean); empty where there is no inner point.
    """
    rows = _sorted(points)
    errors = [
        segment_time_s(_lines([*rows[:index], *rows[index + 1 :]]), rows[index].size_bytes) / rows[index].time_s - 1
        for index in range(1, len(rows) - 1)
    ]
    if not errors:
        return {}
    sizes = np.abs(errors)
    return {
        "median": float(np.median(sizes)),
        "p90": float(np.quantile(sizes, 0.9)),
        "worst": float(np.max(sizes)),
        "bias": float(np.mean(errors)),
    }


def curve_points(records: Mapping[str, CollectiveRecord]) -> dict[str, list[Point]]:
    """Points of the general ladder by kind and ranks (``all_reduce 4``), ascending; without failures and the sizes
    that only scenarios asked for. Of one size in several dtypes the first stands.
    """
    found: dict[str, dict[int, Point]] = {}
    for key, record in records.items():
        kind, ranks, _, size_bytes = key.split()
        if record.time_s is not None and record.origin == "grid":
            sizes = found.setdefault(f"{kind} {ranks}", {})
            sizes.setdefault(int(size_bytes), Point(int(size_bytes), record.time_s, record.spread))
    return {name: sorted(sizes.values()) for name, sizes in sorted(found.items())}


def fit_curves(records: Mapping[str, CollectiveRecord]) -> dict[str, tuple[CollectiveSegment, ...]]:
    """Return the curves of such collectives, which an :class:`~perfmodel.hardware.interconnect.Interconnect` keeps as
    ``segments``.
    """
    return {name: fit_segments(points) for name, points in curve_points(records).items()}


def _sorted(points: Sequence[tuple[float, ...]]) -> list[Point]:
    return sorted(Point(int(size), *rest) for size, *rest in points)


def _lines(rows: Sequence[Point]) -> list[Line]:
    fits = _Fits(rows)
    return [fits.line(start, stop) for start, stop in pairwise(fits.cuts())]


class _Fits:
    """The best line of every stretch, all at once: arrays of stretches by points."""

    def __init__(self, rows: Sequence[Point]) -> None:
        self.rows = rows
        count = len(rows)
        self._least = min(LEAST_POINTS, count)
        self._stretches = [(a, b) for a in range(count) for b in range(a + self._least, count + 1)]
        self._index = {stretch: index for index, stretch in enumerate(self._stretches)}
        start, stop = (np.array(each)[:, None] for each in zip(*self._stretches, strict=True))
        position = np.arange(count)
        self._inside = (position >= start) & (position < stop)
        self._is_first = start[:, 0] == 0
        self._size = np.array([row.size_bytes for row in rows], dtype=float)
        self._time_s = np.array([row.time_s for row in rows])
        trust = 1 / np.hypot(ALIKE, [min(row.spread, WIDEST) for row in rows])
        self._trust = trust / np.sqrt(np.mean(trust**2))
        self._fit()

    def _fit(self) -> None:
        base = np.where(self._inside, self._trust / self._time_s, 0.0)
        weight = base
        for _ in range(ROUNDS):
            self._solve(weight)
            relative = np.abs((self.alpha_s[:, None] + self.beta[:, None] * self._size) / self._time_s - 1)
            limit = OUTLIER * np.nanmedian(np.where(self._inside, relative, np.nan), axis=1) + LEAST_OUTLIER
            relative = np.where(self._inside, relative, 0.0)
            self._errors(weight)
            weight = base * np.minimum(1.0, limit[:, None] / np.maximum(relative, 1e-12))
        self._cost = np.sum((self._trust * np.minimum(relative, limit[:, None])) ** 2, axis=1)

    def _solve(self, weight: np.ndarray) -> None:
        """alpha and beta of least squares about the weighted means, then held to what may be."""
        square = weight**2
        total = square.sum(axis=1)
        mean_size, mean_s = (square @ self._size) / total, (square @ self._time_s) / total
        off = self._size - mean_size[:, None]
        variance = (square * off**2).sum(axis=1)
        covariance = (square * off * (self._time_s - mean_s[:, None])).sum(axis=1)
        several = variance > 0
        beta = np.maximum(np.where(several, covariance / np.where(several, variance, 1.0), 0.0), 0.0)
        alpha_s = mean_s - beta * mean_size
        smallest = np.where(self._is_first, 0.0, np.where(self._inside, self._size, np.inf).min(axis=1))
        through_zero = alpha_s + beta * smallest < 0
        proportional = (square @ (self._size * self._time_s)) / (square @ self._size**2)
        self.alpha_s = np.where(through_zero, 0.0, alpha_s)
        self.beta = np.where(through_zero, proportional, beta)
        self._through_zero, self._is_flat = through_zero, ~through_zero & (beta == 0)
        self._total, self._mean_size, self._variance = total, mean_size, np.where(several, variance, np.inf)

    def _errors(self, weight: np.ndarray) -> None:
        """Standard errors; a parameter that a rule sets has none."""
        left = weight * (self.alpha_s[:, None] + self.beta[:, None] * self._size - self._time_s)
        free = np.where(self._through_zero | self._is_flat, 1, 2)
        per_point = np.sqrt((left**2).sum(axis=1) / np.maximum(self._inside.sum(axis=1) - free, 1))
        alpha = np.where(self._is_flat, 1 / self._total, 1 / self._total + self._mean_size**2 / self._variance)
        beta = np.where(self._through_zero, 1 / (weight**2 @ self._size**2), 1 / self._variance)
        self.alpha_error_s = np.where(self._through_zero, 0.0, per_point * np.sqrt(alpha))
        self.beta_error = np.where(self._is_flat, 0.0, per_point * np.sqrt(beta))

    def cuts(self) -> list[int]:
        """Borders of the best division, from 0 to the number of points."""
        count = len(self.rows)
        best: list[dict[int, tuple[float, tuple[int, ...]]]] = [{0: (0.0, (0,))}]
        for _ in range(min(MOST_SEGMENTS, count // self._least)):
            reached: dict[int, tuple[float, tuple[int, ...]]] = {}
            for start, (so_far, cuts) in best[-1].items():
                for stop in range(start + self._least, count + 1):
                    total = so_far + float(self._cost[self._index[start, stop]])
                    if stop not in reached or total < reached[stop][0]:
                        reached[stop] = (total, (*cuts, stop))
            best.append(reached)
        whole = [found[count] for found in best[1:] if count in found]
        return list(min(whole, key=lambda each: _criterion(each[0], count, len(each[1]) - 1))[1])

    def line(self, start: int, stop: int) -> Line:
        index = self._index[start, stop]
        least_bytes, most_bytes = self.rows[start].size_bytes, self.rows[stop - 1].size_bytes
        return Line(least_bytes, most_bytes, float(self.alpha_s[index]), float(self.beta[index]))

    def segment(self, start: int, stop: int) -> CollectiveSegment:
        index, line = self._index[start, stop], self.line(start, stop)
        return CollectiveSegment(
            least_bytes=line.least_bytes,
            most_bytes=line.most_bytes,
            alpha_s=line.alpha_s,
            beta_s_per_byte=line.beta_s_per_byte,
            alpha_error_s=float(self.alpha_error_s[index]),
            beta_error_s_per_byte=float(self.beta_error[index]),
            points=stop - start,
        )


def _criterion(squared_error: float, count: int, segments: int) -> float:
    """n log(error / n + noise^2) + parameters x log n: two a segment, and the borders."""
    return float(count * np.log(squared_error / count + NOISE**2) + (3 * segments - 1) * np.log(count))
