"""The elements of an accuracy card: measurements with their predictions, a case for each, and statistics of them."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
from pydantic import ConfigDict

if TYPE_CHECKING:
    from perfmodel.hardware.measurement import Measurement
    from perfmodel.prediction.prediction import Prediction

CHECKED = ConfigDict(extra="forbid", allow_inf_nan=False)
RankPeaks = tuple[tuple[float, float] | None, ...]  # measured and predicted, bytes, by rank; None: not measured


@dataclass(frozen=True)
class Layout:
    """How a case is spread over GPUs.

    Attributes
    ----------
    work : str
        Digest of what each rank would compute alone, and of its GPU.
    place : str
        The GPUs, in words; empty for one GPU.
    strategy : str
        The strategy of data parallelism.
    settings : str
        Settings that differ from their defaults, in words; empty if none does.
    """

    work: str
    place: str
    strategy: str
    settings: str

    @property
    def label(self) -> str:
        """The strategy and its settings, as tables name them."""
        return f"{self.strategy} {self.settings}".rstrip()


@dataclass(frozen=True)
class Pair:
    """A measurement and its predictions.

    Attributes
    ----------
    measurement : Measurement
        The measurement.
    prediction : Prediction
        Its prediction with everything that the profile knows.
    step_without_exact_keys_s : float or None
        The step as predicted without kernel times measured for scenarios; None if the general grid does not cover all
        its operators.
    step_at_measured_host_s : float or None
        The step as predicted at the host speed that was measured between its steps; None if that was not measured.
    """

    measurement: Measurement
    prediction: Prediction
    step_without_exact_keys_s: float | None
    step_at_measured_host_s: float | None = None


@dataclass(frozen=True)
class CardCase:
    """One case of the card: a measurement against its prediction.

    Attributes
    ----------
    name, group, split : str
        Name of the measurement, its class, and ``held-out`` or ``tuning``.
    measured, predicted : dict of str to float
        Seconds and bytes by quantity (``step``, ``forward``, ``peak_allocated``, ...), without those that are unknown.
    spread : float
        Standard deviation of the measured steps over their median.
    steps : int
        Number of measured steps.
    in_interval : bool
        Whether the measured step lies in the predicted 90 % interval.
    profile : str
        Name of the profile that it was predicted with.
    versions : dict of str to str
        The machine and libraries that were measured.
    scenario_digest : str
        Equal for measurements of the same scenario.
    host_reference_s : tuple of float
        Seconds of the host reference between the steps.
    settings : dict
        See :func:`perfmodel.accuracy.choices.settings_of`.
    layout : Layout or None
        None on a card that was written before there were any.
    rank_peaks : dict of str to RankPeaks
        See :func:`perfmodel.accuracy.rank_memory.rank_peaks`.
    measured_at : str
        ISO 8601; empty in the earliest measurements, which do not say.
    """

    name: str
    group: str
    split: str
    measured: dict[str, float]
    predicted: dict[str, float]
    spread: float
    steps: int
    in_interval: bool
    profile: str
    versions: dict[str, str]
    scenario_digest: str
    host_reference_s: tuple[float, ...] = ()
    settings: dict[str, tuple[str, str]] = field(default_factory=dict)
    layout: Layout | None = None
    rank_peaks: dict[str, RankPeaks] = field(default_factory=dict)
    measured_at: str = ""
    __pydantic_config__ = CHECKED

    def error(self, quantity: str) -> float | None:
        """Return the signed relative error; None if either value is missing, or the measured one is 0."""
        measured, predicted = self.measured.get(quantity), self.predicted.get(quantity)
        return None if not measured or predicted is None else predicted / measured - 1


@dataclass(frozen=True)
class Statistics:
    """Errors of one quantity over several cases.

    Attributes
    ----------
    cases : int
        How many cases know the quantity.
    mean, median, p95 : float
        Mean, median and 95th percentile of the absolute relative errors.
    worst : float
        The largest error, with its sign.
    worst_case : str
        Name of the case with that error.
    bias : float
        Mean of the signed errors.
    """

    cases: int
    mean: float
    median: float
    p95: float
    worst: float
    worst_case: str
    bias: float


@dataclass(frozen=True)
class Card:
    """All cases, and statistics of them."""

    cases: tuple[CardCase, ...]

    @property
    def groups(self) -> list[str]:
        """Classes of cases, sorted."""
        return sorted({case.group for case in self.cases})

    @property
    def profiles(self) -> list[str]:
        """Names of the profiles that cases were predicted with, sorted."""
        return sorted({case.profile for case in self.cases})

    def rows(self, quantity: str) -> dict[str, Statistics]:
        """Return statistics by the name of a table's row: splits, all, classes, and profiles if there are several.

        Rows without a case that knows the quantity are left out.
        """
        found = {split: self.statistics(quantity, split=split) for split in ("held-out", "tuning")}
        found["all"] = self.statistics(quantity)
        found |= {f"class {group}": self.statistics(quantity, group) for group in self.groups}
        if len(self.profiles) > 1:
            found |= {f"profile {name}": self.statistics(quantity, profile=name) for name in self.profiles}
        return {name: row for name, row in found.items() if row is not None}

    def statistics(
        self, quantity: str, group: str | None = None, split: str | None = None, profile: str | None = None
    ) -> Statistics | None:
        """Return statistics over the cases of a class, split and profile (None: all); None if no case is left."""
        asked = (group, split, profile)
        chosen = [
            case
            for case in self.cases
            if all(want in (None, has) for want, has in zip(asked, (case.group, case.split, case.profile), strict=True))
        ]
        errors = {case.name: error for case in chosen if (error := case.error(quantity)) is not None}
        if not errors:
            return None
        worst_case = max(errors, key=lambda name: abs(errors[name]))
        absolute = [abs(error) for error in errors.values()]
        return Statistics(
            cases=len(errors),
            mean=statistics.fmean(absolute),
            median=statistics.median(absolute),
            p95=float(np.percentile(absolute, 95)),
            worst=errors[worst_case],
            worst_case=worst_case,
            bias=statistics.fmean(errors.values()),
        )

    def host_references(self) -> dict[str, list[float]]:
        """Return all samples of the host reference in seconds, by profile."""
        found: dict[str, list[float]] = {}
        for case in self.cases:
            if case.host_reference_s:
                found.setdefault(case.profile, []).extend(case.host_reference_s)
        return found

    def repeated(self) -> list[tuple[str, list[CardCase]]]:
        """Return the digests of scenarios that were measured more than once, with their cases."""
        ordered = sorted(self.cases, key=lambda case: case.scenario_digest)
        groups = [(digest, list(cases)) for digest, cases in groupby(ordered, key=lambda case: case.scenario_digest)]
        return [(digest, cases) for digest, cases in groups if len(cases) > 1]
