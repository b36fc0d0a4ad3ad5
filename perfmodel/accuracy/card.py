"""The accuracy card: predictions held against measurements, every case with its sign, and sums of them by class.

An error is predicted over measured, minus one: +2 % means predicted too long or too large. The card is plain data
(``ACCURACY.json``); :mod:`perfmodel.accuracy.card_text` writes it out.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from perfmodel.accuracy.choices import settings_of
from perfmodel.accuracy.rank_memory import RankPeaks, rank_peaks
from perfmodel.accuracy.strategies import Layout, layout_of
from perfmodel.errors import PerfModelError, naming
from perfmodel.files.kinds import CARD, CARD_NUMBERS
from perfmodel.files.reading import read_json
from perfmodel.files.validation import validated
from perfmodel.files.versions import upgrade
from perfmodel.files.writing import check_writable, write_atomically
from perfmodel.hardware.measurement import Measurement
from perfmodel.prediction.prediction import Prediction
from perfmodel.scenario.scenario import workload_digest
from perfmodel.simulate.memory.walk import MemoryTimeline
from perfmodel.simulate.timeline import Timeline

# Format history
# 1  first
CARD_VERSION = 1
REMEDY = "Write it again with `perfmodel compare`."
CHECKED = ConfigDict(extra="forbid", allow_inf_nan=False)
LARGEST_WORSENING = 0.003  # of a class's mean absolute error

# Which measured phases a part of the step is; together they are the step.
PHASES_OF_PART = {"forward": ("forward",), "backward": ("backward",), "optimizer": ("zero_grad", "clip", "optimizer")}
QUANTITIES = ("step", "synced_step", "forward", "backward", "optimizer", "peak_allocated", "peak_reserved")
VERSION_KEYS = ("gpu", "driver", "cuda", "torch", "cudnn", "nccl", "transformers", "python")
WITHOUT_EXACT_KEYS = "step_without_exact_keys"
AT_MEASURED_HOST = "step_at_measured_host_speed"


@dataclass(frozen=True)
class Pair:
    """One measurement with what was predicted for it.

    step_without_exact_keys_s: the predicted step without kernel times measured for scenarios; None where the general
    grid does not cover all its operators. step_at_measured_host_s: at the host speed that was measured beside the
    steps; None where it was not.
    """

    measurement: Measurement
    prediction: Prediction
    step_without_exact_keys_s: float | None
    step_at_measured_host_s: float | None = None


@dataclass(frozen=True)
class Case:
    """One row. measured, predicted: seconds and bytes by quantity (``step``, ``forward``, ``peak_allocated``, ...);
    what either side does not know is left out. spread: of the measured steps. in_interval: whether the measured step
    lies in the predicted 90 % interval. versions: of the machine and libraries that were measured. host_reference_s:
    samples of the host's speed beside the steps. settings: see :mod:`perfmodel.accuracy.choices`. layout: None
    on a card
    that was written before there were any. rank_peaks: see :func:`perfmodel.accuracy.rank_memory.rank_peaks`.
    measured_at: ISO 8601; empty in the earliest, which do not say.
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
        """Signed relative error, or None where measured or predicted is missing (or nothing was measured)."""
        measured, predicted = self.measured.get(quantity), self.predicted.get(quantity)
        return None if not measured or predicted is None else predicted / measured - 1


class _CardFile(BaseModel):
    """The card as plain data."""

    model_config = CHECKED

    version: Literal[1]
    summary: dict[str, Any] = {}
    cases: Annotated[tuple[Case, ...], Field(min_length=1)]


@dataclass(frozen=True)
class Statistics:
    """Of one quantity over some cases. mean, median, p95: of absolute errors. worst: signed. bias: mean error."""

    cases: int
    mean: float
    median: float
    p95: float
    worst: float
    worst_case: str
    bias: float


@dataclass(frozen=True)
class Card:
    """Every case and what follows from them."""

    cases: tuple[Case, ...]

    @property
    def groups(self) -> list[str]:
        return sorted({case.group for case in self.cases})

    @property
    def profiles(self) -> list[str]:
        return sorted({case.profile for case in self.cases})

    def rows(self, quantity: str) -> dict[str, Statistics]:
        """By what a table calls it: splits, all, classes, and profiles if there are several; those without are out."""
        found = {split: self.statistics(quantity, split=split) for split in ("held-out", "tuning")}
        found["all"] = self.statistics(quantity)
        found |= {f"class {group}": self.statistics(quantity, group) for group in self.groups}
        if len(self.profiles) > 1:
            found |= {f"profile {name}": self.statistics(quantity, profile=name) for name in self.profiles}
        return {name: row for name, row in found.items() if row is not None}

    def statistics(
        self, quantity: str, group: str | None = None, split: str | None = None, profile: str | None = None
    ) -> Statistics | None:
        """Over the cases of a class, split and profile (None: all) that know the quantity; None if none does."""
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
        """All samples of the host's speed in seconds, by profile."""
        found: dict[str, list[float]] = {}
        for case in self.cases:
            if case.host_reference_s:
                found.setdefault(case.profile, []).extend(case.host_reference_s)
        return found

    def repeated(self) -> list[tuple[str, list[Case]]]:
        """Scenarios that were measured more than once, with their cases."""
        ordered = sorted(self.cases, key=lambda case: case.scenario_digest)
        groups = [(digest, list(cases)) for digest, cases in groupby(ordered, key=lambda case: case.scenario_digest)]
        return [(digest, cases) for digest, cases in groups if len(cases) > 1]


def accuracy_card(pairs: Iterable[Pair]) -> Card:
    """The card of all pairs, cases in order of class and name.

    Raises
    ------
    PerfModelError
        If two cases have one name.
    """
    cases = sorted((_case(pair) for pair in pairs), key=lambda case: (case.group, case.name))
    names = [case.name for case in cases]
    for name in names:
        if names.count(name) > 1:
            raise PerfModelError(
                f"results: names of measurements must differ (got {name!r} twice). Rename or remove one."
            )
    return Card(tuple(cases))


def _case(pair: Pair) -> Case:
    measurement, prediction = pair.measurement, pair.prediction
    predicted = _predicted(prediction)
    if pair.step_without_exact_keys_s is not None:
        predicted[WITHOUT_EXACT_KEYS] = pair.step_without_exact_keys_s
    measured = _measured(measurement, prediction.largest_memory)
    measured[WITHOUT_EXACT_KEYS] = measured["step"]
    if pair.step_at_measured_host_s is not None:
        predicted[AT_MEASURED_HOST] = pair.step_at_measured_host_s
        measured[AT_MEASURED_HOST] = measured["step"]
    low_s, high_s = prediction.interval_s
    return Case(
        name=measurement.name,
        group=measurement.group,
        split=measurement.split,
        measured=measured,
        predicted=predicted,
        spread=measurement.spread,
        steps=len(measurement.step_s),
        in_interval=low_s <= measurement.median_step_s <= high_s,
        profile=prediction.profile.name,
        versions=_versions(measurement.provenance),
        scenario_digest=workload_digest({key: value for key, value in measurement.scenario.items() if key != "name"}),
        host_reference_s=measurement.host_reference_of_ranks_s,
        settings=settings_of(measurement.scenario),
        layout=layout_of(measurement.scenario),
        rank_peaks=rank_peaks(measurement, prediction.rank_memories),
        measured_at=str(measurement.provenance.get("measured_at", "")),
    )


def _measured(measurement: Measurement, memory: MemoryTimeline | None) -> dict[str, float]:
    found: dict[str, float | None] = {
        "step": measurement.median_step_s,
        "synced_step": measurement.median_synced_step_s,
    }
    for part, phases in PHASES_OF_PART.items():
        known = [measurement.median_phase_s(phase) for phase in phases if phase in measurement.phases_s]
        found[part] = sum(known) if known else None
    found |= _measured_communication(measurement)
    rebuild_step = (memory.rebuild_step if memory else None) or 0
    if len(measurement.memory) > rebuild_step:  # else the last that was looked at is no steady step
        found["peak_allocated"] = measurement.peak_allocated_bytes
        found["peak_reserved"] = measurement.peak_reserved_bytes
    return {quantity: float(value) for quantity, value in found.items() if value is not None}


def _measured_communication(measurement: Measurement) -> dict[str, float]:
    """Medians over the ranks, from the last one's arrival in each collective, where that was recorded."""
    columns: dict[str, list[float]] = {}
    for rank in measurement.communication:
        exposed_s = rank.exposed_beyond_pauses_s
        if rank.since_last_arrival_s is not None and exposed_s is not None:
            columns.setdefault("communication", []).append(rank.since_last_arrival_s)
            columns.setdefault("exposed", []).append(exposed_s)
            columns.setdefault("overlap_ratio", []).append(rank.overlap_ratio)
    return {quantity: statistics.median(values) for quantity, values in columns.items()}


def _predicted_communication(timeline: Timeline) -> dict[str, float]:
    whole_s, exposed_s = timeline.communication_s, timeline.exposed_communication_s
    if not timeline.communications:
        return {}
    return {"communication": whole_s, "exposed": exposed_s, "overlap_ratio": 1 - exposed_s / whole_s}


def _predicted(prediction: Prediction) -> dict[str, float]:
    found = {"step": prediction.step_time_s, "synced_step": prediction.timeline.synced_step_time_s}
    first = (prediction.rank_timelines or (prediction.timeline,))[0]  # whose phases a measurement keeps
    for part, phases in PHASES_OF_PART.items():
        found[part] = sum(span.duration_s for span in first.phases if span.phase in phases)
    found |= _predicted_communication(prediction.timeline)
    if (memory := prediction.largest_memory) is not None:
        found["peak_allocated"] = float(memory.peak_allocated_bytes)
        found["peak_reserved"] = float(memory.peak_reserved_bytes)
    return found


def _versions(provenance: dict[str, Any]) -> dict[str, str]:
    """What ran, of what the measurement knows about its machine."""
    known = provenance | {"driver": provenance.get("nvidia_smi", {}).get("driver_version")}
    return {name: str(known[name]) for name in VERSION_KEYS if known.get(name) is not None}


def _identity(case: Case) -> tuple[str, str]:
    """Of a measurement, however it is told from others of its name."""
    return case.name.partition(" (")[0], f"{case.measured.get('step', 0.0):.4g}"


def worsened(card: Card, before: Card) -> list[str]:
    """A sentence for each class that got worse than in ``before`` by more than LARGEST_WORSENING, or that has vanished.

    Judged by the mean absolute error of the step time, the same without exact keys and at the measured host speed, and
    of the memory peaks, over the measurements that both cards have: a new one makes nothing worse.
    """
    known = {_identity(case) for case in before.cases}
    card = Card(tuple(case for case in card.cases if _identity(case) in known))
    found = []
    for quantity in ("step", WITHOUT_EXACT_KEYS, AT_MEASURED_HOST, "peak_allocated", "peak_reserved"):
        for group in [None, *before.groups]:
            old, new = before.statistics(quantity, group), card.statistics(quantity, group)
            what = f"{quantity.replace('_', ' ')} of {group or 'all cases'}"
            if old and not new:
                found.append(f"{what}: no case is left (it had {old.cases})")
            elif old and new and new.mean > old.mean + LARGEST_WORSENING:
                found.append(f"{what}: mean error {new.mean:.2%}, was {old.mean:.2%}")
    return found


def refuse_worse(card: Card, before: Card, path: Path) -> None:
    """Compare with the card that was in ``path``.

    Raises
    ------
    PerfModelError
        If a class got worse, see :func:`worsened`.
    """
    found = worsened(card, before)
    if found:
        raise PerfModelError(
            f"{path}: no class may get worse by more than {100 * LARGEST_WORSENING:.1f} points "
            f"(got {'; '.join(found)}). "
            "Correct the model, or say in the change why this is right and write a new card."
        )


def save_card(card: Card, markdown: str, path: Path) -> list[Path]:
    """Write ``markdown`` to ``path`` and the card's numbers beside it, with the suffix .json."""
    beside = check_card_path(path)
    write_atomically(path, markdown, CARD)
    write_atomically(beside, json.dumps(card_json(card), indent=1) + "\n", CARD_NUMBERS)
    return [path, beside]


def check_card_path(path: Path) -> Path:
    """Refuse now what :func:`save_card` would refuse after the predictions, and return where the numbers go.

    Raises
    ------
    PerfModelError
        If ``path`` does not end in .md, or the card or its numbers cannot be written without replacing another file.
    """
    if path.suffix != ".md":
        raise PerfModelError(f"{path}: an accuracy card must end in .md (got {path.name!r}). Rename it.")
    beside = path.with_suffix(".json")
    check_writable(path, CARD)
    check_writable(beside, CARD_NUMBERS)
    return beside


def card_json(card: Card) -> dict[str, Any]:
    """The card as plain data, rounded to what a comparison can see."""
    summary = {quantity: _summary(card, quantity) for quantity in (*QUANTITIES, WITHOUT_EXACT_KEYS, AT_MEASURED_HOST)}
    return {"version": CARD_VERSION, "summary": summary, "cases": [_rounded(asdict(case)) for case in card.cases]}


def _summary(card: Card, quantity: str) -> dict[str, Any]:
    return {name: _rounded(asdict(row)) for name, row in card.rows(quantity).items()}


def load_card(path: Path) -> Card:
    """Read ``ACCURACY.json``.

    Raises
    ------
    PerfModelError
        If it is not a whole card.
    """
    data = upgrade(path, read_json(path, "an accuracy card", REMEDY), CARD_VERSION, {}, REMEDY)
    with naming(path):
        return Card(validated(_CardFile, data, "card", REMEDY).cases)


def _rounded(value: Any) -> Any:
    """Floats to seven significant digits, so that the last bits of a machine do not show in a diff."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(part) for part in value]
    return value
