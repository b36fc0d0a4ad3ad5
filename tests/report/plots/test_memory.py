"""The picture of memory: what is drawn, where the refused request is marked, and that no words cover data."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from perfmodel.prediction.prediction import Prediction
from perfmodel.program.program import Program, single_device_program
from perfmodel.report.plots import palette
from perfmodel.report.plots.memory import plot_memory
from perfmodel.simulate.memory.walk import simulate_memory
from perfmodel.trace.trace import EventKind
from perfmodel.units import format_bytes
from tests.builders import step_events
from tests.report.synthetic import MIB, prediction, profile, trace


def test_memory_says_its_peak_and_what_the_device_can_reserve() -> None:
    ax = plot_memory(prediction())
    outside_bytes = prediction().memory.outside_bytes
    limit = next(line for line in ax.lines if line.get_color() == palette.CAPACITY)
    assert list(limit.get_ydata()) == [pytest.approx((64 * MIB - outside_bytes) / 2**30)] * 2
    said = [line.get_label() for line in ax.lines]
    assert "peak 8 MiB allocated" in said
    assert f"this device can reserve {format_bytes(64 * MIB - outside_bytes)}" in said
    assert not ax.texts  # which would stand on what is drawn
    assert all(line.get_color() != "white" for line in ax.lines)
    assert [text.get_text() for text in ax.get_legend().get_texts()][-3:] == ["reserved", *said[1:]]


def test_a_limit_far_above_is_said_and_does_not_squeeze_the_picture() -> None:
    device = profile().device.model_copy(update={"memory_bytes": 6400 * MIB})
    ax = plot_memory(prediction(profile=profile().model_copy(update={"device": device})))
    assert all(line.get_color() != palette.CAPACITY for line in ax.lines)
    assert any(text.get_text().startswith("↑ this device can reserve 6.2") for text in ax.texts)
    assert ax.get_ylim()[1] < 2 * 20 * MIB / 2**30


def test_memory_by_kind() -> None:
    ax = plot_memory(prediction())
    named = [text.get_text() for text in ax.get_legend().get_texts()]
    assert named[:4] == ["parameter", "gradient", "activation", "reserved"]
    reserved, _, peak = ax.lines
    assert reserved.get_ydata().max() == pytest.approx(20 * MIB / 2**30)
    assert (peak.get_xdata()[0], peak.get_ydata()[0]) == (pytest.approx(0.0105), pytest.approx(8 * MIB / 2**30))


def on_device_of(memory_bytes: int, program: Program) -> Prediction:
    """Return the prediction of this program on a device that has so much memory."""
    device = profile().device.model_copy(update={"memory_bytes": memory_bytes})
    small = profile().model_copy(update={"device": device})
    return prediction(program=program, profile=small, memory=simulate_memory(program, small))


def short_of_memory_when_steady() -> Prediction:
    """Return the prediction of a step whose gradient of 30 MiB, which the first step lacks, is refused in backward."""
    steady = trace().steady
    larger = np.where((steady.kind == EventKind.ALLOC) & (steady.a == 2), 30 * MIB, steady.b)
    light = step_events(("forward", 0, [(EventKind.OP, 0, -1)]))
    program = single_device_program(replace(trace(), first=light, steady=replace(steady, b=larger)))
    return on_device_of(40 * MIB, program)


def title_of(ax: Axes) -> str:
    return " ".join(ax.get_title().split())


def test_memory_that_does_not_fit_is_drawn_past_the_devices_limit() -> None:
    stopped = on_device_of(10 * MIB, prediction().program)
    ax = plot_memory(stopped)
    title = title_of(ax)
    assert title.startswith("does not fit, needs at least 20 MiB: 10 MiB more than the device's 10 MiB")
    assert title.endswith("what a later step would hold with enough memory")
    reserved, limit, peak = ax.lines
    assert list(limit.get_ydata()) == [(10 * MIB - stopped.memory.outside_bytes) / 2**30] * 2
    whole, _, whole_peak = plot_memory(prediction()).lines
    assert reserved.get_xydata().tolist() == whole.get_xydata().tolist()
    assert peak.get_xydata().tolist() == whole_peak.get_xydata().tolist()


def test_a_request_refused_outside_the_step_that_is_drawn_is_said_in_the_title_alone() -> None:
    ax = plot_memory(on_device_of(10 * MIB, prediction().program))
    assert "refused (not in the step drawn): before step 1" in title_of(ax)
    assert not [line for line in ax.lines if line.get_marker() == "X"]


def test_a_request_refused_in_the_step_that_is_drawn_has_a_cross_where_it_is_made() -> None:
    """It follows the third launch, at 9 us, and comes before the fourth, at 12 us; the last that was served, 4.5 us."""
    stopped = short_of_memory_when_steady()
    assert (stopped.memory.stopped_in, stopped.memory.place.phase) == ("steady", "backward")
    ax = plot_memory(stopped)
    reserved, limit, dot, cross = ax.lines
    assert limit.get_zorder() < reserved.get_zorder() < cross.get_zorder() < dot.get_zorder()
    assert cross.get_markersize() > dot.get_markersize()
    assert (cross.get_marker(), cross.get_label()) == ("X", "refused request")
    assert cross.get_xdata()[0] == pytest.approx(0.0105)
    assert cross.get_ydata()[0] == pytest.approx((40 * MIB - stopped.memory.outside_bytes) / 2**30)
    assert "refused: step 2, backward, micro-batch 0" in title_of(ax)
    assert ax.get_legend().get_texts()[-1].get_text() == "refused request"


def test_a_device_too_small_for_its_own_context_can_reserve_nothing() -> None:
    constants = profile().memory.model_copy(update={"context_bytes": 30 * MIB})
    small = profile().model_copy(
        update={"device": profile().device.model_copy(update={"memory_bytes": 10 * MIB}), "memory": constants}
    )
    program = prediction().program
    ax = plot_memory(prediction(profile=small, memory=simulate_memory(program, small)))
    limit = next(line for line in ax.lines if line.get_color() == palette.CAPACITY)
    assert (list(limit.get_ydata()), limit.get_label()) == ([0.0, 0.0], "this device can reserve 0 B")


@pytest.mark.parametrize("size_inch", [(6.4, 4.8), (13.0, 7.5)])
def test_title_and_legend_lie_within_the_picture(size_inch: tuple[float, float]) -> None:
    figure = Figure(figsize=size_inch, layout="constrained")
    ax = plot_memory(short_of_memory_when_steady(), figure.subplots())
    figure.draw_without_rendering()
    for artist in (ax.title, ax.get_legend()):
        box = artist.get_window_extent()
        assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1
        assert figure.bbox.y0 <= box.y0 < box.y1 <= figure.bbox.y1


def test_memory_of_a_cpu_is_refused() -> None:
    with pytest.raises(ValueError, match="no memory timeline"):
        plot_memory(prediction("cpu"))
