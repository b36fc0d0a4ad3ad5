"""Piecewise alpha-beta curves: found again from points they made, robust to one outlier, never faster for more bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.cost.segments import fit_segments, leave_one_out, segment_time_s
from perfmodel.hardware.interconnect import CollectiveSegment

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
    assert [1e-9 / each.beta_s_per_byte for each in found] == [pytest.approx(10), pytest.approx(200)]


def test_one_outlier_does_not_move_the_rest() -> None:
    time_of = line(10, 100)
    found = fit_segments([(size, time_of(size) * (1.8 if size == 2**24 else 1.0)) for size in SIZES])
    assert segment_time_s(found, 2**25) == pytest.approx(time_of(2**25), rel=0.02)


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
    assert found["worst"] == pytest.approx(0.0, abs=1e-9)
    assert leave_one_out([(1024, 1e-5)]) == {}


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
