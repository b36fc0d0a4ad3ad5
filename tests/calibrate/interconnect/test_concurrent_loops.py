"""Loops at the same time: how long each must run, and which stretch of it counts, on a device that is simulated."""

import pytest

from calibrate.interconnect.concurrent_loops import (
    FED_S,
    LONGER,
    MARKS,
    MOST_FED,
    MOST_LAUNCHES,
    loops,
    overlapped_s,
)
from tests.calibrate.interconnect.gpu import Gpu, timer

SECONDS = [5e-6, 25e-6, 116e-6, 9e-4, 2.7e-3, 8e-3, 0.06]


@pytest.mark.parametrize("own_s", SECONDS)
@pytest.mark.parametrize("other_s", SECONDS)
def test_the_other_loop_lasts_longer_where_the_queue_allows_it(own_s, other_s):
    counts = loops(own_s, other_s)
    assert 3 <= counts.own <= MOST_LAUNCHES
    assert counts.own % counts.stride == 0
    assert counts.own // counts.stride <= 2 * MARKS
    assert counts.held <= min(counts.other, MOST_LAUNCHES)
    assert counts.other <= (MOST_FED if other_s >= FED_S else MOST_LAUNCHES)
    if counts.own > 3:
        assert counts.other * other_s >= 0.99 * LONGER * counts.own * own_s


@pytest.mark.parametrize("launches", [1, 3, 20])
def test_loops_of_calls_with_several_launches_fit_the_queue(launches):
    timed, fed = loops(2e-5, 1e-3, launches, 1), loops(1e-3, 2e-5, 1, launches)
    assert timed.own == {1: 336, 3: 112, 20: 17}[launches]
    assert timed.own * launches <= MOST_LAUNCHES
    assert fed.held * launches <= MOST_LAUNCHES
    assert fed.other == {1: 1500, 3: 116, 20: 17}[launches]  # fed only where a launch lasts as long as FED_S


def test_only_what_ran_side_by_side_counts():
    """Two seconds a call while the other runs, to 20; half a second after."""
    marks_s = [2.0 * index for index in range(11)] + [20.0 + 0.5 * index for index in range(1, 9)]
    assert overlapped_s(marks_s, 1, 20.0) == 2.0
    assert overlapped_s(marks_s, 4, 20.0) == 0.5
    assert overlapped_s(marks_s, 1, 100.0) < 1.5


def test_the_beginning_does_not_count():
    assert overlapped_s([0.0, 9.0, 10.0, 11.0, 12.0], 1, 50.0) == 1.0


def test_too_little_overlap_is_nothing():
    assert overlapped_s([0.0, 1.0, 2.0, 3.0], 1, 2.5) is None
    assert overlapped_s([0.0, 1.0, 2.0, 3.0], 1, 3.0) == 1.0


def test_loops_that_were_not_queued_in_time_are_run_again():
    gpu = Gpu(2.0, late=2)
    found_s = timer(gpu).one_concurrent_s(gpu.call(1e-3), gpu.call(1e-3), loops(1e-3, 1e-3), False)
    assert found_s == pytest.approx(2e-3)
    assert gpu.drains == 2 * 3


def test_a_loop_that_ends_too_soon_is_made_longer():
    """30, 60 and 120 of a fiftieth of what was thought end before the timed one has run three times; 240 do not."""
    gpu = Gpu(2.0)
    counts = loops(1e-3, 1e-3)
    assert counts.other == 30
    assert timer(gpu).one_concurrent_s(gpu.call(1e-3), gpu.call(2e-5), counts, True) == pytest.approx(2e-3)
    assert gpu.drains == 2 * 4
    assert timer(gpu).one_concurrent_s(gpu.call(1e-3), gpu.call(5e-6), counts, True) is None
