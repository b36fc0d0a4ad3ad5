"""What `perfmodel profile show` says about a wiring: fitted curves with standard errors, switches and couplings."""

from __future__ import annotations

import statistics

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from perfmodel.cost.segments import curve_points, leave_one_out
from perfmodel.hardware.interconnect import CollectiveSegment, Interconnect
from perfmodel.units import GB, US, format_bytes, format_share

ALONE = "all_reduce"  # the kind shown; the others are in the file


def interconnect_report(name: str, interconnect: Interconnect) -> RenderableType:
    """Curves of the all-reduce by group size, and how operators and collectives slow each other."""
    measured = sum(record.time_s is not None for record in interconnect.collectives.values())
    nodes = f", {interconnect.nodes} nodes" if interconnect.nodes > 1 else ""
    head = Text(f"\n{name}: {interconnect.backend}{nodes}, {measured} collectives measured", style="bold")
    parts: list[RenderableType] = [head, _curves(interconnect)]
    if interconnect.couplings:
        parts.append(_couplings(interconnect))
    return Group(*parts)


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(names[0], header_style="cyan", no_wrap=True)
    for name in names[1:]:
        table.add_column(name, justify="right", header_style="cyan", no_wrap=True)
    return table


def _curves(interconnect: Interconnect) -> Table:
    table = _table(ALONE, "sizes", "alpha, us", "GB/s", "points", "median", "worst")  # of leave-one-out errors
    points = curve_points(interconnect.collectives)
    for text, segments in sorted(interconnect.segments.items()):
        kind, ranks = text.split()
        if kind != ALONE:
            continue
        errors = leave_one_out(points.get(text, ()))
        left_out = [format_share(errors[name], 1) if name in errors else "" for name in ("median", "worst")]
        for index, segment in enumerate(segments):
            cells = left_out if index == 0 else ["", ""]
            table.add_row(f"{ranks} ranks" if index == 0 else "", *_segment(segment), *cells)
    return table


def _segment(segment: CollectiveSegment) -> tuple[str, str, str, str]:
    """Sizes, alpha and 1 / beta with their standard errors, and points."""
    beta = segment.beta_s_per_byte
    rate = "" if beta == 0 else f"{1 / beta / GB:.1f} ± {segment.beta_error_s_per_byte / beta**2 / GB:.1f}"
    alpha = f"{segment.alpha_s / US:.1f} ± {segment.alpha_error_s / US:.1f}"
    sizes = f"{format_bytes(segment.least_bytes)} to {format_bytes(segment.most_bytes)}"
    return sizes, alpha, rate, str(segment.points)


def _couplings(interconnect: Interconnect) -> Table:
    table = _table("beside collectives", "slowed", "slow them", "tail", "fitted", "held out")
    for kind, coupling in sorted(interconnect.couplings.items()):
        held_out = "" if coupling.held_out_error is None else format_share(coupling.held_out_error, 1)
        table.add_row(
            kind.replace("_", " "),
            f"x {coupling.compute_factor:.2f}",
            f"x {coupling.communication_factor:.2f}",
            format_share(coupling.tail_share),
            format_share(coupling.fitted_error, 1),
            held_out,
        )
    couplings = interconnect.couplings.values()
    left_out = [each.held_out_error for each in couplings if each.held_out_error is not None]
    fitted = statistics.fmean(each.fitted_error for each in couplings)
    table.add_row("mean", "", "", "", *(format_share(each, 1) for each in (fitted, *_mean(left_out))))
    return table


def _mean(values: list[float]) -> list[float]:
    return [statistics.fmean(values)] if values else []
