"""Piecewise alpha-beta curves: found again from points they made, robust to one outlier, never faster for more bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.cost.piecewise import Line, curve_points, fit_curves, fit_segments, leave_one_out, segment_time_s
from perfmodel.hardware.interconnect import CollectiveRecord, CollectiveSegment

US = 1e-6
SIZES = [2**power for power in range(10, 31)]


def line(alpha_us: float, gb_per_s: float):
    return lambda size: alpha_us * US + size / (gb_per_s * 1e9)


def test_one_line_is_one_segment() -> None:
    time_of = line(10, 100)
    (found,) = fit_segments([(size, time_of(size)) for size in SIZES])
    assert (found.alpha_s, found.beta_s_per_byte) == (pytest.approx(10 * US), pytest.approx(1e-11))
    assert (found.least_bytes, found.most_bytes, found.points) == (2**10, 2**30, len(SIZES))
    assert found.alpha_error_s < 1e-3 * US


def test_a_switch_of_protocols_is_found() -> None:
    slow, fast = line(5, 10), line(60, 200)
    found = fit_segments([(size, slow(size) if size < 2**20 else fast(size)) for size in SIZES])
    assert [(each.least_bytes, each.most_bytes) for each in found] == [(2**10, 2**19), (2**20, 2**30)]
    assert [each.alpha_s / US for each in found] == [pytest.approx(5), pytest.approx(60)]
    assert [1e-9 / each.beta_s_per_byte for each in found] == [pytest.approx(10), pytest.approx(200)]


@pytest.mark.parametrize("outlier", [1.8, 1 / 1.8])
@pytest.mark.parametrize("where", SIZES[1:-1])
def test_one_outlier_does_not_move_the_rest(where: int, outlier: float) -> None:
    time_of = line(10, 100)
    found = fit_segments([(size, time_of(size) * (outlier if size == where else 1.0)) for size in SIZES])
    for size in SIZES:
        assert segment_time_s(found, size) == pytest.approx(time_of(size), rel=0.02)


def test_a_size_whose_repeats_differ_counts_less() -> None:
    """Two sizes that contradict the third; the fit without weights would pass between them."""
    rows = [(1000, 1e-5, 0.0), (1001, 2e-5, 0.3), (1002, 1e-5, 0.0)]
    ((even,), (weighted,)) = fit_segments([row[:2] for row in rows]), fit_segments(rows)
    assert segment_time_s((weighted,), 1001) < segment_time_s((even,), 1001)
    assert segment_time_s((weighted,), 1001) == pytest.approx(1e-5, rel=0.05)


def test_standard_errors_are_those_of_weighted_least_squares() -> None:
    """Against numpy: the inverse of the normal equations, times the variance that is left."""
    size, time_s = np.array([1e6, 2e6, 3e6, 4e6]), np.array([10e-6, 22e-6, 30e-6, 38e-6])
    (found,) = fit_segments(list(zip(size, time_s, strict=True)))
    weight = 1 / time_s
    design = np.stack([weight, weight * size / 1e6], axis=1)
    best = np.linalg.solve(design.T @ design, design.T @ (weight * time_s))
    left = weight * time_s - design @ best
    covariance = np.linalg.inv(design.T @ design) * (left @ left) / (len(size) - 2)
    errors = np.sqrt(np.diag(covariance))
    assert (found.alpha_s, found.beta_s_per_byte * 1e6) == (pytest.approx(best[0]), pytest.approx(best[1]))
    assert (found.alpha_error_s, found.beta_error_s_per_byte * 1e6) == (
        pytest.approx(errors[0]),
        pytest.approx(errors[1]),
    )


def test_standard_errors_of_long_messages_are_not_lost() -> None:
    """Columns of the design that differ by 14 orders of magnitude."""
    rows = [(2**power, (20 * US + 2**power / 200e9) * (1 + 0.02 * (-1) ** power)) for power in range(25, 31)]
    (found,) = fit_segments(rows)
    assert 1 * US < found.alpha_error_s < 100 * US


def test_a_first_stretch_through_zero_has_no_latency() -> None:
    """Times that grow faster than the sizes: alpha would be negative, and so would the time of a small message."""
    (found,) = fit_segments([(1000, 1e-6), (2000, 4e-6), (4000, 12e-6)])
    assert (found.alpha_s, found.alpha_error_s) == (0.0, 0.0)
    assert found.beta_s_per_byte > 0
    assert segment_time_s((found,), 1) > 0


def test_few_points_are_one_segment() -> None:
    (found,) = fit_segments([(1000, 2e-5)])
    assert (found.alpha_s, found.beta_s_per_byte) == (pytest.approx(2e-5), 0.0)
    with pytest.raises(ValueError, match="needs points"):
        fit_segments([])


def test_falling_times_have_no_slope() -> None:
    (found,) = fit_segments([(1024, 3e-5), (2048, 2e-5)])
    assert found.beta_s_per_byte == 0.0


def test_inner_points_are_predicted_from_the_others() -> None:
    time_of = line(10, 100)
    found = leave_one_out([(size, time_of(size)) for size in SIZES])
    assert found == {name: pytest.approx(0.0, abs=1e-9) for name in ("median", "p90", "worst", "bias")}
    spoilt = leave_one_out([(size, time_of(size) * (0.5 if size == 2**20 else 1.0)) for size in SIZES])
    assert (spoilt["worst"], spoilt["median"]) == (pytest.approx(1.0, rel=0.05), pytest.approx(0.0, abs=1e-3))
    assert leave_one_out([(1024, 1e-5)]) == {}


def test_curves_are_of_the_general_ladder() -> None:
    records = {
        "all_reduce 2 float32 2048": CollectiveRecord(time_s=2e-5, spread=0.1),
        "all_reduce 2 float32 1024": CollectiveRecord(time_s=1e-5),
        "all_reduce 2 bfloat16 1024": CollectiveRecord(time_s=9e-5),
        "all_reduce 2 float32 1000": CollectiveRecord(time_s=9e-5, origin="scenario"),
        "all_reduce 4 float32 1024": CollectiveRecord(error="out of memory"),
    }
    assert curve_points(records) == {"all_reduce 2": [(1024, 1e-5, 0.0), (2048, 2e-5, 0.1)]}
    ((name, (only,)),) = fit_curves(records).items()
    assert (name, only.points) == ("all_reduce 2", 2)


times_us = st.lists(st.floats(1, 1e5), min_size=1, max_size=15)


@given(values_us=times_us, sizes=st.tuples(st.integers(1, 2**31), st.integers(1, 2**31)))
def test_more_bytes_are_never_faster(values_us: list[float], sizes: tuple[int, int]) -> None:
    found = fit_segments([(2 ** (10 + index), value * US) for index, value in enumerate(values_us)])
    small, large = sorted(sizes)
    assert 0 <= segment_time_s(found, small) <= segment_time_s(found, large) * (1 + 1e-12)


def test_a_later_segment_is_not_below_the_one_before() -> None:
    first = CollectiveSegment(least_bytes=1, most_bytes=100, alpha_s=10.0, beta_s_per_byte=0.1)
    second = CollectiveSegment(least_bytes=200, most_bytes=1000, alpha_s=0.0, beta_s_per_byte=0.05)
    assert segment_time_s((first, second), 200) == 20.0
    assert segment_time_s((first, second), 1000) == 50.0


def test_between_two_segments_the_time_is_read_off_in_logarithms() -> None:
    curve = (Line(1, 100, 1.0, 0.0), Line(10000, 20000, 0.0, 1e-2))
    assert [segment_time_s(curve, size) for size in (100, 1000, 10000)] == [1.0, pytest.approx(10.0), 100.0]


segments_drawn = st.lists(
    st.tuples(st.integers(1, 1000), st.integers(0, 1000), st.floats(-1, 1), st.floats(0, 1)), min_size=1, max_size=5
)


@given(drawn=segments_drawn, sizes=st.tuples(st.integers(1, 20000), st.integers(1, 20000)))
def test_no_border_makes_more_bytes_faster(drawn: list[tuple[int, int, float, float]], sizes: tuple[int, int]) -> None:
    """Whatever the segments, also those that another program wrote."""
    curve, at = [], 0
    for gap, length, alpha_s, beta in drawn:
        curve.append(Line(at + gap, at + gap + length, alpha_s, beta))
        at += gap + length
    small, large = sorted(sizes)
    assert 0 <= segment_time_s(curve, small) <= segment_time_s(curve, large) * (1 + 1e-12)
    slower = [each._replace(beta_s_per_byte=2 * each.beta_s_per_byte) for each in curve]
    assert segment_time_s(curve, small) <= segment_time_s(slower, small) * (1 + 1e-12)
