"""The accuracy card: predictions compared with measurements, every case with its sign, and statistics by class.

An error is predicted over measured, minus one: +2 % means predicted too long or too large. The card is plain data
(``ACCURACY.json``); :mod:`perfmodel.accuracy.card_text` writes it out.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from perfmodel.accuracy.cases import CHECKED, Card, CardCase, Pair
from perfmodel.accuracy.choices import settings_of
from perfmodel.accuracy.rank_memory import rank_peaks
from perfmodel.accuracy.strategies import layout_of
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
LARGEST_WORSENING = 0.003  # of a class's mean absolute error

# The measured phases of each quantity; together they are the step.
PHASES_OF_QUANTITY = {
    "forward": ("forward",),
    "backward": ("backward",),
    "optimizer": ("zero_grad", "clip", "optimizer"),
}
QUANTITIES = ("step", "synced_step", "forward", "backward", "optimizer", "peak_allocated", "peak_reserved")
VERSION_KEYS = ("gpu", "driver", "cuda", "torch", "cudnn", "nccl", "transformers", "python")
WITHOUT_EXACT_KEYS = "step_without_exact_keys"
AT_MEASURED_HOST = "step_at_measured_host_speed"


class _CardFile(BaseModel):
    """The card as plain data."""

    model_config = CHECKED

    version: Literal[1]
    summary: dict[str, Any] = {}
    cases: Annotated[tuple[CardCase, ...], Field(min_length=1)]


def accuracy_card(pairs: Iterable[Pair]) -> Card:
    """Make the card of all pairs, with cases in order of class and name.

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


def _case(pair: Pair) -> CardCase:
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
    return CardCase(
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
    for quantity, phases in PHASES_OF_QUANTITY.items():
        known = [measurement.median_phase_s(phase) for phase in phases if phase in measurement.phases_s]
        found[quantity] = sum(known) if known else None
    found |= _measured_communication(measurement)
    rebuild_step = (memory.rebuild_step if memory else None) or 0
    if len(measurement.memory) > rebuild_step:  # else the last that was looked at is no steady step
        found["peak_allocated"] = measurement.peak_allocated_bytes
        found["peak_reserved"] = measurement.peak_reserved_bytes
    return {quantity: float(value) for quantity, value in found.items() if value is not None}


def _measured_communication(measurement: Measurement) -> dict[str, float]:
    """Return medians over ranks, counted from the last rank's arrival in each collective, where that was recorded."""
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
    for quantity, phases in PHASES_OF_QUANTITY.items():
        found[quantity] = sum(span.duration_s for span in first.phases if span.phase in phases)
    found |= _predicted_communication(prediction.timeline)
    if (memory := prediction.largest_memory) is not None:
        found["peak_allocated"] = float(memory.peak_allocated_bytes)
        found["peak_reserved"] = float(memory.peak_reserved_bytes)
    return found


def _versions(provenance: dict[str, Any]) -> dict[str, str]:
    """Return versions of the machine and libraries, as far as the measurement knows them."""
    known = provenance | {"driver": provenance.get("nvidia_smi", {}).get("driver_version")}
    return {name: str(known[name]) for name in VERSION_KEYS if known.get(name) is not None}


def _identity(case: CardCase) -> tuple[str, str]:
    """Return what identifies a measurement on two cards, whatever distinguishes it from others of its name there."""
    return case.name.partition(" (")[0], f"{case.measured.get('step', 0.0):.4g}"


def worsened(card: Card, before: Card) -> list[str]:
    """Return a sentence for each class that got worse than ``before`` by more than LARGEST_WORSENING, or has vanished.

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
    """Write ``markdown`` to ``path`` and the card's numbers next to it, with the suffix .json."""
    numbers = check_card_path(path)
    write_atomically(path, markdown, CARD)
    write_atomically(numbers, json.dumps(card_json(card), indent=1) + "\n", CARD_NUMBERS)
    return [path, numbers]


def check_card_path(path: Path) -> Path:
    """Refuse now what :func:`save_card` would refuse after the predictions, and return where the numbers go.

    Raises
    ------
    PerfModelError
        If ``path`` does not end in .md, or the card or its numbers cannot be written without replacing another file.
    """
    if path.suffix != ".md":
        raise PerfModelError(f"{path}: an accuracy card must end in .md (got {path.name!r}). Rename it.")
    numbers = path.with_suffix(".json")
    check_writable(path, CARD)
    check_writable(numbers, CARD_NUMBERS)
    return numbers


def card_json(card: Card) -> dict[str, Any]:
    """Return the card as plain data, rounded to what a comparison can see."""
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
    """Round floats to seven significant digits, so that the last bits of a machine do not show in a diff."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    return value
