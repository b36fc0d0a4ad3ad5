"""Pictures of a sweep: time and memory over the varied values. Functions draw on Axes and return them.

Values are dots with their intervals, so that an axis may begin near the lowest and differences can be seen. Where the
varied values change how many GPUs there are, throughput is drawn on logarithmic axes with the line of ideal scaling.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import pairwise, product
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import numpy as np

from perfmodel.prediction.sweep_result import label, value_text
from perfmodel.report.plots.canvas import axes_or_new, save_figure, spread_limits
from perfmodel.report.plots.palette import CAPACITY, GRID, INK, SERIES
from perfmodel.scenario.scenario import MICRO_BATCHES
from perfmodel.units import GIB, MS, format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from perfmodel.prediction.sweep_result import Configuration, SweepOutcome, SweepResult

LOGARITHMIC = 4  # largest value over smallest, from which an axis is
ROOM_ON_LOGARITHMIC = 1.4  # of the lowest and highest value, for numbers
FEW_NUMBERS = 10  # dots that bear their values; more would hide each other
MARKERS = "osD^vPX*"
LONGEST_TITLE = 80  # characters of a line
LONGEST_OF_TWO = 48  # characters of a legend in two columns
FEW_BANDS = 3  # more of them over each other cannot be read
NEAR_CAPACITY = 0.4  # of the device's memory; below, its limit would only squeeze what is drawn

_Heights = tuple[float, float, float] | None  # of a configuration: value, low and high


def save_sweep_plots(result: SweepResult, directory: Path) -> list[Path]:
    """Write time.png and, where memory is predicted, memory.png."""
    title = f"{result.scenario} on {result.profile}"
    if result.assignments:
        title += "\n" + shorten(f"with {', '.join(result.assignments)}", LONGEST_TITLE, placeholder=" …")
    draw_time = [lambda ax: plot_sweep_time(result, ax)]
    if not result.same_work or MICRO_BATCHES in result.vary or _scales(result):
        draw_time.append(lambda ax: plot_sweep_throughput(result, ax))
    saved = [save_figure(directory / "time.png", title, (11, 6.5 * len(draw_time)), draw_time)]
    if any(_memory_gib(each) is not None for each in result.configurations):
        saved.append(
            save_figure(directory / "memory.png", title, (11, 6.5), [lambda ax: plot_sweep_memory(result, ax)])
        )
    return saved


def plot_sweep_time(result: SweepResult, ax: Axes | None = None) -> Axes:
    """Step time with its 90 % interval; a cross at the bottom where there is none."""
    ax = _draw(result, _step_ms, ax, lambda each, ideal_samples_per_s: each.samples_per_step / ideal_samples_per_s / MS)
    ax.set_ylabel("step time, ms")
    ax.set_title(_explained("step time and its 90 % interval", result, _step_ms))
    return ax


def plot_sweep_throughput(result: SweepResult, ax: Axes | None = None) -> Axes:
    """Samples a second of all GPUs together with their 90 % interval: what ranks configurations."""
    ax = _draw(result, _samples_per_s, ax, lambda _, ideal_samples_per_s: ideal_samples_per_s)
    if _scales(result):
        ax.set_yscale("log")
        drawn = [end for each in result.configurations if (point := _samples_per_s(each)) for end in point]
        ax.set_ylim(min(drawn, default=1.0) / ROOM_ON_LOGARITHMIC, max(drawn, default=1.0) * ROOM_ON_LOGARITHMIC)
        _plain_ticks(ax)
    ax.set_ylabel("samples/s")
    ax.set_title(_explained("throughput and its 90 % interval", result, _samples_per_s))
    return ax


def plot_sweep_memory(result: SweepResult, ax: Axes | None = None) -> Axes:
    """Draw the device memory in use at the peak, of the rank that takes most, and the device's limit where it is near.

    What lies above the limit does not fit; its height is the smallest device memory in which it would.
    """
    ax = _draw(result, _memory_gib, ax)
    outcomes = [each.outcome for each in result.configurations if each.outcome is not None]
    capacities = sorted({outcome.capacity_bytes for outcome in outcomes})
    most = max(outcome.device_bytes or outcome.needed_bytes or 0 for outcome in outcomes)
    if most > NEAR_CAPACITY * capacities[0] or any(outcome.fits is False for outcome in outcomes):
        for capacity in capacities:
            ax.axhline(capacity / GIB, color=CAPACITY, linewidth=2)
            said: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "ha": "right"}
            ax.annotate(f"all of {format_bytes(capacity)}", (0.995, capacity / GIB), (0, 4), color=CAPACITY, **said)
        ax.set_ylim(0, 1.1 * max(capacities[-1], most) / GIB)
    ax.set_ylabel("device memory in use, GiB")
    limit = " or ".join(map(format_bytes, capacities))
    whose = " of the rank that takes most" if MICRO_BATCHES in result.vary else ""
    least = "\nabove the limit: the least that is needed" if any(each.needed_bytes for each in outcomes) else ""
    ax.set_title(_explained(f"peak memory in use{whose}; the device has {limit}{least}", result, _memory_gib))
    return ax


def _step_ms(each: Configuration) -> _Heights:
    if each.rank is None or each.outcome is None:
        return None
    low_s, high_s = each.outcome.interval_s
    return each.outcome.step_time_s / MS, low_s / MS, high_s / MS


def _samples_per_s(each: Configuration) -> _Heights:
    if each.rank is None or each.outcome is None:
        return None
    low_s, high_s = each.outcome.interval_s
    samples = each.outcome.samples_per_step
    return each.outcome.throughput_samples_per_s, samples / high_s, samples / low_s


def _memory_gib(each: Configuration) -> _Heights:
    held_bytes = None if each.outcome is None else each.outcome.device_bytes or each.outcome.needed_bytes
    return None if held_bytes is None else (held_bytes / GIB,) * 3


_Ideal = Callable[["SweepOutcome", float], float]  # height of ideal scaling, of an outcome and its ideal samples/s


def _draw(
    result: SweepResult, heights: Callable[[Configuration], _Heights], ax: Axes | None, ideal: _Ideal | None = None
) -> Axes:
    """A line where the values along the axis are numbers, else dots; one for each combination of the rest."""
    ax = axes_or_new(ax)
    along = _along(result)
    numeric = _numeric(result.vary[along])
    values = sorted(result.vary[along]) if numeric else list(result.vary[along])
    found = {_identity(each.values): each for each in result.configurations}
    others = [key for key in result.vary if key != along]
    combinations = [dict(zip(others, each, strict=True)) for each in product(*(result.vary[key] for key in others))]
    for number, combination in enumerate(combinations):
        own = [found[_identity({**combination, along: value})] for value in values]
        there = [heights(each) for each in own]
        if numeric:
            _line(ax, values, there, label(combination), number, len(combinations))
        else:
            x = [index + _offset(number, len(combinations)) for index in range(len(values))]
            _dots(ax, x, there, label(combination), number)
        if ideal is not None and numeric and _scales(result):
            _draw_ideal(ax, values, own, ideal, is_named=number == 0)
    drawn = [point for each in result.configurations if (point := heights(each)) is not None]
    ax.set_ylim(*spread_limits([end for each in drawn for end in each]))
    ax.margins(x=0.09)
    if len(drawn) <= FEW_NUMBERS and len(combinations) == 1:
        _add_numbers(ax, is_below=_scales(result) and heights is _samples_per_s)
    _label_values(ax, values, numeric, LOGARITHMIC if not _scales(result) else 1)
    ax.set_xlabel(along)
    ax.grid(axis="y", color=GRID, zorder=0)
    ax.set_axisbelow(True)
    if len(combinations) > 1 or (ideal is not None and _scales(result)):
        names = ax.get_legend_handles_labels()[1]
        columns = 2 if max(map(len, names), default=0) <= LONGEST_OF_TWO else 1
        where = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.14), "frameon": False}
        ax.legend(**where, ncols=columns, fontsize="small" if len(combinations) > 2 * len(SERIES) else None)
    return ax


def _scales(result: SweepResult) -> bool:
    """Return whether the number of GPUs grows along the axis."""
    along = _along(result)
    if not _numeric(result.vary[along]):
        return False
    gpus: dict[Any, set[int]] = {}
    for each in result.configurations:
        if each.outcome is not None:
            gpus.setdefault(each.values[along], set()).add(each.outcome.gpus)
    most = [max(gpus[value]) for value in sorted(gpus)]
    return len(most) > 1 and all(a < b for a, b in pairwise(most))


def _draw_ideal(ax: Axes, values: Sequence[float], own: Sequence[Configuration], ideal: _Ideal, is_named: bool) -> None:
    """Draw ideal scaling: every GPU has as many samples a second as those of the first configuration with a rank."""
    ranked = [(at, each.outcome) for at, each in zip(values, own, strict=True) if each.rank and each.outcome]
    if len(ranked) < 2:
        return
    first = ranked[0][1]
    each_gpu = first.throughput_samples_per_s / first.gpus
    heights = [ideal(outcome, each_gpu * outcome.gpus) for _, outcome in ranked]
    name = f"ideal: as many samples/s a GPU as on {first.gpus}" if is_named else None
    ax.plot([at for at, _ in ranked], heights, color=INK, linestyle="--", linewidth=1.5, label=name, zorder=1)


def _line(ax: Axes, x: Sequence[float], there: list[_Heights], name: str, number: int, count: int) -> None:
    colour, marker = SERIES[number % len(SERIES)], MARKERS[number % len(MARKERS)]
    points = [(at, *each) for at, each in zip(x, there, strict=True) if each is not None]
    if points:
        at, y, low, high = (list(column) for column in zip(*points, strict=True))
        ax.plot(at, y, color=colour, marker=marker, markersize=9, linewidth=2, label=name or "predicted")
        if count <= FEW_BANDS:
            ax.fill_between(at, low, high, color=colour, alpha=0.15, linewidth=0)
        _intervals(ax, points, colour)
    _cross(ax, x, there, colour, None if points else name, number % len(SERIES))


def _dots(ax: Axes, x: Sequence[float], there: list[_Heights], name: str, number: int) -> None:
    colour, marker = SERIES[number % len(SERIES)], MARKERS[number % len(MARKERS)]
    points = [(at, *each) for at, each in zip(x, there, strict=True) if each is not None]
    if points:
        at, y, *_ = (list(column) for column in zip(*points, strict=True))
        ax.plot(at, y, color=colour, marker=marker, markersize=10, linestyle="none", label=name)
        _intervals(ax, points, colour)
    _cross(ax, x, there, colour, None if points else name)


def _add_numbers(ax: Axes, is_below: bool) -> None:
    """Write its value to the right of each dot, above or below the line to the next."""
    style: dict[str, Any] = {
        "textcoords": "offset points",
        "fontsize": "small",
        "bbox": {"color": "white", "alpha": 0.7, "pad": 0.5},
    }
    dots = ax.lines[0] if ax.lines and ax.lines[0].get_marker() != "x" else None
    for x, y in np.asarray(dots.get_xydata()).tolist() if dots else ():
        ax.annotate(f"{y:.4g}", (x, y), (9, -17 if is_below else 8), **style)


def _plain_ticks(ax: Axes) -> None:
    from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    ax.yaxis.set_minor_formatter(NullFormatter())


def _intervals(ax: Axes, points: list[tuple[float, float, float, float]], colour: str) -> None:
    """Return place, value, low and high of the points that have them."""
    wide = [each for each in points if each[2] < each[3]]
    if wide:
        at, y, low, high = zip(*wide, strict=True)
        below_and_above = [[a - b for a, b in zip(y, low, strict=True)], [b - a for a, b in zip(y, high, strict=True)]]
        ax.errorbar(at, y, below_and_above, fmt="none", ecolor=colour, capsize=5, linewidth=1.5)


def _cross(ax: Axes, x: Sequence[float], there: list[_Heights], colour: str, name: str | None, level: int = 0) -> None:
    """Draw crosses at the bottom where there is nothing to draw, above ``level`` other rows of crosses."""
    missing = [at for at, each in zip(x, there, strict=True) if each is None]
    style: dict[str, Any] = {"linestyle": "none", "marker": "x", "markersize": 12, "markeredgewidth": 3}
    if missing:
        height = [0.03 + 0.05 * level] * len(missing)
        ax.plot(missing, height, color=colour, transform=ax.get_xaxis_transform(), label=name, **style)


def _label_values(ax: Axes, values: list[Any], numeric: bool, logarithmic: float) -> None:
    """Label the axis with values; it is logarithmic if the largest value is ``logarithmic`` times the smallest."""
    if not numeric:
        ax.set_xticks(range(len(values)), [value_text(value) for value in values])
        return
    if values[0] > 0 and values[-1] / values[0] >= logarithmic:
        ax.set_xscale("log")
    ax.set_xticks(values, [value_text(value) if abs(value) < 1e5 else f"{value:.4g}" for value in values])
    ax.minorticks_off()


def _offset(number: int, count: int) -> float:
    """Return the offset of a dot from the middle of its group, which is 0.5 wide."""
    return (number + 0.5) / count * 0.5 - 0.25


def _along(result: SweepResult) -> str:
    """The key along the axis: micro-batches, or of those with numbers, or of all, the one with most values."""
    if _numeric(result.vary.get(MICRO_BATCHES, ())):
        return MICRO_BATCHES
    return max(result.vary, key=lambda key: (_numeric(result.vary[key]), len(result.vary[key])))


def _numeric(values: Sequence[Any]) -> bool:
    return len(values) > 1 and all(isinstance(each, int | float) and not isinstance(each, bool) for each in values)


def _identity(values: dict[str, Any]) -> str:
    return json.dumps(values, sort_keys=True)


def _explained(title: str, result: SweepResult, heights: Callable[[Configuration], _Heights]) -> str:
    missing = any(heights(each) is None for each in result.configurations)
    return f"{title}\ncross: does not fit, or not predicted" if missing else title
