"""Pictures of the accuracy card: predicted against measured with the ±5 % band, and every case's error."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from perfmodel.report.accuracy import Card, Case
from perfmodel.report.canvas import COLOURS, axes_or_new, save_figure
from perfmodel.report.strategies_plots import save_strategy_plots
from perfmodel.units import GIB, MS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BAND = 0.05
SHAPES = ("o", "s", "^", "D")  # the next, where classes have used all colours once
MOST_ROWS = 50  # of errors, below each other
PICTURES = {
    "step": ("step time", MS, "ms"),
    "peak_allocated": ("peak memory allocated", GIB, "GiB"),
    "peak_reserved": ("peak memory reserved", GIB, "GiB"),
}


def save_accuracy_plots(card: Card, directory: Path) -> list[Path]:
    """For each quantity of the card, write predicted against measured, and errors (of many cases in columns); then a
    picture of each group of strategies.
    """
    saved = []
    for quantity, (title, _, _) in PICTURES.items():
        if card.statistics(quantity) is None:
            continue
        name = quantity.replace("_", "-")
        count = sum(case.error(quantity) is not None for case in card.cases)
        parts = [slice(start, start + MOST_ROWS) for start in range(0, count, MOST_ROWS)]
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
                (12 * len(parts), 2.5 + 0.36 * min(len(card.cases), MOST_ROWS)),
                [partial(plot_errors, card, quantity, part=part) for part in parts],
                beside=True,
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
    ax.fill_between(ends, ends * (1 - BAND), ends * (1 + BAND), color="#DDDDDD", label="±5 %")
    ax.plot(ends, ends, color="black", linewidth=1)
    for group in card.groups:
        members = [case for case in cases if case.group == group]
        x = [case.measured[quantity] / scale for case in members]
        y = [case.predicted[quantity] / scale for case in members]
        fills = [_fill(card, case) for case in members]
        colour, shape = _style(card, group)
        ax.scatter(x, y, s=80, c=fills, edgecolor=colour, marker=shape, linewidth=1.5, zorder=3)
        ax.scatter([], [], s=80, color=colour, marker=shape, label=group)
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


def plot_errors(card: Card, quantity: str = "step", ax: Axes | None = None, part: slice = slice(None)) -> Axes:
    """Each case's signed error as a point in a row of its own, over the ±5 % band. part: of the cases."""
    ax = axes_or_new(ax)
    known = [case for case in card.cases if case.error(quantity) is not None]
    cases = known[part]
    ax.axvspan(-100 * BAND, 100 * BAND, color="#EEEEEE")
    ax.axvline(0, color="black", linewidth=1)
    for row, case in enumerate(cases):
        error = case.error(quantity)
        assert error is not None
        colour, shape = _style(card, case.group)
        ax.plot(100 * error, row, shape, markeredgecolor=colour, markerfacecolor=_fill(card, case), markersize=9)
    ax.set_yticks(range(len(cases)), [f"{case.name}{' *' if case.split == 'held-out' else ''}" for case in cases])
    ax.set_ylim(len(cases) - 0.4, -0.6)
    farthest = max(abs(case.error(quantity) or 0.0) for case in known)
    ax.set_xlim(-110 * max(BAND, farthest), 110 * max(BAND, farthest))
    ax.set_xlabel("error, %; the band is ±5 %, filled and * are held out")
    ax.grid(axis="y", color="#DDDDDD", zorder=0)
    return ax


def _style(card: Card, group: str) -> tuple[str, str]:
    """Colour and shape of a class."""
    index = card.groups.index(group)
    return COLOURS[index % len(COLOURS)], SHAPES[index // len(COLOURS) % len(SHAPES)]


def _fill(card: Card, case: Case) -> str:
    return _style(card, case.group)[0] if case.split == "held-out" else "white"
