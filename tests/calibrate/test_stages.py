"""Which stages of a draft are done, and which fit into what is left of a budget, on an injected clock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from calibrate.draft import Draft
from calibrate.stages import Stages
from perfmodel.hardware.power import Power, PowerLoop, PowerReading
from perfmodel.hardware.profile import Device, Profile


@pytest.fixture
def draft(tmp_path: Path) -> Draft:
    profile = Profile(name="p", device=Device(kind="cpu", name="cpu", memory_bytes=1))
    return Draft(tmp_path / "p.json", profile, stages_s={"grid": 1.0, "power": 1.0, "cache": 1.0})


def test_stages_that_older_versions_left_empty_are_not_done_on_a_gpu(draft: Draft) -> None:
    on_gpu = Stages(draft, "cuda")
    assert [on_gpu.is_done(stage) for stage in ("grid", "power", "cache", "host")] == [True, False, False, False]
    assert Stages(draft, "cpu").is_done("power")
    loops = (PowerLoop(time_s=1.0, clock_hz=1e9),)
    draft.update(power=Power(readings={"row": PowerReading(alone_s=1.0, loops=loops)}))
    assert on_gpu.is_done("power")


def test_on_a_base_all_but_the_host_is_done(draft: Draft) -> None:
    draft.update(base="another")
    stages = Stages(draft, "cuda")
    assert [stages.is_done(stage) for stage in ("power", "waiting", "host")] == [True, True, False]


@pytest.mark.parametrize(
    ("device", "spent_s", "has_time", "left_out"),
    [
        ("cuda", 0.0, True, []),
        ("cuda", 33.0, False, ["the stage waiting was"]),  # of 100, 67 are left, and half of them is too little for 34
        ("cpu", 99.0, True, []),
        ("cpu", 101.0, False, ["the stage waiting was"]),
    ],
)
def test_a_stage_must_fit_into_half_of_what_is_left(
    draft: Draft, device: str, spent_s: float, has_time: bool, left_out: list[str]
) -> None:
    now_s = [5.0]
    stages = Stages(draft, device, 100.0, lambda: now_s[0])
    now_s[0] += spent_s
    assert (stages.has_time_for("waiting"), stages.left_out) == (has_time, left_out)
    assert stages.is_late == (spent_s > 100.0)


@pytest.mark.parametrize("budget_s", [None, 0.0])
def test_without_a_budget_there_is_always_time(draft: Draft, budget_s: float | None) -> None:
    times_s = iter([0.0, 1e9, 1e9])
    stages = Stages(draft, "cuda", budget_s, lambda: next(times_s))
    assert stages.has_time_for("waiting")
    assert not stages.is_late


def test_a_stage_is_run_once_and_its_seconds_are_kept(draft: Draft) -> None:
    ran: list[Any] = []
    times_s = iter([0.0, 10.0, 12.5])
    stages = Stages(draft, "cpu", clock=lambda: next(times_s))
    stages.once("grid", lambda: ran.append("grid"))
    stages.once("host", lambda: ran.append("host"))
    assert (ran, draft.stages_s["host"]) == (["host"], 2.5)
    assert Draft.load(draft.path).stages_s["host"] == 2.5


def test_facts_are_added_to_provenance(draft: Draft) -> None:
    stages = Stages(draft, "cpu")
    stages.note("launch", {"a": 1})
    stages.note("launch", {"b": 2})
    assert draft.profile.provenance == {"launch": {"a": 1, "b": 2}}
