"""What a collective costs on an otherwise idle machine, and how we know.

Exact sizes first; then the alpha-beta curve of its kind and number of ranks; then, for more ranks than were measured,
that of the largest measured group, carried on by the formula of a ring:

    t_n(S) = steps_n / steps_m x alpha_m + wire_n(S) / wire_m x beta_m

steps: 2 (n - 1) for all_reduce, n - 1 for all_gather, reduce_scatter and all_to_all, 1 else. wire: bytes that each rank
sends for a byte of size, (n - 1) / n as often as there are steps of a chunk.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from perfmodel.cost.segments import segment_time_s
from perfmodel.errors import PerfModelError
from perfmodel.hardware.interconnect import CollectiveSegment, Interconnect, collective_key

Source = Literal["exact", "curve", "extrapolated"]
CURVE_SPREAD = 0.05  # relative; a prior where a curve says nothing of its own
# A ring carried on from 4 to 8 H100s was 5 to 7 % off for all_gather, up to 20 % for reduce_scatter and 34 % for
# all_reduce (XLA's published collective table, as fitted in the notes on cost modelling).
EXTRAPOLATED_SPREAD = {"all_reduce": 0.3, "reduce_scatter": 0.2}
EXTRAPOLATED_SPREAD_OTHER = 0.15
CHUNKED = ("all_gather", "reduce_scatter", "all_to_all")


class CollectiveCost(NamedTuple):
    """time_s: from the last rank's arrival to the end. spread: relative standard deviation. source: how it is known.
    algbw_bytes_per_s, busbw_bytes_per_s: as nccl-tests defines them.
    """

    time_s: float
    spread: float
    source: Source
    algbw_bytes_per_s: float
    busbw_bytes_per_s: float


def busbw_factor(kind: str, ranks: int) -> float:
    """busbw / algbw: what a ring would need of a link for one byte a second of size.

    >>> busbw_factor("all_reduce", 4), busbw_factor("all_gather", 4), busbw_factor("broadcast", 4)
    (1.5, 0.75, 1.0)
    """
    share = (ranks - 1) / ranks
    return 2 * share if kind == "all_reduce" else share if kind in CHUNKED else 1.0


def algbw_bytes_per_s(size_bytes: int, time_s: float) -> float:
    """Size over time."""
    return size_bytes / time_s if time_s > 0 else 0.0


def ring_steps(kind: str, ranks: int) -> int:
    """How often data is passed on, one after another."""
    return 2 * (ranks - 1) if kind == "all_reduce" else ranks - 1 if kind in CHUNKED else 1


def collective_cost(
    kind: str, ranks: int, dtype: str, size_bytes: int, interconnect: Interconnect, exact: bool = True
) -> CollectiveCost:
    """Of one collective.

    Parameters
    ----------
    kind : str
        One of :data:`~perfmodel.hardware.interconnect.COLLECTIVES`.
    ranks : int
        In the group; a group of one costs nothing.
    dtype : str
        Without ``torch.``; a size measured in another dtype counts as exact too, since wires carry bytes.
    size_bytes : int
        As :func:`~perfmodel.hardware.interconnect.collective_key` counts.
    exact : bool
        Use sizes that were measured for scenarios.

    Raises
    ------
    PerfModelError
        If the interconnect was not measured for this kind.
    """
    if ranks == 1:
        return CollectiveCost(0.0, 0.0, "exact", 0.0, 0.0)
    for name in (dtype, "float32", "bfloat16"):
        record = interconnect.collectives.get(collective_key(kind, ranks, name, size_bytes))
        if record is not None and record.time_s is not None and (exact or record.origin == "grid"):
            return _cost(kind, ranks, size_bytes, record.time_s, record.spread, "exact")
    segments = interconnect.segments.get(f"{kind} {ranks}")
    if segments:
        return _cost(kind, ranks, size_bytes, segment_time_s(segments, size_bytes), CURVE_SPREAD, "curve")
    measured = _largest_group(kind, ranks, interconnect)
    carried = _carried_on(kind, ranks, measured, interconnect.segments[f"{kind} {measured}"])
    spread = EXTRAPOLATED_SPREAD.get(kind, EXTRAPOLATED_SPREAD_OTHER)
    return _cost(kind, ranks, size_bytes, segment_time_s(carried, size_bytes), spread, "extrapolated")


def _cost(kind: str, ranks: int, size_bytes: int, time_s: float, spread: float, source: Source) -> CollectiveCost:
    algbw = algbw_bytes_per_s(size_bytes, time_s)
    return CollectiveCost(time_s, spread, source, algbw, algbw * busbw_factor(kind, ranks))


def _largest_group(kind: str, ranks: int, interconnect: Interconnect) -> int:
    groups = [int(text.split()[1]) for text in interconnect.segments if text.split()[0] == kind]
    if not groups:
        known = ", ".join(sorted({text.split()[0] for text in interconnect.segments})) or "none"
        raise PerfModelError(
            f"the interconnect must have been measured for {kind} (it has {known}), which {ranks} ranks need."
            " Measure it with `perfmodel calibrate --interconnect`."
        )
    return max(groups)


def _carried_on(
    kind: str, ranks: int, measured: int, segments: tuple[CollectiveSegment, ...]
) -> tuple[CollectiveSegment, ...]:
    steps = ring_steps(kind, ranks) / ring_steps(kind, measured)
    wire = busbw_factor(kind, ranks) / busbw_factor(kind, measured)
    return tuple(
        each.model_copy(
            update={"alpha_s": max(each.alpha_s, 0.0) * steps, "beta_s_per_byte": each.beta_s_per_byte * wire}
        )
        for each in segments
    )
