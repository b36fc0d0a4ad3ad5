"""Estimates against the committed samples of an H200, and the table that is printed from them."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from bench.estimate_cases import cases
from bench.estimates import Row, blind_coverage, main, predicted, with_samples
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


# What the calls that name a constant are predicted to take of what they took: the least and the most.
MET = {
    "BARRIER_S": (0.90, 1.16),
    "CACHE_WAIT_S": (1.00, 1.00),
    "MEMORY_WAIT_S": (0.93, 1.06),
    "KERNEL_S": (0.64, 0.90),
    "LONG_SORT_S_PER_BYTE": (0.97, 1.53),
    "SHORT_SORT_S_PER_BYTE": (0.74, 0.74),
    "SELECT_S": (1.02, 1.57),
    "BATCHED_COLUMN_S": (0.80, 1.24),
    "COLUMN_S": (0.53, 1.92),
    "ITERATIONS": (0.68, 1.35),
    "SUBSTITUTED_COLUMN_S": (1.04, 1.04),
    "EFFICIENCY": (0.96, 0.96),
    "ADDITION_S": (0.47, 1.50),
}


def test_each_constant_comes_as_near_to_its_calls_as_known(rows: list[Row]) -> None:
    by_constant: dict[str, list[float]] = {}
    for row in rows:
        assert row.measured_s is not None
        for name in row.case.constants:
            by_constant.setdefault(name, []).append(row.cost.time_s / row.measured_s)
    assert all(hasattr(dependent_steps, name) for name in by_constant)
    assert {name: (round(min(times), 2), round(max(times), 2)) for name, times in by_constant.items()} == MET


@pytest.mark.parametrize(
    ("constant", "call", "documented"),
    [
        ("KERNEL_S", "cumsum.default(float32[4194304], 0)", 7.5e-6),
        ("KERNEL_S", "sort.default(float32[64,256], 1)", 4.4e-6),
        ("SHORT_SORT_S_PER_BYTE", "sort.default(float32[8192,2048], 1)", 6.1e-12),
    ],
)
def test_calls_imply_the_documented_value_of_a_constant(
    rows: list[Row], constant: str, call: str, documented: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The value with which the call would be predicted to take what it took; its time is linear in the constant."""
    (row,) = (row for row in rows if kernel_key(row.case.operation) == f"aten.{call}")
    chosen, device = getattr(dependent_steps, constant), load_profile(find_profile("h200-sxm-x4")).device
    before_s = dependent_steps.dependent_steps_s(row.case.operation, device)
    monkeypatch.setattr(dependent_steps, constant, 2 * chosen)
    slope = (dependent_steps.dependent_steps_s(row.case.operation, device) - before_s) / chosen
    assert row.measured_s is not None
    implied = chosen + (row.measured_s - row.cost.time_s) / slope
    assert implied == pytest.approx(documented, rel=0.01)


def test_the_documented_shares_lie_within_the_factor(rows: list[Row]) -> None:
    held_out = [row for row in rows if row.case.mark == "held-out"]
    assert (sum(row.is_within for row in held_out), len(held_out)) == (53, 57)
    tuning = [row for row in rows if row.case.mark == "tuning"]
    assert (sum(bool(row.case.constants) for row in tuning), len(tuning)) == (34, 42)


def test_both_rounds_count_as_they_were_predicted_at_first(rows: list[Row]) -> None:
    """Calls of the first round that rules were rewritten by count too, outside where the first rules had them."""
    shares = []
    for number in (1, 2):
        calls = [row for row in rows if row.case.blind_round == number]
        shares.append((sum(row.was_within for row in calls), len(calls)))
    assert shares == [(38, 45), (22, 24)]
    assert "all: 60 of 69" in blind_coverage(rows)
    assert sum(row.is_within for row in rows if row.case.blind_round is not None) == 65


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
    assert "round 1: 38 of 45" in found.output
    assert "round 2: 22 of 24" in found.output
    (gathered,) = (line for line in found.output.splitlines() if "gather.default(float32[8192,8192]" in line)
    assert gathered.split()[:2] == ["1730.10us", "379.61us"]
    assert "outside" in gathered
