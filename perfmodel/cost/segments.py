"""Piecewise alpha-beta curves: seconds = alpha + beta x bytes on each stretch of sizes that one protocol serves.

The function that is fitted is the function that predicts. Where two stretches meet, the later one is never taken below
the earlier one's end, so that more bytes are never faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from perfmodel.hardware.interconnect import CollectiveSegment

LEAST_POINTS = 3  # of a segment
MOST_SEGMENTS = 5
OUTLIER = 3.0  # times the median relative error beyond which a point counts less
PENALTY = 2.0  # of a further segment: it must divide the squared error by n**(PENALTY * parameters / n)


class Point(NamedTuple):
    """One measured size."""

    size_bytes: int
    time_s: float


def segment_time_s(segments: Sequence[CollectiveSegment], size_bytes: int) -> float:
    """Seconds of a size: the first segment also serves smaller ones, the last larger; between two, the later."""
    floor_s = 0.0
    for segment in segments:
        time_s = max(segment.alpha_s + segment.beta_s_per_byte * size_bytes, floor_s)
        if size_bytes <= segment.most_bytes or segment is segments[-1]:
            return time_s
        floor_s = max(floor_s, segment.alpha_s + segment.beta_s_per_byte * segment.most_bytes)
    raise ValueError("no segments")


def fit_segments(points: Sequence[tuple[int, float]]) -> tuple[CollectiveSegment, ...]:
    """Segments of measured points: weighted least squares of relative error on stretches of at least three sizes.

    Where protocols switch is found by dynamic programming over all divisions into at most five stretches; the number of
    stretches is the one with the least Bayesian information criterion. A point far off its stretch (one in a run was
    seen 1.8 times its neighbours) counts with the weight of a point at three times the median error.

    Parameters
    ----------
    points : sequence of (int, float)
        Bytes and seconds, in any order; one a size.

    Raises
    ------
    ValueError
        If there are no points.
    """
    rows = sorted(Point(*point) for point in points)
    if not rows:
        raise ValueError("a curve needs points")
    if len(rows) < LEAST_POINTS:
        return (_fit(rows),)
    cuts = _best_cuts(rows)
    return tuple(_fit(rows[start:stop]) for start, stop in pairwise(cuts))


def leave_one_out(points: Sequence[tuple[int, float]]) -> dict[str, float]:
    """Relative errors of predicting each inner point from the others: median, p90, worst, bias."""
    rows = sorted(Point(*point) for point in points)
    errors = [
        segment_time_s(fit_segments([*rows[:index], *rows[index + 1 :]]), row.size_bytes) / row.time_s - 1
        for index, row in enumerate(rows)
        if 0 < index < len(rows) - 1
    ]
    if not errors:
        return {}
    sizes = np.abs(errors)
    return {
        "median": float(np.median(sizes)),
        "p90": float(np.quantile(sizes, 0.9)),
        "worst": float(errors[int(np.argmax(sizes))]),
        "bias": float(np.mean(errors)),
    }


def _best_cuts(rows: Sequence[Point]) -> list[int]:
    count = len(rows)
    most = min(MOST_SEGMENTS, count // LEAST_POINTS)
    stretches = [(a, b) for a in range(count) for b in range(a + LEAST_POINTS, count + 1)]
    error = {(start, stop): _squared_error(rows[start:stop]) for start, stop in stretches}
    best: list[dict[int, tuple[float, list[int]]]] = [{0: (0.0, [0])}]
    for _ in range(most):
        reached: dict[int, tuple[float, list[int]]] = {}
        for start, (so_far, cuts) in best[-1].items():
            for stop in range(start + LEAST_POINTS, count + 1):
                total = so_far + error[start, stop]
                if stop not in reached or total < reached[stop][0]:
                    reached[stop] = (total, [*cuts, stop])
        best.append(reached)
    whole = [found[count] for found in best[1:] if count in found]
    return min(whole, key=lambda each: _criterion(each[0], count, len(each[1]) - 1))[1]


def _criterion(squared_error: float, count: int, segments: int) -> float:
    """n log(error / n) + PENALTY x parameters x log n; two parameters a segment and the cut."""
    return float(count * np.log(squared_error / count + 1e-8) + PENALTY * (3 * segments - 1) * np.log(count))


def _squared_error(rows: Sequence[Point]) -> float:
    alpha_s, beta, _ = _line(rows)
    relative = np.array([(alpha_s + beta * row.size_bytes) / row.time_s - 1 for row in rows])
    limit = OUTLIER * float(np.median(np.abs(relative))) + 1e-3
    return float(np.sum(np.minimum(np.abs(relative), limit) ** 2))


def _fit(rows: Sequence[Point]) -> CollectiveSegment:
    alpha_s, beta, (alpha_error_s, beta_error) = _line(rows)
    return CollectiveSegment(
        least_bytes=rows[0].size_bytes,
        most_bytes=rows[-1].size_bytes,
        alpha_s=alpha_s,
        beta_s_per_byte=beta,
        alpha_error_s=alpha_error_s,
        beta_error_s_per_byte=beta_error,
        points=len(rows),
    )


def _line(rows: Sequence[Point]) -> tuple[float, float, tuple[float, float]]:
    """alpha, beta >= 0 and their standard errors, by least squares of relative error; twice, the second time with less
    weight on points that the first left far off.
    """
    size = np.array([row.size_bytes for row in rows], dtype=float)
    time_s = np.array([row.time_s for row in rows])
    weight = 1 / time_s
    for _ in range(2):
        design = np.stack([weight, weight * size], axis=1)
        found, *_ = np.linalg.lstsq(design, weight * time_s, rcond=None)
        if len(rows) == 1 or found[1] < 0:
            found = np.array([np.sum(weight**2 * time_s) / np.sum(weight**2), 0.0])
        off = np.abs((found[0] + found[1] * size) / time_s - 1)
        limit = OUTLIER * float(np.median(off)) + 1e-3
        weight = np.minimum(1.0, limit / np.maximum(off, 1e-12)) / time_s
    lowest_s = found[0] + found[1] * size[0]
    if lowest_s <= 0:
        found = np.array([0.0, float(np.median(time_s / size))])
    freedom = max(len(rows) - 2, 1)
    left = weight * (found[0] + found[1] * size - time_s)
    covariance = np.linalg.pinv(design.T @ design) * float(left @ left) / freedom
    errors = np.sqrt(np.maximum(np.diag(covariance), 0.0))
    return float(found[0]), float(found[1]), (float(errors[0]), float(errors[1]))
