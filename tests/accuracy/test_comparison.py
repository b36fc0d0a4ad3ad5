"""Measurements are predicted one at a time, and what is kept of them is what cards and pictures show."""

import json
import shutil

import pytest

from perfmodel.accuracy import comparison
from perfmodel.accuracy.card import accuracy_card
from perfmodel.accuracy.comparison import predict_measured
from perfmodel.errors import PerfModelError
from perfmodel.scenario.scenario import Scenario
from tests.places import ROOT

MEASURED = ROOT / "results/one-gpu-node/gpt-small-amp.json"


@pytest.fixture
def results(tmp_path):
    for name in ("a", "b"):
        shutil.copy(MEASURED, tmp_path / f"{name}.json")
        data = json.loads(MEASURED.read_text())
        (tmp_path / f"{name}.json").write_text(json.dumps(data | {"name": name}))
    return tmp_path


def test_a_measurement_is_predicted_when_it_is_asked_for(results, monkeypatch):
    asked = []
    predict = comparison.predict

    def counted(scenario: Scenario, *rest, **options):
        asked.append(scenario)
        return predict(scenario, *rest, **options)

    monkeypatch.setattr(comparison, "predict", counted)
    pairs = predict_measured(results)
    assert asked == []
    assert next(pairs).measurement.name == "a"
    of_one = len(asked)
    assert next(pairs).measurement.name == "b"
    assert len(asked) == 2 * of_one > 0


def test_what_is_kept_is_what_a_card_shows(results):
    pairs = list(predict_measured(results))
    assert [pair.prediction.memory.history for pair in pairs] == [(), ()]
    assert "instructions" not in vars(pairs[0].prediction.program)
    first, second = accuracy_card(pairs).cases
    assert first.predicted == second.predicted
    assert first.predicted["peak_allocated"] > 0 and first.predicted["step_without_exact_keys"] > 0
    assert len(pairs[0].prediction.program.instructions.kind) > 0  # worked out again


def test_a_card_among_the_measurements_is_left_out(results):
    (results / "cards").mkdir()
    shutil.copy(ROOT / "ACCURACY.json", results / "cards" / "ACCURACY.json")
    assert [pair.measurement.name for pair in predict_measured(results)] == ["a", "b"]
    with pytest.raises(PerfModelError, match=r"must hold measurement files \(got none\)"):
        predict_measured(results / "cards")


def test_too_many_measurements_are_refused_before_they_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(comparison, "MOST_MEASUREMENTS", 2)
    for number in range(3):
        (tmp_path / f"{number}.json").write_text("no measurement")
    with pytest.raises(PerfModelError, match=r"at most 2 measurement files \(got 3\)"):
        predict_measured(tmp_path)
