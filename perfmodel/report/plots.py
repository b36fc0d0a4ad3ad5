"""Pictures of one prediction. Each function draws on the Axes it is given (or on new ones) and returns them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from perfmodel.program.program import COMPUTE
from perfmodel.report.canvas import COLOURS, OTHER_COLOUR, axes_or_new, save_figure, wrapped
from perfmodel.report.memory_text import shortage_text
from perfmodel.report.operators import seconds_by_kind, use_by_operation
from perfmodel.report.pipeline_plot import save_pipeline_plot
from perfmodel.report.pipeline_ranks import computed_stretches, largest_rank, on_rank, with_largest_memory
from perfmodel.report.text import LEAST_SHARE, describe, parts_of
from perfmodel.simulate.memory import MemoryTimeline
from perfmodel.simulate.prediction import KernelUse, Prediction
from perfmodel.simulate.timeline import PhaseSpan
from perfmodel.units import GIB, MS, format_bytes, format_bytes_per_s, format_flops_per_s, format_seconds, format_share
from perfmodel.workload.trace_file import StorageKind

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NOTHING: Mapping[str, str] = MappingProxyType({})
MOST_KINDS = 7  # named in a legend; the rest is "other"
LONGEST_TITLE = 100  # letters of a line of the timeline's
WHOLE_NAME = 0.1  # of the step; a shorter phase has room for its initial only,
INITIAL = 0.015  # and a still shorter one for nothing
LEAST_INTENSITY = 1e-3  # FLOP a byte; below it a kernel only moves data
WIRE_COLOUR = "#BB2222"
WAITING_COLOUR = "#F2C9C9"
MEMORY_COLOURS = {
    StorageKind.PARAMETER: "#4477AA",
    StorageKind.BUFFER: "#66CCEE",
    StorageKind.INPUT: "#999933",
    StorageKind.GRADIENT: "#228833",
    StorageKind.OPTIMIZER_STATE: "#AA3377",
    StorageKind.ACTIVATION: "#EE6677",
    StorageKind.TEMPORARY: "#CCBB44",
}


def save_plots(prediction: Prediction, directory: Path) -> list[Path]:
    """Write timeline.png, where-the-time-goes.png, roofline.png, memory.png where it is predicted; of a pipeline, whose
    ranks these name, pipeline.png as well.
    """
    title = f"{prediction.scenario.name} on {prediction.profile.name}\n{describe(prediction.scenario)}"
    saved = [
        save_figure(directory / "timeline.png", title, (13, 5.5), [lambda ax: plot_timeline(prediction, ax)]),
        save_figure(
            directory / "where-the-time-goes.png",
            title,
            (13, 8),
            [lambda ax: plot_breakdown(prediction, ax), lambda ax: plot_kinds(prediction, ax)],
        ),
        save_figure(directory / "roofline.png", title, (11, 8), [lambda ax: plot_roofline(prediction, ax)]),
    ]
    if prediction.memory is not None:
        saved.append(save_figure(directory / "memory.png", title, (13, 6.5), [lambda ax: plot_memory(prediction, ax)]))
    if prediction.rank_timelines:
        saved.append(save_pipeline_plot(prediction, directory / "pipeline.png"))
    return saved


def plot_timeline(prediction: Prediction, ax: Axes | None = None) -> Axes:
    """The step on the clocks of host and device: a row for the host, its phases, and each stream of the device."""
    ax = axes_or_new(ax)
    timeline, colours = prediction.timeline, _colours_by_kind(prediction)
    uses = use_by_operation(prediction)
    kinds = np.array([uses[operation].cost.kind for operation in timeline.operation.tolist()])
    on_device = prediction.profile.device.kind == "cuda"
    rows = [f"stream {stream}" if on_device else "operators" for stream in np.unique(timeline.stream).tolist()]
    for row, stream in enumerate(np.unique(timeline.stream).tolist()):
        for kind, colour in colours.items():
            chosen = (timeline.stream == stream) & (kinds == kind)
            _bars(ax, row, timeline.start_s[chosen], timeline.end_s[chosen], colour)
    for stream in sorted({each.stream for each in timeline.communications}):
        on_stream = [each for each in timeline.communications if each.stream == stream]
        starts_s, waits_s, ends_s = np.array([(each.start_s, each.waits_s, each.end_s) for each in on_stream]).T
        row = 0 if stream == COMPUTE else len(rows)
        _bars(ax, row, starts_s, starts_s + waits_s, WAITING_COLOUR)
        _bars(ax, row, starts_s + waits_s, ends_s, WIRE_COLOUR, edge=0.8 if waits_s.any() else 0.0)
        if row:
            rows.append(_wire_row(prediction, stream))
    if timeline.side:
        bars = np.array([(each.start_s, each.end_s) for each in timeline.side])
        _bars(ax, len(rows), bars[:, 0], bars[:, 1], OTHER_COLOUR, edge=0.8)
        rows.append("copies beside")
    if on_device:
        _bars(ax, len(rows), timeline.host_start_s, timeline.issue_s, "#555555")
        rows.append("host")
    spans = timeline.phases
    _phase_row(ax, len(rows), prediction)
    rows.append("phases")
    ax.set_yticks(range(len(rows)), rows)
    ax.set_ylim(-0.6, len(rows) - 0.4)
    until_s = [*(span.end_s for span in spans), *timeline.end_s[-1:].tolist()]
    ax.set_xlim(0, max(until_s, default=1.0) / MS)
    ax.set_xlabel("ms since the host began the step")
    title = _titled(prediction, f"step {format_seconds(prediction.step_time_s)}; {prediction.bottleneck}")
    ax.set_title(wrapped(title, LONGEST_TITLE))
    _kind_legend(ax, colours, _wire_colours(prediction))
    return ax


def _titled(prediction: Prediction, title: str) -> str:
    """Of a pipeline, with the rank that is drawn."""
    return title if prediction.shown_rank is None else f"rank {prediction.shown_rank}: {title}"


def _wire_colours(prediction: Prediction) -> dict[str, str]:
    """What a pipeline's messages show; collectives do not tell apart what they wait."""
    if not prediction.rank_timelines:
        return {}
    return {"communication": WIRE_COLOUR, "waiting for another rank": WAITING_COLOUR}


def _wire_row(prediction: Prediction, stream: int) -> str:
    """What runs on this stream, if only one kind of collective does and another stream has others."""
    communications, kinds = prediction.timeline.communications, dict[int, set[str]]()
    if all(each.exchange >= 0 for each in communications if each.stream == stream):
        return "messages"
    for each in communications:
        kinds.setdefault(each.stream, set()).add(prediction.program.collectives[each.collective].kind)
    own, several = kinds[stream], len(kinds.keys() - {COMPUTE}) > 1
    return _words(next(iter(own))) if several and len(own) == 1 else "communication"


def _bars(ax: Axes, row: int, start_s: np.ndarray, end_s: np.ndarray, colour: str, edge: float = 0.0) -> None:
    """edge: points, for what would be narrower than a pixel."""
    spans = list(zip((start_s / MS).tolist(), ((end_s - start_s) / MS).tolist(), strict=True))
    ax.broken_barh(spans, (row - 0.35, 0.7), facecolors=colour, edgecolors=colour, linewidth=edge)


def _phase_row(ax: Axes, row: int, prediction: Prediction) -> None:
    spans = [span for span in _phases(prediction) if span.duration_s > 0]
    shades = dict(zip(dict.fromkeys(span.phase for span in spans), COLOURS, strict=False))
    total_s = max(prediction.step_time_s, 1e-12)
    for span in spans:
        ax.broken_barh(
            [(span.start_s / MS, span.duration_s / MS)], (row - 0.25, 0.5), facecolors=shades[span.phase], alpha=0.35
        )
        label = span.phase if span.duration_s > WHOLE_NAME * total_s else span.phase[0].upper()
        if span.duration_s > INITIAL * total_s:
            ax.text((span.start_s + span.end_s) / 2 / MS, row, label, ha="center", va="center")


def _phases(prediction: Prediction) -> list[PhaseSpan]:
    """Of a pipeline without the waiting at their ends: it is for what comes next."""
    timeline = prediction.timeline
    if not prediction.rank_timelines:
        return list(timeline.phases)
    stretches = computed_stretches(timeline)
    return [replace(timeline.phases[run], start_s=start_s, end_s=end_s) for run, start_s, end_s in stretches]


def _colours_by_kind(prediction: Prediction) -> dict[str, str]:
    """Every kind of kernel in order of its time; past the first few they share one colour."""
    kinds = list(seconds_by_kind(prediction))
    return {kind: COLOURS[index] if index < MOST_KINDS else OTHER_COLOUR for index, kind in enumerate(kinds)}


def _kind_legend(ax: Axes, colours: dict[str, str], more: Mapping[str, str] = NOTHING, **where: Any) -> None:
    """more: colours by what they stand for beside kernels."""
    from matplotlib.patches import Patch

    named = {kind: colour for kind, colour in colours.items() if colour != OTHER_COLOUR}
    patches = [Patch(color=colour, label=_words(kind)) for kind, colour in named.items()]
    if len(colours) > len(named):
        patches.append(Patch(color=OTHER_COLOUR, label="other"))
    patches += [Patch(color=colour, label=name) for name, colour in more.items()]
    if patches:
        default = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16), "ncols": 4, "frameon": False}
        ax.legend(handles=patches, **(default | where))


def _words(name: str) -> str:
    return name.replace("_", " ")


def plot_breakdown(prediction: Prediction, ax: Axes | None = None) -> Axes:
    """The parts of the step, which add up to it."""
    parts = {
        label: prediction.breakdown[part]
        for part, label in parts_of(prediction).items()
        if prediction.breakdown[part] >= LEAST_SHARE * prediction.step_time_s
    }
    title = f"where the step's time goes{on_rank(prediction.shown_rank)}"
    return _horizontal_bars(ax, parts, prediction.step_time_s, [COLOURS[0]] * len(parts), title)


def plot_kinds(prediction: Prediction, ax: Axes | None = None) -> Axes:
    """Device time by class of kernel."""
    seconds, colours = seconds_by_kind(prediction), _colours_by_kind(prediction)
    parts = {_words(kind): value for kind, value in list(seconds.items())[:MOST_KINDS]}
    others = sum(list(seconds.values())[MOST_KINDS:])
    shades = [colours[kind] for kind in list(seconds)[:MOST_KINDS]]
    if others > 0:
        parts["other"] = others
        shades.append(OTHER_COLOUR)
    title = f"device time by kind of kernel{on_rank(prediction.shown_rank)}"
    return _horizontal_bars(ax, parts, prediction.step_time_s, shades, title)


def _horizontal_bars(ax: Axes | None, parts: dict[str, float], total_s: float, colours: list[str], title: str) -> Axes:
    ax = axes_or_new(ax)
    values_ms = [seconds / MS for seconds in parts.values()]
    bars = ax.barh(list(parts), values_ms, color=colours)
    labels = [f" {format_seconds(seconds)}, {format_share(seconds / total_s, 1)}" for seconds in parts.values()]
    ax.bar_label(bars, labels)
    ax.invert_yaxis()
    ax.set_xlim(0, 1.3 * max(values_ms, default=1.0))
    ax.set_xlabel("ms of one step")
    ax.set_title(title)
    return ax


def plot_roofline(prediction: Prediction, ax: Axes | None = None) -> Axes:
    """Every kernel of the step under the datasheet's roofs; a marker's area is its share of the device's time.

    Attainable FLOP/s = min(peak, intensity x bandwidth). Source: Williams, Waterman, Patterson 2009, Roofline.
    """
    ax = axes_or_new(ax)
    colours = _colours_by_kind(prediction)
    shown = [
        use
        for use in prediction.kernels
        if use.cost.bytes > 0 and use.cost.flops / use.cost.bytes > LEAST_INTENSITY and use.total_s > 0
    ]
    busy_s = sum(use.total_s for use in prediction.kernels) or 1.0
    for use in shown:
        ax.scatter(
            use.cost.flops / use.cost.bytes,
            use.cost.flops / use.mean_s,
            s=40 + 3000 * use.total_s / busy_s,
            color=colours[use.cost.kind],
            alpha=0.6,
            linewidth=0,
        )
    ax.set_xscale("log")
    ax.set_yscale("log")
    _draw_roofs(ax, prediction, shown)
    hidden = 1 - sum(use.total_s for use in shown) / busy_s
    ax.set_title(_titled(prediction, f"{format_share(hidden)} of the device's time is in kernels without arithmetic"))
    ax.set_xlabel("arithmetic intensity, FLOP a byte")
    ax.set_ylabel("FLOP/s")
    _kind_legend(
        ax,
        {kind: colours[kind] for kind in colours if any(use.cost.kind == kind for use in shown)},
        loc="lower right",
        bbox_to_anchor=None,
        ncols=1,
        frameon=True,
    )
    return ax


def _draw_roofs(ax: Axes, prediction: Prediction, shown: list[KernelUse]) -> None:
    device = prediction.profile.device
    bandwidth = device.peak_memory_bytes_per_s
    used = {use.cost.arithmetic for use in shown}
    peaks = {arithmetic: peak for arithmetic, peak in device.peak_flops_per_s.items() if arithmetic in used}
    intensities = [use.cost.flops / use.cost.bytes for use in shown] or [1.0]
    ridge = max(peaks.values()) / bandwidth if peaks and bandwidth else 1.0
    low, high = min(intensities) / 3, max([*intensities, ridge]) * 10
    x = np.geomspace(low, high, 200)
    for arithmetic, peak in peaks.items():
        roof = np.full_like(x, peak) if bandwidth is None else np.minimum(peak, x * bandwidth)
        ax.plot(x, roof, color="black", linewidth=1.5)
        label = f"{arithmetic} {format_flops_per_s(peak)}"
        ax.annotate(label, (high, peak), ha="right", va="bottom", xytext=(-8, 5), textcoords="offset points")
    if bandwidth is not None and peaks:
        at = (low * ridge) ** 0.5
        label = format_bytes_per_s(bandwidth)
        ax.annotate(label, (at, at * bandwidth), ha="right", va="bottom", xytext=(-6, 4), textcoords="offset points")
    ax.set_xlim(low, high)


def plot_memory(prediction: Prediction, ax: Axes | None = None) -> Axes:
    """What the caching allocator holds over the steady step, by kind, on the host's clock (which allocates). Of ranks
    that differ, one that the title names: see :func:`~perfmodel.report.pipeline_ranks.with_largest_memory`. A step that
    does not fit is drawn as on a device without a limit, with a line at the most that this one could reserve.

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
    title, refused = _memory_title(prediction, memory), memory.out_of_memory
    memory = memory.unlimited or memory
    x = _host_time_s(prediction, memory) / MS
    kinds = [kind for kind in StorageKind if memory.kind_bytes[kind].any()]
    held = memory.kind_bytes[kinds] / GIB
    labels = [_words(kind.name.lower()) for kind in kinds]
    colours = [MEMORY_COLOURS[kind] for kind in kinds]
    if kinds:
        for layer in ax.stackplot(x, held, labels=labels, colors=colours, step="post", linewidth=0.8):
            layer.set_edgecolor("face")  # a peak of one operator is narrower than a pixel
    ax.step(x, memory.reserved_bytes / GIB, where="post", color="black", linestyle="--", label="reserved")
    peak = int(np.argmax(memory.allocated_bytes))
    ax.plot(x[peak], memory.allocated_bytes[peak] / GIB, "o", color="black", markersize=7)
    if refused is not None:
        ax.axhline(refused.limit_bytes / GIB, color="firebrick", linewidth=2, label="most this device can reserve")
    most = "" if rank == largest else f"\nrank {largest} takes most"
    ax.set_title(title if rank is None else f"rank {rank}: {title}{most}")
    ax.set_xlim(0, max(float(x[-1]), 1e-9))
    ax.set_ylim(0, 1.15 * float(max(memory.reserved_bytes.max(), 1)) / GIB)
    ax.set_xlabel("ms since the host began the step")
    ax.set_ylabel("GiB")
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=4, frameon=False)
    return ax


def _memory_title(prediction: Prediction, memory: MemoryTimeline) -> str:
    if not memory.fits:
        return f"does not fit: {shortage_text(memory, prediction.profile.device.memory_bytes)}"
    device = format_bytes(prediction.profile.device.memory_bytes)
    return (
        f"peak {format_bytes(memory.peak_allocated_bytes)} allocated, "
        f"{format_bytes(memory.peak_reserved_bytes)} reserved, "
        f"{format_bytes(memory.device_bytes)} of {device} in use"
    )


def _host_time_s(prediction: Prediction, memory: MemoryTimeline) -> np.ndarray:
    """When the host came by each sample: between the launches around it."""
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
