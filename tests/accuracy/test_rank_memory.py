"""Peaks rank by rank: errors worked out by hand, and what the card says of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from perfmodel.accuracy.card import accuracy_card, load_card, save_card
from perfmodel.accuracy.card_text import accuracy_markdown
from perfmodel.accuracy.cases import Card, Pair
from perfmodel.accuracy.rank_memory import RankErrors, rank_errors, rank_memory_section, rank_peaks
from perfmodel.hardware.measurement import Measurement, RankSamples, StepMemory
from perfmodel.simulate.memory.walk import MemoryTimeline
from tests.accuracy.cards import measurement
from tests.report.synthetic import MIB, prediction

MEMORY = prediction().memory
assert MEMORY is not None


def rank(*peaks_mib: int) -> RankSamples:
    """Steps with these allocated peaks and twice as much reserved."""
    memory = tuple(
        StepMemory(allocated_before_bytes=0, peak_allocated_bytes=peak * MIB, peak_reserved_bytes=2 * peak * MIB)
        for peak in peaks_mib
    )
    return RankSamples(step_s=(39e-6,), synced_step_s=(43e-6,), phases_s={}, memory=memory)


def of_ranks(*ranks: RankSamples) -> Measurement:
    return measurement(ranks=ranks)


def predicted(allocated_mib: int, rebuild_step: int | None = None) -> MemoryTimeline:
    steady = StepMemory(
        allocated_before_bytes=0, peak_allocated_bytes=allocated_mib * MIB, peak_reserved_bytes=2 * allocated_mib * MIB
    )
    assert MEMORY is not None
    return replace(MEMORY, steady=steady, rebuild_step=rebuild_step)


def test_each_rank_is_held_against_its_own_prediction() -> None:
    found = rank_peaks(of_ranks(rank(99, 99, 10), rank(99, 99, 20)), (predicted(11), predicted(19)))
    assert found == {
        "peak_allocated": ((10 * MIB, 11 * MIB), (20 * MIB, 19 * MIB)),
        "peak_reserved": ((20 * MIB, 22 * MIB), (40 * MIB, 38 * MIB)),
    }
    assert rank_errors(found["peak_allocated"]) == RankErrors(2, pytest.approx(0.075), pytest.approx(0.1), 0)  # type: ignore[arg-type]


def test_a_rank_of_which_no_steady_step_was_read_is_left_out() -> None:
    memories = (predicted(11), predicted(30), predicted(20, rebuild_step=3))
    found = rank_peaks(of_ranks(rank(99, 99), rank(99, 99, 20), rank(99, 99, 10)), memories)
    assert found["peak_allocated"] == (None, (20 * MIB, 30 * MIB), None)
    assert rank_errors(found["peak_allocated"]) == RankErrors(1, pytest.approx(0.5), pytest.approx(0.5), 1)  # type: ignore[arg-type]
    assert rank_peaks(of_ranks(rank(99), rank()), memories[:2]) == {}


def test_one_rank_and_unpredicted_ranks_have_none() -> None:
    assert rank_peaks(measurement(), (predicted(11),)) == {}
    assert rank_peaks(of_ranks(rank(9, 9, 9), rank(9, 9, 9)), ()) == {}
    assert rank_errors(()) is None


def card() -> Card:
    known = replace(prediction(), rank_memories=(predicted(11), predicted(19), predicted(30)))
    ranks = of_ranks(rank(9, 9, 10), rank(9, 9, 20), rank(9, 9, 20))
    sharded = accuracy_card([Pair(ranks, known, None)])
    return Card((*sharded.cases, replace(sharded.cases[0], name="alone", rank_peaks={})))


def test_section() -> None:
    text = rank_memory_section(card())
    assert (
        "Allocated: 21.67% in the mean over 3 ranks, +50.00% at worst (rank 2 of toy). "
        "Reserved: 21.67% in the mean over 3 ranks, +50.00% at worst (rank 2 of toy)."
    ) in text
    assert text.splitlines()[4:] == [
        "| case | ranks | allocated mean | allocated worst | allocated of rank | reserved mean | reserved worst | reserved of rank |",
        "|---|---|---|---|---|---|---|---|",
        "| toy | 3 | 21.67% | +50.00% | 2 | 21.67% | +50.00% | 2 |",
    ]  # fmt: skip
    assert "\n## Peak memory by rank\n" in accuracy_markdown(card())
    assert rank_memory_section(Card(card().cases[1:])) == ""


def test_a_card_keeps_them(tmp_path: Path) -> None:
    _, path = save_card(card(), "", tmp_path / "card.md")
    kept = [(case.rank_peaks, case.layout) for case in load_card(path).cases]
    assert [list(peaks) for peaks, _ in kept] == [["peak_allocated", "peak_reserved"], []]
    assert kept[0][0]["peak_allocated"][1] == pytest.approx((20 * MIB, 19 * MIB), rel=1e-6)
    assert [layout for _, layout in kept] == [case.layout for case in card().cases]
