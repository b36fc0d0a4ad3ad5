"""What fully_shard and DTensors add, told apart from steps of unlike models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from calibrate.interconnect.wrappers import fsdp
from calibrate.interconnect.wrappers.fsdp import MODELS, line

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


def own_s(name: str, groups: int, parameters: int) -> float:
    group_s, parameter_s = EACH_S[name]
    return groups * group_s + groups * parameters * parameter_s


def blocked_s(kind: str, groups: int, parameters: int, *_: Any) -> float:
    """Not in proportion to anything that keys are of: what is left of it would be seen."""
    return {"all_gather": 1e-2, "reduce_scatter": 3e-2}[kind] / (groups + parameters)


def step_samples_s(model: tuple[int, int, bool | None], *_: Any) -> tuple[list[float], list[float]]:
    """Forward and backward of one form, of which only forward of the keeping one is to be of no account."""
    groups, parameters, reshards = model
    forward_s, backward_s = 1e-3 * groups * parameters, 2e-3 * groups * parameters
    gather_s, reduce_s = (blocked_s(kind, groups, parameters) for kind in ("all_gather", "reduce_scatter"))
    if reshards is not None:
        forward_s += own_s("forward", groups, parameters) + gather_s if reshards else 1.0
        backward_s += own_s("reduce", groups, parameters) + reduce_s
    if reshards:
        backward_s += own_s("gather", groups, parameters) + gather_s
    return [forward_s] * 3, [backward_s] * 3


def test_what_groups_take_is_what_the_forms_of_a_model_differ_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the collectives that hold the host up: a gather in forward and backward each, and a reduction."""
    mesh: Any = SimpleNamespace(device_type="cpu")
    monkeypatch.setattr(fsdp, "_model", lambda groups, parameters, _, reshards: (groups, parameters, reshards))
    monkeypatch.setattr(fsdp, "step_seconds", step_samples_s)
    monkeypatch.setattr(fsdp, "_blocked_s", blocked_s)
    found = fsdp._groups(mesh, SimpleNamespace())  # type: ignore[arg-type]
    wanted_s = {
        f"fsdp {name} {of}": s
        for name, two in EACH_S.items()
        for of, s in zip(("group", "parameter"), two, strict=True)
    }
    assert {key: record.time_s for key, record in found.items()} == pytest.approx(wanted_s)


def test_collectives_hold_up_no_host_beside_a_gpu() -> None:
    mesh: Any = SimpleNamespace(device_type="cuda")
    assert fsdp._blocked_s("all_gather", 2, 2, mesh, SimpleNamespace()) == 0  # type: ignore[arg-type]
