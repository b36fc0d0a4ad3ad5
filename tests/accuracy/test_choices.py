"""What predictions would have chosen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from perfmodel.accuracy.card_text import accuracy_markdown
from perfmodel.accuracy.cases import Card, CardCase
from perfmodel.accuracy.choices import MICRO_BATCHES, Swap, choices, common_words, settings_of, swaps


def case(name: str, measured_s: float, predicted_s: float, **parallelism: Any) -> CardCase:
    scenario = {"name": name, "model": {"family": "gpt"}, "parallelism": {"dp": 4, "strategy": "ddp"} | parallelism}
    return CardCase(
        name=name,
        group="ddp",
        split="tuning",
        measured={"step": measured_s},
        predicted={"step": predicted_s},
        spread=0.0,
        steps=10,
        in_interval=True,
        profile="toy",
        versions={},
        scenario_digest=name,
        settings=settings_of(scenario),
        measured_at="2" if "again" in name else "1",
    )


CASES = [
    case("b1", 1.00, 1.3, bucket_cap_mb=1.0),
    case("b25 (again)", 5.0, 5.0, bucket_cap_mb=25.0),
    case("b25", 0.90, 1.1, bucket_cap_mb=25.0),
    case("b100", 0.95, 1.0, bucket_cap_mb=100.0),
    case("default", 0.97, 1.2),
    case("naive", 1.40, 0.9, strategy="naive"),
    case("two ranks", 0.5, 0.5, dp=2, bucket_cap_mb=1.0),
]


def test_cases_that_differ_in_one_setting_are_a_choice() -> None:
    buckets, strategies = choices(CASES)
    assert (buckets.setting, list(buckets.cases)) == ("parallelism.bucket_cap_mb", ["25", "100", "default", "1"])
    assert (buckets.best, buckets.chosen, buckets.order_is_right) == ("25", "100", False)
    assert abs(buckets.costs - (0.95 / 0.90 - 1)) < 1e-12
    assert buckets.cases["25"].name == "b25"
    assert (strategies.setting, list(strategies.cases)) == ("parallelism.strategy", ["ddp", "naive"])
    assert (strategies.best, strategies.chosen, strategies.order_is_right) == ("ddp", "naive", False)


def test_the_right_choice_costs_nothing() -> None:
    (only,) = choices([CASES[0], CASES[2]])
    assert (only.best, only.chosen, only.costs, only.order_is_right) == ("25", "25", 0.0, True)


def test_a_case_alone_is_no_choice() -> None:
    assert choices(CASES[-1:]) == []


def test_a_card_of_several_profiles_says_whose_choice_it_is() -> None:
    here = [case("gpt-b1", 1.0, 1.3, bucket_cap_mb=1.0), case("gpt-b25", 0.9, 1.1, bucket_cap_mb=25.0)]
    there = [case("gpt-b1 (node)", 1.0, 1.3, dp=8, bucket_cap_mb=1.0), case("gpt-b25 (node)", 0.9, 1.1, dp=8)]
    alone = accuracy_markdown(Card(tuple(here)))
    both = accuracy_markdown(Card((*here, *(replace(each, profile="node") for each in there))))
    assert "| bucket_cap_mb | gpt | 25 | 25 |" in alone
    assert "| bucket_cap_mb | gpt (toy) | 25 | 25 |" in both
    assert "| bucket_cap_mb | gpt (node) | default | default |" in both


def test_swapped_pairs_and_how_far_apart_they_are() -> None:
    cases = {"a": case("a", 1.0, 3.0), "b": case("b", 1.25, 2.0), "c": case("c", 1.5, 2.0), "d": case("d", 1.5, 1.0)}
    assert swaps(cases, "step") == [
        Swap("a", "b", 0.25),
        Swap("a", "c", 0.5),
        Swap("a", "d", 0.5),
        Swap("b", "d", pytest.approx(0.2)),  # type: ignore[arg-type]
    ]  # b and c are predicted alike, c and d measured alike
    assert swaps(cases | {"e": replace(cases["a"], predicted={})}, "step") == swaps(cases, "step")
    assert swaps(cases, "peak_allocated") == []


def test_names_that_have_nothing_in_common() -> None:
    assert common_words(["gpt-a", "vgg-a"]) == ""


def test_pipelines_that_differ_in_micro_batches_alone_are_a_choice() -> None:
    def pipeline(name: str, measured_s: float, predicted_s: float, count: int, stages: int = 2) -> CardCase:
        section = {"stages": stages, "schedule": "1f1b", "micro_batches": count}
        return case(name, measured_s, predicted_s, strategy="none", pp=section)

    cases = [pipeline("m2", 1.2, 1.0, 2), pipeline("m4", 1.0, 1.1, 4), pipeline("three", 2.0, 2.0, 6, stages=3)]
    (choice,) = choices([*cases, case("none", 3.0, 3.0, strategy="none"), case("no-pp", 3.0, 3.0, pp=None)])
    assert (choice.setting, list(choice.cases), choice.best, choice.chosen) == (MICRO_BATCHES, ["4", "2"], "4", "2")
    assert MICRO_BATCHES not in settings_of({"parallelism": {"pp": None}})


def test_digests_do_not_change_what_they_are_of() -> None:
    scenario = {"parallelism": {"pp": {"stages": 2, "micro_batches": 4}}}
    settings_of(scenario)
    assert scenario == {"parallelism": {"pp": {"stages": 2, "micro_batches": 4}}}
