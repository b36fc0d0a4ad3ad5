"""Pictures of a sweep: time and memory over the varied values. Functions draw on Axes and return them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from perfmodel.report.canvas import COLOURS, axes_or_new, save_figure
from perfmodel.report.choices import MICRO_BATCHES
from perfmodel.report.sweep_text import label, value_text
from perfmodel.units import GIB, MS, format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from perfmodel.sweep import Configuration, SweepResult

LOGARITHMIC = 8  # largest value over smallest, from which an axis is
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
    if not result.same_work or MICRO_BATCHES in result.vary:
        draw_time.append(lambda ax: plot_sweep_throughput(result, ax))
    saved = [save_figure(directory / "time.png", title, (11, 6.5 * len(draw_time)), draw_time)]
    if any(_memory_gib(each) is not None for each in result.configurations):
        saved.append(
            save_figure(directory / "memory.png", title, (11, 6.5), [lambda ax: plot_sweep_memory(result, ax)])
        )
    return saved


def plot_sweep_time(result: SweepResult, ax: Axes | None = None) -> Axes:
    """Step time with its 90 % interval; a cross at the bottom where there is none."""
    ax = _draw(result, _step_ms, ax)
    ax.set_ylabel("step time, ms")
    ax.set_title(_explained("step time and its 90 % interval", result, _step_ms))
    return ax


def plot_sweep_throughput(result: SweepResult, ax: Axes | None = None) -> Axes:
    """Samples a second of all GPUs together with their 90 % interval: what ranks configurations."""
    ax = _draw(result, _samples_per_s, ax)
    ax.set_ylabel("samples/s")
    ax.set_title(_explained("throughput and its 90 % interval", result, _samples_per_s))
    return ax


def plot_sweep_memory(result: SweepResult, ax: Axes | None = None) -> Axes:
    """Device memory in use at the peak, of the rank that takes most, and the device's limit where that is near: what
    lies above does not fit.
    """
    ax = _draw(result, _memory_gib, ax)
    outcomes = [each.outcome for each in result.configurations if each.outcome is not None]
    capacities = sorted({outcome.capacity_bytes for outcome in outcomes})
    most = max(outcome.device_bytes or outcome.needed_bytes or 0 for outcome in outcomes)
    if most > NEAR_CAPACITY * capacities[0] or any(outcome.fits is False for outcome in outcomes):
        for capacity in capacities:
            ax.axhline(capacity / GIB, color="black", linestyle="--", linewidth=1.5)
        ax.set_ylim(0, 1.1 * max(capacities[-1], most) / GIB)
    ax.set_ylabel("device memory in use, GiB")
    limit = " or ".join(map(format_bytes, capacities))
    whose = " of the rank that takes most" if MICRO_BATCHES in result.vary else ""
    ax.set_title(_explained(f"peak memory in use{whose}; the device has {limit}", result, _memory_gib))
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


def _draw(result: SweepResult, heights: Callable[[Configuration], _Heights], ax: Axes | None) -> Axes:
    """A line where the values along the axis are numbers, else groups of bars; one for each combination of the rest."""
    ax = axes_or_new(ax)
    along = _along(result)
    numeric = _numeric(result.vary[along])
    values = sorted(result.vary[along]) if numeric else list(result.vary[along])
    found = {_identity(each.values): heights(each) for each in result.configurations}
    others = [key for key in result.vary if key != along]
    combinations = [dict(zip(others, each, strict=True)) for each in product(*(result.vary[key] for key in others))]
    draw = _line if numeric else _bars
    for number, combination in enumerate(combinations):
        there = [found[_identity({**combination, along: value})] for value in values]
        x = values if numeric else [index + _offset(number, len(combinations)) for index in range(len(values))]
        draw(ax, x, there, label(combination), number, len(combinations))
    ax.set_ylim(bottom=0, top=1.1 * max((each[2] for each in found.values() if each is not None), default=1.0))
    _label_values(ax, values, numeric)
    ax.set_xlabel(along)
    if len(combinations) > 1:
        columns = 2 if max(len(label(each)) for each in combinations) <= LONGEST_OF_TWO else 1
        where = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.14), "frameon": False}
        ax.legend(**where, ncols=columns, fontsize="small" if len(combinations) > 2 * len(COLOURS) else None)
    return ax


def _line(ax: Axes, x: Sequence[float], there: list[_Heights], name: str, number: int, count: int) -> None:
    colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
    points = [(at, *each) for at, each in zip(x, there, strict=True) if each is not None]
    if points:
        at, y, low, high = (list(column) for column in zip(*points, strict=True))
        ax.plot(at, y, color=colour, marker=marker, markersize=9, linewidth=2, label=name)
        if count <= FEW_BANDS:
            ax.fill_between(at, low, high, color=colour, alpha=0.15, linewidth=0)
        _intervals(ax, points, colour)
    _cross(ax, x, there, colour, None if points else name, number % len(COLOURS))


def _bars(ax: Axes, x: Sequence[float], there: list[_Heights], name: str, number: int, count: int) -> None:
    colour = COLOURS[number % len(COLOURS)]
    points = [(at, *each) for at, each in zip(x, there, strict=True) if each is not None]
    if points:
        at, y, *_ = (list(column) for column in zip(*points, strict=True))
        ax.bar(at, y, 0.8 / count, color=colour, label=name)
        _intervals(ax, points, "black")
    _cross(ax, x, there, colour, None if points else name)


def _intervals(ax: Axes, points: list[tuple[float, float, float, float]], colour: str) -> None:
    """Of those that have one; points: place, value, low and high."""
    wide = [each for each in points if each[2] < each[3]]
    if wide:
        at, y, low, high = zip(*wide, strict=True)
        below_and_above = [[a - b for a, b in zip(y, low, strict=True)], [b - a for a, b in zip(y, high, strict=True)]]
        ax.errorbar(at, y, below_and_above, fmt="none", ecolor=colour, capsize=5, linewidth=1.5)


def _cross(ax: Axes, x: Sequence[float], there: list[_Heights], colour: str, name: str | None, level: int = 0) -> None:
    """Where there is nothing to draw, at the bottom; level: above the crosses of so many others."""
    missing = [at for at, each in zip(x, there, strict=True) if each is None]
    style: dict[str, Any] = {"linestyle": "none", "marker": "x", "markersize": 12, "markeredgewidth": 3}
    if missing:
        height = [0.03 + 0.05 * level] * len(missing)
        ax.plot(missing, height, color=colour, transform=ax.get_xaxis_transform(), label=name, **style)


def _label_values(ax: Axes, values: list[Any], numeric: bool) -> None:
    if not numeric:
        ax.set_xticks(range(len(values)), [value_text(value) for value in values])
        return
    if values[0] > 0 and values[-1] / values[0] >= LOGARITHMIC:
        ax.set_xscale("log")
    ax.set_xticks(values, [value_text(value) if abs(value) < 1e5 else f"{value:.4g}" for value in values])
    ax.minorticks_off()


def _offset(number: int, count: int) -> float:
    """Of a bar from the middle of its group, which is 0.8 wide."""
    return (number + 0.5) / count * 0.8 - 0.4


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
