"""What fully_shard and DTensors add, told apart from steps of unlike models."""

from __future__ import annotations

import pytest

from calibrate.sharded_calls import MODELS, line


def test_groups_and_parameters_are_told_apart() -> None:
    rows = [(groups, groups * parameters) for groups, parameters in MODELS]
    found = line(("group", "parameter"), rows, [3e-4 * groups + 2e-5 * count for groups, count in rows], 0.1, 25)
    assert found["group"].time_s == pytest.approx(3e-4)
    assert found["parameter"].time_s == pytest.approx(2e-5)
    assert (found["group"].spread, found["parameter"].samples) == (0.1, 25 * len(MODELS))


def test_what_takes_nothing_more_costs_nothing() -> None:
    """Where noise makes more parameters faster, the whole is the group's."""
    found = line(("a", "b"), [(1, 4), (1, 32)], [5e-4, 3e-4], 0.0, 9)
    assert found["a"].time_s == pytest.approx(4e-4)
    assert found["b"].time_s == 0
