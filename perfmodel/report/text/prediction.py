"""Report of a prediction, to be read in ten seconds: a table, bars, and the sources of the numbers. Returns
renderables.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from perfmodel.cost.power import Clock
from perfmodel.prediction.figures_of_merit import mfu, peak_flops_per_s, throughput_samples_per_s
from perfmodel.prediction.memory_text import AnswerRow, memory_rows
from perfmodel.prediction.pipeline_ranks import RankShare, bubble_share, on_rank, rank_shares
from perfmodel.prediction.prediction import Prediction
from perfmodel.scenario.scenario import EveryK, PipelineSection, Scenario
from perfmodel.scenario.stage_split import pipeline_of
from perfmodel.units import format_bytes, format_flops_per_s, format_seconds, format_share

BAR_CELLS = 30
TOP_KERNELS = 8
LEAST_SHARE = 0.0005
KERNEL_SOURCES = {
    "exact": "measured kernels",
    "curve": "fitted curves",
    "extrapolated": "fitted curves outside their shapes",
    "estimated": "not measured: estimated",
    "roofline": "roofline",
}
COLLECTIVE_SOURCES = {"exact": "measured sizes", "curve": "fitted curves", "extrapolated": "extrapolated"}
BREAKDOWN_LABELS = {
    "forward_s": "forward",
    "backward_s": "backward",
    "optimizer_s": "optimizer",
    "exposed_communication_s": "exposed communication",
    "bubble_s": "pipeline bubble",
    "host_bound_s": "waiting for the host",
}


def report(prediction: Prediction) -> RenderableType:
    """Make the whole report, to be printed by a rich console."""
    parts: list[RenderableType] = [
        _title(prediction),
        _answer(prediction),
        *([_pipeline(prediction)] if prediction.rank_timelines else []),
        _bottleneck(prediction),
        *([_ranks(prediction)] if prediction.rank_timelines else []),
        _breakdown(prediction),
        _top_kernels(prediction),
        _provenance(prediction),
    ]
    return Group(*parts, *(Text(f"warning: {warning}", style="yellow") for warning in prediction.warnings))


def rendered(renderable: RenderableType, width: int = 120) -> str:
    """Return a renderable as plain text, for files and comparisons."""
    console = Console(
        width=width, color_system=None, force_terminal=False, legacy_windows=False, markup=False, emoji=False
    )
    with console.capture() as capture:
        console.print(renderable)
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"


def _title(prediction: Prediction) -> Text:
    scenario, profile = prediction.scenario, prediction.profile
    head = Text(f"{scenario.name} on {profile.name} ({profile.device.name})", style="bold")
    return head.append(f"\n{describe(scenario)}\n", style="not bold dim")


def describe(scenario: Scenario) -> str:
    """Describe the question in one line."""
    model, batch, training = scenario.model, scenario.batch, scenario.training
    what = model.target or " ".join(part for part in (model.family, model.size) if part)
    tokens = "" if batch.sequence_length is None else f" x {batch.sequence_length} tokens"
    parts = [what, scenario.precision, f"batch {batch.size}{tokens}"]
    if training.memory_format != "contiguous":
        parts.append(training.memory_format)
    if scenario.mode == "forward":
        return ", ".join([*parts, "forward only"])
    parts.append(f"{scenario.optimizer.name} {scenario.optimizer.implementation}")
    if scenario.optimizer.max_grad_norm is not None:
        parts.append("gradient clipping")
    if training.gradient_accumulation > 1:
        parts.append(f"{training.gradient_accumulation} micro-batches a step")
    if isinstance(training.activation_checkpointing, EveryK):
        parts.append(f"checkpointing every {training.activation_checkpointing.every} blocks")
    elif training.activation_checkpointing != "none":
        parts.append(f"{training.activation_checkpointing} checkpointing")
    wire = f" over {scenario.hardware.interconnect}" if scenario.hardware.interconnect else ""
    if (pipeline := scenario.parallelism.pp) is not None:
        stages = "" if pipeline.virtual_stages == 1 else f"{pipeline.number_of_stages} stages and "
        parts.append(
            f"{pipeline.schedule} pipeline of {stages}{_micro_batches(pipeline)} on {pipeline.stages} GPUs{wire}"
        )
    if scenario.parallelism.dp > 1:
        what = f"GPUs{wire}" if pipeline is None else "such pipelines"
        parts.append(f"{scenario.parallelism.strategy} on {scenario.parallelism.dp} {what}")
    policy = scenario.parallelism.fsdp and scenario.parallelism.fsdp.mixed_precision
    if policy:
        computed = policy.param or scenario.precision
        parts.append(f"computed in {computed}, reduced in {policy.reduce or computed}")
    return ", ".join(parts)


def _micro_batches(pipeline: PipelineSection) -> str:
    return f"{pipeline.micro_batches} micro-batch" + ("" if pipeline.micro_batches == 1 else "es")


def _answer(prediction: Prediction) -> Table:
    """Make the table of figures with remarks.

    If the step does not fit, memory comes first, and times are those of a device with more memory. If the allocator
    fills the device in every step, times are bounds.
    """
    low_s, high_s = prediction.interval_s
    table = _grid()
    fits, retries = prediction.fits is not False, prediction.step_retries
    if not fits:
        _add_rows(table, memory_rows(prediction))
    if retries:
        interval = f"and {_retries(retries)} a step, which are not predicted"
    else:
        interval = f"{format_seconds(low_s)} to {format_seconds(high_s)} (90 %, uncalibrated)"
    bound = "over " if retries else ""
    step_time = Text(f"{bound}{format_seconds(prediction.step_time_s)}", style="bold")
    table.add_row("step time", step_time, interval if fits else f"{interval}, with enough memory")
    synced = f"{bound}{format_seconds(prediction.timeline.synced_step_time_s)}"
    table.add_row("synced step", synced, "with a synchronisation after each step")
    bound = "under " if retries else ""
    _add_rows(table, [("throughput", *_throughput(prediction, bound)), ("MFU", *_mfu(prediction, bound))])
    if prediction.clock is not None:
        table.add_row("clock", *_clock(prediction.clock))
    if fits:
        _add_rows(table, memory_rows(prediction))
    return table


def _add_rows(table: Table, rows: Iterable[AnswerRow]) -> None:
    for row in rows:
        table.add_row(*row)


def _retries(count: int) -> str:
    return f"{count} allocator {'retry' if count == 1 else 'retries'}"


def _grid() -> Table:
    table = Table.grid(padding=(0, 3))
    table.add_column(style="cyan")
    return table


def _throughput(prediction: Prediction, bound: str) -> tuple[str, str]:
    samples_per_s = throughput_samples_per_s(prediction)
    length = prediction.scenario.batch.sequence_length
    tokens = "" if length is None else f"{samples_per_s * length:,.0f} tokens/s"
    shown = f"{samples_per_s:,.0f}" if samples_per_s >= 1000 else f"{samples_per_s:.4g}"
    return f"{bound}{shown} samples/s", tokens and f"{bound}{tokens}"


def _mfu(prediction: Prediction, bound: str) -> tuple[str, str]:
    value, peak = mfu(prediction), peak_flops_per_s(prediction)
    if value is None or peak is None:
        return "unknown", "no datasheet peak in the profile"
    per_cent = f"{100 * value:.1f}" if value >= LEAST_SHARE or value == 0 else f"{100 * value:.2g}"
    return f"{bound}{per_cent} %", f"of {format_flops_per_s(peak)}"


def _clock(clock: Clock) -> tuple[str, str]:
    kind, factor = next(iter(clock.factors.items()))
    slowed = f"{kind.replace('_', ' ')} kernels take {factor:.3g} times as long"
    return _ghz(clock.hz), f"{clock.limit_w:g} W lower it from {_ghz(clock.full_hz)}: {slowed}"


def _ghz(clock_hz: float) -> str:
    return f"{clock_hz / 1e9:.4g} GHz"


def _bottleneck(prediction: Prediction) -> Text:
    """Write the bottleneck in line with the table above, but as wide as it needs."""
    return Text("bottleneck    ", style="cyan").append(prediction.bottleneck, style="default")


def _pipeline(prediction: Prediction) -> Text:
    """Describe the pipeline in one line. Its bubbles are over all ranks; those of the breakdown are of one rank."""
    section = pipeline_of(prediction.scenario)
    blocks = ", ".join(map(str, prediction.program.stage_blocks))
    parts = (
        f"{section.schedule}, stages of {blocks} blocks, {_micro_batches(section)}, "
        f"bubbles {format_share(bubble_share(prediction), 1)}"
    )
    return Text("pipeline      ", style="cyan").append(parts, style="default")


def _ranks(prediction: Prediction) -> Table:
    """Make a table with a row for each rank, or for ranks of several pipelines that have the same stages."""
    table = _table("\nranks")
    waits = ("exposed\ncommunication", "waiting for\nthe host")
    for heading in ("rank", "stages", "blocks", "busy", "bubble", *waits, "memory\nallocated"):
        table.add_column(heading, justify="right", vertical="bottom", header_style="cyan")
    shares, stages = rank_shares(prediction), pipeline_of(prediction.scenario).stages
    for number in range(stages):
        table.add_row(*_rank_row(shares[number::stages]))
    return table


def _rank_row(ranks: Sequence[RankShare]) -> Iterator[str]:
    """Make the row of ``ranks`` that have the same stages, one of each pipeline."""
    share = ranks[0]
    for numbers in ([each.rank for each in ranks], share.stages, share.blocks):
        yield ", ".join(map(str, numbers))
    for seconds in (share.busy_s, share.bubble_s, share.exposed_communication_s, share.host_bound_s):
        yield format_seconds(seconds)
    peak_bytes = share.peak_allocated_bytes
    yield "does not fit" if peak_bytes is None else format_bytes(peak_bytes)


def labels_of(prediction: Prediction) -> dict[str, str]:
    """Return labels of the shares of the step for this device: a CPU is its own host."""
    on_cpu = prediction.profile.device.kind == "cpu"
    return BREAKDOWN_LABELS | {"host_bound_s": "between the operators"} if on_cpu else BREAKDOWN_LABELS


def _breakdown(prediction: Prediction) -> Table:
    total_s = sum(prediction.breakdown[key] for key in BREAKDOWN_LABELS)
    table = _grid()
    table.add_row(Text(f"\nwhere the time goes{on_rank(prediction.shown_rank)}", style="bold"))
    for key, label in labels_of(prediction).items():
        seconds = prediction.breakdown[key]
        share = seconds / total_s
        if share >= LEAST_SHARE:
            table.add_row(label, bar(share), f"{share:4.0%}".replace("%", " %"), format_seconds(seconds))
    return table


def bar(share: float) -> str:
    """Draw a bar of BAR_CELLS cells, filled to ``share`` in eighths of a cell.

    >>> bar(0.05)
    '█▌'
    """
    eighths = round(share * BAR_CELLS * 8)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def _top_kernels(prediction: Prediction) -> Table:
    table = _table(f"\nlargest kernels{on_rank(prediction.shown_rank)}")
    for name in ("time", "share", "calls", "each"):
        table.add_column(name, justify="right", no_wrap=True, header_style="cyan")
    table.add_column("source", no_wrap=True, header_style="cyan")
    table.add_column("operator", header_style="cyan")
    busy_s = sum(use.total_s for use in prediction.kernels)
    for use in prediction.kernels[:TOP_KERNELS]:
        share = f"{use.total_s / busy_s:.0%}".replace("%", " %") if busy_s else ""
        operator = Text(use.key.removeprefix("aten.").replace(".default(", "(", 1), overflow="ellipsis", no_wrap=True)
        each = format_seconds(use.mean_s)
        table.add_row(format_seconds(use.total_s), share, str(use.count), each, use.cost.source, operator)
    return table


def _table(title: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title=title)
    table.title_justify, table.title_style = "left", "bold"
    return table


def _provenance(prediction: Prediction) -> Text:
    shares = ", ".join(_shares(prediction.provenance, KERNEL_SOURCES))
    text = Text("\nwhere the numbers come from: ", style="cyan").append(shares or "nothing runs", style="default")
    if prediction.scaled_share > 0:
        share = f"{prediction.scaled_share:.1%}".replace("%", " %")
        text.append(f"; {share} of their time follows the changed datasheet", style="default")
    if prediction.collective_provenance:
        shares = ", ".join(_shares(prediction.collective_provenance, COLLECTIVE_SOURCES))
        text.append("\nof the collectives: ", style="cyan").append(shares, style="default")
    if prediction.assumptions:
        text.append(f"\nassuming {' and '.join(prediction.assumptions)}", style="yellow")
    settings = prediction.profile.provenance.get("set", {}).items()
    changed = [f"{key}={value}" for key, value in settings if key not in prediction.own_settings]
    if changed:
        text.append(f"\nchanged by --set: {', '.join(changed)}", style="yellow")
    return text


def _shares(provenance: dict[str, float], meaning: dict[str, str]) -> Iterator[str]:
    for source, share in provenance.items():
        if share > 0:
            yield f"{share:.1%} {meaning.get(source, source)}".replace("%", " %")
