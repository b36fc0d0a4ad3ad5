"""Which stages of a calibration are done, how long each took, and which there is no time for."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from calibrate.draft import Draft
from calibrate.stage_names import CACHE, POWER

USUAL_S = {"waiting": 34.0, "cache": 3.0, "power": 8.0}  # on a GPU, of stages that are measured whole or not at all


class Stages:
    """The stages of one run over one draft.

    Parameters
    ----------
    draft : Draft
        What is measured goes there.
    device : str
        ``cuda`` or ``cpu``.
    budget_s : float, optional
        Seconds after which no general stage is begun; unlimited if left out or 0.
    clock : callable
        Returns the time in seconds.

    Attributes
    ----------
    left_out : list of str
        What there was no time for, each as the beginning of a sentence.
    """

    def __init__(
        self,
        draft: Draft,
        device: str,
        budget_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.draft, self.device, self.clock = draft, device, clock
        self.began_s = clock()
        self.left_out: list[str] = []
        self._ends_s = self.began_s + budget_s if budget_s else float("inf")

    @property
    def is_late(self) -> bool:
        """Whether the budget is used up."""
        return self.clock() > self._ends_s

    def is_done(self, stage: str) -> bool:
        """Return whether the profile has the stage: measured by this version, or, but for the host, from its base."""
        profile = self.draft.profile
        lacks = {POWER: not profile.power.readings, CACHE: profile.cache.code_miss_s is None}  # of older versions
        is_old = self.device == "cuda" and lacks.get(stage, False)
        is_the_bases = profile.base is not None and stage != "host"
        return is_the_bases or (stage in self.draft.stages_s and not is_old)

    def has_time_for(self, stage: str) -> bool:
        """Return whether to measure a stage that is left to do, now; else it is noted as left out."""
        if self.is_done(stage):
            return False
        usual_s = USUAL_S[stage] if self.device == "cuda" else 0.0
        if usual_s <= (self._ends_s - self.clock()) / 2:
            return True
        self.left_out.append(f"the stage {stage} was")
        return False

    def once(self, stage: str, work: Callable[[], None]) -> None:
        """Do the work of a stage, unless it is done."""
        if not self.is_done(stage):
            self.run(stage, work)

    def run(self, stage: str, work: Callable[[], None]) -> None:
        """Do the work of a stage, and mark it as done."""
        began_s = self.clock()
        work()
        self.draft.complete(stage, self.clock() - began_s)

    def note(self, name: str, facts: dict[str, Any]) -> None:
        """Add facts to a section of the profile's provenance."""
        provenance = self.draft.profile.provenance
        self.draft.update(provenance=provenance | {name: provenance.get(name, {}) | facts})


def now() -> str:
    """Return the time of day as provenance keeps it."""
    return datetime.now(UTC).isoformat(timespec="seconds")
