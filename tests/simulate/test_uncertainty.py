"""The interval of a step as a root of a sum of squares."""

from __future__ import annotations

import pytest

from perfmodel.cost.kernels.cost import KernelCost
from perfmodel.simulate.prediction import KernelUse
from perfmodel.simulate.uncertainty import IN_SITU, NORMAL_90, step_interval_s


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


def test_no_step_takes_less_than_no_time() -> None:
    assert step_interval_s(1.0, [use(1.0, 5.0)], 0.0)[0] == 0.0
