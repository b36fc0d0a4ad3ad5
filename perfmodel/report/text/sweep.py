"""Report of a sweep as a table to choose from: best first, ties and refusals in words."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from rich.table import Table

from perfmodel.prediction.sweep_result import label, value_text
from perfmodel.report.text.prediction import rendered
from perfmodel.units import format_bytes, format_seconds, format_share

if TYPE_CHECKING:
    from perfmodel.prediction.sweep_result import Configuration, SweepOutcome, SweepResult

WIDEST = 1000  # of the table: never wrapped


def sweep_text(result: SweepResult) -> str:
    """Write every configuration of a sweep with its rank, and a sentence for each tie and each configuration without a
    rank.
    """
    lines = [f"{result.scenario} on {result.profile}: {_counted(len(result.configurations), 'configuration')}"]
    if result.assignments:
        lines.append(f"with {', '.join(result.assignments)}")
    if result.ranked:
        lines += ["", rendered(_table(result), WIDEST).rstrip()]
    ties = [_tie(rank, list(group)) for rank, group in groupby(result.ranked, lambda each: each.rank or 0)]
    lines += ["", *filter(None, ties)] if any(ties) else []
    notes = _notes(result.ranked)
    lines += ["", *notes] if notes else []
    if result.unranked:
        lines += ["", "without a rank:", *(f"  {label(each.values)}: {each.reason}" for each in result.unranked)]
    if result.ranked:
        lines += ["", _verdict(result.ranked)]
    elif nearest := _nearest(result.unranked):
        lines += ["", nearest]
    return "\n".join(lines) + "\n"


def _table(result: SweepResult) -> Table:
    outcomes = [each.outcome for each in result.ranked if each.outcome is not None]
    communicates = any(outcome.exposed_s > 0 for outcome in outcomes)
    has_gpus = len({outcome.gpus for outcome in outcomes}) > 1 and "hardware.gpus" not in result.vary
    has_bubbles = any(outcome.bubble_share is not None for outcome in outcomes)
    has_memory = any(outcome.device_bytes is not None for outcome in outcomes)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("rank", justify="right")
    headings = [key.replace(".", ".\n") for key in result.vary]
    headings += ["GPUs"] if has_gpus else []
    headings += ["samples/s", "of best", "step time", "90 % interval"]
    headings += ["exposed\ncommunication"] if communicates else []
    headings += ["pipeline\nbubble"] if has_bubbles else []
    headings += ["memory\nallocated", "device memory\nin use"] if has_memory else []
    for heading in headings:
        table.add_column(heading, justify="right")
    for each, outcome in zip(result.ranked, outcomes, strict=True):
        low_s, high_s = outcome.interval_s
        row = [str(each.rank), *map(value_text, each.values.values())]
        row += [str(outcome.gpus)] if has_gpus else []
        row.append(samples_per_s_text(outcome))
        row.append(format_share(outcome.throughput_samples_per_s / outcomes[0].throughput_samples_per_s, 1))
        row += [format_seconds(outcome.step_time_s), f"{format_seconds(low_s)} to {format_seconds(high_s)}"]
        row += [format_seconds(outcome.exposed_s)] if communicates else []
        row += ["" if outcome.bubble_share is None else format_share(outcome.bubble_share, 1)] if has_bubbles else []
        row += [_bytes(outcome.peak_allocated_bytes), _bytes(outcome.device_bytes)] if has_memory else []
        table.add_row(*row)
    return table


def samples_per_s_text(outcome: SweepOutcome) -> str:
    """Four digits, or all of a large whole number."""
    value = outcome.throughput_samples_per_s
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _bytes(value: int | None) -> str:
    return "not predicted" if value is None else format_bytes(value)


def _tie(rank: int, group: list[Configuration]) -> str:
    if len(group) == 1:
        return ""
    return (
        f"{_counted(len(group), 'configuration')} share rank {rank}: their 90 % intervals overlap that of the first of "
        f"them, so which is faster is not known"
    )


def _notes(ranked: tuple[Configuration, ...]) -> list[str]:
    """Write each distinct assumption and warning once, with its configurations unless it holds for all."""
    found: dict[str, list[Configuration]] = {}
    for each in ranked:
        assert each.outcome is not None
        notes = [f"assuming {text}" for text in each.outcome.assumptions]
        for note in notes + [f"warning: {text}" for text in each.outcome.warnings]:
            found.setdefault(note, []).append(each)
    in_order = sorted(found, key=lambda note: note.startswith("warning"))
    return [f"{note}{_holding_for(found[note], ranked)}" for note in in_order]


def _holding_for(those: list[Configuration], ranked: tuple[Configuration, ...]) -> str:
    if len(those) == len(ranked):
        return ""
    return f" ({label(those[0].values)})" if len(those) == 1 else f" ({len(those)} of {len(ranked)} configurations)"


def _verdict(ranked: tuple[Configuration, ...]) -> str:
    best = ranked[0]
    assert best.outcome is not None
    tied = sum(each.rank == best.rank for each in ranked) > 1
    found = "fastest as predicted, but tied" if tied else "best"
    return f"{found}: {label(best.values)}; its bottleneck is {best.outcome.bottleneck}"


def _nearest(unranked: tuple[Configuration, ...]) -> str:
    """If nothing fits, name the configuration that lacks the least memory; empty if that is not known for any."""
    missing = [
        (each.outcome.needed_bytes - each.outcome.capacity_bytes, each)
        for each in unranked
        if each.outcome is not None and each.outcome.needed_bytes is not None
    ]
    if len(missing) < len(unranked):
        return ""
    least_bytes, nearest = min(missing, key=lambda pair: pair[0])
    return f"none fits; nearest to it: {label(nearest.values)}, which needs {format_bytes(least_bytes)} more"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")
