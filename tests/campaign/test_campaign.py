"""Sixty mutated inputs, and every one that once failed. bench/campaign.py runs thousands, with tracing."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.campaign.commands import Example, examples
from tests.campaign.documents import edited
from tests.campaign.running import run

FOUND = Path(__file__).parent / "found"
LOADED_FIRST = ("calibrate.session", "calibrate.interconnect.session", "validate.run")  # what running.py replaces


@pytest.fixture
def nothing_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracing takes seconds an example. Shipped traces are there; of others perfmodel says what they need."""
    for name in LOADED_FIRST:
        importlib.import_module(name)
    for name in ("step", "optimizer", "stage"):
        assert find_spec(f"perfmodel.tracing.{name}") is not None
        monkeypatch.setitem(sys.modules, f"perfmodel.tracing.{name}", None)


@pytest.mark.usefixtures("nothing_is_traced")
@settings(max_examples=60, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(examples())
def test_mutated_inputs_end_in_an_answer_or_one_sentence(example: Example) -> None:
    outcome = run(example)
    assert outcome.fault is None, outcome.output


@pytest.mark.parametrize("path", sorted(FOUND.glob("*.json")), ids=lambda path: path.stem)
def test_inputs_that_once_failed(path: Path) -> None:
    outcome = run(Example.from_json(path.read_text()))
    assert outcome.fault is None, outcome.output


def test_edits_share_no_values() -> None:
    value = {"a": 1}
    tree = edited({"x": 0}, ((["x"], "set", value), (["x"], "add", ["again", value])))
    assert (tree, value) == ({"x": {"a": 1, "again": {"a": 1}}}, {"a": 1})
