"""What the card says of the order of strategies."""

from __future__ import annotations

from dataclasses import replace

from perfmodel.accuracy.card_text import accuracy_markdown
from perfmodel.accuracy.cases import Card
from perfmodel.accuracy.strategies_text import strategies_section
from tests.accuracy.strategy_cases import GROUP


def test_whole() -> None:
    assert strategies_section(Card(GROUP)).splitlines()[4:] == [
        "By time: the order is right in 0 of 1 groups, and in 1 where it may be wrong among cases measured within 1% of each other.",
        "",
        "| group | order right | swapped | all within 1% | measured and (predicted), in measured order |",
        "|---|---|---|---|---|",
        "| gpt, 4 GPUs over nvlink | no | ddp and zero1 (0.50% apart) | yes | none: 100 ms (100 ms), ddp: 200 ms (204 ms), zero1: 201 ms (203 ms), zero2: 300 ms (300 ms), zero3: 400 ms (400 ms) |",
        "",
        "By memory: the order is right in 0 of 1 groups, and in 0 where it may be wrong among cases measured within 1% of each other.",
        "",
        "| group | order right | swapped | all within 1% | measured and (predicted), in measured order |",
        "|---|---|---|---|---|",
        "| gpt, 4 GPUs over nvlink | no | zero3 and zero1 (100.00% apart) | no | zero3: 1 GiB (1.5 GiB), zero1: 2 GiB (1 GiB), none: 3 GiB (3 GiB), ddp: 4 GiB (4 GiB) |",
    ]  # fmt: skip


def test_a_right_order_has_nothing_swapped() -> None:
    alike = tuple(replace(each, predicted=each.measured) for each in GROUP)
    text = strategies_section(Card(alike))
    assert "By time: the order is right in 1 of 1 groups, and in 1 where" in text
    assert "| gpt, 4 GPUs over nvlink | yes |  |  | none: 100 ms (100 ms)," in text


def test_a_card_of_several_profiles_names_them() -> None:
    text = strategies_section(Card((*GROUP, replace(GROUP[0], name="other", layout=None, profile="other-gpu"))))
    assert "| gpt, 4 GPUs over nvlink (toy-gpu) | no |" in text


def test_the_section_stands_in_the_card_where_there_is_a_group() -> None:
    assert "\n## Strategies\n" in accuracy_markdown(Card(GROUP))
    assert strategies_section(Card(GROUP[:2])) == ""
    without_memory = tuple(replace(each, measured={"step": each.measured["step"]}) for each in GROUP)
    assert "By memory" not in strategies_section(Card(without_memory))
