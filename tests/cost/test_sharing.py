"""What copies of other streams and operators beside them cost each other."""

from __future__ import annotations

import numpy as np
import pytest

from perfmodel.cost.kernels.cost import KernelCost
from perfmodel.cost.sharing import memory_sharing

COPY = 0


def cost(time_s: float, moved_bytes: float) -> KernelCost:
    return KernelCost(time_s, 0.0, "exact", "copy", 0.0, moved_bytes, "fp32", 1, time_s)


def test_operators_slow_a_copy_by_the_share_of_the_bandwidth_that_they_draw() -> None:
    # The copy moves 100 bytes a second. Operators: 50, 200 (what the cache holds counts too), and none.
    costs = [cost(2.0, 200.0), cost(1.0, 50.0), cost(1.0, 200.0), cost(1.0, 0.0)]
    found = memory_sharing(costs, np.array([1, 2, 3]), np.array([1.0, 1.0, 1.0]), [COPY])
    assert list(found) == [COPY]
    assert found[COPY].compute_factor.tolist() == [1.5, 2.0, 1.0]
    assert found[COPY].communication_factor.tolist() == [1.5, 2.0, 1.0]
    assert np.isinf(found[COPY].tail_s).all()


def test_what_an_operator_draws_goes_with_how_long_it_lasts_in_the_step() -> None:
    costs = [cost(1.0, 100.0), cost(1.0, 50.0)]
    found = memory_sharing(costs, np.array([1, 1]), np.array([2.0, 0.0]), [COPY], np.array([3.0, 4.0]))
    assert found[COPY].compute_factor.tolist() == [1.25, 1.0]
    assert found[COPY].tail_s.tolist() == [3.0, 4.0]


@pytest.mark.parametrize("empty", [cost(0.0, 10.0), cost(1.0, 0.0)])
def test_a_copy_of_nothing_shares_nothing(empty: KernelCost) -> None:
    assert memory_sharing([empty, cost(1.0, 10.0)], np.array([1]), np.array([1.0]), [COPY]) == {}
