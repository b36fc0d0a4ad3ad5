"""What a sweep asks, how it ranks, what it refuses."""

from __future__ import annotations

import json
import re
import sys
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perfmodel.errors import PerfModelError
from perfmodel.prediction.predict import predict
from perfmodel.prediction.prediction import Prediction
from perfmodel.prediction.sweep import parse_vary, sweep
from perfmodel.prediction.sweep_result import SweepResult
from perfmodel.program.ranks import rank_programs
from perfmodel.progress import what_is_done
from perfmodel.scenario.yaml_file import load_question
from perfmodel.units import format_bytes
from tests.places import ROOT
from tests.report.synthetic import prediction

SHIPPED_SCENARIO = ROOT / "scenarios/gpt2.7b-ddp.yaml"
TINY = "name: toy\nmodel: {family: gpt, size: tiny}\nbatch: {size: 2, sequence_length: 16}\nhardware: {profile: h200-sxm-x4}\n"


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    path = tmp_path / "toy.yaml"
    path.write_text(TINY)
    return path


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[int, Prediction | PerfModelError]:
    """What is predicted, by batch size."""
    known: dict[int, Prediction | PerfModelError] = {}

    def answer(scenario: Any, profile: Any, **options: Any) -> Prediction:
        found = known[scenario.batch.size]
        if isinstance(found, PerfModelError):
            raise found
        return replace(found, scenario=scenario, profile=profile)

    monkeypatch.setattr("perfmodel.prediction.sweep.predict", answer)
    return known


def predicted(low_s: float, step_s: float, high_s: float) -> Prediction:
    made = prediction()
    timeline = replace(made.timeline, step_time_s=step_s)
    return replace(made, timeline=timeline, interval_s=(low_s, high_s))


def order(result: SweepResult) -> list[tuple[int | None, Any]]:
    return [(each.rank, each.values["batch.size"]) for each in result.configurations]


def test_every_combination_is_what_predict_says(toy: Path) -> None:
    result = sweep(toy, {"batch.size": (2, 4), "precision": ("fp32", "amp-bf16")})
    assert (result.scenario, result.profile) == ("toy", "h200-sxm-x4")
    assert result.vary == {"batch.size": (2, 4), "precision": ("fp32", "amp-bf16")}
    found = {(each.values["batch.size"], each.values["precision"]): each.outcome for each in result.configurations}
    assert len(found) == 4
    for (size, precision), outcome in found.items():
        alone = predict(*load_question(toy, [f"batch.size={size}", f"precision={precision}"]))
        assert outcome is not None
        assert alone.memory is not None
        assert (outcome.step_time_s, outcome.interval_s) == (alone.step_time_s, alone.interval_s)
        assert outcome.throughput_samples_per_s == pytest.approx(size / alone.step_time_s)
        assert (outcome.fits, outcome.device_bytes) == (True, alone.memory.device_bytes)
        assert outcome.peak_allocated_bytes == alone.memory.peak_allocated_bytes
    rates = [each.outcome.throughput_samples_per_s for each in result.configurations if each.outcome]
    assert rates == sorted(rates, reverse=True)
    assert not result.same_work


def test_set_holds_for_all_and_hardware_can_be_varied(toy: Path) -> None:
    vary = parse_vary(["hardware.launch.latency_s=1e-6,1e-2", "batch.size=2"])
    result = sweep(toy, vary, ["mode=forward", "hardware.device.memory_bytes=5e9"])
    assert result.assignments == ("mode=forward", "hardware.device.memory_bytes=5e9")
    assert {each.outcome.capacity_bytes for each in result.configurations if each.outcome} == {5e9}
    assert result.same_work
    without = sweep(toy, {"batch.size": (2,)}, ["mode=forward"])
    assert without.configurations[0].outcome is not None
    assert without.configurations[0].outcome.capacity_bytes > 100e9


def test_what_does_not_fit_has_no_rank(toy: Path) -> None:
    result = sweep(toy, parse_vary(["hardware.device.memory_bytes=1e6,1e11"]))
    (first,) = result.ranked
    assert first.values == {"hardware.device.memory_bytes": 1e11}
    (refused,) = result.unranked
    assert refused.reason is not None
    memory = predict(*load_question(toy)).memory
    assert memory is not None
    needed, missing = memory.device_bytes, memory.device_bytes - 1e6
    assert refused.reason == (
        f"does not fit, needs at least {format_bytes(needed)}: {format_bytes(missing)} more than the device's 976.6 KiB "
        "(runs out: before step 1)"
    )
    assert refused.outcome is not None
    assert (refused.outcome.fits, refused.outcome.device_bytes) == (False, None)
    assert (refused.outcome.needed_bytes, refused.outcome.capacity_bytes) == (needed, 1e6)


def test_ranks_and_ties(toy: Path, answers: dict[int, Any]) -> None:
    """By samples a second: 8 (6.7 to 10), 7 (6.7 to 7.4) ties; 6 (5.9 to 6.2) does not, 5.8 (4 to 6.7) ties with that."""
    answers[8] = predicted(0.8, 1.0, 1.2)
    answers[7] = predicted(0.95, 1.0, 1.05)
    answers[6] = predicted(0.96, 1.0, 1.02)
    answers[1] = predicted(0.15, 1 / 5.8, 0.25)
    result = sweep(toy, {"batch.size": (1, 6, 7, 8)})
    assert order(result) == [(1, 8), (1, 7), (3, 6), (3, 1)]


def test_a_tie_is_with_the_first_of_the_rank(toy: Path, answers: dict[int, Any]) -> None:
    """10, 9 and 8 samples a second, each overlapping the next: the third does not overlap the first."""
    answers.update({10: predicted(0.92, 1, 1.08), 9: predicted(0.92, 1, 1.08), 8: predicted(0.92, 1, 1.08)})
    assert order(sweep(toy, {"batch.size": (8, 9, 10)})) == [(1, 10), (1, 9), (3, 8)]


PIPELINE = (
    TINY.replace("size: 2", "size: 4")
    .replace("tiny}", "tiny, layers: 4}")
    .replace("x4}", "x4, gpus: 2, interconnect: nvlink}")
    + "parallelism: {pp: {stages: 2, micro_batches: 4}}\n"
)


def gpus_of(result: SweepResult) -> dict[int, int | None]:
    """By number of stages; None where it was refused."""
    return {
        each.values["parallelism.pp.stages"]: None if each.outcome is None else each.outcome.gpus
        for each in result.configurations
    }


def test_gpus_follow_the_ranks_unless_something_else_says_how_many(toy: Path) -> None:
    toy.write_text(PIPELINE)
    stages = {"parallelism.pp.stages": (2, 4)}
    result = sweep(toy, stages)
    assert gpus_of(result) == {2: 2, 4: 4}
    assert all(each.outcome and 0 < (each.outcome.bubble_share or 0) < 1 for each in result.configurations)
    alone = predict(*load_question(toy, ["parallelism.pp.stages=4", "hardware.gpus=4"]))
    assert alone.step_time_s in {each.outcome.step_time_s for each in result.configurations if each.outcome}
    assert gpus_of(sweep(toy, stages, ["hardware.gpus=2"])) == {2: 2, 4: None}
    assert gpus_of(sweep(toy, stages | {"hardware.gpus": (4,)})) == {2: None, 4: 4}
    toy.write_text(PIPELINE.replace("gpus: 2", "gpus: 4"))
    assert gpus_of(sweep(toy, stages)) == {2: None, 4: 4}


def test_a_rank_that_does_not_fit_is_named(toy: Path) -> None:
    toy.write_text(PIPELINE)
    (refused,) = sweep(toy, {"hardware.device.memory_bytes": (2e6,)}).configurations
    assert refused.reason is not None
    assert re.search(r"needs at least \S+ GiB on rank \d: ", refused.reason)


def test_what_is_refused_or_not_predicted_comes_last_with_its_reason(toy: Path, answers: dict[int, Any]) -> None:
    made = prediction()
    assert made.memory is not None
    answers[1] = PerfModelError("the wire must hold. Mend it.")
    answers[2] = replace(made, memory=replace(made.memory, step_retries=3))
    answers[3] = predicted(0.9, 1.0, 1.1)
    result = sweep(toy, {"batch.size": (-5, 1, 2, 3)})
    assert [(each.values["batch.size"], each.rank, each.reason) for each in result.configurations] == [
        (3, 1, None),
        (-5, None, "batch.size must be greater than or equal to 1 (got -5). `perfmodel schema scenario` says what each key takes."),
        (1, None, "the wire must hold. Mend it."),
        (2, None, "fits only with 3 allocator retries a step, which wait for the device: its time is not predicted"),
    ]  # fmt: skip


def test_a_defect_in_one_configuration_loses_no_other(toy: Path, answers: dict[int, Any]) -> None:
    answers[3] = predicted(0.9, 1.0, 1.1)  # of 2, the fixture raises a KeyError
    first, second = sweep(toy, {"batch.size": (2, 3)}).configurations
    assert (first.values, first.rank) == ({"batch.size": 3}, 1)
    assert (second.rank, second.outcome) == (None, None)
    assert second.reason is not None
    assert "KeyError: 2" in second.reason
    assert "perfmodel predict" in second.reason


def test_all_failing_is_an_error_with_each_reason_once(toy: Path, answers: dict[int, Any]) -> None:
    reasons = ["a must hold (got 1).", "a must hold (got 2).", "b must.", "c must.", "d must.", "e must."]
    answers.update({size: PerfModelError(reason) for size, reason in enumerate(reasons, start=1)})
    with pytest.raises(PerfModelError) as error:
        sweep(toy, {"batch.size": tuple(answers)})
    assert str(error.value) == (
        f"{toy}: a must hold (got 1). With batch.size 3: b must. With batch.size 4: c must. There are 2 more reasons."
    )


def test_strategies_are_compared_and_none_is_refused_for_several_gpus(toy: Path) -> None:
    strategies = ("none", "ddp", "zero1", "zero2", "zero3")
    together = ["parallelism.dp=4", "hardware.gpus=4", "hardware.interconnect=nvlink"]
    result = sweep(toy, {"parallelism.strategy": strategies}, together)
    (refused,) = result.unranked
    assert refused.values == {"parallelism.strategy": "none"}
    assert refused.reason is not None
    assert refused.reason.startswith("parallelism.strategy must say how 4 ranks work together (got none).")
    found = {each.values["parallelism.strategy"]: each.outcome for each in result.ranked}
    assert sorted(found) == sorted(strategies[1:])
    assert all(each is not None and each.step_time_s > 0 and each.device_bytes for each in found.values())


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])  # of zero1 and zero3, test_packaging says so
def test_all_that_a_shipped_scenario_traces_for_a_strategy_is_shipped(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERFMODEL_CACHE", str(tmp_path))
    monkeypatch.setattr("perfmodel.trace.store._remembered", OrderedDict())
    for tracer in ("session", "optimizer"):
        monkeypatch.setitem(sys.modules, f"perfmodel.tracing.{tracer}", None)
    monkeypatch.setattr("perfmodel.program.ranks.data_parallel_program", lambda *_: None)
    monkeypatch.setattr("perfmodel.program.ranks.within_limits", tuple)
    scenario, _ = load_question(SHIPPED_SCENARIO, [f"parallelism.strategy={strategy}"])
    programs = rank_programs(scenario)
    assert sorted(rank for each in programs for rank in each.ranks) == [0, 1, 2, 3]


def test_what_a_prediction_assumes_and_warns_of_is_kept(toy: Path, answers: dict[int, Any]) -> None:
    answers[2] = replace(prediction(), assumptions=("links 2 x as fast as measured",), warnings=("unstable",))
    (only,) = sweep(toy, {"batch.size": (2,)}).configurations
    assert only.outcome is not None
    assert (only.outcome.assumptions, only.outcome.warnings) == (("links 2 x as fast as measured",), ("unstable",))


FACTOR = "hardware.interconnects.two-nodes.bandwidth_factor"


def test_an_interconnect_that_no_configuration_uses_is_not_changed(toy: Path, answers: dict[int, Any]) -> None:
    answers[2] = predicted(0.9, 1.0, 1.1)
    two = ["parallelism.dp=2"]
    ending = "must change an interconnect that is in use (in use: nvlink). Choose it by hardware.interconnect and parallelism.dp, or leave it out."  # fmt: skip
    with pytest.raises(PerfModelError) as caught:
        sweep(toy, {FACTOR: (1, 2)}, two)
    assert str(caught.value) == f"--vary {FACTOR} {ending}"
    with pytest.raises(PerfModelError) as caught:
        sweep(toy, {"hardware.interconnect": ("nvlink",)}, [*two, f"{FACTOR}=2"])
    assert str(caught.value) == f"--set {FACTOR} {ending}"


def test_interconnects_may_be_compared_with_one_of_them_changed(toy: Path, answers: dict[int, Any]) -> None:
    answers[2] = predicted(0.9, 1.0, 1.1)
    both = {"hardware.interconnect": ("nvlink", "two-nodes")}
    assert len(sweep(toy, both, ["parallelism.dp=2", f"{FACTOR}=2"]).ranked) == 2


def test_a_cpu_has_no_memory(toy: Path, answers: dict[int, Any]) -> None:
    answers[2] = prediction("cpu")
    (only,) = sweep(toy, {"batch.size": (2,)}).configurations
    assert only.rank == 1
    assert only.outcome is not None
    assert (only.outcome.fits, only.outcome.peak_allocated_bytes, only.outcome.device_bytes) == (None, None, None)


def test_json(toy: Path, answers: dict[int, Any]) -> None:
    answers.update({2: predicted(0.9, 1.0, 1.1), 3: PerfModelError("no. Mend it.")})
    data = json.loads(json.dumps(sweep(toy, {"batch.size": (2, 3)}, ["precision=bf16"]).to_json()))
    assert (data["version"], data["scenario"], data["assignments"]) == (1, "toy", ["precision=bf16"])
    assert data["vary"] == {"batch.size": [2, 3]}
    first, second = data["configurations"]
    assert (first["values"], first["rank"], first["reason"]) == ({"batch.size": 2}, 1, None)
    assert first["outcome"]["interval_s"] == [0.9, 1.1]
    assert second == {"values": {"batch.size": 3}, "rank": None, "outcome": None, "reason": "no. Mend it."}


def test_values_are_yaml() -> None:
    assert parse_vary(["a.b=1,2.5,true,null, x ,80e9,'1,2',{every: 2}"]) == {
        "a.b": (1, 2.5, True, None, "x", 80e9, "1,2", {"every": 2})
    }


@pytest.mark.parametrize(
    ("vary", "sentence"),
    [
        (["batch.size"], "--vary must read key=value,value... (got 'batch.size')."),
        (["batch.size="], "--vary must read key=value,value... (got 'batch.size=')."),
        (["=1"], "--vary must read key=value,value... (got '=1')."),
        (["batch.size=1,,2"], "--vary batch.size: must be whole YAML"),
        (["batch.size=!!python/name:os.system 1"], "--vary batch.size: values must be plain text, numbers, lists"),
        (["batch.size=1", "batch.size=2"], "--vary batch.size: a key must be varied once (got it twice)."),
        ([], "--vary must be given (got none)."),
        (["batch.size=8,8"], "--vary batch.size: values must differ (got 8 twice)."),
        (["precision=bf16"], "--vary precision: a varied key must not be in --set as well (it is)."),
        ([f"{key}={','.join(map(str, range(32)))}" for key in ("a", "b")], "--vary must make at most 1000 configurations (got 1024)."),
        (["batch.sise=8,16"], "{path}: batch.sise must be a key of batch (got 8). Did you mean 'size'?"),
        (["hardware.device.memory_byte=8"], "{path}: --set hardware.device.memory_byte must be a key of device (got 8). Did you mean 'memory_bytes'?"),
        (["batch.size=no,-1"], "{path}: batch.size must be an integer (got False)."),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_sentence(toy: Path, vary: list[str], sentence: str) -> None:
    with pytest.raises(PerfModelError) as error:
        sweep(toy, parse_vary(vary), ["precision=fp32"])
    assert str(error.value).startswith(sentence.format(path=toy))
    assert "\n" not in str(error.value)


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(PerfModelError, match=r"none\.yaml: a scenario must be a readable file"):
        sweep(tmp_path / "none.yaml", {"batch.size": (1,)})


def test_which_configuration_is_predicted_is_said(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = []

    def answer(*question: Any, **options: Any) -> Any:
        said.append(what_is_done())
        return predicted(0.9, 1.0, 1.1)

    monkeypatch.setattr("perfmodel.prediction.sweep.predict", answer)
    sweep(toy, {"batch.size": (2, 4)}, progress=True)
    assert said == ["configuration 1 of 2", "configuration 2 of 2"]


def test_a_time_that_is_hardly_known_is_ranked(toy: Path) -> None:
    """The host's records say that their speed may be several times another."""
    result = sweep(
        toy, {"batch.size": (2, 4)}, ["hardware.launch.latency_s=1e-6", "hardware.host.reference.spread=3.0"]
    )
    for each in result.ranked:
        assert each.outcome is not None
        assert 0 < each.outcome.interval_s[0] < each.outcome.step_time_s
    assert len(result.ranked) == 2
