"""A few hundred mutated inputs, and every one that once failed."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.campaign.commands import Example, examples
from tests.campaign.running import run

FOUND = Path(__file__).parent / "found"


@settings(max_examples=150, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(examples())
def test_mutated_inputs_end_in_an_answer_or_one_sentence(example: Example) -> None:
    outcome = run(example)
    assert outcome.fault is None, outcome.output


@pytest.mark.parametrize("path", sorted(FOUND.glob("*.json")), ids=lambda path: path.stem)
def test_inputs_that_once_failed(path: Path) -> None:
    outcome = run(Example.from_json(path.read_text()))
    assert outcome.fault is None, outcome.output
