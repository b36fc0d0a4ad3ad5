"""The picture of a step's timeline: what host and device do when, and which stretch of it the step is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from perfmodel.prediction.pipeline_ranks import computed_stretches, titled_of_rank
from perfmodel.prediction.prediction import Prediction
from perfmodel.program.program import COMPUTE
from perfmodel.report.operators import use_by_operation
from perfmodel.report.plots import palette
from perfmodel.report.plots.canvas import axes_or_new, legend_below, wrapped
from perfmodel.simulate.timeline import PhaseSpan, SideKernel, merged
from perfmodel.units import MS, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LONGEST_TITLE = 100  # letters of a line
COLUMNS = 720  # along the axis, each about two pixels wide
HALF_ROW = 0.38  # of the distance of rows
WHOLE_NAME = 0.1  # of the step; a shorter phase has room for its initial only,
INITIAL = 0.015  # and a still shorter one for nothing
LEAST_WIDTH = 0.8  # points, of what would be narrower than a pixel
BEFORE = "the step before"

_Stretches = dict[str, list[tuple[float, float]]]  # start and end in seconds, by colour


def plot_timeline(prediction: Prediction, ax: Axes | None = None) -> Axes:
    """The step on the clocks of host and device: a row for the step, its phases, the host, and each stream.

    Notes
    -----
    Most operators are shorter than a pixel is wide. In their rows, the height of a column is the share of its time in
    which an operator runs, stacked by families of kernels.
    """
    ax = axes_or_new(ax)
    phases, ends_s = prediction.timeline.phases, prediction.timeline.end_s[-1:].tolist()
    end_s = max([*(span.end_s for span in phases), *ends_s], default=MS)
    rows = list(_rows(prediction, np.linspace(0.0, end_s, COLUMNS + 1)))
    for row, (_, draw) in enumerate(rows):
        draw(ax, row)
    ax.set_yticks(range(len(rows)), [name for name, _ in rows])
    ax.set_ylim(len(rows) - 0.5, -0.6)
    ax.set_xlim(0, end_s / MS)
    column = format_seconds(float(f"{end_s / COLUMNS:.2g}"))
    ax.set_xlabel(f"ms since the host began the step (height of a row's columns: busy share of {column})")
    title = titled_of_rank(prediction, f"step {format_seconds(prediction.step_time_s)}; {prediction.bottleneck}")
    ax.set_title(wrapped(title, LONGEST_TITLE))
    legend_below(ax, _legend(prediction))
    return ax


def _rows(prediction: Prediction, edges_s: np.ndarray) -> Iterator[tuple[str, Callable[[Axes, int], None]]]:
    """Return the name of each row and the function that draws it, from above; ``edges_s`` are those of the columns."""
    timeline, on_device = prediction.timeline, prediction.profile.device.kind == "cuda"
    yield "step", partial(_draw_step, prediction)
    yield "phases", partial(_draw_phases, prediction)
    if on_device:
        calls = zip(timeline.host_start_s.tolist(), timeline.issue_s.tolist(), strict=True)
        yield "host", partial(_draw_busy, {palette.HOST: list(calls)}, edges_s)
    own = timeline.launches[: len(timeline.operation)]
    yield "compute stream" if on_device else "operators", partial(_draw_compute, prediction, own, edges_s)
    for stream in sorted({each.stream for each in timeline.communications} - {COMPUTE}):
        yield _communication_row(prediction, stream), partial(_draw_communications, prediction, stream)
    if timeline.side:
        yield "copy streams", partial(_draw_side, prediction)


def _communication_row(prediction: Prediction, stream: int) -> str:
    """Name the row of a stream that runs one kind of collective alone, if another stream has others."""
    communications, kinds = prediction.timeline.communications, dict[int, set[str]]()
    if all(each.exchange >= 0 for each in communications if each.stream == stream):
        return "messages"
    for each in communications:
        kinds.setdefault(each.stream, set()).add(prediction.program.collectives[each.collective].kind)
    own, several = kinds[stream], len(kinds.keys() - {COMPUTE}) > 1
    return next(iter(own)).replace("_", " ") if several and len(own) == 1 else "communication"


def _draw_step(prediction: Prediction, ax: Axes, row: int) -> None:
    """An arrow from the step's start on the device to the next step's, and lines through all rows at both."""
    phases = prediction.timeline.phases
    if not phases:
        return
    start_ms, end_ms = phases[0].start_s / MS, phases[-1].end_s / MS
    for at_ms in (start_ms, end_ms):
        ax.axvline(at_ms, color=palette.INK, linewidth=1.2, linestyle=":", zorder=4)
    arrow = {"arrowstyle": "<->", "color": palette.INK, "shrinkA": 0, "shrinkB": 0, "linewidth": 1.5}
    ax.annotate("", (start_ms, row), (end_ms, row), arrowprops=arrow)
    label = f"one step: {format_seconds(prediction.step_time_s)}"
    box = {"facecolor": "white", "edgecolor": "none", "pad": 2}
    ax.text((start_ms + end_ms) / 2, row, label, ha="center", va="center", fontweight="bold", bbox=box)


def _draw_phases(prediction: Prediction, ax: Axes, row: int) -> None:
    total_s = max(prediction.step_time_s, 1e-12)
    for span in _phases(prediction):
        if span.duration_s <= 0:
            continue
        bar = [(span.start_s / MS, span.duration_s / MS)]
        ax.broken_barh(bar, (row - 0.3, 0.6), facecolors=palette.phase_colour(span.phase), alpha=0.45)
        label = span.phase if span.duration_s > WHOLE_NAME * total_s else span.phase[0].upper()
        if span.duration_s > INITIAL * total_s:
            ax.text((span.start_s + span.end_s) / 2 / MS, row, label, ha="center", va="center")


def _phases(prediction: Prediction) -> list[PhaseSpan]:
    """Return the phases; those of a pipeline without the waiting at their ends, which belongs to what follows."""
    timeline = prediction.timeline
    if not prediction.rank_timelines:
        return list(timeline.phases)
    stretches = computed_stretches(timeline)
    return [replace(timeline.phases[run], start_s=start_s, end_s=end_s) for run, start_s, end_s in stretches]


def _draw_compute(prediction: Prediction, own: Iterable[SideKernel], edges_s: np.ndarray, ax: Axes, row: int) -> None:
    """Operators and what else is on their stream; before the step begins, the device still runs the step before."""
    _draw_busy(_by_family(prediction, own), edges_s, ax, row)
    _draw_communications(prediction, COMPUTE, ax, row)
    if before_ms := _before_s(prediction) / MS:
        ax.broken_barh([(0.0, before_ms)], (row - HALF_ROW, 2 * HALF_ROW), facecolors=palette.OUTSIDE)


def _before_s(prediction: Prediction) -> float:
    """Return by how much the host leads the device when it begins the step."""
    phases = prediction.timeline.phases
    return max(phases[0].start_s, 0.0) if phases and prediction.profile.device.kind == "cuda" else 0.0


def _by_family(prediction: Prediction, launched: Iterable[SideKernel]) -> _Stretches:
    uses, found = use_by_operation(prediction), dict[str, list[tuple[float, float]]]()
    for each in launched:
        colour = palette.kernel_colour(uses[each.operation].cost.kind)
        found.setdefault(colour, []).append((each.start_s, each.end_s))
    return {colour: found[colour] for colour in palette.KERNEL_FAMILIES.values() if colour in found}


def _draw_busy(stretches_s: _Stretches, edges_s: np.ndarray, ax: Axes, row: int) -> None:
    ax.axhspan(row - HALF_ROW, row + HALF_ROW, color=palette.IDLE, linewidth=0, zorder=0)
    floor = np.full(len(edges_s), row + HALF_ROW)
    for colour, own_s in stretches_s.items():
        shares = busy_shares(own_s, edges_s)
        top = floor - 2 * HALF_ROW * np.append(shares, shares[-1:])
        ax.fill_between(edges_s / MS, floor, top, step="post", color=colour, linewidth=0)
        floor = top


def busy_shares(stretches_s: Iterable[tuple[float, float]], edges_s: np.ndarray) -> np.ndarray:
    """Return the share of each column that at least one of the stretches, (start, end), covers.

    The columns lie between neighbours of ``edges_s``.

    >>> busy_shares([(0.0, 1.0), (2.5, 4.0), (3.0, 3.5)], np.array([0.0, 2.0, 4.0])).tolist()
    [0.5, 0.75]
    """
    rows_s = merged(stretches_s)
    busy_s = np.concatenate([[0.0], np.cumsum(np.diff(rows_s, axis=1))])
    until_s = np.interp(edges_s, rows_s.ravel(), np.repeat(busy_s, 2)[1:-1]) if len(rows_s) else 0.0 * edges_s
    return np.asarray(np.diff(until_s) / np.diff(edges_s))


def _draw_communications(prediction: Prediction, stream: int, ax: Axes, row: int) -> None:
    on_stream = [each for each in prediction.timeline.communications if each.stream == stream]
    if not on_stream:
        return
    starts_s, waits_s, ends_s = np.array([(each.start_s, each.waits_s, each.end_s) for each in on_stream]).T
    _bars(ax, row, starts_s, starts_s + waits_s, palette.WAITING_FOR_RANK, 0.0)
    _bars(ax, row, starts_s + waits_s, ends_s, palette.COMMUNICATION, LEAST_WIDTH if stream != COMPUTE else 0.0)


def _draw_side(prediction: Prediction, ax: Axes, row: int) -> None:
    """Operators of the other streams: few and short, so each is a bar that can be seen."""
    for colour, own_s in _by_family(prediction, prediction.timeline.side).items():
        start_s, end_s = np.array(own_s).T
        _bars(ax, row, start_s, end_s, colour, LEAST_WIDTH)


def _bars(ax: Axes, row: int, start_s: np.ndarray, end_s: np.ndarray, colour: str, edge: float) -> None:
    """Draw bars whose edges are ``edge`` points wide."""
    spans = list(zip((start_s / MS).tolist(), ((end_s - start_s) / MS).tolist(), strict=True))
    where = (row - HALF_ROW, 2 * HALF_ROW)
    ax.broken_barh(spans, where, facecolors=colour, edgecolors=colour, linewidth=edge)


def _legend(prediction: Prediction) -> dict[str, str]:
    """Colours by what they stand for."""
    timeline, uses = prediction.timeline, use_by_operation(prediction)
    found = palette.families(use.cost.kind for use in uses.values())
    if timeline.communications:
        found["communication"] = palette.COMMUNICATION
    if any(each.waits_s > 0 for each in timeline.communications):
        found["waiting for another rank"] = palette.WAITING_FOR_RANK
    if _before_s(prediction) > 0:
        found[BEFORE] = palette.OUTSIDE
    return found
