"""A setting of the hardware changes the answer, or the answer says that it does not."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.prediction.predict import predict
from perfmodel.prediction.prediction import Prediction
from perfmodel.prediction.sweep import parse_vary, sweep
from perfmodel.report.text.prediction import rendered, report
from perfmodel.scenario.yaml_file import load_question, with_assignments
from tests.places import ROOT

SCENARIOS = ROOT / "scenarios"
ALONE = SCENARIOS / "gpt2-batch1.yaml"
LARGE = SCENARIOS / "gpt2.7b.yaml"


def answer(path: Path, *assignments: str) -> Prediction:
    return predict(*load_question(path, assignments))


def said_idle(prediction: Prediction) -> list[str]:
    return [warning.partition("=")[0] for warning in prediction.warnings if "changes nothing here" in warning]


def test_a_faster_memory_makes_a_step_shorter_and_less_certain() -> None:
    measured = answer(LARGE)
    faster = answer(LARGE, "hardware.device.peak_memory_bytes_per_s=8e12")
    assert faster.step_time_s < 0.98 * measured.step_time_s
    (supposed,) = (text for text in faster.assumptions if "rooflines" in text)
    assert "memory at 8 TB/s instead of 4.8 TB/s" in supposed
    assert 0.05 < faster.scaled_share < 1
    low_s, high_s = faster.interval_s
    assert (high_s - low_s) / faster.step_time_s > (
        measured.interval_s[1] - measured.interval_s[0]
    ) / measured.step_time_s
    assert said_idle(faster) == []


def test_twice_the_device_takes_little_more_than_half_the_step() -> None:
    peaks = "{fp32: 134e12, tf32: 989e12, bf16: 1979e12, fp16: 1979e12}"
    twice = answer(LARGE, f"hardware.device.peak_flops_per_s={peaks}", "hardware.device.peak_memory_bytes_per_s=9.6e12")
    assert 0.5 < twice.step_time_s / answer(LARGE).step_time_s < 0.53


def test_the_profiles_own_values_leave_the_answer_as_it_is_to_the_last_bit() -> None:
    own = ("device.peak_memory_bytes_per_s=4.8e12", "device.peak_flops_per_s.fp32=67e12", "device.l2_bytes=62914560")
    same, measured = answer(ALONE, *(f"hardware.{text}" for text in own)), answer(ALONE)
    assert (same.step_time_s, same.interval_s, same.breakdown) == (
        measured.step_time_s,
        measured.interval_s,
        measured.breakdown,
    )
    assert (same.scaled_share, said_idle(same), same.idle_settings) == (0, [], ())
    assert same.own_settings == tuple(f"hardware.{text.partition('=')[0]}" for text in own)


def test_a_setting_at_the_profiles_own_value_is_said_to_change_nothing_and_not_listed_as_a_change() -> None:
    own, other = "hardware.device.peak_memory_bytes_per_s=4.8e12", "hardware.launch.latency_s=1e-2"
    found = answer(ALONE, own, other)
    assert [text for text in found.warnings if "has that value already" in text and text.startswith(f"{own} ")]
    (listed,) = (line for line in rendered(report(found)).splitlines() if "changed by --set" in line)
    assert listed == f"changed by --set: {other}"
    assert "changed by --set" not in rendered(report(answer(ALONE, own)))


def test_a_sweep_says_so_of_what_is_set_and_not_of_one_value_among_several() -> None:
    key, own = "hardware.device.peak_memory_bytes_per_s", "hardware.device.peak_flops_per_s.bf16=989.5e12"
    found = sweep(ALONE, parse_vary([f"{key}=4.8e12,8e12"]), [own]).configurations
    for each in found:
        assert each.outcome is not None
        assert [text.partition("=")[0] for text in each.outcome.warnings if "that value already" in text] == [
            own.partition("=")[0]
        ]


def test_settings_are_told_as_they_were_written() -> None:
    for written in ("hardware.topology=null", "hardware.device.memory_bytes=80e9", "hardware.unstable=[a, 'b']"):
        found = answer(ALONE, "hardware.launch.latency_s=1e-2", written)
        assert found.profile.provenance["set"][written.partition("=")[0]] == written.partition("=")[2]
        text = rendered(report(found)) + "".join(found.warnings)
        assert f"{written} changes nothing" in text or f"hardware.launch.latency_s=1e-2, {written}" in text


def test_what_follows_a_value_does_not_depend_on_how_far_it_is_changed() -> None:
    """The share is of the time as measured: seconds that memory limits, of all."""
    shares = [
        answer(LARGE, f"hardware.device.peak_memory_bytes_per_s={value}").scaled_share for value in ("2.4e12", "7e12")
    ]
    assert shares[0] == pytest.approx(shares[1], rel=0.1)


def test_a_setting_that_the_step_does_not_depend_on_is_said() -> None:
    idle = "hardware.device.peak_flops_per_s.fp16=5e15"
    found = answer(ALONE, idle, "hardware.launch.latency_s=1e-2")
    assert said_idle(found) == ["hardware.device.peak_flops_per_s.fp16"]
    assert found.step_time_s != answer(ALONE).step_time_s


def test_capacity_is_part_of_the_answer_even_where_all_fits() -> None:
    assert said_idle(answer(ALONE, "hardware.device.memory_bytes=80e9")) == []


def test_one_rank_talks_over_no_interconnect() -> None:
    assert said_idle(answer(ALONE, "hardware.interconnect=nvlink")) == ["hardware.interconnect"]


@pytest.mark.parametrize("first", ["4.8e12", "5e15"])
def test_a_sweep_says_of_each_configuration_what_changed_nothing(first: str) -> None:
    key = "hardware.device.peak_flops_per_s.fp16"
    vary = parse_vary([f"{key}=989.5e12,{first},6e15"])
    found = [(each.values[key], each.outcome.warnings) for each in sweep(ALONE, vary).configurations if each.outcome]
    assert len(found) == 3
    for value, warnings in found:
        assert any(text.startswith(f"{key}=") for text in warnings) == (value != 989.5e12)


@settings(max_examples=6)
@given(memory=st.floats(0.3, 3), flops=st.floats(0.3, 3), more=st.floats(1, 3))
def test_a_better_device_never_takes_longer_for_a_step(memory: float, flops: float, more: float) -> None:
    """The power limit included: a step that draws more at full clock is not slowed by more than it gains."""
    scenario, profile = load_question(SCENARIOS / "llama1b-bf16.yaml")

    def step_s(memory: float, flops: float) -> float:
        peaks = profile.device.peak_flops_per_s
        values = [f"peak_flops_per_s.{kind}={flops * peak!r}" for kind, peak in peaks.items()]
        values.append(f"peak_memory_bytes_per_s={memory * 4.8e12!r}")
        asked = with_assignments(profile, [f"hardware.device.{value}" for value in values])
        return predict(scenario, asked, doubted=()).step_time_s

    slower_s = step_s(memory, flops)
    assert step_s(more * memory, flops) <= slower_s * (1 + 1e-6)
    assert step_s(memory, more * flops) <= slower_s * (1 + 1e-6)
