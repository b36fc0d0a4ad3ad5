"""A :class:`~perfmodel.report.diff.diff.Diff` as tables a person can read. Returns renderables."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from perfmodel.report.diff.diff import Diff, DiffRow
from perfmodel.units import format_seconds

TOP_OPERATORS = 12
ON_DEVICE = "The profiler slows the host: waiting times in the trace are too long, kernel times hold."
ON_CPU = "The profiler slows every operator on a CPU: compare shares, not times."


def diff_report(diff: Diff) -> RenderableType:
    """Explain the difference, by class of kernel and by operator, largest first."""
    whose = "" if diff.rank is None else f"rank {diff.rank}: "
    relative = diff.difference_s / diff.measured_step_s
    predicted, measured = format_seconds(diff.predicted_step_s), format_seconds(diff.measured_step_s)
    difference = f"{_signed(diff.difference_s)}, {relative:+.1%}".replace("%", " %")
    head = Text(f"{whose}predicted {predicted}, in the trace {measured}: {difference}", style="bold")
    notes = [] if diff.is_predicted else [Text(f"\n{ON_DEVICE if diff.on_device else ON_CPU}", style="dim")]
    return Group(
        head,
        Text("\nby class of kernel", style="bold"),
        _table(tuple(_worded(row) for row in diff.kinds), diff),
        Text("\nby operator", style="bold"),
        _table(diff.operators[:TOP_OPERATORS], diff),
        *notes,
    )


def _table(rows: tuple[DiffRow, ...], diff: Diff) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("")
    for name in ("predicted", "trace", "difference", "of step", "matched"):
        table.add_column(name, justify="right", no_wrap=True, header_style="cyan")
    table.add_column("unmatched", header_style="cyan")
    for row in rows:
        share = f"{row.difference_s / diff.measured_step_s:+.2%}".replace("%", " %")
        times = (format_seconds(row.predicted_s), format_seconds(row.measured_s), _signed(row.difference_s), share)
        table.add_row(row.name, *times, str(row.matched) if row.matched else "", _unmatched(row))
    return table


def _unmatched(row: DiffRow) -> str:
    """Calls that only one side has."""
    sides = ((row.only_predicted, "predicted"), (row.only_measured, "in the trace"))
    return ", ".join(f"{count} {side}" for count, side in sides if count)


def _worded(row: DiffRow) -> DiffRow:
    return replace(row, name=row.name.replace("_", " "))


def _signed(seconds: float) -> str:
    return ("+" if seconds >= 0 else "-") + format_seconds(abs(seconds))
