"""The accuracy card: errors, statistics and the check against an earlier card, all worked out by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from perfmodel.accuracy.card import (
    accuracy_card,
    card_json,
    load_card,
    refuse_worse,
    save_card,
    worsened,
)
from perfmodel.accuracy.cases import Card, Pair, Statistics
from perfmodel.errors import PerfModelError
from perfmodel.hardware.measurement import Measurement
from tests.accuracy.cards import CARD, case, measurement
from tests.report.pipelines import measured_pipeline, pipeline
from tests.report.synthetic import prediction


def pair(found: Measurement) -> Pair:
    return Pair(found, prediction(), 50e-6)


def test_the_peak_of_a_step_that_rebuilds_is_no_steady_peak() -> None:
    known = prediction()
    for rebuild_step, is_known in [(2, True), (3, False)]:
        memory = replace(known.memory, rebuild_step=rebuild_step)  # type: ignore[type-var]
        (found,) = accuracy_card([Pair(measurement(), replace(known, memory=memory), None)]).cases
        assert [f"peak_{kind}" in found.measured for kind in ("allocated", "reserved")] == [is_known, is_known]


def test_a_pair_becomes_a_case() -> None:
    (found,) = accuracy_card([pair(measurement())]).cases
    errors = {quantity: found.error(quantity) for quantity in found.measured}
    assert errors == {
        "step": pytest.approx(38 / 39.5 - 1),
        "synced_step": pytest.approx(0),
        "forward": pytest.approx(0),
        "backward": pytest.approx(20 / 25 - 1),
        "optimizer": pytest.approx(0),
        "peak_allocated": pytest.approx(8 / 10 - 1),
        "peak_reserved": pytest.approx(0),
        "step_without_exact_keys": pytest.approx(50 / 39.5 - 1),
    }
    assert found.spread == pytest.approx(1 / 39.5)
    assert (found.steps, found.profile, found.in_interval) == (3, "toy-gpu", True)
    assert found.versions == {"gpu": "Toy GPU", "driver": "580", "torch": "2.11"}


def test_phases_of_a_pipeline_are_those_of_the_first_rank_whichever_is_shown() -> None:
    """As of a measurement, whose columns are the first rank's."""
    found = []
    for rank in (0, 1):
        shown = replace(pipeline(), timeline=pipeline().rank_timelines[rank], shown_rank=rank)
        (case,) = accuracy_card([Pair(measured_pipeline(), shown, None)]).cases
        found.append(case.predicted["optimizer"])
    own = {span.phase: span.duration_s for span in pipeline().rank_timelines[0].phases}
    assert found == [pytest.approx(own["zero_grad"] + own["optimizer"])] * 2


def test_a_step_that_the_grid_does_not_cover() -> None:
    (found,) = accuracy_card([replace(pair(measurement()), step_without_exact_keys_s=None)]).cases
    assert found.error("step_without_exact_keys") is None


def test_a_step_at_the_host_speed_beside_it() -> None:
    found = measurement(host_reference_s=(2e-3, 3e-3))
    (known,) = accuracy_card([replace(pair(found), step_at_measured_host_s=79e-6)]).cases
    assert known.error("step") == pytest.approx(38 / 39.5 - 1)
    assert known.error("step_at_measured_host_speed") == pytest.approx(1.0)
    card = Card((known, replace(known, name="b", profile="other"), CARD.cases[0]))
    assert card.host_references() == {"toy-gpu": [2e-3, 3e-3], "other": [2e-3, 3e-3]}
    (unknown,) = accuracy_card([pair(found)]).cases
    assert unknown.error("step_at_measured_host_speed") is None


def test_what_was_not_measured_has_no_error() -> None:
    bare = measurement(phases_s={"forward": (12e-6,)}, memory=())
    (found,) = accuracy_card([pair(bare)]).cases
    assert [found.error(quantity) for quantity in ("backward", "optimizer", "peak_allocated", "peak_reserved")] == [
        None
    ] * 4


def test_a_measurement_outside_the_interval() -> None:
    (found,) = accuracy_card([pair(measurement(step_s=(41e-6,) * 3))]).cases
    assert not found.in_interval


def test_statistics() -> None:
    assert CARD.statistics("step") == Statistics(
        cases=4,
        mean=pytest.approx(0.025),  # type: ignore[arg-type]
        median=pytest.approx(0.02),  # type: ignore[arg-type]
        p95=pytest.approx(0.03 + 0.85 * 0.02),  # type: ignore[arg-type]  # at 2.85 of 0.01 0.01 0.03 0.05
        worst=pytest.approx(0.05),  # type: ignore[arg-type]
        worst_case="c",
        bias=pytest.approx(0.005),  # type: ignore[arg-type]
    )
    held_out = CARD.statistics("step", split="held-out")
    assert held_out is not None
    assert (held_out.cases, held_out.bias) == (2, pytest.approx(0.01))
    fp32 = CARD.statistics("step", group="fp32")
    assert fp32 is not None
    assert (fp32.worst, fp32.worst_case) == (pytest.approx(-0.03), "b")
    assert CARD.statistics("forward") is None


def test_several_profiles_have_a_row_each() -> None:
    assert list(CARD.rows("step")) == ["held-out", "tuning", "all", "class amp", "class fp32"]
    other = case("e", "amp", "tuning", 0.2, profile="other-gpu")
    rows = Card((*CARD.cases, other)).rows("step")
    assert list(rows)[-2:] == ["profile other-gpu", "profile toy-gpu"]
    assert (rows["profile other-gpu"].cases, rows["profile other-gpu"].worst) == (1, pytest.approx(0.2))
    assert rows["profile toy-gpu"] == CARD.rows("step")["all"]
    assert Card((other,)).rows("peak_allocated") == {}


def test_repeated_measurements() -> None:
    twice = [measurement("toy"), measurement("toy-again"), measurement("other", scenario={"precision": "bf16"})]
    groups = [[found.name for found in cases] for _, cases in accuracy_card(map(pair, twice)).repeated()]
    assert groups == [["toy", "toy-again"]]


def test_names_must_differ() -> None:
    with pytest.raises(PerfModelError, match=r"names of measurements must differ \(got 'toy' twice\)"):
        accuracy_card([pair(measurement()), pair(measurement())])


def test_a_class_may_worsen_by_no_more_than_a_third_of_a_point() -> None:
    def card(error: float) -> Card:
        return Card((case("a", "fp32", "tuning", error), case("b", "amp", "tuning", 0.0)))

    assert worsened(card(0.0129), card(0.01)) == []
    assert worsened(card(-0.0132), card(0.01)) == ["step of fp32: mean error 1.32%, was 1.00%"]
    assert worsened(card(0.0), card(0.05)) == []


def test_a_class_may_not_vanish() -> None:
    without = Card(tuple(found for found in CARD.cases if found.group != "amp"))
    assert worsened(without, CARD) == ["step of amp: no case is left (it had 2)"]


def test_memory_is_checked_too() -> None:
    def card(predicted: float) -> Card:
        sides = {"measured": {"peak_allocated": 100.0}, "predicted": {"peak_allocated": predicted}}
        return Card((case("a", "fp32", "tuning", 0.0, **sides),))

    assert worsened(card(102.0), card(101.0)) == [
        "peak allocated of all cases: mean error 2.00%, was 1.00%",
        "peak allocated of fp32: mean error 2.00%, was 1.00%",
    ]


def test_card_file(tmp_path: Path) -> None:
    card = Card((replace(CARD.cases[0], host_reference_s=(2e-3, 3e-3)), *CARD.cases[1:]))
    paths = save_card(card, "text", tmp_path / "ACCURACY.md")
    assert [path.name for path in paths] == ["ACCURACY.md", "ACCURACY.json"]
    assert (paths[0].read_text(), load_card(paths[1])) == ("text", card)
    refuse_worse(card, load_card(paths[1]), paths[1])
    worse = Card((replace(CARD.cases[0], predicted={"step": 1.5}), *CARD.cases[1:]))
    with pytest.raises(
        PerfModelError, match=r"no class may get worse by more than 0\.3 points \(got step of all cases"
    ):
        refuse_worse(worse, load_card(paths[1]), paths[1])
    with pytest.raises(PerfModelError, match=r"an accuracy card must end in \.md"):
        save_card(CARD, "text", tmp_path / "card.txt")


def changed(**keys: object) -> dict[str, object]:
    """A card of one case with these keys of the case."""
    data = json.loads(json.dumps(card_json(CARD)))
    return data | {"cases": [data["cases"][0] | keys]}


def test_card_summary() -> None:
    assert card_json(CARD)["summary"]["step"]["class amp"] == {
        "cases": 2,
        "mean": 0.03,
        "median": 0.03,
        "p95": 0.048,
        "worst": 0.05,
        "worst_case": "c",
        "bias": 0.02,
    }


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"version": 2, "cases": []}, "version must be at most 1"),
        ({"version": 1}, r"cases must be given\. Write it again"),
        ({"version": 1, "cases": [{"name": "a"}]}, r"cases\.0\.\w+ must be given\. Write it again"),
        ({"version": 1, "cases": []}, "cases must"),
        ({"version": 1, "cases": 3}, r"cases must be a list \(got 3\)"),
        (changed(measured={"step": "long"}), r"cases\.0\.measured\.step must be a number \(got 'long'\)"),
        (changed(measured={"step": "nan"}), r"cases\.0\.measured\.step must be a finite number"),
        (changed(predicted=[]), r"cases\.0\.predicted must be "),
        (changed(name=None), r"cases\.0\.name must be a string"),
        (changed(host_reference_s=1.0), r"cases\.0\.host_reference_s must be a list"),
        (changed(settings={"precision": ["digest"]}), r"cases\.0\.settings\.precision must"),
        (changed(layout={"work": "digest"}), r"cases\.0\.layout\.place must be given"),
        (changed(rank_peaks={"peak_allocated": [[1]]}), r"cases\.0\.rank_peaks\.peak_allocated\.0"),
        (changed(spred=0.1), r"cases\.0\.spred must be"),
        ([], "an accuracy card must be a JSON object"),
    ],
)
def test_refused_cards(tmp_path: Path, data: object, sentence: str) -> None:
    path = tmp_path / "ACCURACY.json"
    path.write_text(json.dumps(data))
    with pytest.raises(PerfModelError, match=sentence):
        load_card(path)


def test_new_measurements_make_nothing_worse() -> None:
    before = Card((case("a", "fp32", "tuning", 0.01),))
    more = (case("a (node-1)", "fp32", "tuning", 0.01), case("b", "fp32", "tuning", 0.5, measured={"step": 7.0}))
    assert worsened(Card(more), before) == []
