"""Report of a profile for `perfmodel profile show`: its contents, errors of its curves, and unstable keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from perfmodel.cost.transfers import transfer_cost, transfer_points
from perfmodel.hardware.profile import Cache, Profile
from perfmodel.report.text.interconnect import interconnect_report
from perfmodel.units import (
    GB,
    GIB,
    KIB,
    MIB,
    format_bytes,
    format_bytes_per_s,
    format_flops_per_s,
    format_seconds,
    format_share,
)

MOST_UNSTABLE = 10
COPIES = "\ncopies: GB/s each way by size, ~ where read off a curve"
COPIED_BYTES = (64 * KIB, MIB, 16 * MIB, GIB)
CURVES = "\nfitted curves: error at each grid point when it is predicted from the others"


def profile_report(profile: Profile) -> RenderableType:
    """The whole answer, to be printed by a rich console."""
    parts: list[RenderableType] = [
        Text(f"{profile.name}: {profile.gpus} x {profile.device.name}", style="bold"),
        _machine(profile),
    ]
    if profile.curves:
        parts += [Text(CURVES, style="bold"), _curves(profile)]
    if copies := transfer_points(profile.transfers):
        sizes = {name: len(points) for name, points in copies.items()}
        parts += [Text(COPIES, style="bold"), _copies(profile, sizes)]
    parts += [interconnect_report(name, interconnect) for name, interconnect in profile.interconnects.items()]
    parts.append(Text(_unstable(profile), no_wrap=True, overflow="ignore"))
    return Group(*parts)


def _machine(profile: Profile) -> Table:
    device, launch = profile.device, profile.launch
    table = Table.grid(padding=(0, 3))
    table.add_column(style="cyan", overflow="fold")  # the longest names are wider than a terminal
    table.add_column(overflow="fold")
    table.add_row("memory", format_bytes(device.memory_bytes))
    if device.peak_memory_bytes_per_s is not None:
        table.add_row("datasheet bandwidth", format_bytes_per_s(device.peak_memory_bytes_per_s))
    for arithmetic, peak in device.peak_flops_per_s.items():
        table.add_row(f"datasheet {arithmetic}", format_flops_per_s(peak))
    table.add_row(
        "launch",
        f"latency {format_seconds(launch.latency_s)}, gap {format_seconds(launch.gap_s)}, "
        f"queue {launch.queue_depth}, synchronise {format_seconds(launch.synchronize_s)}",
    )
    if launch.waiting_gap_s:
        gaps = (f"{format_seconds(gap_s)} with {n}" for n, gap_s in enumerate(launch.waiting_gap_s, 1))
        table.add_row("waiting streams", f"longer gaps: {', '.join(gaps)}")
    if profile.cache != Cache():
        table.add_row("cache", _cache(profile))
    measured = [record for record in profile.kernels.values() if record.time_s is not None]
    grid = sum(record.origin == "grid" for record in measured)
    failed = len(profile.kernels) - len(measured)
    table.add_row("kernels", f"{grid} of the grid, {len(measured) - grid} for scenarios, {failed} that failed")
    if profile.base is not None:
        table.add_row("base", f"{profile.base}, measured on another machine")
    table.add_row("host costs", f"{len(profile.host)}")
    for name, kind in profile.power.kinds.items():
        follows = format_share(kind.clock_share)
        table.add_row(f"power.{name}", f"{kind.draw_w:.0f} W at full clock; {follows} of its time follows the clock")
    for name, value in _flat(profile.provenance):
        table.add_row(name, value)
    return table


def _cache(profile: Profile) -> str:
    holds, miss_s = f"holds {format_bytes(profile.cache_capacity_bytes)}", profile.cache.code_miss_s
    misses = "" if miss_s is None else f"; a call whose code it does not hold takes {format_seconds(miss_s)} more"
    return holds + misses


def _flat(provenance: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    found = []
    for name, value in provenance.items():
        if isinstance(value, Mapping):
            found += _flat(value, f"{prefix}{name}.")
        else:
            found.append((f"{prefix}{name}", str(value)))
    return found


def _curves(profile: Profile) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("curve", "form"):
        table.add_column(name, header_style="cyan")
    for name in ("points", "median", "p90", "worst", "bias"):
        table.add_column(name, justify="right", header_style="cyan", no_wrap=True)
    for name, curve in sorted(profile.curves.items()):
        errors = [curve.leave_one_out.get(measure) for measure in ("median", "p90", "worst", "bias")]
        cells = ["" if error is None else f"{error:.1%}".replace("%", " %") for error in errors]
        table.add_row(name, curve.form, str(curve.points), *cells)
    return table


def _copies(profile: Profile, measured: Mapping[str, int]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("copy", header_style="cyan", no_wrap=True)
    for name in (*map(format_bytes, COPIED_BYTES), "sizes"):
        table.add_column(name, justify="right", header_style="cyan", no_wrap=True)
    for name, sizes in measured.items():
        direction, _, memory = name.partition(" ")
        costs = [transfer_cost(direction, memory or None, size_bytes, profile) for size_bytes in COPIED_BYTES]
        cells = [f"{'' if each.source == 'exact' else '~'}{each.bytes_per_s / GB:.3g}" for each in costs]
        table.add_row(name, *cells, str(sizes))
    return table


def _unstable(profile: Profile) -> str:
    if not profile.unstable:
        return "\nno key was measured unstable"
    shown = "\n".join(f"  {key}" for key in profile.unstable[:MOST_UNSTABLE])
    more = len(profile.unstable) - MOST_UNSTABLE
    rest = f"\n  and {more} more" if more > 0 else ""
    command = "`perfmodel calibrate --output PROFILE --only KEY`"
    head = f"\n{len(profile.unstable)} keys were measured unstable; {command} repeats one:"
    return f"{head}\n{shown}{rest}"
