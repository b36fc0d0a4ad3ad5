"""The picture of a pipeline: boxes, numbers, shades and what stands below each other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from perfmodel.accuracy.cases import Pair
from perfmodel.report.plots.palette import OUTSIDE
from perfmodel.report.plots.pipeline import (
    KINDS,
    PALEST,
    plot_measured_pipeline,
    plot_pipeline,
    save_measured_pipelines,
    save_pipeline_plot,
)
from perfmodel.report.plots.prediction import save_plots
from perfmodel.units import MS, US
from tests.report.pipelines import TWO_STAGES, measured_pipeline, pipeline
from tests.report.synthetic import prediction

Box = tuple[int, float, float]


def boxes(ax: Axes, colour: str | tuple[float, ...]) -> list[Box]:
    """Row, start and end in microseconds of all boxes of a colour that are wider than nothing."""
    found = []
    for drawn in ax.collections:
        if np.allclose(drawn.get_facecolor()[0][:3], to_rgb(colour)):
            for path in drawn.get_paths():
                (left, low), (right, high) = path.vertices.min(axis=0), path.vertices.max(axis=0)
                if right - left > 1e-9:
                    start, end = (round(each * MS / US, 6) for each in (left, right))
                    found.append((round((low + high) / 2), start, end))
    return found


def test_a_row_for_each_rank_and_a_box_for_each_action() -> None:
    ax = Figure().subplots()
    assert plot_pipeline(pipeline(), ax) is ax
    assert boxes(ax, KINDS["F"][1]) == [(0, 2, 5), (0, 5, 7), (1, 6, 9), (1, 9, 12)]
    assert boxes(ax, KINDS["B"][1]) == [(0, 13, 17), (0, 19, 23), (1, 12, 16), (1, 16, 20)]
    assert boxes(ax, KINDS["optimizer"][1]) == [(0, 23, 24), (0, 24, 26), (1, 22, 24)]
    assert boxes(ax, OUTSIDE) == [(0, 0, 2), (1, 25, 27)]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["rank 0", "rank 1"]
    assert ax.yaxis_inverted()
    assert ax.get_xlim() == pytest.approx((0, 27e-3))
    assert ax.get_title() == (
        "predicted: step 25 us; ranks run forwards and backwards in 54.0 % of it, bubbles take 18.0 %"
    )


def test_boxes_bear_the_number_of_their_micro_batch_where_it_fits() -> None:
    texts = plot_pipeline(pipeline()).texts
    assert [text.get_text() for text in texts] == ["0", "1"] * 4
    assert [text.get_position() for text in texts[:2]] == [pytest.approx((3.5e-3, 0)), pytest.approx((6e-3, 0))]
    assert [text.get_color() for text in texts[:4]] == ["black", "black", "white", "white"]
    assert plot_pipeline(pipeline(), end_s=1.0).texts[:] == []


def test_later_stages_of_a_rank_are_paler() -> None:
    ax = plot_pipeline(pipeline(computed_stages=TWO_STAGES))
    pale = tuple((1 - PALEST) * part + PALEST for part in to_rgb(KINDS["F"][1]))
    assert (boxes(ax, KINDS["F"][1]), boxes(ax, pale)) == ([(0, 2, 5), (1, 6, 9)], [(0, 5, 7), (1, 9, 12)])
    assert [label.get_text() for label in ax.get_yticklabels()] == ["rank 0\nstages 0, 2", "rank 1\nstages 1, 3"]


def test_measured_actions() -> None:
    ax = plot_measured_pipeline(measured_pipeline())
    assert boxes(ax, KINDS["B"][1]) == [(0, 14, 18), (0, 20, 24), (1, 13, 17), (1, 17, 21)]
    assert boxes(ax, KINDS["optimizer"][1]) == [(0, 24, 26), (1, 21, 23)]
    assert boxes(ax, OUTSIDE) == [(1, 23, 26)]
    assert ax.get_title() == (
        "measured: step 30 us in the median; in the one drawn, ranks run forwards and backwards for 13 us"
    )


def test_predicted_stands_above_measured_on_the_same_axis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Axes] = []

    def keep(path: Path, title: str, size_inch: tuple[float, float], draw: list[object]) -> Path:
        drawn.extend(each(Figure(layout="constrained").subplots()) for each in draw)
        return path

    monkeypatch.setattr("perfmodel.report.plots.pipeline.save_figure", keep)
    save_pipeline_plot(pipeline(), tmp_path / "p.png", measured_pipeline())
    above, below = drawn
    assert (above.get_title()[:9], below.get_title()[:8]) == ("predicted", "measured")
    assert above.get_xlim() == below.get_xlim() == pytest.approx((0, 27e-3))
    (legend,) = above.figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "forward",
        "backward",
        "gradient scaling, optimizer",
        "idle",
        "the step before or after",
    ]


def test_files(tmp_path: Path) -> None:
    assert "pipeline.png" in [path.name for path in save_plots(replace(pipeline(), memory=None), tmp_path)]
    assert "pipeline.png" not in [path.name for path in save_plots(prediction(), tmp_path / "one")]
    assert (tmp_path / "pipeline.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_measured_pipelines_whose_actions_are_known_have_pictures(tmp_path: Path) -> None:
    pairs = [
        Pair(measured_pipeline("a (again)"), pipeline(), None),
        Pair(measured_pipeline("no actions", actions=False), pipeline(), None),
        Pair(measured_pipeline("no pipeline"), prediction(), None),
    ]
    assert [path.name for path in save_measured_pipelines(pairs, tmp_path)] == ["pipeline-a-again.png"]
