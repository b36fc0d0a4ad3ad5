"""The check of refusals fails where a sentence is about something else, or leaves a value out."""

from __future__ import annotations

import pytest

from perfmodel.errors import PerfModelError
from tests.refusals import refused

SENTENCE = "x.yaml: hardware.gpus must be 8 or 16 (got 12). Use `perfmodel sweep`."


@pytest.mark.parametrize(
    "named",
    [("hardware.gpus",), ("x.yaml", 12), ("hardware.gpus", 8, 16, 12), ("hardware.gpus", "perfmodel sweep")],
)
def test_what_the_sentence_names(named: tuple[object, ...]) -> None:
    with refused(*named):
        raise PerfModelError(SENTENCE)


@pytest.mark.parametrize(
    ("named", "failure"),
    [
        (("gpus",), "not about gpus"),
        (("hardware",), "not about hardware"),
        (("hardware.gpus", 1), "does not name [1]"),
        (("hardware.gpus", 12, "hardware.nodes"), "does not name ['hardware.nodes']"),
        ((8,), "not about 8"),
    ],
)
def test_what_it_does_not(named: tuple[object, ...], failure: str) -> None:
    with pytest.raises(AssertionError) as caught, refused(*named):
        raise PerfModelError(SENTENCE)
    assert failure in str(caught.value)


def test_a_sentence_without_a_rule_and_no_refusal_fail() -> None:
    with pytest.raises(AssertionError, match="no rule"), refused("hardware.gpus"):
        raise PerfModelError("hardware.gpus is 12.")
    with pytest.raises(pytest.fail.Exception), refused("hardware.gpus"):
        pass
