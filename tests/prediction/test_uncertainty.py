"""The interval of a step as a root of a sum of squares."""

from __future__ import annotations

import math

import pytest

from perfmodel.cost.kernels.kernel_cost import KernelCost
from perfmodel.prediction.prediction import KernelUse
from perfmodel.prediction.uncertainty import IN_SITU, NORMAL_90, step_interval_s


def use(total_s: float, spread: float) -> KernelUse:
    return KernelUse("k", KernelCost(total_s, spread, "exact", "gemm", 0.0, 0.0, "fp32", 1, total_s), 1, total_s)


def test_variances_add_up() -> None:
    low_s, high_s = step_interval_s(10.0, [use(2.0, 0.1), use(3.0, 0.2)], 0.3, 0.4, 0.5)
    variance = 0.2**2 + 0.6**2 + (5.0 * IN_SITU["gemm"]) ** 2 + 0.3**2 + 0.4**2 + 0.5**2
    assert high_s - 10.0 == pytest.approx(NORMAL_90 * variance**0.5)
    assert 10.0 - low_s == pytest.approx(high_s - 10.0)


def test_bubbles_are_as_wrong_as_busy_time() -> None:
    """A rank that is busy for 4 of 10 s and waits for others in 6: the error is that of 10 s of these kernels."""
    waits, works = (
        step_interval_s(10.0, [use(4.0, 0.1)], 0.0, bubbles=1.5),
        step_interval_s(10.0, [use(10.0, 0.1)], 0.0),
    )
    assert waits == pytest.approx(works)
    hot, cool = (step_interval_s(10.0, [], 0.0, clock_s=each, bubbles=1.5)[1] for each in (0.2, 0.0))
    assert hot - cool == pytest.approx(NORMAL_90 * 0.5)
    both = [step_interval_s(10.0, [], 0.3, 0.4, bubbles=each) for each in (0.0, 1.5)]
    assert both[0] == both[1]


@pytest.mark.parametrize("half_s", [0.4, 0.5, 0.6, 1.0, 3.0, 1e3])
def test_no_error_takes_a_step_to_no_time(half_s: float) -> None:
    """Half the step is where the low end leaves the straight line, with the same slope."""
    low_s, high_s = step_interval_s(1.0, [], half_s / NORMAL_90)
    assert high_s == pytest.approx(1.0 + half_s)
    assert low_s == pytest.approx(1.0 - half_s if half_s <= 0.5 else 0.25 / half_s)
    assert 0 < low_s < 1


def test_the_low_end_has_no_kink() -> None:
    below, at, above = (step_interval_s(1.0, [], half_s / NORMAL_90)[0] for half_s in (0.499, 0.5, 0.501))
    assert below - at == pytest.approx(at - above, rel=3e-3)


def test_what_is_known_to_a_factor_may_take_as_many_times_as_long() -> None:
    """A second that may be ten, or a tenth, in a step of ten."""
    cost = KernelCost(1.0, math.log(10) / NORMAL_90, "estimated", "sort", 0.0, 0.0, "fp32", 1, 1.0)
    assert step_interval_s(10.0, [KernelUse("k", cost, 1, 1.0)], 0.0) == pytest.approx((10 - 0.9, 10 + 9))
    low_s, high_s = step_interval_s(10.0, [KernelUse("k", cost, 1, 1.0)], 4 / NORMAL_90)
    assert (10 - low_s, high_s - 10) == pytest.approx((math.hypot(4, 0.9), math.hypot(4, 9)))
