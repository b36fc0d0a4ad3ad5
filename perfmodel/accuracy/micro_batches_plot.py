"""Pictures of measured pipelines that differ in micro-batches alone: throughput and memory, predicted and measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from perfmodel.accuracy.choices import Choice, choices, common_words
from perfmodel.prediction.figures_of_merit import samples_per_step
from perfmodel.report.plots.canvas import axes_or_new, file_words, save_figure, spread_limits
from perfmodel.report.plots.palette import GRID, SIDE_STYLES, SIDES
from perfmodel.scenario.scenario import MICRO_BATCHES
from perfmodel.units import GIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from perfmodel.accuracy.cases import Card, CardCase, Pair

ABOVE_POINTS, BELOW_POINTS = 11, -22  # from a point to its number: the larger of two stands above
ROOM = 0.12  # of the axis, above what it shows, for the legend
SIZE_INCH = (11, 11)
HELD_OUT = "*: held out"


def save_micro_batch_plots(card: Card, pairs: Iterable[Pair], directory: Path) -> list[Path]:
    """Write micro-batches-<cases>.png for each group of the card's cases that differ in nothing else.

    pairs: those that the card is of.
    """
    samples = {pair.measurement.name: samples_per_step(pair.prediction) for pair in pairs}
    saved: list[Path] = []
    for choice in choices(card.cases):
        if choice.setting != MICRO_BATCHES:
            continue
        names = [case.name for case in choice.cases.values()]
        together = common_words(names) or names[0]
        path = directory / f"micro-batches-{file_words(together)}.png"
        if path in saved:
            path = directory / f"micro-batches-{file_words(together)}-{len(saved)}.png"
        profiles = sorted({case.profile for case in choice.cases.values()})
        title = f"{together} ({', '.join(profiles)}){_held_out(choice)}"
        draw: list[Callable[[Axes], Axes]] = [partial(plot_throughput, choice, samples[names[0]])]
        if any("peak_allocated" in case.predicted for case in choice.cases.values()):
            draw.append(partial(plot_memory, choice))
        saved.append(save_figure(path, title, SIZE_INCH, draw))
    return saved


def _held_out(choice: Choice) -> str:
    return f"\n{HELD_OUT}" if any(case.split == "held-out" for case in choice.cases.values()) else ""


def plot_throughput(choice: Choice, samples: int, ax: Axes | None = None) -> Axes:
    """Samples a second of all ranks together. samples: of a step."""
    found = {side: _values(choice, side, "step") for side in SIDES}
    rates = {side: {count: samples / step_s for count, step_s in values.items()} for side, values in found.items()}
    ax = _draw(choice, rates, ax)
    ax.set_ylabel("samples/s")
    ax.set_title("throughput")
    return ax


def plot_memory(choice: Choice, ax: Axes | None = None) -> Axes:
    """Peak memory allocated, GiB, of the rank that takes most."""
    found = {side: _values(choice, side, "peak_allocated") for side in SIDES}
    ax = _draw(choice, {side: {at: size / GIB for at, size in values.items()} for side, values in found.items()}, ax)
    ax.set_ylabel("GiB")
    ax.set_title("peak memory allocated of the rank that takes most")
    return ax


def _values(choice: Choice, side: str, quantity: str) -> dict[int, float]:
    """Return the cases by number of micro-batches, ascending."""
    known: dict[int, Mapping[str, float]] = {int(at): getattr(case, side) for at, case in choice.cases.items()}
    return {at: values[quantity] for at, values in sorted(known.items()) if quantity in values}


def _draw(choice: Choice, sides: Mapping[str, Mapping[int, float]], ax: Axes | None) -> Axes:
    ax = axes_or_new(ax)
    for side, values in sides.items():
        at, heights = list(values), list(values.values())
        ax.plot(at, heights, color=SIDES[side], label=side, **SIDE_STYLES[side])
        for x, y in values.items():
            highest = max((other for other in sides if x in sides[other]), key=lambda other: sides[other][x])
            offset = (0, ABOVE_POINTS if side == highest else BELOW_POINTS)
            ax.annotate(f"{y:.4g}", (x, y), offset, textcoords="offset points", ha="center", color=SIDES[side])
    counts = sorted(((int(at), case) for at, case in choice.cases.items()), key=lambda each: each[0])
    ax.set_xscale("log")
    ax.set_xticks([at for at, _ in counts], [_tick(at, case) for at, case in counts])
    ax.minorticks_off()
    low, high = spread_limits([y for values in sides.values() for y in values.values()])
    ax.set_ylim(low, high + ROOM * (high - low))
    ax.grid(axis="y", color=GRID)
    ax.set_axisbelow(True)
    ax.set_xlabel("micro-batches")
    ax.legend(frameon=False, loc="upper right", ncols=2)
    return ax


def _tick(count: int, case: CardCase) -> str:
    return f"{count} *" if case.split == "held-out" else str(count)
