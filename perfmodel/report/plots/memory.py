"""The picture of a step's memory: what the caching allocator holds, by kind, and what the device has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from perfmodel.prediction.memory_text import shortage_text
from perfmodel.prediction.pipeline_ranks import largest_rank, with_largest_memory
from perfmodel.prediction.prediction import Prediction
from perfmodel.program.program import COMPUTE
from perfmodel.report.plots import palette
from perfmodel.report.plots.canvas import axes_or_new
from perfmodel.simulate.memory.walk import MemoryTimeline
from perfmodel.trace.trace import StorageKind
from perfmodel.units import GIB, MS, format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SMALL = 0.2  # of the device's memory; an axis that reached up to the limit would squeeze what is drawn
LINE_OF_TEXT = 0.1  # of the axis' height, with the space around it
ON_WHITE = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.5}  # words over what is drawn
ROOM = 1.18  # above the highest line, for its name


def plot_memory(prediction: Prediction, ax: Axes | None = None) -> Axes:
    """Draw what the caching allocator holds over the steady step, by kind, on the host's clock (which allocates).

    If ranks differ, one is shown that the title names: see
    :func:`~perfmodel.prediction.pipeline_ranks.with_largest_memory`. A step that does not fit is drawn as on a device
    without a limit. A line shows the most that this device can reserve: its memory less what the context and
    communicators take. Words take its place if it lies so far above a small step that the axis would squeeze the step.

    Raises
    ------
    ValueError
        If the prediction has no memory (a CPU).
    """
    largest = largest_rank(prediction)
    prediction, rank = with_largest_memory(prediction)
    memory = prediction.memory
    if memory is None:
        raise ValueError("this prediction has no memory timeline")
    ax = axes_or_new(ax)
    title = _title(prediction, memory)
    reservable_bytes = prediction.profile.device.memory_bytes - memory.outside_bytes
    memory = memory.unlimited or memory
    x = _host_time_s(prediction, memory) / MS
    _draw_kinds(ax, x, memory)
    ax.step(x, memory.reserved_bytes / GIB, where="post", color=palette.INK, linestyle="--", label="reserved")
    most = "" if rank == largest else f"\nrank {largest} takes most"
    ax.set_title(title if rank is None else f"rank {rank}: {title}{most}")
    ax.set_xlim(0, max(float(x[-1]), 1e-9))
    _draw_limit(ax, float(memory.reserved_bytes.max()), float(reservable_bytes))
    _draw_peak(ax, x, memory)
    ax.set_xlabel("ms since the host began the step")
    ax.set_ylabel("GiB")
    handles, labels = ax.get_legend_handles_labels()
    ax.legend(handles, labels, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=4, frameon=False)
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
    """Draw a dot with its number, above it unless the line of reserved memory is so close that both would overlap."""
    peak = int(np.argmax(memory.allocated_bytes))
    allocated_bytes = int(memory.allocated_bytes[peak])
    ax.plot(x[peak], allocated_bytes / GIB, "o", color=palette.INK, markersize=7, zorder=5)
    is_left = x[peak] < 0.5 * x[-1]
    is_free = memory.reserved_bytes.max() - allocated_bytes > LINE_OF_TEXT * ax.get_ylim()[1] * GIB
    ax.annotate(
        f"peak {format_bytes(allocated_bytes)}",
        (x[peak], allocated_bytes / GIB),
        (8 if is_left else -8, 5 if is_free else -7),
        textcoords="offset points",
        ha="left" if is_left else "right",
        va="bottom" if is_free else "top",
        fontweight="bold",
        bbox=ON_WHITE,
        zorder=6,
    )


def _draw_limit(ax: Axes, reserved_bytes: float, reservable_bytes: float) -> None:
    """A line where it does not squeeze what is drawn, else words."""
    said = f"this device can reserve {format_bytes(reservable_bytes)}"
    if reserved_bytes < SMALL * reservable_bytes:
        ax.set_ylim(0, ROOM * max(reserved_bytes, 1.0) / GIB)
        where: dict[str, Any] = {"xycoords": "axes fraction", "ha": "right", "va": "top", "color": palette.CAPACITY}
        ax.annotate(
            f"↑ {said}, {reservable_bytes / max(reserved_bytes, 1.0):.0f} times as much", (0.995, 0.99), **where
        )
        return
    ax.set_ylim(0, ROOM * max(reserved_bytes, reservable_bytes) / GIB)
    ax.axhline(reservable_bytes / GIB, color="white", linewidth=6, zorder=4)  # stands out from what is drawn below
    ax.axhline(reservable_bytes / GIB, color=palette.CAPACITY, linewidth=2.5, zorder=4)
    style: dict[str, Any] = {
        "textcoords": "offset points",
        "xycoords": ("axes fraction", "data"),
        "color": palette.CAPACITY,
    }
    ax.annotate(
        said, (0.995, reservable_bytes / GIB), (0, 5), ha="right", va="bottom", bbox=ON_WHITE, zorder=6, **style
    )


def _title(prediction: Prediction, memory: MemoryTimeline) -> str:
    if not memory.fits:
        return f"does not fit, {shortage_text(memory, prediction.profile.device.memory_bytes)}"
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
