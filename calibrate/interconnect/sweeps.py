"""Passes over the collectives of a group, far apart in time, and what the passes together say of each collective."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

from calibrate.interconnect.collectives import CollectiveBench, Wanted, cost_s, differ, record_of
from perfmodel.hardware.interconnect import CollectiveRecord

LONGEST_S = 0.4  # of one collective; larger sizes of the ladder are left out


class Sweeps:
    """Passes over the collectives of one group. What is timed next follows from values on which all members agree.

    Parameters
    ----------
    wanted : mapping of Wanted to str
        What to time, and who asked for it: ``scenario``, which is timed whatever it takes, or ``grid``.
    """

    def __init__(
        self, bench: CollectiveBench, wanted: Mapping[Wanted, str], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._bench, self._wanted, self._clock = bench, wanted, clock
        self._passes: dict[Wanted, list[list[float]]] = {}
        self._is_first = True

    def run(self, budget_s: float, only_disputed: bool = False) -> Iterator[tuple[str, CollectiveRecord]]:
        """Time one pass, and yield what is known of each collective after it; later passes only repeat what the first
        timed.

        Parameters
        ----------
        budget_s : float
            Sizes of the ladder that would not end in so many seconds are left out.
        only_disputed : bool
            Time only those of which the passes so far differ.
        """
        stop_s = self._clock() + budget_s
        for wanted, origin in self._wanted.items():
            passes = self._passes.get(wanted, [])
            if (not self._is_first and not passes) or (only_disputed and not differ(passes)):
                continue
            record = self._timed(wanted, origin, stop_s)
            if record is not None:
                yield wanted.key, record
        self._is_first = False

    def _timed(self, wanted: Wanted, origin: str, stop_s: float) -> CollectiveRecord | None:
        expected_s = self._expected_s(wanted)
        late_s = self._bench.agree(self._clock() + cost_s(expected_s) - stop_s)
        if origin == "grid" and (late_s > 0 or expected_s > LONGEST_S):
            return None
        samples_s, error = self._bench.measure(wanted)
        if error is None:
            passes = self._passes.setdefault(wanted, [])
            passes.append(samples_s)
            return record_of(passes, "scenario" if origin == "scenario" else "grid")
        if wanted in self._passes:
            return None
        return CollectiveRecord.model_validate({"error": error, "origin": origin})

    def _expected_s(self, wanted: Wanted) -> float:
        """Return the seconds it took before, or in proportion to the nearest smaller size; 0 where there is none."""
        smaller = [
            each
            for each in self._passes
            if (each.kind, each.dtype) == (wanted.kind, wanted.dtype) and each.size_bytes <= wanted.size_bytes
        ]
        if not smaller:
            return 0.0
        nearest = max(smaller, key=lambda each: each.size_bytes)
        return min(self._passes[nearest][-1]) * wanted.size_bytes / nearest.size_bytes
