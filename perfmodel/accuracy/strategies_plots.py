"""Pictures of strategies side by side: step time, exposed communication and memory, predicted and measured."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfmodel.accuracy.strategies import StrategyGroup, strategy_groups
from perfmodel.report.plots.canvas import axes_or_new, file_words, save_figure, spread_limits
from perfmodel.report.plots.palette import GRID, SIDE_MARKERS, SIDES
from perfmodel.units import GIB, MS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from perfmodel.accuracy.cases import Card, CardCase

ASIDE = 0.13  # of the distance of rows: measured stands so far above the row's middle, predicted below
ROOM = 0.35  # of what the axis shows, right of it, for numbers
LEAST = 1e-3  # of a unit; what is smaller is written as zero, and no axis is shorter
PANELS = {
    "step": ("step time,\nsteady state", MS, "ms"),
    "exposed": ("exposed communication,\nmeasured where traced", MS, "ms"),
    "peak_allocated": ("peak memory allocated\nof the rank that takes most", GIB, "GiB"),
}


def save_strategy_plots(card: Card, directory: Path) -> list[Path]:
    """Write strategies-<group>.png for every group of the card."""
    saved: list[Path] = []
    for group in strategy_groups(card.cases):
        words = (group.name, group.place, *(group.profiles if len(card.profiles) > 1 else ()))
        name = file_words("-".join(words))
        path = directory / f"strategies-{name}.png"
        if path in saved:
            path = directory / f"strategies-{name}-{len(saved)}.png"
        saved.append(_save(group, path))
    return saved


def _save(group: StrategyGroup, path: Path) -> Path:
    first, *others = PANELS

    def draw_first(ax: Axes) -> Axes:
        plot_strategies(group, first, ax)
        ax.figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=len(SIDES), frameon=False)
        return ax

    draw: list[Callable[[Axes], Axes]] = [draw_first]
    draw += [partial(plot_strategies, group, each, named=False) for each in others]
    title = f"{group.name} on {group.place} ({', '.join(group.profiles)})\n{_explained(group)}".rstrip()
    return save_figure(path, title, (18, 3.6 + 0.8 * len(group.cases)), draw, side_by_side=True)


def _explained(group: StrategyGroup) -> str:
    """Explain the names of rows."""
    alone = any(case.layout is not None and not case.layout.place for case in group.cases.values())
    held_out = any(case.split == "held-out" for case in group.cases.values())
    return ", ".join([*(["none: one GPU alone"] if alone else []), *(["*: held out"] if held_out else [])])


def plot_strategies(group: StrategyGroup, quantity: str = "step", ax: Axes | None = None, named: bool = True) -> Axes:
    """A row of two dots for each case of the group, with their values, the axis beginning where differences can be
    seen. named: whether rows bear names.
    """
    ax = axes_or_new(ax)
    title, scale, unit = PANELS[quantity]
    drawn: list[float] = []
    for row, case in enumerate(group.cases.values()):
        values = {side: getattr(case, side).get(quantity) for side in SIDES}
        known = {side: value / scale for side, value in values.items() if value is not None}
        for side, value in known.items():
            height = row + (-ASIDE if side == "measured" else ASIDE)
            ax.plot(value, height, SIDE_MARKERS[side], color=SIDES[side], markersize=11, clip_on=False)
            text = f"{value if value >= LEAST else 0:.4g}"
            ax.annotate(text, (value, height), (10, 0), textcoords="offset points", va="center", color=SIDES[side])
        if not known:
            text = "no communication" if quantity == "exposed" else "not known"
            where: dict[str, Any] = {
                "xycoords": ("axes fraction", "data"),
                "textcoords": "offset points",
                "va": "center",
            }
            ax.annotate(text, (0, row), (8, 0), fontsize=12, **where)
        drawn += known.values()
    for side, colour in SIDES.items():
        ax.plot([], [], SIDE_MARKERS[side], color=colour, markersize=11, label=side)
    names = [_name(label, case) for label, case in group.cases.items()]
    ax.set_yticks(range(len(names)), names if named else [""] * len(names))
    ax.set_ylim(len(names) - 0.4, -0.6)
    low, high = spread_limits([*drawn, *([LEAST] if not any(drawn) else [])])
    ax.set_xlim(low, high + ROOM * (high - low))
    ax.grid(axis="y", color=GRID)
    ax.set_axisbelow(True)
    ax.set_xlabel(unit)
    ax.set_title(title)
    return ax


def _name(label: str, case: CardCase) -> str:
    """Settings, which may be long, stand below their strategy."""
    strategy, _, settings = label.partition(" ")
    held_out = " *" if case.split == "held-out" else ""
    return f"{strategy}{held_out}\n{settings}".rstrip()
