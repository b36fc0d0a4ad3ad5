"""Pictures of a pipeline: what its ranks compute over time, predicted above measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from perfmodel.prediction.pipeline_ranks import (
    Computed,
    ComputedStep,
    bubble_share,
    computing_s,
    measured_steps,
    predicted_steps,
)
from perfmodel.prediction.prediction import Prediction
from perfmodel.report.plots import palette
from perfmodel.report.plots.canvas import axes_or_new, file_words, save_figure
from perfmodel.report.text.prediction import describe
from perfmodel.scenario.stage_split import pipeline_of
from perfmodel.trace.phases import OPTIMIZER
from perfmodel.units import MS, format_seconds, format_share

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.patches import Patch

    from perfmodel.accuracy.cases import Pair
    from perfmodel.hardware.measurement import Measurement

KINDS = {  # what the legend calls them, and their colours
    "F": ("forward", palette.PHASES["forward"]),
    "B": ("backward", palette.PHASES["backward"]),
    "I": ("backward for inputs", palette.PHASES["backward_input"]),
    "W": ("backward for weights", palette.PHASES["backward_weight"]),
    OPTIMIZER: ("gradient scaling, optimizer", palette.PHASES["optimizer"]),
}
WIDTH_INCH, AXES_INCH = 18.0, 16.2  # of the picture, and about that of its axes
ROW_INCH, ROOM_INCH = 0.62, 1.45  # of a rank, and around the rows of a panel
COLUMNS = 5  # of the legend, at most
ROW = 0.84  # of the distance of rows
DIGIT_INCH, BORDER_INCH = 0.106, 0.02  # of a number at this size:
NUMBER_SIZE = 12
PALEST = 0.62  # share of white in a rank's last stage
BRIGHT = 0.5  # luminance, from which numbers are black


def save_pipeline_plot(prediction: Prediction, path: Path, measurement: Measurement | None = None) -> Path:
    """Draw the prediction, and below it on the same axis what was measured, where its actions are known.

    Raises
    ------
    PerfModelError
        As :func:`~perfmodel.report.plots.canvas.save_figure`.
    """
    measured = [] if measurement is None else measured_steps(measurement)
    end_s = max(each.end_s for each in (*predicted_steps(prediction), *measured))
    draw: list[Callable[[Axes], Axes]] = [partial(_draw_first, prediction, end_s=end_s)]
    if measurement is not None and measured:
        draw.append(partial(plot_measured_pipeline, measurement, end_s=end_s))
    name = prediction.scenario.name if measurement is None else measurement.name
    title = f"{name} on {prediction.profile.name}\n{describe(prediction.scenario)}"
    rows = len(prediction.rank_timelines) * len(draw)
    return save_figure(path, title, (WIDTH_INCH, 1.6 + ROW_INCH * rows + ROOM_INCH * len(draw)), draw)


def save_measured_pipelines(pairs: Iterable[Pair], directory: Path) -> list[Path]:
    """Write pipeline-<case>.png of every measured pipeline whose actions are known."""
    return [
        save_pipeline_plot(
            pair.prediction, directory / f"pipeline-{file_words(pair.measurement.name)}.png", pair.measurement
        )
        for pair in pairs
        if pair.prediction.rank_timelines and measured_steps(pair.measurement)
    ]


def plot_pipeline(prediction: Prediction, ax: Axes | None = None, end_s: float | None = None) -> Axes:
    """Draw a row for each rank and a box for each action, with the number of its micro-batch if that fits.

    The axis ends at ``end_s`` seconds, or by default at the end of the last action.
    """
    steps = predicted_steps(prediction)
    step_s = prediction.step_time_s
    ax = _draw(steps, axes_or_new(ax), end_s)
    computing = f"ranks run forwards and backwards in {format_share(computing_s(steps) / step_s, 1)} of it"
    bubbles = f"bubbles take {format_share(bubble_share(prediction), 1)}"
    ax.set_title(f"predicted: step {format_seconds(step_s)}; {computing}, {bubbles}")
    return ax


def plot_measured_pipeline(measurement: Measurement, ax: Axes | None = None, end_s: float | None = None) -> Axes:
    """Draw the same of a measurement whose actions are known.

    Actions are recorded for one step, which may have taken longer than the median.
    """
    steps = measured_steps(measurement)
    ax = _draw(steps, axes_or_new(ax), end_s)
    computing = f"in the one drawn, ranks run forwards and backwards for {format_seconds(computing_s(steps))}"
    ax.set_title(f"measured: step {format_seconds(measurement.median_step_s)} in the median; {computing}")
    return ax


def _draw_first(prediction: Prediction, ax: Axes, end_s: float) -> Axes:
    plot_pipeline(prediction, ax, end_s)
    handles = _legend(prediction)
    ax.figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), COLUMNS), frameon=False)
    return ax


def _draw(steps: Sequence[ComputedStep], ax: Axes, end_s: float | None) -> Axes:
    end_s = end_s or max(each.end_s for each in steps)
    for row, step in enumerate(steps):
        outside = [(0.0, max(step.start_s, 0.0) / MS), (step.end_s / MS, (end_s - step.end_s) / MS)]
        ax.broken_barh(outside, (row - ROW / 2, ROW), facecolors=palette.OUTSIDE)
        for each in step.computed:
            _box(ax, row, each, step.stages, end_s)
    stages = [step.stages for step in steps]
    names = [f"rank {rank}" if len(own) == 1 else f"rank {rank}\n{_stages(own)}" for rank, own in enumerate(stages)]
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.45, -0.55)
    ax.set_xlim(0, end_s / MS)
    ax.set_xlabel("ms since the first rank began the step")
    return ax


def _stages(own: Sequence[int]) -> str:
    return f"stages {', '.join(map(str, own))}"


def _box(ax: Axes, row: int, computed: Computed, stages: Sequence[int], end_s: float) -> None:
    shade = _shade(computed, stages)
    across = (computed.start_s / MS, computed.duration_s / MS)
    ax.broken_barh([across], (row - ROW / 2, ROW), facecolors=[shade], edgecolors="black", linewidth=0.4)
    text = "" if computed.micro_batch < 0 else str(computed.micro_batch)
    width_inch = AXES_INCH * computed.duration_s / end_s
    if text and width_inch > DIGIT_INCH * len(text) + BORDER_INCH:
        middle_ms = (computed.start_s + computed.end_s) / 2 / MS
        colour = "black" if _luminance(shade) > BRIGHT else "white"
        ax.text(middle_ms, row, text, ha="center", va="center", fontsize=NUMBER_SIZE, color=colour)


_Shade = tuple[float, float, float]


def _shade(computed: Computed, stages: Sequence[int]) -> _Shade:
    """The colour of its kind, paler for later stages of the rank."""
    from matplotlib.colors import to_rgb

    place = stages.index(computed.stage) if computed.stage in stages else 0
    white = PALEST * place / max(len(stages) - 1, 1)
    red, green, blue = ((1 - white) * each + white for each in to_rgb(KINDS[computed.kind][1]))
    return red, green, blue


def _luminance(shade: _Shade) -> float:
    """Return the luminance of a colour; white has 1. Source: ITU-R BT.709."""
    red, green, blue = shade
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _legend(prediction: Prediction) -> list[Patch]:
    from matplotlib.patches import Patch

    drawn = {each.kind for step in predicted_steps(prediction) for each in step.computed}
    found = [Patch(color=colour, label=name) for kind, (name, colour) in KINDS.items() if kind in drawn]
    if pipeline_of(prediction.scenario).virtual_stages > 1:
        found.append(Patch(alpha=0, label="paler: the rank's later stages"))
    idle = Patch(facecolor="white", edgecolor="black", label="idle")
    return [*found, idle, Patch(color=palette.OUTSIDE, label="the step before or after")]
