"""Predictions of shipped scenarios are what they were, figure by figure."""

from __future__ import annotations

from typing import Any

import pytest

from tests.goldens.predictions import QUESTIONS, answer, figures, load, moved


def test_every_question_has_a_golden() -> None:
    assert list(load()) == list(QUESTIONS)


@pytest.mark.usefixtures("empty_cache")
@pytest.mark.parametrize("name", QUESTIONS)
def test_the_prediction_is_what_it_was(name: str) -> None:
    lines = moved(load().get(name, {}), figures(answer(name)))
    if lines:
        listed = "\n  ".join(lines)
        pytest.fail(
            f"{len(lines)} figures of {name!r} moved (old -> new):\n  {listed}\n"
            "Where that is meant, renew them with `python -m tests.goldens` and commit the difference.",
            pytrace=False,
        )


HELD = {"step_time_s": 1.0, "retries": 0, "fits": True, "breakdown": {"forward_s": 0.25, "bubble_s": 0.0}}


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"step_time_s": 1.0 + 5e-10}, None),
        ({"step_time_s": 1.0 + 5e-9}, "step_time_s: 1.0 -> 1.000000005 (+5.00e-09)"),
        ({"retries": 1}, "retries: 0 -> 1"),
        ({"fits": 1}, "fits: True -> 1"),
        ({"fits": None}, "fits: True -> None"),
        ({"breakdown": {"forward_s": 0.25, "bubble_s": 1e-18}}, None),
        ({"breakdown": {"forward_s": 0.5, "bubble_s": 0.0}}, "breakdown > forward_s: 0.25 -> 0.5 (+1.00e+00)"),
        ({"breakdown": {"forward_s": 0.25}}, "breakdown > bubble_s: 0.0 -> nothing"),
        ({"clock_hz": 1e9}, "clock_hz: nothing -> 1000000000.0"),
    ],
)
def test_what_moved_is_listed_with_old_and_new(change: dict[str, Any], line: str | None) -> None:
    assert moved(HELD, HELD | change) == ([] if line is None else [line])
