"""Pictures of one prediction. Each function draws on the Axes it is given (or on new ones) and returns them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from perfmodel.prediction.pipeline_ranks import on_rank
from perfmodel.prediction.prediction import Prediction
from perfmodel.report.operators import seconds_by_kind
from perfmodel.report.plots import palette
from perfmodel.report.plots.canvas import axes_or_new, save_figure
from perfmodel.report.plots.memory import plot_memory
from perfmodel.report.plots.pipeline import save_pipeline_plot
from perfmodel.report.plots.roofline import plot_roofline
from perfmodel.report.plots.timeline import plot_timeline
from perfmodel.report.text.prediction import LEAST_SHARE, describe, labels_of
from perfmodel.units import MS, format_seconds, format_share

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_KINDS = 9  # with a bar each; the rest share one


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
        save_figure(directory / "roofline.png", title, (11, 9.6), [lambda ax: plot_roofline(prediction, ax)]),
    ]
    if prediction.memory is not None:
        saved.append(save_figure(directory / "memory.png", title, (13, 7.5), [lambda ax: plot_memory(prediction, ax)]))
    if prediction.rank_timelines:
        saved.append(save_pipeline_plot(prediction, directory / "pipeline.png"))
    return saved


def plot_breakdown(prediction: Prediction, ax: Axes | None = None) -> Axes:
    """Draw the shares of the step, which add up to it."""
    names = {
        key: label
        for key, label in labels_of(prediction).items()
        if prediction.breakdown[key] >= LEAST_SHARE * prediction.step_time_s
    }
    seconds = {label: prediction.breakdown[key] for key, label in names.items()}
    colours = [palette.BREAKDOWN[key] for key in names]
    title = f"where the step's time goes{on_rank(prediction.shown_rank)}"
    return _horizontal_bars(ax, seconds, prediction.step_time_s, colours, "step", title)


def plot_kinds(prediction: Prediction, ax: Axes | None = None) -> Axes:
    """Device time by class of kernel, each with its share of all device time; streams that run at once both count."""
    by_kind = seconds_by_kind(prediction)
    named = dict(list(by_kind.items())[: MOST_KINDS if len(by_kind) > MOST_KINDS + 1 else None])
    seconds = {kind.replace("_", " "): value for kind, value in named.items()}
    colours = [palette.kernel_colour(kind) for kind in named]
    if hidden := len(by_kind) - len(named):
        seconds[f"{hidden} more kinds"] = sum(by_kind.values()) - sum(named.values())
        colours.append(palette.OTHER)
    busy_s = sum(by_kind.values())
    title = f"device time by kind of kernel{on_rank(prediction.shown_rank)}, {format_seconds(busy_s)} in all"
    return _horizontal_bars(ax, seconds, busy_s, colours, "device time", title)


def _horizontal_bars(
    ax: Axes | None, seconds: dict[str, float], total_s: float, colours: list[str], whole: str, title: str
) -> Axes:
    """Draw bars with their shares of ``total_s``, which ``whole`` names."""
    ax = axes_or_new(ax)
    values_ms = [each / MS for each in seconds.values()]
    bars = ax.barh(list(seconds), values_ms, color=colours)
    shares = [each / total_s if total_s else 0.0 for each in seconds.values()]
    labels = [
        f" {format_seconds(each)}, {format_share(share, 1)}"
        for each, share in zip(seconds.values(), shares, strict=True)
    ]
    ax.bar_label(bars, labels)
    ax.invert_yaxis()
    ax.set_xlim(0, 1.3 * max(values_ms, default=1.0))
    ax.set_xlabel(f"ms; %: of the {whole}")
    ax.set_title(title)
    return ax
