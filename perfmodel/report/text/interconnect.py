"""Report of an interconnect for `perfmodel profile show`: fitted curves with standard errors, and couplings."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from perfmodel.cost.collectives import eager_buffer
from perfmodel.cost.piecewise import curve_points, leave_one_out
from perfmodel.hardware.interconnect import CollectiveSegment, Coupling, Interconnect, Role
from perfmodel.units import GB, US, format_bytes, format_share

ALONE = "all_reduce"  # the kind shown; the others are in the file
HEADING_OF_ROLE: dict[Role, str] = {
    "send": "during a send",
    "receive": "during a receive",
    "wait": "during a receive that waits",
}


def interconnect_report(name: str, interconnect: Interconnect) -> RenderableType:
    """Show one interconnect of a profile.

    Returns
    -------
    RenderableType
        Curves of the all-reduce by group size, how much operators and communication slow each other, for how many own
        kernels of scenarios that was measured, and how many messages are sent eagerly, before their receiver has come.
    """
    measured = sum(record.time_s is not None for record in interconnect.collectives.values())
    nodes = f", {interconnect.nodes} nodes" if interconnect.nodes > 1 else ""
    head = Text(f"\n{name}: {interconnect.backend}{nodes}, {measured} collectives measured", style="bold")
    parts: list[RenderableType] = [head, _curves(interconnect)]
    if interconnect.couplings:
        parts.append(_couplings("during collectives", interconnect.couplings))
    of_messages, own_of_messages = interconnect.message_couplings, interconnect.own_message_couplings
    parts += [
        _couplings(heading, of_messages[role]) for role, heading in HEADING_OF_ROLE.items() if of_messages.get(role)
    ]
    own = {"during collectives": interconnect.own_couplings}
    own |= {heading: own_of_messages[role] for role, heading in HEADING_OF_ROLE.items() if role in own_of_messages}
    parts += [Text(f"own kernels {heading}: {_factors(each)}") for heading, each in own.items() if each]
    if interconnect.messages_ahead:
        parts.append(Text(f"eager sends: {_eager_sends(interconnect)}"))
    return Group(*parts)


def _factors(couplings: Mapping[str, Coupling]) -> str:
    factors = [each.compute_factor for each in couplings.values()]
    return f"{len(factors)}, slowed x {min(factors):.2f} to x {max(factors):.2f}"


def _eager_sends(interconnect: Interconnect) -> str:
    messages, most_bytes = eager_buffer(interconnect)
    return f"{messages} messages, {format_bytes(most_bytes)}" if messages else "no message"


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


def _couplings(heading: str, of_kinds: Mapping[str, Coupling]) -> Table:
    table = _table(heading, "slowed", "slow them", "tail", "fitted", "held out")
    for kind, coupling in sorted(of_kinds.items()):
        held_out = "" if coupling.held_out_error is None else format_share(coupling.held_out_error, 1)
        table.add_row(
            kind.replace("_", " "),
            f"x {coupling.compute_factor:.2f}",
            f"x {coupling.communication_factor:.2f}",
            format_share(coupling.tail_share),
            format_share(coupling.fitted_error, 1),
            held_out,
        )
    left_out = [each.held_out_error for each in of_kinds.values() if each.held_out_error is not None]
    fitted = statistics.fmean(each.fitted_error for each in of_kinds.values())
    table.add_row("mean", "", "", "", *(format_share(each, 1) for each in (fitted, *_mean(left_out))))
    return table


def _mean(values: list[float]) -> list[float]:
    return [statistics.fmean(values)] if values else []
