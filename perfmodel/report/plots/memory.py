"""The picture of a step's memory: what the caching allocator holds, by kind, and what the device has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from perfmodel.prediction.memory_text import refused_request_text, shortage_text
from perfmodel.prediction.pipeline_ranks import largest_rank, with_largest_memory
from perfmodel.prediction.prediction import Prediction
from perfmodel.program.program import COMPUTE
from perfmodel.report.plots import palette
from perfmodel.report.plots.canvas import axes_or_new, wrapped
from perfmodel.simulate.memory.walk import MemoryTimeline
from perfmodel.trace.trace import StorageKind
from perfmodel.units import GIB, MS, format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SMALL = 0.2  # of the device's memory; an axis that reached up to the limit would squeeze what is drawn
ROOM = 1.1  # above the highest line
LETTERS_AN_INCH = 10  # of a line of the title, over the axes' width before the layout widens them
DRAWN_STEPS = ("early", "steady")  # sections of the memory walk that make the requests of the step that is drawn
LEGEND: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.13), "ncols": 3, "frameon": False}


def plot_memory(prediction: Prediction, ax: Axes | None = None) -> Axes:
    """Draw what the caching allocator holds over the steady step, by kind, on the host's clock (which allocates).

    Parameters
    ----------
    prediction : Prediction
        Of ranks that differ, one is drawn, which the title names: see
        :func:`~perfmodel.prediction.pipeline_ranks.with_largest_memory`.
    ax : Axes, optional
        Where to draw; new ones if left out.

    Raises
    ------
    ValueError
        If the prediction has no memory (a CPU).

    Notes
    -----
    A line shows the most that this device can reserve: its memory less what the context and communicators take. Words
    take its place if it lies so far above a small step that the axis would squeeze the step. All other words stand in
    the title and in the legend, where they cover no data.

    A step that does not fit is drawn as on a device with enough memory. A cross marks the request that is refused; if
    the refused request is one of another step than the one drawn, such as the first, the title says so instead.
    """
    largest = largest_rank(prediction)
    prediction, rank = with_largest_memory(prediction)
    memory = prediction.memory
    if memory is None:
        raise ValueError("this prediction has no memory timeline")
    ax = axes_or_new(ax)
    drawn = memory.unlimited or memory
    x = _host_time_s(prediction, drawn) / MS
    _draw_kinds(ax, x, drawn)
    dashes: dict[str, Any] = {"color": palette.INK, "linestyle": "--", "zorder": 4.5}  # seen on the limit's line, too
    ax.step(x, drawn.reserved_bytes / GIB, where="post", label="reserved", **dashes)
    most = "" if rank == largest else f"\nrank {largest} takes most"
    title = _title(prediction, memory)
    title = title if rank is None else f"rank {rank}: {title}{most}"
    ax.set_title(wrapped(title, LETTERS_AN_INCH * ax.bbox.width / ax.figure.dpi))
    ax.set_xlim(0, max(float(x[-1]), 1e-9))
    reservable_bytes = max(float(prediction.profile.device.memory_bytes - memory.outside_bytes), 0.0)
    _draw_limit(ax, float(drawn.reserved_bytes.max()), reservable_bytes)
    _draw_peak(ax, x, drawn)
    refused = _refused_sample(memory)
    if refused is not None:
        _draw_mark(ax, x[refused], reservable_bytes, ("X", 15), palette.CAPACITY, "refused request")
    ax.set_xlabel("ms since the host began the step")
    ax.set_ylabel("GiB")
    ax.legend(**LEGEND)
    return ax


def _draw_kinds(ax: Axes, x: np.ndarray, memory: MemoryTimeline) -> None:
    kinds = [kind for kind in StorageKind if memory.kind_bytes[kind].any()]
    if not kinds:
        return
    labels = [kind.name.lower().replace("_", " ") for kind in kinds]
    colours = [palette.STORAGE[kind] for kind in kinds]
    held = memory.kind_bytes[kinds] / GIB
    for layer in ax.stackplot(x, held, labels=labels, colors=colours, step="post", linewidth=0.8):
        layer.set_edgecolor("face")  # a peak of one operator is narrower than a pixel


def _draw_peak(ax: Axes, x: np.ndarray, memory: MemoryTimeline) -> None:
    peak = int(np.argmax(memory.allocated_bytes))
    allocated_bytes = int(memory.allocated_bytes[peak])
    _draw_mark(ax, x[peak], allocated_bytes, ("o", 7), palette.INK, f"peak {format_bytes(allocated_bytes)} allocated")


def _draw_mark(ax: Axes, at_ms: float, at_bytes: float, mark: tuple[str, int], colour: str, label: str) -> None:
    """Draw one marker, of a shape and a size in points, whole at the edges of the axes, too, and named in the legend.

    The smaller of two markers lies on top, so that both are seen where they meet.
    """
    shape, size = mark
    look: dict[str, Any] = {"color": colour, "markeredgecolor": palette.INK, "linestyle": "none", "markersize": size}
    ax.plot(at_ms, at_bytes / GIB, shape, label=label, zorder=5 + 1 / size, clip_on=False, **look)


def _refused_sample(memory: MemoryTimeline) -> int | None:
    """Return the sample of the drawn step at which the refused request is made; None if another step makes it.

    The walk that was refused and the one with enough memory make the same requests in the same order, so the refused
    request is the first that the former has no sample of.
    """
    return len(memory.event) if memory.stopped_in in DRAWN_STEPS else None


def _draw_limit(ax: Axes, reserved_bytes: float, reservable_bytes: float) -> None:
    """Draw a line where it does not squeeze what is drawn, else words."""
    said = f"this device can reserve {format_bytes(reservable_bytes)}"
    if reserved_bytes < SMALL * reservable_bytes:
        ax.set_ylim(0, ROOM * max(reserved_bytes, 1.0) / GIB)
        where: dict[str, Any] = {"xycoords": "axes fraction", "ha": "right", "va": "top", "color": palette.CAPACITY}
        ax.annotate(
            f"↑ {said}, {reservable_bytes / max(reserved_bytes, 1.0):.0f} times as much", (0.995, 0.99), **where
        )
        return
    ax.set_ylim(0, ROOM * max(reserved_bytes, reservable_bytes) / GIB)
    ax.axhline(reservable_bytes / GIB, color=palette.CAPACITY, linewidth=2.5, zorder=4, label=said)


def _title(prediction: Prediction, memory: MemoryTimeline) -> str:
    if not memory.fits:
        shortage = shortage_text(memory, prediction.profile.device.memory_bytes)
        elsewhere = " (not in the step drawn)" if _refused_sample(memory) is None else ""
        return (
            f"does not fit, {shortage}\n"
            f"refused{elsewhere}: {refused_request_text(memory)}\n"
            "drawn: what a later step would hold with enough memory"
        )
    device = format_bytes(prediction.profile.device.memory_bytes)
    return (
        f"peak {format_bytes(memory.peak_allocated_bytes)} allocated, "
        f"{format_bytes(memory.peak_reserved_bytes)} reserved, "
        f"{format_bytes(memory.device_bytes)} of {device} in use"
    )


def _host_time_s(prediction: Prediction, memory: MemoryTimeline) -> np.ndarray:
    """Return the host's time at each sample, between the launches around it."""
    timeline, columns = prediction.timeline, prediction.program.instructions
    launched = columns.launches[np.isin(columns.a[columns.launches], np.unique(timeline.operation))]
    if timeline.side:
        launched = launched[columns.stream[launched] == COMPUTE]
    end_s = timeline.host_spans[-1].end_s if timeline.host_spans else 0.0
    positions = np.concatenate([[0], launched, [len(columns.kind)]])
    times_s = np.concatenate([[0.0], timeline.issue_s, [end_s]])
    times: np.ndarray = np.interp(memory.event, positions, np.maximum.accumulate(times_s))
    times[0] = 0.0  # what the step starts with
    return times
