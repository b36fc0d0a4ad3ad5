"""Peak memory rank by rank: with sharded strategies no two ranks hold the same, and the largest hides the rest."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from perfmodel.accuracy.markdown import table

if TYPE_CHECKING:
    from perfmodel.accuracy.cases import Card, CardCase, RankPeaks
    from perfmodel.hardware.measurement import Measurement
    from perfmodel.simulate.memory.walk import MemoryTimeline

PEAKS = {"peak_allocated": "allocated", "peak_reserved": "reserved"}  # quantities of a case, and their short names
REMARK = (
    "Each rank's peaks in a steady step against those predicted for that rank. Mean and worst are over ranks, and the "
    "mean is of absolute errors."
)


@dataclass(frozen=True)
class RankErrors:
    """Relative errors of one peak over ranks.

    Attributes
    ----------
    ranks : int
        How many ranks were measured.
    mean : float
        Mean of the absolute errors.
    worst : float
        The largest error, with its sign.
    worst_rank : int
        The rank with that error.
    """

    ranks: int
    mean: float
    worst: float
    worst_rank: int


def rank_peaks(measurement: Measurement, memories: tuple[MemoryTimeline, ...]) -> dict[str, RankPeaks]:
    """Return measured and predicted peaks of every rank, by quantity of :data:`PEAKS`.

    Parameters
    ----------
    measurement : Measurement
        The measured ranks.
    memories : tuple of MemoryTimeline
        Predicted memory of each rank, in order of ranks.

    Returns
    -------
    dict of str to RankPeaks
        Empty if one rank ran, or memory of no steady step was read on any.
    """
    if not measurement.ranks or len(measurement.ranks) != len(memories):
        return {}
    rows = [
        (rank.steady_memory if len(rank.memory) > (predicted.rebuild_step or 0) else None, predicted)
        for rank, predicted in zip(measurement.ranks, memories, strict=True)
    ]
    if not any(measured for measured, _ in rows):
        return {}
    return {
        quantity: tuple(
            None
            if measured is None
            else (float(getattr(measured, f"{quantity}_bytes")), float(getattr(predicted, f"{quantity}_bytes")))
            for measured, predicted in rows
        )
        for quantity in PEAKS
    }


def rank_errors(peaks: RankPeaks) -> RankErrors | None:
    """Return the errors over the ranks that were measured; None if none was."""
    errors = {rank: pair[1] / pair[0] - 1 for rank, pair in enumerate(peaks) if pair is not None and pair[0]}
    if not errors:
        return None
    worst_rank = max(errors, key=lambda rank: abs(errors[rank]))
    mean = statistics.fmean(map(abs, errors.values()))
    return RankErrors(len(errors), mean, errors[worst_rank], worst_rank)


def rank_memory_section(card: Card) -> str:
    """Write a sentence for each peak over all cases, and a row for each case of several ranks; empty without any."""
    cases = [case for case in card.cases if case.rank_peaks]
    if not cases:
        return ""
    sentences = " ".join(filter(None, (_over_all(cases, quantity) for quantity in PEAKS)))
    columns = ("mean", "worst", "of rank")
    head = ("case", "ranks", *(f"{short} {column}" for short in PEAKS.values() for column in columns))
    rows = [[case.name, str(len(next(iter(case.rank_peaks.values())))), *_cells(case)] for case in cases]
    return "\n\n".join(["## Peak memory by rank", f"{REMARK} {sentences}", table(head, rows)])


def _cells(case: CardCase) -> list[str]:
    found = []
    for quantity in PEAKS:
        errors = rank_errors(case.rank_peaks.get(quantity, ()))
        found += (
            ["", "", ""] if errors is None else [f"{errors.mean:.2%}", f"{errors.worst:+.2%}", f"{errors.worst_rank}"]
        )
    return found


def _over_all(cases: list[CardCase], quantity: str) -> str:
    """Write the mean and worst error of one peak; every rank has the same weight."""
    known = [(case, errors) for case in cases if (errors := rank_errors(case.rank_peaks.get(quantity, ()))) is not None]
    if not known:
        return ""
    ranks = sum(errors.ranks for _, errors in known)
    mean = sum(errors.mean * errors.ranks for _, errors in known) / ranks
    case, worst = max(known, key=lambda pair: abs(pair[1].worst))
    return (
        f"{PEAKS[quantity].capitalize()}: {mean:.2%} in the mean over {ranks} ranks, {worst.worst:+.2%} at worst "
        f"(rank {worst.worst_rank} of {case.name})."
    )
