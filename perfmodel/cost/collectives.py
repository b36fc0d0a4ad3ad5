"""What a collective costs on an otherwise idle machine, and how we know.

Exact sizes first; then the alpha-beta curve of its kind and number of ranks; then, where that number was not measured,
the curve of the nearest larger group, or else of the largest, m, carried on to n ranks:

    ring    t_n(S) = (n - 1) / (m - 1) x beta_m x S' + alpha_m + h x (steps_n - steps_m),   S' = S m / n
    tree    t_n(S) = m / (m - 1) x beta_m x S + alpha_m + h x (depth_n - depth_m)

In a ring each rank passes on chunks of S / n, one after another, so the curve is read where the chunks are as large as
they are to be: bandwidth, and the protocol that is switched to, go with the chunk. A tree sends everything up and down
again; all_reduce over several nodes takes the faster of the two, as the library does. broadcast is a pipeline,
send_recv one message and exchange one each way at once: S' = S, and no factor.

h is what a step more costs, of the ring or of the tree: alpha_m less what a launch costs, over steps_m or depth_m,
since the launch does not grow with the ranks. On one node the launch is what alpha would be without steps, by the
straight line through the groups that were measured; else alpha of the largest group inside a node, or STEP_SHARE
tells. (Held against H200s over NVLink and through host memory, all of alpha growing with the steps makes small
messages of 4 ranks twice as slow as they are.)
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, hypot, inf, log2
from typing import Literal, NamedTuple

from perfmodel.cost.piecewise import Line, segment_time_s
from perfmodel.errors import PerfModelError
from perfmodel.hardware.interconnect import (
    CHUNKED,
    COLLECTIVES,
    MESSAGES,
    CollectiveSegment,
    Interconnect,
    collective_key,
)
from perfmodel.units import DTYPE_BYTES, format_bytes

Source = Literal["exact", "curve", "extrapolated"]
# Relative; of the curves of H200s over three wirings, points that were left out were 2 to 3 % off in the median and 4
# to 6 % in the mean.
CURVE_SPREAD = 0.05
# Relative, for twice as many ranks; it grows with the root of the doublings. Root mean square error over all sizes:
# all_reduce of 8 A100s (vTrain's table) 0.05 from 7, 0.06 from 6, 0.19 from 4, 0.26 to 0.35 from 2 and 3; all_gather
# of 4 H200s 0.11 to 0.14 from 2 (with STEP_SHARE, which is from there), reduce_scatter 0.15 to 0.42, broadcast 0.03 to
# 0.6, where single sizes stand out. all_reduce of 5 ranks and more may use
# multicast, which makes 8 H100s or H200s 30 % faster than any ring (480 for 366 GB/s); the pairs of an all_to_all share
# links in ways that no formula has (0.3 from 2 to 4). Across nodes there is one check, 3 to 4 ranks: 0.34.
EXTRAPOLATED_SPREAD = {"all_reduce": 0.3, "all_to_all": 0.3}
EXTRAPOLATED_SPREAD_OTHER = 0.2
ACROSS_NODES_SPREAD = 0.5
# A step's latency over what a launch costs, where only one group was measured: 0.14 to 0.33 of the rings of H200s; an
# all_to_all sends to all at once.
STEP_SHARE = {"all_reduce": 0.2, "all_gather": 0.2, "reduce_scatter": 0.2, "all_to_all": 0.05}
RINGS = ("all_reduce", *CHUNKED)
USUAL = ("float32", "bfloat16", "float16")
DTYPES = (*USUAL, *(name for name in DTYPE_BYTES if name not in USUAL))


class CollectiveCost(NamedTuple):
    """Seconds of a collective, and where they come from.

    Attributes
    ----------
    time_s : float
        From the last rank's arrival to the end.
    spread : float
        Relative standard deviation.
    source : str
        ``exact``, ``curve``, or ``extrapolated`` to other numbers of ranks or beyond the largest size of a curve.
    """

    time_s: float
    spread: float
    source: Source


def ring_steps(kind: str, ranks: int) -> int:
    """Return how often a ring passes data on, one step after another.

    >>> ring_steps("all_reduce", 4), ring_steps("all_gather", 4), ring_steps("exchange", 2)
    (6, 3, 1)
    """
    return 2 * (ranks - 1) if kind == "all_reduce" else 1 if kind in MESSAGES else ranks - 1


def tree_depth(ranks: int, ranks_per_node: float) -> float:
    """Steps up and down a tree of all_reduce: a chain inside each node, a binary tree over the nodes.

    >>> tree_depth(16, 4)
    10.0
    """
    return 2 * (ranks_per_node - 1 + log2(ranks / ranks_per_node))


def collective_cost(
    kind: str,
    ranks: int,
    dtype: str,
    size_bytes: int,
    interconnect: Interconnect,
    exact: bool = True,
    sharing: int = 1,
) -> CollectiveCost:
    """Return what one collective costs over an interconnect.

    Parameters
    ----------
    kind : str
        One of :data:`~perfmodel.hardware.interconnect.COLLECTIVES`.
    ranks : int
        In the group; a group of one costs nothing.
    dtype : str
        Without ``torch.``; a size measured in another dtype counts as exact too, since links carry bytes.
    size_bytes : int
        As :func:`~perfmodel.hardware.interconnect.collective_key` counts.
    exact : bool
        Use sizes that were measured for scenarios.
    sharing : int
        Groups that do the same over the same links at the same time (:mod:`perfmodel.cost.routing`).

    Raises
    ------
    PerfModelError
        If the interconnect was not measured for this kind.

    Notes
    -----
    Links that are to be f times as fast (``bandwidth_factor``) leave what a message of one byte takes, and divide the
    rest by f; groups that share them divide f among them evenly. Not modelled: ranks beyond the node of an interconnect
    that was measured inside one.
    """
    if ranks == 1:
        return CollectiveCost(0.0, 0.0, "exact")
    found = _measured_cost(kind, ranks, dtype, size_bytes, interconnect, exact)
    factor = interconnect.bandwidth_factor / sharing
    if factor == 1:
        return found
    least_s = min(_measured_cost(kind, ranks, dtype, 1, interconnect, exact=False).time_s, found.time_s)
    time_s = least_s + (found.time_s - least_s) / factor
    return CollectiveCost(time_s, found.spread, found.source)


def eager_share(size_bytes: int, interconnect: Interconnect) -> float:
    """Return the fraction of NCCL's per-peer eager buffer that a message of this size occupies.

    A send blocks once the outstanding fractions exceed 1; where the buffer was not measured, the fraction is infinite
    and every send waits for its receiver.

        share = ceil(size n / B) / n        n: most messages that were seen in the buffer, B: most bytes

    Source: NCCL keeps 8 steps for each of two ranks' channels (src/include/device.h, ``NCCL_STEPS``), of which a
    message takes whole ones. That is how it goes over NVLink and shared memory; sockets were seen to keep other numbers
    of messages, for which this is a stand-in.

    >>> interconnect = Interconnect(backend="nccl", messages_ahead={1024: 8, 4096: 4, 16384: 1, 32768: 0})
    >>> [eager_share(size_bytes, interconnect) for size_bytes in (1, 2048, 2049, 16384, 32768)]
    [0.125, 0.125, 0.25, 1.0, 2.0]
    """
    messages, most_bytes = eager_buffer(interconnect)
    return ceil(size_bytes * messages / most_bytes) / messages if messages else inf


def eager_buffer(interconnect: Interconnect) -> tuple[int, int]:
    """Return the most messages and the most bytes that were seen in the eager buffer, their receiver not having come.

    >>> eager_buffer(Interconnect(backend="nccl", messages_ahead={1024: 8, 4096: 4, 32768: 0}))
    (8, 16384)
    """
    known = interconnect.messages_ahead
    return max(known.values(), default=0), max((size * kept for size, kept in known.items()), default=0)


def measured_groups(kind: str, interconnect: Interconnect) -> list[int]:
    """Numbers of ranks whose curve of this kind is known, ascending: what other numbers are extrapolated from."""
    measured = (name.split() for name, segments in interconnect.segments.items() if segments)
    return sorted(int(ranks) for name, ranks in measured if name == kind)


def largest_group(kind: str, interconnect: Interconnect) -> int | None:
    """The most ranks that collectives of this kind were measured with, be it in a curve or just for a scenario."""
    exact = (key.split() for key, record in interconnect.collectives.items() if record.time_s is not None)
    groups = {int(ranks) for name, ranks, _, _ in exact if name == kind}
    return max(groups.union(measured_groups(kind, interconnect)), default=None)


def nodes_of(ranks: int, interconnect: Interconnect) -> int:
    """Return on how many nodes that many ranks are.

    They are as measured, and beyond that as many ranks a node as the largest all_reduce had. Inside one node all stay.

    >>> segment = CollectiveSegment(least_bytes=1, most_bytes=2, alpha_s=1, beta_s_per_byte=1)
    >>> interconnect = Interconnect(backend="nccl", nodes=2, segments={"all_reduce 4": (segment,)})
    >>> [nodes_of(ranks, interconnect) for ranks in (2, 4, 5, 8)]
    [2, 2, 3, 4]
    """
    largest = largest_group("all_reduce", interconnect) or ranks
    if interconnect.nodes == 1 or ranks <= largest:
        return min(interconnect.nodes, ranks)
    return ceil(ranks * interconnect.nodes / largest)


def extrapolation(kind: str, ranks: int, interconnect: Interconnect) -> str:
    """Return in words what an extrapolated collective is extrapolated from."""
    segments = interconnect.segments.get(f"{kind} {ranks}")
    if segments:
        measured = format_bytes(segments[-1].most_bytes)
        return f"collectives of {ranks} ranks are extrapolated from sizes of up to {measured} by the end of their curve"
    groups = measured_groups(kind, interconnect)
    known = f"{groups[0]} to {groups[-1]}" if len(groups) > 1 else str(groups[0])
    nodes = nodes_of(ranks, interconnect)
    formulas, where = ("ring", "inside one node") if nodes == 1 else ("ring and tree", f"over {nodes} nodes")
    return f"collectives of {ranks} ranks are extrapolated from those of {known} by {formulas} formulas, as {where}"


def _measured_cost(
    kind: str, ranks: int, dtype: str, size_bytes: int, interconnect: Interconnect, exact: bool
) -> CollectiveCost:
    """Return the cost with links as they were measured, whatever ``bandwidth_factor`` says."""
    for name in (dtype, *DTYPES):
        record = interconnect.collectives.get(collective_key(kind, ranks, name, size_bytes))
        if record is not None and record.time_s is not None and (exact or record.origin == "grid"):
            return CollectiveCost(record.time_s, record.spread, "exact")
    segments = interconnect.segments.get(f"{kind} {ranks}")
    if segments:
        source: Source = "curve" if size_bytes <= segments[-1].most_bytes else "extrapolated"
        return CollectiveCost(segment_time_s(segments, size_bytes), CURVE_SPREAD, source)
    measured = _nearest_group(kind, ranks, interconnect)
    time_s = _carried_on(kind, ranks, measured, size_bytes, interconnect)
    return CollectiveCost(time_s, _carried_spread(kind, ranks / measured, interconnect), "extrapolated")


def _nearest_group(kind: str, ranks: int, interconnect: Interconnect) -> int:
    groups = measured_groups(kind, interconnect)
    if not groups:
        known = ", ".join(sorted(name for name in COLLECTIVES if measured_groups(name, interconnect))) or "none"
        raise PerfModelError(
            f"the interconnect must have been measured for {kind} (it has {known}), which {ranks} ranks need."
            " Measure it with `perfmodel calibrate --interconnect`."
        )
    return next((group for group in groups if group > ranks), groups[-1])


def _carried_spread(kind: str, times: float, interconnect: Interconnect) -> float:
    doubled = (
        EXTRAPOLATED_SPREAD.get(kind, EXTRAPOLATED_SPREAD_OTHER) if interconnect.nodes == 1 else ACROSS_NODES_SPREAD
    )
    return hypot(CURVE_SPREAD, doubled * abs(log2(times)) ** 0.5)


def _carried_on(kind: str, ranks: int, measured: int, size_bytes: int, interconnect: Interconnect) -> float:
    segments = interconnect.segments[f"{kind} {measured}"]
    latency_s = max(segments[0].alpha_s, 0.0) - _launch_s(kind, measured, interconnect)
    steps = ring_steps(kind, measured)
    later_s = latency_s * (ring_steps(kind, ranks) / steps - 1)
    is_ring = kind in RINGS
    chunk_bytes = size_bytes * measured / ranks if is_ring else size_bytes
    ring_s = _shifted_s(segments, later_s, (ranks - 1) / (measured - 1) if is_ring else 1.0, chunk_bytes)
    if kind != "all_reduce" or interconnect.nodes == 1:
        return ring_s
    per_node = max(measured / interconnect.nodes, 1.0)
    later_s = latency_s * (tree_depth(ranks, per_node) / tree_depth(measured, per_node) - 1)
    return min(ring_s, _shifted_s(segments, later_s, measured / (measured - 1), size_bytes))


def _shifted_s(segments: Sequence[CollectiveSegment], later_s: float, slower: float, size_bytes: float) -> float:
    curve = [
        Line(each.least_bytes, each.most_bytes, each.alpha_s + later_s, each.beta_s_per_byte * slower)
        for each in segments
    ]
    return segment_time_s(curve, size_bytes)


def _launch_s(kind: str, measured: int, interconnect: Interconnect) -> float:
    """The part of the smallest messages' time that does not grow with the steps."""

    def alpha_s(ranks: int) -> float:
        return max(interconnect.segments[f"{kind} {ranks}"][0].alpha_s, 0.0)

    groups = [each for each in measured_groups(kind, interconnect) if each <= measured]
    inside = [each for each in groups if interconnect.nodes > 1 and each <= measured / interconnect.nodes]
    if inside:  # what the links between nodes add is latency
        return min(alpha_s(inside[-1]), alpha_s(measured))
    steps = [ring_steps(kind, each) for each in groups]
    if interconnect.nodes > 1 or len(set(steps)) < 2:
        return alpha_s(measured) / (1 + STEP_SHARE.get(kind, 0.0) * ring_steps(kind, measured))
    return min(max(_intercept(steps, [alpha_s(each) for each in groups]), 0.0), alpha_s(measured))


def _intercept(x: Sequence[float], y: Sequence[float]) -> float:
    """Return where the straight line of least squares crosses x = 0."""
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)
    return mean_y - slope * mean_x
