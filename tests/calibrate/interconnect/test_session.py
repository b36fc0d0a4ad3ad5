"""What a run puts into a profile: all of it, single stages, or what had finished when it was ended."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from calibrate.interconnect.plan import InterconnectOptions
from calibrate.interconnect.request import Measured, Request
from calibrate.interconnect.session import Measure, calibrate_interconnect
from calibrate.stage_names import GENERAL
from perfmodel.errors import PerfModelError
from perfmodel.hardware.interconnect import CollectiveRecord, Interconnect
from perfmodel.hardware.profile import Device, Profile, load_profile, save_profile
from tests.calibrate.interconnect.scenarios import pipeline_scenario
from tests.refusals import refused

TWO = InterconnectOptions("gloo", "cpu", 2)


class Ranks:
    """Stands in for the ranks of a machine: what they were asked, with the time limit; their stages are fixed."""

    def __init__(self) -> None:
        self.asked: list[tuple[Request, float]] = []

    def measure(self, request: Request, timeout_s: float, kept: Path) -> Measured | None:
        self.asked.append((request, timeout_s))
        if request.nodes > 1:  # as where rank 0 is not
            return None
        kept.write_text("{}")
        now = Interconnect(backend="gloo", provenance={"measured_at": "now"})
        return Measured(now, {}, {"group of 2": 0.5, "calls": 1.5})


@pytest.fixture
def ranks() -> Ranks:
    return Ranks()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "cpu.json"
    save_profile(Profile(name="cpu", device=Device(kind="cpu", name="cpu", memory_bytes=1)), path)
    return path


def test_an_interconnect_is_added_to_a_profile(path: Path, ranks: Ranks) -> None:
    calibrate_interconnect(path, TWO, measure=ranks.measure)
    found = load_profile(path)
    assert (list(found.interconnects), found.interconnect, found.gpus) == (["gloo"], "gloo", 2)
    assert found.provenance["interconnects_s"] == {"gloo": {"group of 2": 0.5, "calls": 1.5}}
    assert os.listdir(path.parent) == ["cpu.json"]


@pytest.mark.parametrize(("timeout_s", "expected_s"), [(None, 400.0), (5.0, 5.0)])
def test_the_time_limit_is_the_usual_one_or_as_given(
    path: Path, ranks: Ranks, timeout_s: float | None, expected_s: float
) -> None:
    calibrate_interconnect(path, TWO, timeout_s, ranks.measure)
    ((_, limit_s),) = ranks.asked
    assert limit_s == expected_s


def test_messages_of_a_pipeline_are_measured_without_a_budget(path: Path) -> None:
    calibrate_interconnect(path, InterconnectOptions("gloo", "cpu", 2, [pipeline_scenario()], budget_s=0))
    found = load_profile(path).interconnects["gloo"]
    assert [key.split()[:3] for key in sorted(found.collectives)] == [
        ["exchange", "2", "bfloat16"],
        ["send_recv", "2", "bfloat16"],
    ]
    assert all(record.time_s and record.origin == "scenario" for record in found.collectives.values())
    assert found.host == {}


def test_nothing_is_written_where_rank_0_is_not(path: Path, ranks: Ranks) -> None:
    before, options = path.read_bytes(), InterconnectOptions("gloo", "cpu", 4, nodes=2, rendezvous="host:1")
    assert calibrate_interconnect(path, options, measure=ranks.measure) is None
    assert (len(ranks.asked), path.read_bytes()) == (1, before)


FINISHED: dict[str, Any] = {
    "collectives": {"all_reduce 2 float32 1024": {"time_s": 1e-3}},
    "host": {"wait": {"time_s": 1e-6}},
    "provenance": {"measured_at": "earlier"},
    "stages_s": {"group of 2": 1.0, "calls": 2.0},
}


def finished(profile: str, stages: tuple[str, ...] = GENERAL) -> str:
    """What the file holds that a run's stages are kept in."""
    return json.dumps(FINISHED | {"asked": {"profile": profile, "ranks": 2, "nodes": 1, "stages": stages}})


def stopped_by(kind: type[BaseException]) -> Measure:
    """A measurement that ends so after its first stages."""

    def measure(request: Request, timeout_s: float, kept: Path) -> None:
        kept.write_text(finished(request.profile))
        raise kind

    return measure


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, PerfModelError])
def test_a_run_that_is_ended_leaves_its_finished_stages_in_the_profile(path: Path, kind: type[BaseException]) -> None:
    for _ in range(2):
        with pytest.raises(kind):
            calibrate_interconnect(path, TWO, measure=stopped_by(kind))
        found = load_profile(path).interconnects["gloo"]
        assert found.collectives == {"all_reduce 2 float32 1024": CollectiveRecord(time_s=1e-3)}
        assert found.host["wait"].time_s == 1e-6
        assert found.rerun_spread is None  # it was measured once
    assert os.listdir(path.parent) == ["cpu.json"]


def test_after_a_kill_the_next_start_keeps_the_stages_that_had_finished(path: Path, ranks: Ranks) -> None:
    kept = path.with_name("cpu.gloo.partial.json")
    kept.write_text(finished("None"))
    with refused("--budget"):
        calibrate_interconnect(path, InterconnectOptions("gloo", "cpu", 2, budget_s=0), measure=ranks.measure)
    assert list(load_profile(path).interconnects["gloo"].collectives) == ["all_reduce 2 float32 1024"]
    kept.write_text(finished("None", ("calls",)))  # of a later run of one stage
    calibrate_interconnect(path, TWO, measure=ranks.measure)
    assert os.listdir(path.parent) == ["cpu.json"]
    assert list(load_profile(path).interconnects["gloo"].collectives) == ["all_reduce 2 float32 1024"]
    assert [request.profile for request, _ in ranks.asked] == ["None"]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (finished("2026-01-01"), r"must belong to the profile .* for a profile of 2026-01-01\)\. Move it away"),
        (json.dumps(FINISHED), r"must belong to the profile .* of an unknown time\)"),
        ('{"collectives": 3}', r"collectives must be a mapping .*\. Delete it"),
        (
            finished("None").replace("0.001", "-1.0"),
            r"collectives\.all_reduce 2 float32 1024\.time_s must be greater than 0 \(got -1\.0\)\. Delete it",
        ),
        ('{"collectives": {', "must be whole JSON"),
    ],
)
def test_finished_stages_that_are_damaged_or_of_another_profile_stay_as_they_are(
    path: Path, ranks: Ranks, content: str, sentence: str
) -> None:
    kept, before = path.with_name("cpu.gloo.partial.json"), path.read_bytes()
    kept.write_text(content)
    with pytest.raises(PerfModelError, match=rf"cpu\.gloo\.partial\.json: .*{sentence}"):
        calibrate_interconnect(path, TWO, measure=ranks.measure)
    assert (kept.read_text(), path.read_bytes(), ranks.asked) == (content, before, [])


def test_a_stage_alone_leaves_the_rest_and_says_when(path: Path, ranks: Ranks) -> None:
    calibrate_interconnect(path, TWO, measure=ranks.measure)
    known = load_profile(path)
    update = {"provenance": {"cpu": "a", "measured_at": "then"}, "communicator_bytes": {"2": 5}}
    before = known.interconnects["gloo"].model_copy(update=update)
    stages = {"interconnects_s": {"gloo": {"calls": 2.5, "group of 2": 9.0, "transfers": 3.0}}}
    save_profile(known.model_copy(update={"interconnects": {"gloo": before}, "provenance": stages}), path)
    again = InterconnectOptions("gloo", "cpu", 2, only=["calls", "p2p"])  # of which p2p does not come to run
    calibrate_interconnect(path, again, measure=ranks.measure)
    (_, (request, _)) = ranks.asked
    assert (request.stages, request.exact, request.own) == (("calls", "p2p"), (), ())
    found = load_profile(path)
    assert found.provenance["interconnects_s"] == {"gloo": {"calls": 1.5, "group of 2": 9.0, "transfers": 3.0}}
    assert found.interconnects["gloo"].communicator_bytes == {"2": 5}
    provenance = found.interconnects["gloo"].provenance
    assert provenance == {"cpu": "a", "measured_at": "then", "calls": {"again_at": "now"}}
    collectives = InterconnectOptions("gloo", "cpu", 2, only=["collectives"])  # group by group
    calibrate_interconnect(path, collectives, measure=ranks.measure)
    found = load_profile(path)
    assert found.interconnects["gloo"].provenance["collectives"] == {"again_at": "now"}
    assert found.provenance["interconnects_s"]["gloo"]["group of 2"] == 0.5


def test_bad_options_are_refused_before_the_profile_is_looked_for(tmp_path: Path) -> None:
    with refused("--ranks", 1):
        calibrate_interconnect(tmp_path / "absent.json", InterconnectOptions("gloo", "cpu", 1))
