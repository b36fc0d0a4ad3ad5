"""ACCURACY.md, whole, for a card of two cases."""

from __future__ import annotations

from perfmodel.accuracy.card_text import INTRODUCTION, accuracy_markdown, case_table, summary_line
from perfmodel.accuracy.cases import Card, CardCase
from perfmodel.report.text.prediction import rendered
from tests.accuracy.cards import CARD, case

TWO = Card(
    (
        case("a", "fp32", "tuning", 0.01, spread=0.002, scenario_digest="same"),
        case(
            "b",
            "fp32",
            "held-out",
            0.0,
            measured={"step": 2.0, "peak_allocated": 2.0**30},
            predicted={"step": 1.96, "peak_allocated": 2.0**30, "peak_reserved": 3.0},
            in_interval=False,
            scenario_digest="same",
        ),
    )
)
WHOLE = f"""\
{INTRODUCTION}

## Step time

Steady state: no synchronisation between steps.

|  | cases | mean | median | p95 | worst | worst case | bias |
|---|---|---|---|---|---|---|---|
| held-out | 1 | 2.00% | 2.00% | 2.00% | -2.00% | b | -2.00% |
| tuning | 1 | 1.00% | 1.00% | 1.00% | +1.00% | a | +1.00% |
| all | 2 | 1.50% | 1.50% | 1.95% | -2.00% | b | -0.50% |
| class fp32 | 2 | 1.50% | 1.50% | 1.95% | -2.00% | b | -0.50% |

## Peak memory allocated

|  | cases | mean | median | p95 | worst | worst case | bias |
|---|---|---|---|---|---|---|---|
| held-out | 1 | 0.00% | 0.00% | 0.00% | +0.00% | b | +0.00% |
| all | 1 | 0.00% | 0.00% | 0.00% | +0.00% | b | +0.00% |
| class fp32 | 1 | 0.00% | 0.00% | 0.00% | +0.00% | b | +0.00% |

## Every case

| case | class | split | measured | predicted | step | at measured host speed | forward | backward | optimizer | synced | allocated | reserved | without exact keys |
|---|---|---|---|---|---|---|---|---|---|---|---|---|---|
| a | fp32 | tuning | 1 s | 1.01 s | +1.00% | - |  |  |  |  |  |  |  |
| b | fp32 | held-out | 2 s | 1.96 s | -2.00% | - |  |  |  |  | +0.00% |  |  |

## Intervals

1 of 2 measured steps lie in the predicted 90 % interval, which is uncalibrated.

## Noise floor

Spread: standard deviation of a measurement's steps over their median, largest first.

| case | steps | spread |
|---|---|---|
| b | 12 | 1.00% |
| a | 12 | 0.20% |

Scenarios measured more than once, and how far their medians lie apart:

| cases | apart |
|---|---|
| a, b | 100.00% |

## Versions

| profile | torch | cases |
|---|---|---|
| toy-gpu | 2.11 | 2 |
"""


def test_whole_card() -> None:
    assert accuracy_markdown(TWO) == WHOLE


def test_what_would_have_been_chosen() -> None:
    def bucket(size: str, measured_s: float, predicted_s: float) -> CardCase:
        sides = {"measured": {"step": measured_s}, "predicted": {"step": predicted_s}}
        settings = {"parallelism.bucket_cap_mb": ("rest", size)}
        return case(f"gpt-large-ddp4-bucket{size}", "ddp", "tuning", 0.0, settings=settings, **sides)

    card = Card((bucket("1", 0.3, 0.2), bucket("25", 0.2, 0.21)))
    text = accuracy_markdown(card)
    assert "It does in 0 of 1 choices, and in 0 within 1% of the fastest." in text
    row = "| bucket_cap_mb | gpt-large-ddp4 | 25 | 1 | +50.00% | no | 25: 200 ms (210 ms), 1: 300 ms (200 ms) |"
    assert row in text.splitlines()


def test_communication_stands_beside_its_prediction() -> None:
    sides = {
        "measured": {"step": 0.2, "communication": 0.05, "exposed": 0.01, "overlap_ratio": 0.8},
        "predicted": {"step": 0.2, "communication": 0.06, "exposed": 0.012, "overlap_ratio": 0.85},
    }
    card = Card((case("ddp4", "ddp", "tuning", 0.0, **sides), case("alone", "fp32", "tuning", 0.0)))
    row = "| ddp4 | 50 ms | 60 ms | 10 ms | 12 ms | +1.00% | 80% | 85% |"
    lines = accuracy_markdown(card).splitlines()
    assert row in lines
    assert [line for line in lines if line.startswith("| alone | 50")] == []


def test_cases_that_the_grid_does_not_cover_are_counted() -> None:
    sides = {quantity: {"step": 1.0, "step_without_exact_keys": 1.0} for quantity in ("measured", "predicted")}
    card = Card((case("covered", "fp32", "tuning", 0.0, **sides), case("not", "fp32", "tuning", 0.0)))
    assert "1 cases have operators that no curve covers, and are left out." in accuracy_markdown(card)


def test_a_host_that_wandered_is_told() -> None:
    sides = {
        "measured": {"step": 1.0, "step_at_measured_host_speed": 1.0},
        "predicted": {"step": 1.2, "step_at_measured_host_speed": 1.02},
    }
    samples_s = {"a": (2e-3, 3e-3), "b": (4e-3,)}
    wandering = [case(name, "fp32", "tuning", 0.0, **sides, host_reference_s=each) for name, each in samples_s.items()]
    text = accuracy_markdown(Card((*wandering, case("without", "fp32", "tuning", 0.0))))
    assert (
        "Over all measurements of toy-gpu, that reference took 3 ms in the median, with a spread of 27.2%, "
        "from 2 ms to 4 ms."
    ) in text
    section = text.partition("## Step time at measured host speed")[2].partition("##")[0]
    assert "| all | 2 | 2.00% | 2.00% | 2.00% | +2.00% | a | +2.00% |" in section
    assert "| a | fp32 | tuning | 1 s | 1.2 s | +20.00% | +2.00% |" in text
    assert "| without | fp32 | tuning | 1 s | 1 s | +0.00% | - |" in text


def test_nothing_repeated() -> None:
    assert "No scenario was measured twice." in accuracy_markdown(CARD)


def test_summary_judges_the_held_out_cases() -> None:
    assert summary_line(CARD) == (
        "2 held-out cases: step time off by 4.00% in the median, 4.00% in the mean, +5.00% at worst (c)"
    )
    tuning = Card(tuple(found for found in CARD.cases if found.split == "tuning"))
    assert (
        summary_line(tuning) == "2 cases: step time off by 1.00% in the median, 1.00% in the mean, +1.00% at worst (a)"
    )


def test_case_table() -> None:
    assert rendered(case_table(TWO)).splitlines() == [
        "case                  measured  predicted   error",
        "a     step                 1 s     1.01 s  +1.0 %",
        "b     step                 2 s     1.96 s  -2.0 %",
        "      peak allocated     1 GiB      1 GiB  +0.0 %",
    ]


def test_memory_that_was_read_too_early_is_named() -> None:
    early = case("c", "ddp", "tuning", 0.0, predicted={"step": 1.0, "peak_allocated": 2.0})
    card = accuracy_markdown(Card((*TWO.cases, early)))
    words = "Left out, because memory was read in no step after the one in which DDP rebuilds its buckets: c."
    assert f"## Peak memory allocated\n\n{words}\n" in card
