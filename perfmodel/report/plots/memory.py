"""The picture of a step's memory: what the caching allocator holds, by kind, and what the device has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from perfmodel.prediction.memory_text import refusal_text, shortage_text
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
LETTERS = 95  # in a line of the title


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
    A line shows the most that this device can reserve: its memory less what the context and communicators take; far
    above a small step it would squeeze, words stand in its place. A step that does not fit is drawn as on a device
    with enough memory: the title says which request is refused, and a cross marks it where the step shown makes it.
    """
    largest = largest_rank(prediction)
    prediction, rank = with_largest_memory(prediction)
    memory = prediction.memory
    if memory is None:
        raise ValueError("this prediction has no memory timeline")
    ax = axes_or_new(ax)
    drawn = memory.unlimited or memory
    reservable_bytes = prediction.profile.device.memory_bytes - memory.outside_bytes
    x = _host_time_s(prediction, drawn.event) / MS
    x[0] = 0.0  # what the step starts with
    _draw_kinds(ax, x, drawn)
    ax.step(x, drawn.reserved_bytes / GIB, where="post", color=palette.INK, linestyle="--", label="reserved")
    most = "" if rank == largest else f"\nrank {largest} takes most"
    title = _title(prediction, memory)
    ax.set_title(wrapped(title if rank is None else f"rank {rank}: {title}{most}", LETTERS))
    ax.set_xlim(0, max(float(x[-1]), 1e-9))
    _draw_limit(ax, float(drawn.reserved_bytes.max()), float(reservable_bytes))
    _draw_peak(ax, x, drawn)
    if memory.stopped_in == "steady":
        _draw_refusal(ax, prediction, memory, float(reservable_bytes))
    ax.set_xlabel("ms since the host began the step")
    ax.set_ylabel("GiB")
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=3, frameon=False)
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
    dot: dict[str, Any] = {"color": palette.INK, "markersize": 7, "zorder": 5, "linestyle": "none", "clip_on": False}
    ax.plot(x[peak], allocated_bytes / GIB, "o", label=f"peak {format_bytes(allocated_bytes)} allocated", **dot)


def _draw_refusal(ax: Axes, prediction: Prediction, memory: MemoryTimeline, reservable_bytes: float) -> None:
    """Draw a cross where a request of the step that is drawn is refused, at what the device can reserve."""
    at_ms = float(_host_time_s(prediction, memory.event[-1:])[0]) / MS
    cross: dict[str, Any] = {"color": palette.CAPACITY, "markeredgecolor": palette.INK, "zorder": 6, "clip_on": False}
    ax.plot(at_ms, max(reservable_bytes, 0.0) / GIB, "X", markersize=13, linestyle="none", label="refused", **cross)


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
    ax.axhline(reservable_bytes / GIB, color=palette.CAPACITY, linewidth=2.5, zorder=4, label=said)


def _title(prediction: Prediction, memory: MemoryTimeline) -> str:
    if not memory.fits:
        short = shortage_text(memory, prediction.profile.device.memory_bytes)
        when, what = refusal_text(memory)
        request, _, _ = what.rpartition(" while ")
        return f"does not fit, {short}\nrefused: {when}, {request}\ndrawn: a later step, with enough memory"
    device = format_bytes(prediction.profile.device.memory_bytes)
    return (
        f"peak {format_bytes(memory.peak_allocated_bytes)} allocated, "
        f"{format_bytes(memory.peak_reserved_bytes)} reserved, "
        f"{format_bytes(memory.device_bytes)} of {device} in use"
    )


def _host_time_s(prediction: Prediction, instructions: np.ndarray) -> np.ndarray:
    """Return when the host came by each of these instructions: between the launches around it."""
    timeline, columns = prediction.timeline, prediction.program.instructions
    launched = columns.launches[np.isin(columns.a[columns.launches], np.unique(timeline.operation))]
    if timeline.side:
        launched = launched[columns.stream[launched] == COMPUTE]
    end_s = timeline.host_spans[-1].end_s if timeline.host_spans else 0.0
    positions = np.concatenate([[0], launched, [len(columns.kind)]])
    times_s = np.concatenate([[0.0], timeline.issue_s, [end_s]])
    times: np.ndarray = np.interp(instructions, positions, np.maximum.accumulate(times_s))
    return times
