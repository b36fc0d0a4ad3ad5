"""A :class:`~perfmodel.report.diff.Diff` as tables a person can read. Returns renderables."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from perfmodel.report.diff import Diff, DiffRow
from perfmodel.units import format_seconds

TOP_OPERATORS = 12


def diff_report(diff: Diff) -> RenderableType:
    """What explains the difference, by class of kernel and by operator, largest first."""
    relative = diff.difference_s / diff.measured_step_s
    head = Text(
        f"predicted {format_seconds(diff.predicted_step_s)}, in the trace {format_seconds(diff.measured_step_s)}: "
        f"{_signed(diff.difference_s)}, {relative:+.1%}".replace("%", " %"),
        style="bold",
    )
    return Group(
        head,
        _table("by class of kernel", tuple(_worded(row) for row in diff.kinds), diff),
        _table("by operator", diff.operators[:TOP_OPERATORS], diff),
        Text(
            "The profiler slows the host down, so waiting times in the trace are too long; kernel times hold.",
            style="dim",
        ),
    )


def _table(title: str, rows: tuple[DiffRow, ...], diff: Diff) -> Table:
    table = Table(
        box=None, pad_edge=False, padding=(0, 2, 0, 0), title=f"\n{title}", title_justify="left", title_style="bold"
    )
    table.add_column("", header_style="cyan")
    for name in (
        "predicted",
        "in the trace",
        "difference",
        "of the step",
        "matched",
        "only predicted",
        "only in the trace",
    ):
        table.add_column(name, justify="right", no_wrap=True, header_style="cyan")
    for row in rows:
        share = f"{row.difference_s / diff.measured_step_s:+.2%}".replace("%", " %")
        times = (format_seconds(row.predicted_s), format_seconds(row.measured_s), _signed(row.difference_s), share)
        counts = (str(count) if count else "" for count in (row.matched, row.only_predicted, row.only_measured))
        table.add_row(row.name, *times, *counts)
    return table


def _worded(row: DiffRow) -> DiffRow:
    return replace(row, name=row.name.replace("_", " "))


def _signed(seconds: float) -> str:
    return ("+" if seconds >= 0 else "-") + format_seconds(abs(seconds))
