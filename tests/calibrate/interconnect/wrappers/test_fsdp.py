"""What fully_shard and DTensors add, told apart from steps of unlike models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from calibrate.interconnect.wrappers.fsdp import MODELS, ShapeTimes, StepTimes, blocked_s, group_records, line

EACH_S = {"forward": (3e-4, 2e-5), "reduce": (5e-4, 4e-5), "gather": (7e-4, 6e-5)}  # a group, a parameter


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


def added_s(name: str, groups: int, parameters: int) -> float:
    group_s, parameter_s = EACH_S[name]
    return groups * group_s + groups * parameters * parameter_s


def times(groups: int, parameters: int) -> ShapeTimes:
    """What collectives take is in proportion to nothing that keys count: what is left of it would be seen."""
    forward_s, backward_s = 1e-3 * groups * parameters, 2e-3 * groups * parameters
    gathers_s, reductions_s = 1e-2 / (groups + parameters), 3e-2 / (groups + parameters)
    keeping_s = backward_s + added_s("reduce", groups, parameters) + reductions_s
    return ShapeTimes(
        plain=StepTimes(forward_s, backward_s, 0.0),
        freeing=StepTimes(
            forward_s + added_s("forward", groups, parameters) + gathers_s,
            keeping_s + added_s("gather", groups, parameters) + gathers_s,
            0.2,
        ),
        keeping=StepTimes(1.0, keeping_s, 0.1),  # whose forward is of no account
        gathers_s=gathers_s,
        reductions_s=reductions_s,
    )


def test_what_groups_take_is_what_the_forms_of_a_model_differ_in() -> None:
    """Beyond the collectives that hold the host up: a gather in forward and backward each, and a reduction."""
    found = group_records([times(*shape) for shape in MODELS])
    wanted_s = {
        f"fsdp {name} {of}": s
        for name, two in EACH_S.items()
        for of, s in zip(("group", "parameter"), two, strict=True)
    }
    assert {key: record.time_s for key, record in found.items()} == pytest.approx(wanted_s)
    assert {record.spread for record in found.values()} == {0.2}


def test_collectives_hold_up_no_host_beside_a_gpu() -> None:
    mesh: Any = SimpleNamespace(device_type="cuda")
    assert blocked_s("all_gather", 2, 2, mesh, SimpleNamespace()) == 0  # type: ignore[arg-type]
