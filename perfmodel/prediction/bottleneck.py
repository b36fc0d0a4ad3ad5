"""One sentence: what to change first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

from perfmodel.prediction.breakdown import RankFigures
from perfmodel.prediction.prediction import KernelUse
from perfmodel.units import format_share

LEAST_HELD = 0.02  # of a step that a device waits for its host; with less, only a slower host would be felt
LEAST_EXCESS = 0.1  # of a step, by which a rank has more to do than the mean of all


def bottleneck(
    step_time_s: float, ranks: Sequence[RankFigures], host_limited_s: float, wire_limited_s: float = 0.0
) -> str:
    """Return in a sentence what takes most of the step.

    Parameters
    ----------
    step_time_s : float
        Of the step.
    ranks : sequence of RankFigures
        All ranks of a pipeline in order, over which shares are taken; else one.
    host_limited_s, wire_limited_s : float
        How much of the step grows with the costs of the host, d step / d log(host), and with those of the interconnect.
    """
    if step_time_s <= 0 or not any(each.kernels for each in ranks):
        return "nothing runs on the device"
    share_of = {
        part: fmean(each.breakdown[part] for each in ranks) / step_time_s
        for part in ("exposed_communication_s", "bubble_s", "host_bound_s")
    }
    exposed, bubbles, held = share_of.values()
    keeps_waiting = any(each.breakdown["host_bound_s"] >= LEAST_HELD * step_time_s for each in ranks)
    if host_limited_s > step_time_s / 2 and keeps_waiting:
        return _host(step_time_s, ranks, min(host_limited_s / step_time_s, 1), held, bubbles)
    everywhere = " over all ranks" if len(ranks) > 1 else ""
    kind, share = _largest_kind([use for each in ranks for use in each.kernels], len(ranks) * step_time_s)
    if bubbles > max(share, exposed):
        cause = _cause(step_time_s, ranks, wire_limited_s)
        return f"the pipeline's bubbles: {format_share(bubbles)} of the step{everywhere}; {cause}"
    if exposed > share:
        taken = format_share(exposed)
        return f"the interconnect: exposed communication takes {taken} of the step{everywhere}"
    return f"the device: {kind} kernels take {format_share(share)} of the step{everywhere}"


def slow_rank(step_time_s: float, ranks: Sequence[RankFigures]) -> int | None:
    """Return the rank of a pipeline that the others wait for; None where they wait for their turns.

    A rank has to do what keeps its device or its host busy, whichever is more. It is the one that has most to do, where
    that is so much more than the mean that it explains more of the others' waiting than there is in its own step, and
    LEAST_EXCESS of the step at least.
    """
    loads_s = [each.load_s for each in ranks]
    most_s, mean_s = max(loads_s), fmean(loads_s)
    least_s = max(step_time_s - most_s, LEAST_EXCESS * step_time_s)
    return loads_s.index(most_s) if most_s - mean_s > least_s else None


def _host(step_time_s: float, ranks: Sequence[RankFigures], follows: float, held: float, bubbles: float) -> str:
    """Return the sentence about a step that the host limits.

    Parameters
    ----------
    step_time_s, ranks
        As for :func:`bottleneck`.
    follows, held, bubbles : float
        Shares of the step that grow with the host's costs, in which devices wait for their own hosts, and for other
        ranks.
    """
    of_step, slow = f"{format_share(follows)} of the step follows it", slow_rank(step_time_s, ranks)
    if len(ranks) == 1:
        return f"the host: {of_step}, the device waits {format_share(held)}"
    if slow is not None and ranks[slow].is_held_by_host:
        busy = format_share(ranks[slow].host_busy_s / step_time_s)
        return f"the host of rank {slow}: {of_step}, it works {busy}, and the other ranks wait for that rank"
    return f"the host: {of_step}, devices wait {format_share(held)} for it and {format_share(bubbles)} for other ranks"


def _cause(step_time_s: float, ranks: Sequence[RankFigures], wire_limited_s: float) -> str:
    """Return what causes the bubbles."""
    if wire_limited_s > step_time_s / 2:
        return f"messages are the cause: {format_share(min(wire_limited_s / step_time_s, 1))} of the step follows them"
    slow = slow_rank(step_time_s, ranks)
    if slow is None:
        return "more micro-batches would shorten them"
    if ranks[slow].is_held_by_host:
        busy = format_share(ranks[slow].host_busy_s / step_time_s)
        return f"the other ranks wait for rank {slow}, whose host works {busy} of the step"
    kind, share = _largest_kind(ranks[slow].kernels, step_time_s)
    return f"the other ranks wait for rank {slow}, whose {kind} kernels take {format_share(share)} of the step"


def _largest_kind(kernels: Sequence[KernelUse], whole_s: float) -> tuple[str, float]:
    """Return the kind of kernels that takes most, in words, and its share of the whole."""
    by_kind: defaultdict[str, float] = defaultdict(float)
    for use in kernels:
        by_kind[use.cost.kind] += use.total_s
    kind = max(by_kind, key=lambda each: by_kind[each], default="")
    return kind.replace("_", " "), by_kind[kind] / whole_s
