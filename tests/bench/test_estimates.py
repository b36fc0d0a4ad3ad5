"""Estimates against the committed samples of an H200, and the table that is printed from them."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from bench.estimate_cases import cases
from bench.estimates import Row, main, predicted, with_samples
from perfmodel.cost.kernels import dependent_steps
from perfmodel.hardware.profile import find_profile, load_profile
from perfmodel.trace.kernel_key import kernel_key
from tests.places import ROOT

MEASURED = ROOT / "bench" / "results" / "estimates-h200.json"


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    profile = load_profile(find_profile("h200-sxm-x4"))
    return with_samples(predicted(profile, cases()), json.loads(MEASURED.read_text()))


def test_every_call_was_measured_and_none_is_listed_twice(rows: list[Row]) -> None:
    calls = json.loads(MEASURED.read_text())["calls"]
    keys = [kernel_key(row.case.operation) for row in rows]
    assert sorted(keys) == sorted(calls)
    assert all(len(row.samples_s) >= 3 for row in rows)
    assert all(calls[key]["mark"] == row.case.mark for key, row in zip(keys, rows, strict=True))
    assert {row.cost.source for row in rows} == {"estimated"}


def test_calls_that_constants_come_from_lie_within_the_factor(rows: list[Row]) -> None:
    assert [row.case.operation.name for row in rows if row.case.mark == "tuning" and not row.is_within] == []


def test_each_constant_is_met_by_a_call_that_it_comes_from(rows: list[Row]) -> None:
    by_constant: dict[str, list[float]] = {}
    for row in rows:
        assert row.measured_s is not None
        for name in row.case.constants:
            by_constant.setdefault(name, []).append(row.cost.time_s / row.measured_s)
    assert len(by_constant) >= 9
    for name, times in by_constant.items():
        assert hasattr(dependent_steps, name)
        assert min(abs(each - 1) for each in times) < 0.3, name


def test_the_documented_share_of_the_held_out_calls_lies_within_the_factor(rows: list[Row]) -> None:
    held_out = [row for row in rows if row.case.mark == "held-out"]
    assert (sum(row.is_within for row in held_out), len(held_out)) == (53, 57)


def test_predictions_are_those_made_before_held_out_calls_were_measured(rows: list[Row]) -> None:
    """A constant that is changed asks for other held-out calls."""
    calls = json.loads(MEASURED.read_text())["calls"]
    for row in rows:
        if row.case.mark == "held-out":
            before_s = calls[kernel_key(row.case.operation)]["predicted_s"]
            assert row.cost.time_s == pytest.approx(before_s, rel=0.02), row.case.operation.name


def test_the_table_is_printed_without_a_device() -> None:
    found = CliRunner().invoke(main, ["--measured", str(MEASURED)])
    assert found.exit_code == 0
    assert "NVIDIA H200" in found.output
    assert "within the factor: 53 of 57" in found.output
    (gathered,) = (line for line in found.output.splitlines() if "gather.default(float32[8192,8192]" in line)
    assert gathered.split()[:2] == ["1730.10us", "379.61us"]
    assert "outside" in gathered
