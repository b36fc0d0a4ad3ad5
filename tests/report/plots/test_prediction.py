"""The pictures: what stands on the Axes, and that every file is a PNG."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from perfmodel.accuracy.cases import Card
from perfmodel.accuracy.plots import plot_errors, plot_predicted_against_measured, save_accuracy_plots
from perfmodel.prediction.predict import predict
from perfmodel.report.plots import palette
from perfmodel.report.plots.memory import plot_memory
from perfmodel.report.plots.prediction import plot_breakdown, plot_kinds, save_plots
from perfmodel.report.plots.roofline import plot_roofline
from perfmodel.report.plots.timeline import busy_shares, plot_timeline
from perfmodel.scenario.scenario import ParallelismSection
from tests.accuracy.cards import CARD
from tests.prediction.toys import wired, with_ranks
from tests.report.pipelines import pipeline, with_larger_last
from tests.report.synthetic import prediction

PNG = b"\x89PNG\r\n\x1a\n"


def axes() -> Axes:
    return Figure().subplots()


def labels(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.get_yticklabels()]


def test_every_function_draws_on_the_axes_it_is_given() -> None:
    for draw in (plot_timeline, plot_breakdown, plot_kinds, plot_roofline, plot_memory):
        ax = axes()
        assert draw(prediction(), ax) is ax
        assert isinstance(draw(prediction()), Axes)


def test_timeline_rows() -> None:
    assert labels(plot_timeline(prediction())) == ["step", "phases", "host", "compute stream"]
    assert labels(plot_timeline(prediction("cpu"))) == ["step", "phases", "operators"]


def test_streams_beside_the_compute_stream_have_rows_of_their_own() -> None:
    curve = wired().interconnects["wires"].segments["all_reduce 4"]
    wires = wired(segments={f"{kind} 4": curve for kind in ("all_reduce", "all_gather", "reduce_scatter")})
    sharded = with_ranks(4).model_copy(update={"parallelism": ParallelismSection(dp=4, strategy="zero3")})
    found = predict(sharded, wires)
    rows = ["step", "phases", "host", "compute stream", "all gather", "reduce scatter", "copy streams"]
    assert labels(plot_timeline(found)) == rows
    assert isinstance(plot_memory(found), Axes)
    assert sum(use.count for use in found.kernels) == len(found.timeline.operation) + len(found.timeline.side)


def test_timeline_reaches_the_end_of_the_step() -> None:
    ax = plot_timeline(prediction())
    assert ax.get_xlim() == (0, pytest.approx(0.042))
    written = [text.get_text() for text in ax.texts if text.get_text()]
    assert written == ["one step: 38 us", "forward", "backward", "optimizer"]


def test_timeline_marks_the_step_on_the_device() -> None:
    """The host begins it 4 us before the device, which still runs the step before."""
    ax = plot_timeline(prediction())
    assert [line.get_xdata()[0] * 1e3 for line in ax.lines] == pytest.approx([4, 42])
    assert spans_us(ax, palette.OUTSIDE) == [(0, 4)]
    assert legend_of(ax)[-1] == "the step before"
    assert "the step before" not in legend_of(plot_timeline(prediction("cpu")))


def legend_of(ax: Axes) -> list[str]:
    legend = ax.get_legend()
    return [] if legend is None else [text.get_text() for text in legend.get_texts()]


def test_operators_too_short_for_a_column_still_fill_it_in_part() -> None:
    """Two operators of 1 us in the second of four columns, of 10 us each, and one over the third and fourth."""
    stretches_s = [(11e-6, 12e-6), (15e-6, 16e-6), (20e-6, 35e-6)]
    assert busy_shares(stretches_s, np.arange(5) * 10e-6) == pytest.approx([0, 0.2, 1, 0.5])
    assert busy_shares([], np.arange(3) * 1.0).tolist() == [0, 0]


def test_a_kind_has_one_colour_in_every_picture() -> None:
    shown = prediction()
    gemm, pointwise, optimizer = (to_rgb(palette.kernel_colour(kind)) for kind in ("gemm", "pointwise", "optimizer"))
    bars = {
        label: to_rgb(bar.get_facecolor()[:3])
        for label, bar in zip(labels(plot_kinds(shown)), plot_kinds(shown).patches, strict=True)
    }
    assert bars == {"gemm": gemm, "optimizer": optimizer, "pointwise": pointwise}
    points = {tuple(points.get_facecolor()[0][:3]) for points in plot_roofline(shown).collections}
    columns = {tuple(drawn.get_facecolor()[0][:3]) for drawn in plot_timeline(shown).collections}
    assert points == {gemm, pointwise, optimizer} <= columns
    phases = {to_rgb(palette.phase_colour(phase)) for phase in ("forward", "backward", "optimizer")}
    assert phases <= columns
    assert {to_rgb(bar.get_facecolor()[:3]) for bar in plot_breakdown(shown).patches} == {*phases, to_rgb(palette.HOST)}


def test_breakdown_leaves_out_what_is_nothing() -> None:
    ax = plot_breakdown(prediction())
    assert labels(ax) == ["forward", "backward", "optimizer", "waiting for the host"]
    assert [bar.get_width() for bar in ax.patches] == pytest.approx([0.012, 0.020, 0.005, 0.001])


def test_kinds_past_the_named_ones_are_one_bar() -> None:
    uses = prediction().kernels
    many = tuple(
        replace(uses[0], count=1, cost=uses[0].cost._replace(kind=f"kind {number}"), total_s=1e-6 * (20 - number))
        for number in range(10)
    )
    many = (*many, replace(many[-1], cost=many[-1].cost._replace(kind="last"), total_s=5e-6))
    ax = plot_kinds(prediction(kernels=many))
    assert labels(ax) == [f"kind {number}" for number in range(9)] + ["2 more kinds"]
    assert ax.patches[-1].get_width() == pytest.approx(0.011 + 0.005)
    assert ax.get_title() == "device time by kind of kernel, 160 us in all"
    assert ax.texts[0].get_text() == " 20 us, 12.5 %"  # of the device's time, not of the step
    assert ax.get_xlabel() == "ms; %: of the device time"


def test_roofline_points_and_roof() -> None:
    ax = plot_roofline(prediction())
    points = sorted(tuple(collection.get_offsets()[0]) for collection in ax.collections)
    assert points == [
        pytest.approx((64 / 768, 64 / 5e-6)),
        pytest.approx((64 / 768, 64 / 2e-6)),
        pytest.approx((1024 / 768, 1024 / 10e-6)),
    ]
    (roof,) = ax.lines
    x, y = roof.get_xdata(), roof.get_ydata()
    assert np.allclose(y, np.minimum(1e9, x * 1e9))


def test_roofline_without_a_datasheet_has_points_only() -> None:
    ax = plot_roofline(prediction("cpu"))
    assert (len(ax.collections), len(ax.lines)) == (3, 0)


def test_roofline_names_its_largest_kernels_and_explains_sizes() -> None:
    ax = plot_roofline(prediction())
    numbers = [text.get_text() for text in ax.texts if text.get_text()[:1].isdigit() and "/" not in text.get_text()]
    assert sorted(numbers) == ["1", "2", "3"]
    (listed,) = [text.get_text().splitlines()[1:] for text in ax.texts if text.get_text().startswith("largest kernels")]
    assert listed[0] == "1  mm(float32[8,8], float32[8,8]): 81 % , 10 % of the roof".replace(" ,", ",")
    assert [line[:1] for line in listed] == ["1", "2", "3"]
    assert legend_of(ax)[-3:] == [f"{share} % of the device's time" for share in (1, 5, 20)]


def test_kernels_that_stand_together_share_a_label() -> None:
    twice = tuple(replace(use, key=f"{use.key} again") for use in prediction().kernels[:1])
    ax = plot_roofline(prediction(kernels=(*prediction().kernels[:1], *twice)))
    assert "1, 2" in [text.get_text() for text in ax.texts]


def test_files(tmp_path: Path) -> None:
    saved = save_plots(prediction(), tmp_path)
    assert [path.name for path in saved] == ["timeline.png", "where-the-time-goes.png", "roofline.png", "memory.png"]
    assert all(path.read_bytes().startswith(PNG) for path in saved)
    on_cpu = save_plots(prediction("cpu"), tmp_path / "cpu")
    assert [path.name for path in on_cpu] == ["timeline.png", "where-the-time-goes.png", "roofline.png"]


def test_predicted_against_measured() -> None:
    ax = plot_predicted_against_measured(CARD)
    band, *classes = ax.collections
    drawn = {
        (*place, "open" if tuple(fill) == (1, 1, 1, 1) else "filled")
        for points in classes
        for place, fill in zip(points.get_offsets().tolist(), points.get_facecolors().tolist(), strict=False)
    }
    assert drawn == {
        (1000.0, 1000 * found.predicted["step"], "filled" if found.split == "held-out" else "open")
        for found in CARD.cases
    }
    legend = [text.get_text() for text in ax.get_legend().get_texts()]
    assert legend == ["±5 %", "one GPU", "open: tuning"]
    corners = band.get_paths()[0].vertices
    assert (corners[:, 1] / corners[:, 0]).min() == pytest.approx(0.95)
    assert (corners[:, 1] / corners[:, 0]).max() == pytest.approx(1.05)


def test_errors_stand_in_the_rows_of_their_classes() -> None:
    ax = plot_errors(CARD)
    counts = [sum(case.group == group for case in CARD.cases) for group in CARD.groups]
    assert labels(ax) == [f"{group} ({count})" for group, count in zip(CARD.groups, counts, strict=True)]
    drawn = [(line.get_xdata()[0], CARD.groups[round(line.get_ydata()[0])]) for line in ax.lines[1:]]
    expected = [(100 * (case.error("step") or 0.0), case.group) for case in CARD.cases]
    assert sorted(drawn) == [(pytest.approx(error), group) for error, group in sorted(expected)]
    assert ax.get_xlim() == pytest.approx((-5.5, 5.5))
    assert ax.get_xticks().tolist() == [-5, -2, 0, 2, 5]


def test_errors_of_memory_have_a_scale_of_their_own() -> None:
    """Peaks are predicted within a tenth of a percent, which would be one line on the scale of times."""
    near = [
        replace(case, measured={"peak_allocated": 1000.0}, predicted={"peak_allocated": 1000.5}) for case in CARD.cases
    ]
    ax = plot_errors(Card(tuple(near)), "peak_allocated")
    at = ax.transAxes.inverted().transform(ax.transData.transform([(0.0, 0), (0.05, 0)]))
    assert at[1][0] - at[0][0] > 0.05
    assert ax.get_xticks().tolist() == [-5, -1, -0.3, -0.1, -0.05, 0, 0.05, 0.1, 0.3, 1, 5]


def test_accuracy_files(tmp_path: Path) -> None:
    saved = save_accuracy_plots(CARD, tmp_path)
    assert [path.name for path in saved] == ["step.png", "step-errors.png"]
    assert all(path.read_bytes().startswith(PNG) for path in saved)
    assert save_accuracy_plots(Card(()), tmp_path) == []


def spans_us(ax: Axes, colour: str) -> list[tuple[float, float]]:
    """Start and end of the bars of a colour."""
    found = []
    for bars in ax.collections:
        if len(bars.get_facecolor()) and np.allclose(bars.get_facecolor()[0][:3], to_rgb(colour)):
            corners = [path.vertices[:, 0] for path in bars.get_paths()]
            found += [(round(1e3 * x.min(), 6), round(1e3 * x.max(), 6)) for x in corners]
    return [each for each in found if each[0] < each[1]]


def test_what_a_message_waits_is_no_communication() -> None:
    ax = plot_timeline(pipeline())
    assert labels(ax) == ["step", "phases", "host", "compute stream", "messages"]
    assert spans_us(ax, palette.COMMUNICATION) == [(6, 7), (11, 12)]
    assert spans_us(ax, palette.WAITING_FOR_RANK) == [(7, 11)]
    assert legend_of(ax)[1:3] == ["communication", "waiting for another rank"]
    assert "communication" not in legend_of(plot_timeline(prediction()))


def test_phases_of_a_pipeline_end_with_their_operators() -> None:
    """The first rank's second forward ends at 6, its backward begins at 12."""
    drawn = {round(text.get_position()[0] * 1e3, 6): text.get_text() for text in plot_timeline(pipeline()).texts}
    assert drawn[5] == "F"
    assert drawn[14] == "backward"
    assert drawn[20] == "backward"


def test_pictures_of_a_pipeline_name_their_rank() -> None:
    shown = replace(with_larger_last(), shown_rank=1)
    assert plot_timeline(shown).get_title().startswith("rank 1: step 25 us; ")
    assert plot_roofline(shown).get_title().startswith("rank 1: ")
    assert plot_breakdown(shown).get_title() == "where the step's time goes on rank 1"
    assert plot_kinds(shown).get_title().startswith("device time by kind of kernel on rank 1, ")
    for draw in (plot_timeline, plot_roofline, plot_breakdown, plot_kinds, plot_memory):
        assert "rank" not in draw(prediction()).get_title()


def test_memory_is_of_the_rank_that_takes_most() -> None:
    known = replace(with_larger_last(), rank_timelines=(prediction().timeline,) * 2)  # of the program that allocates
    title = " ".join(plot_memory(known).get_title().split())
    assert title.startswith("rank 1: peak 8 MiB allocated, 20 MiB reserved, 23 MiB of ")
    sharded = replace(prediction(), memory=known.rank_memories[0], rank_memories=known.rank_memories)
    title = plot_memory(sharded).get_title()
    assert title.startswith("rank 0: peak 8 MiB allocated")
    assert title.endswith("\nrank 1 takes most")
