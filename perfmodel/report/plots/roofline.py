"""The roofline of a step: every kernel's FLOP/s over its arithmetic intensity, under what the datasheet allows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from perfmodel.prediction.pipeline_ranks import titled_of_rank
from perfmodel.prediction.prediction import KernelUse, Prediction
from perfmodel.report.plots import palette
from perfmodel.report.plots.canvas import axes_or_new
from perfmodel.units import format_bytes_per_s, format_flops_per_s, format_share

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

    from perfmodel.hardware.profile import Device

LEAST_INTENSITY = 1e-3  # FLOP a byte; below it a kernel only moves data
NAMED = 6  # kernels with most of the device's time
LONGEST_NAME = 76  # letters
SIZE_KEY = (0.01, 0.05, 0.2)  # shares of the device's time
ROOM_RIGHT = 25.0  # of the highest intensity, for the names of roofs
LEGEND_COLUMNS = 4
LEGEND_TOP, LEGEND_ROW = 66, 23  # points below the axes, and of each row
NEAR_X, NEAR_Y = 0.09, 0.045  # of the axes: numbers of kernels that stand so near each other are written together


def plot_roofline(prediction: Prediction, ax: Axes | None = None) -> Axes:
    """Every kernel of the step under the datasheet's roofs, a marker's area being its share of the device's time; the
    largest bear numbers, which a list below the axes names.

    Attainable FLOP/s = min(peak, intensity x bandwidth). Source: Williams, Waterman, Patterson 2009, Roofline.
    """
    ax = axes_or_new(ax)
    busy_s = sum(use.total_s for use in prediction.kernels) or 1.0
    shown = [
        use
        for use in prediction.kernels
        if use.cost.bytes > 0 and _intensity(use) > LEAST_INTENSITY and use.total_s > 0
    ]
    for use in shown:
        size, colour = _area(use.total_s / busy_s), palette.kernel_colour(use.cost.kind)
        ax.scatter(_intensity(use), _rate(use), s=size, color=colour, alpha=0.6, linewidth=0)
    ax.set_xscale("log")
    ax.set_yscale("log")
    _draw_roofs(ax, prediction.profile.device, shown)
    hidden = 1 - sum(use.total_s for use in shown) / busy_s
    ax.set_title(
        titled_of_rank(prediction, f"{format_share(hidden)} of the device's time is in kernels without arithmetic")
    )
    ax.set_xlabel("arithmetic intensity, FLOP a byte")
    ax.set_ylabel("FLOP/s")
    handles = _legend(shown)
    where: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.1), "frameon": False}
    ax.legend(handles=handles, **where, fontsize="small", ncols=LEGEND_COLUMNS, labelspacing=0.8)
    rows = -(-len(handles) // LEGEND_COLUMNS)
    _name_largest(ax, prediction.profile.device, shown[:NAMED], busy_s, LEGEND_TOP + LEGEND_ROW * rows)
    return ax


def _intensity(use: KernelUse) -> float:
    return use.cost.flops / use.cost.bytes


def _rate(use: KernelUse) -> float:
    return use.cost.flops / use.mean_s


def _area(share: float) -> float:
    """Return the area of a marker in square points."""
    return 40 + 3000 * share


def _legend(shown: Sequence[KernelUse]) -> list[Line2D]:
    """Families by colour, then the key to sizes."""
    from matplotlib.lines import Line2D

    round_marker: dict[str, Any] = {"linestyle": "none", "marker": "o"}
    found = palette.families(use.cost.kind for use in shown)
    colours = [Line2D([], [], **round_marker, color=each, markersize=9, label=name) for name, each in found.items()]
    sizes = [
        Line2D(
            [],
            [],
            **round_marker,
            color="white",
            markeredgecolor=palette.INK,
            markersize=_area(share) ** 0.5,
            label=f"{format_share(share)} of the device's time",
        )
        for share in SIZE_KEY
    ]
    return colours + sizes


def _draw_roofs(ax: Axes, device: Device, shown: Sequence[KernelUse]) -> None:
    bandwidth = device.peak_memory_bytes_per_s
    used = {use.cost.arithmetic for use in shown}
    peaks = {arithmetic: peak for arithmetic, peak in device.peak_flops_per_s.items() if arithmetic in used}
    intensities = [_intensity(use) for use in shown] or [1.0]
    ridge = max(peaks.values()) / bandwidth if peaks and bandwidth else 1.0
    low, high = min(intensities) / 3, max([*intensities, ridge]) * ROOM_RIGHT
    x = np.geomspace(low, high, 200)
    for arithmetic, peak in peaks.items():
        roof = np.full_like(x, peak) if bandwidth is None else np.minimum(peak, x * bandwidth)
        ax.plot(x, roof, color="black", linewidth=1.5)
        label = f"{arithmetic} {format_flops_per_s(peak)}"
        ax.annotate(label, (high, peak), ha="right", va="bottom", xytext=(-8, 5), textcoords="offset points")
    if bandwidth is not None and peaks:
        at = ridge / 3
        label = format_bytes_per_s(bandwidth)
        ax.annotate(label, (at, at * bandwidth), ha="right", va="bottom", xytext=(-6, 4), textcoords="offset points")
    ax.set_xlim(low, high)
    rates = [_rate(use) for use in shown] or [1.0]
    ax.set_ylim(min(rates) / 3, 4 * max([*rates, *peaks.values()]))


def _name_largest(ax: Axes, device: Device, largest: Sequence[KernelUse], busy_s: float, below: float) -> None:
    """Numbers at the markers, one text for all that stand close together, and a list so many points below the axes."""
    places: list[tuple[float, float, list[int]]] = []
    for number, use in enumerate(largest, start=1):
        x, y = ax.transAxes.inverted().transform(ax.transData.transform((_intensity(use), _rate(use))))
        near = next((each for each in places if abs(each[0] - x) < NEAR_X and abs(each[1] - y) < NEAR_Y), None)
        if near is None:
            places.append((x, y, [number]))
        else:
            near[2].append(number)
    for x, y, numbers in places:
        ax.annotate(
            _joined(numbers),
            (x, y),
            (0, -22),
            xycoords="axes fraction",
            textcoords="offset points",
            ha="center",
            va="top",
            fontweight="bold",
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 1},
        )
    lines = [f"{number}  {_described(use, device, busy_s)}" for number, use in enumerate(largest, start=1)]
    if lines:
        text = "largest kernels: share of the device's time, and of the FLOP/s under the roof\n"
        ax.annotate(
            text + "\n".join(lines),
            (0, 0),
            (0, -below),
            xycoords="axes fraction",
            textcoords="offset points",
            va="top",
            fontsize="small",
            linespacing=1.4,
        )


def _joined(numbers: Sequence[int]) -> str:
    """Join ascending numbers.

    >>> _joined([1, 2, 3]), _joined([2, 5])
    ('1 to 3', '2, 5')
    """
    first, last = numbers[0], numbers[-1]
    is_range = len(numbers) > 2 and last - first == len(numbers) - 1
    return f"{first} to {last}" if is_range else ", ".join(map(str, numbers))


def _described(use: KernelUse, device: Device, busy_s: float) -> str:
    name = re.sub(r"\{[^}]*\}", "", use.key.removeprefix("aten.").replace(".default(", "("))  # without strides
    name = name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"
    share = format_share(use.total_s / busy_s)
    allowed = _allowed(use, device)
    reached = "" if allowed is None else f", {format_share(_rate(use) / allowed)} of the roof"
    return f"{name}: {share}{reached}"


def _allowed(use: KernelUse, device: Device) -> float | None:
    """FLOP/s under the roof; None without a datasheet."""
    peak, bandwidth = device.peak_flops_per_s.get(use.cost.arithmetic), device.peak_memory_bytes_per_s
    limits = [limit for limit in (peak, bandwidth and bandwidth * _intensity(use)) if limit]
    return min(limits, default=None)
