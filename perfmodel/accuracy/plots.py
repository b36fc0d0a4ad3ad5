"""Pictures of the accuracy card: predicted against measured with the ±5 % band, and every case's error by class."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from perfmodel.accuracy.cases import Card, CardCase
from perfmodel.accuracy.strategies_plots import save_strategy_plots
from perfmodel.report.plots.canvas import axes_or_new, save_figure
from perfmodel.report.plots.palette import ACCURATE, GRID, LAYOUT_MARKERS, LAYOUTS, OUTSIDE
from perfmodel.scenario.scenario import MICRO_BATCHES
from perfmodel.units import GIB, MS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BAND = 0.05
TIME_ERRORS = (2, 5, 10, 20, 40, 80)  # ticks on either side of 0, %; beyond the band the scale is logarithmic
MEMORY_ERRORS = (0.05, 0.1, 0.3, 1, 5, 20, 80)  # beyond a tenth of a percent it is
LINEAR_MEMORY = 0.001
STAGGERED = (0.0, 0.24, -0.24, 0.12, -0.12)  # of a row, so that equal errors do not hide each other
PICTURES = {
    "step": ("step time", MS, "ms"),
    "peak_allocated": ("peak memory allocated", GIB, "GiB"),
    "peak_reserved": ("peak memory reserved", GIB, "GiB"),
}


def save_accuracy_plots(card: Card, directory: Path) -> list[Path]:
    """Write for each quantity of the card predicted against measured, and errors by class; then a picture of each group
    of strategies.
    """
    saved = []
    for quantity, (title, _, _) in PICTURES.items():
        if card.statistics(quantity) is None:
            continue
        name = quantity.replace("_", "-")
        saved.append(
            save_figure(
                directory / f"{name}.png",
                f"{title}: predicted against measured",
                (10, 9),
                [lambda ax, quantity=quantity: plot_predicted_against_measured(card, quantity, ax)],  # type: ignore[misc]
            )
        )
        saved.append(
            save_figure(
                directory / f"{name}-errors.png",
                f"{title}: predicted over measured, minus one",
                (13, 2.5 + 0.45 * len(card.groups)),
                [partial(_draw_errors, card, quantity)],
            )
        )
    return saved + save_strategy_plots(card, directory)


def plot_predicted_against_measured(card: Card, quantity: str = "step", ax: Axes | None = None) -> Axes:
    """Each case as a point, held-out ones filled, on logarithmic axes with the diagonal and its ±5 % band."""
    ax = axes_or_new(ax)
    _, scale, unit = PICTURES[quantity]
    cases = [case for case in card.cases if case.error(quantity) is not None]
    values = [side[quantity] / scale for case in cases for side in (case.measured, case.predicted)]
    ends = np.array([min(values) / 1.5, max(values) * 1.5])
    ax.fill_between(ends, ends * (1 - BAND), ends * (1 + BAND), color=OUTSIDE, label="±5 %")
    ax.plot(ends, ends, color="black", linewidth=1)
    for layout, colour in LAYOUTS.items():
        members = [case for case in cases if layout_words(case) == layout]
        x = [case.measured[quantity] / scale for case in members]
        y = [case.predicted[quantity] / scale for case in members]
        fills, shape = [_fill(case) for case in members], LAYOUT_MARKERS[layout]
        if members:
            ax.scatter(x, y, s=80, c=fills, edgecolor=colour, marker=shape, linewidth=1.5, zorder=3)
            ax.scatter([], [], s=80, color=colour, marker=shape, label=layout)
    ax.set_xscale("log")
    ax.set_yscale("log")
    _plain_ticks(ax)
    ax.set_xlim(*ends)
    ax.set_ylim(*ends)
    ax.set_aspect("equal")
    ax.set_xlabel(f"measured, {unit}")
    ax.set_ylabel(f"predicted, {unit}")
    if any(case.split == "tuning" for case in cases):
        ax.scatter([], [], s=80, c="white", edgecolor="black", linewidth=1.5, label="open: tuning")
    ax.legend(loc="upper left", frameon=False, fontsize=12)
    return ax


def _plain_ticks(ax: Axes) -> None:
    """1, 2, 5, 10, ... as plain numbers, few enough to read."""
    from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(FormatStrFormatter("%g"))
        axis.set_minor_formatter(NullFormatter())


def _draw_errors(card: Card, quantity: str, ax: Axes) -> Axes:
    """Draw errors by class with a legend below the picture."""
    from matplotlib.lines import Line2D

    plot_errors(card, quantity, ax)
    drawn = {layout_words(case) for case in card.cases if case.error(quantity) is not None}
    handles = [
        Line2D([], [], color=colour, marker=LAYOUT_MARKERS[layout], linestyle="none", markersize=8, label=layout)
        for layout, colour in LAYOUTS.items()
        if layout in drawn
    ]
    ax.figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    return ax


def plot_errors(card: Card, quantity: str = "step", ax: Axes | None = None) -> Axes:
    """Each case's signed error in the row of its class, held-out ones filled; linear around 0, logarithmic beyond."""
    ax = axes_or_new(ax)
    rows: dict[str, list[tuple[float, CardCase]]] = {}
    for case in card.cases:
        if (error := case.error(quantity)) is not None:
            rows.setdefault(case.group, []).append((error, case))
    rows = {group: sorted(rows[group], key=lambda each: each[0]) for group in card.groups if group in rows}
    ax.axvspan(-100 * BAND, 100 * BAND, color=ACCURATE)
    ax.axvline(0, color="black", linewidth=1)
    for row, cases in enumerate(rows.values()):
        for number, (error, case) in enumerate(cases):
            layout, height = layout_words(case), row + STAGGERED[number % len(STAGGERED)]
            style: dict[str, Any] = {
                "markeredgecolor": LAYOUTS[layout],
                "markerfacecolor": _fill(case),
                "markersize": 8,
            }
            ax.plot(100 * error, height, LAYOUT_MARKERS[layout], **style)
    ax.set_yticks(range(len(rows)), [f"{group} ({len(cases)})" for group, cases in rows.items()])
    ax.set_ylim(len(rows) - 0.4, -0.6)
    farthest = max(abs(error) for cases in rows.values() for error, _ in cases)
    _error_axis(ax, 100 * max(BAND, farthest), quantity)
    ax.grid(axis="y", color=GRID, zorder=0)
    return ax


def _error_axis(ax: Axes, farthest: float, quantity: str) -> None:
    """Peaks of memory are predicted so much closer than times that a scale of theirs shows how they differ."""
    is_time = quantity == "step"
    ticks = TIME_ERRORS if is_time else MEMORY_ERRORS
    ax.set_xscale("symlog", linthresh=100 * (BAND if is_time else LINEAR_MEMORY), linscale=1.2)
    shown = [tick for tick in ticks if tick <= farthest]
    ax.set_xticks([*(-tick for tick in reversed(shown)), 0, *shown])
    ax.set_xticks([], minor=True)
    ax.xaxis.set_major_formatter("{x:g}")
    ax.set_xlim(-1.1 * farthest, 1.1 * farthest)
    ax.set_xlabel("error, %; the band is ±5 %, filled: held out")


def layout_words(case: CardCase) -> str:
    """Return how the case is spread over GPUs, one of :data:`~perfmodel.report.plots.palette.LAYOUTS`."""
    if MICRO_BATCHES in case.settings:
        return "pipeline"
    if case.layout is None or not case.layout.place:
        return "one GPU"
    return "ZeRO" if case.layout.strategy.startswith("zero") else "data parallel"


def _fill(case: CardCase) -> str:
    return LAYOUTS[layout_words(case)] if case.split == "held-out" else "white"
