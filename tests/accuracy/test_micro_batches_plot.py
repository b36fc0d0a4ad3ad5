"""Pictures of measured pipelines that differ in micro-batches."""

from __future__ import annotations

from pathlib import Path

import pytest

from perfmodel.accuracy.cases import Card, CardCase, Pair
from perfmodel.accuracy.choices import choices, settings_of
from perfmodel.accuracy.micro_batches_plot import plot_memory, plot_throughput, save_micro_batch_plots
from perfmodel.units import GIB
from tests.accuracy import test_card
from tests.report.pipelines import measured_pipeline, pipeline


def case(count: int, measured_s: float, predicted_s: float, split: str = "tuning", name: str = "gpt-1f1b") -> CardCase:
    section = {"stages": 2, "schedule": name, "micro_batches": count}
    return test_card.case(
        f"{name}-m{count}",
        "pp",
        split,
        0.0,
        settings=settings_of({"parallelism": {"strategy": "none", "pp": section}}),
        measured={"step": measured_s, "peak_allocated": 8.0 / count * GIB} if count != 4 else {"step": measured_s},
        predicted={"step": predicted_s, "peak_allocated": 4.0 * GIB},
    )


CASES = (case(16, 0.5, 0.5), case(2, 1.0, 0.8), case(4, 0.4, 0.4, "held-out"))


def lines(ax: object) -> dict[str, tuple[list[float], list[float]]]:
    """Places and heights by label."""
    found = ax.get_lines()
    return {line.get_label(): (line.get_xdata().tolist(), line.get_ydata().tolist()) for line in found}


def test_throughput_of_both_sides_in_order_of_micro_batches() -> None:
    (choice,) = choices(CASES)
    ax = plot_throughput(choice, samples=8)
    assert lines(ax) == {
        "measured": ([2, 4, 16], pytest.approx([8, 20, 16])),
        "predicted": ([2, 4, 16], pytest.approx([10, 20, 16])),
    }
    assert [label.get_text() for label in ax.get_xticklabels()] == ["2", "4 *", "16"]
    assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_xscale()) == ("micro-batches", "samples/s", "log")
    above = [(text.get_text(), text.xyann[1] > 0) for text in ax.texts]
    assert above == [("8", False), ("20", True), ("16", True), ("10", True), ("20", False), ("16", False)]


def test_memory_where_it_is_known() -> None:
    (choice,) = choices(CASES)
    assert lines(plot_memory(choice)) == {"measured": ([2, 16], [4, 0.5]), "predicted": ([2, 4, 16], [4, 4, 4])}


def test_a_picture_for_each_group(tmp_path: Path) -> None:
    others = (case(2, 1.0, 1.0, name="gpt-gpipe"), case(4, 1.0, 1.0, name="gpt-gpipe"), case(2, 1.0, 1.0, name="alone"))
    card = Card((*CASES, *others))
    pairs = [Pair(measured_pipeline(each.name), pipeline(), None) for each in card.cases]
    saved = save_micro_batch_plots(card, pairs, tmp_path)
    assert [path.name for path in saved] == ["micro-batches-gpt-1f1b.png", "micro-batches-gpt-gpipe.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n") for path in saved)
