"""Predictions of every measurement in a folder, with today's model."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from perfmodel.accuracy.cases import Pair
from perfmodel.errors import PerfModelError, naming
from perfmodel.files.kinds import CARD_NUMBERS, head_of
from perfmodel.hardware.interconnect import REFERENCE
from perfmodel.hardware.measurement import Measurement, load_measurement
from perfmodel.hardware.profile import find_profile, load_profile
from perfmodel.limits import MOST_MEASUREMENTS
from perfmodel.prediction.predict import predict
from perfmodel.prediction.prediction import Prediction
from perfmodel.progress import doing
from perfmodel.scenario.yaml_file import parse_scenario
from perfmodel.simulate.memory.walk import MemoryTimeline


def predict_measured(
    directory: Path,
    profile: str | None = None,
    *,
    allow_import: bool = False,
) -> Iterator[Pair]:
    """Predict each measurement below ``directory``, with and without kernel times measured for scenarios, and at the
    host speed that was measured between its steps.

    Parameters
    ----------
    directory : Path
        Searched with its subfolders for measurement files (``*.json``). Numbers of accuracy cards are left out.
    profile : str, optional
        In place of the profile that each measured scenario names.
    allow_import : bool
        As in :func:`perfmodel.prediction.predict.predict`.

    Returns
    -------
    iterator of Pair
        In the order of the files. Each is predicted when it is asked for, so that a card needs memory for one.

    Raises
    ------
    PerfModelError
        If there is no measurement, or are too many, or one cannot be read or predicted; the sentence names the file.
    """
    paths = sorted(directory.rglob("*.json"))
    if len(paths) <= MOST_MEASUREMENTS:
        paths = [path for path in paths if not _is_card(path)]
    if not paths:
        raise PerfModelError(
            f"{directory}: must hold measurement files (got none). "
            f"Make one with `perfmodel validate --output {directory}`."
        )
    if len(paths) > MOST_MEASUREMENTS:
        raise PerfModelError(
            f"{directory}: must hold at most {MOST_MEASUREMENTS:,} measurement files (got {len(paths):,}): each is "
            "predicted three times. Compare a subfolder at a time."
        )
    return _pairs(_told_apart(directory, paths), paths, profile, allow_import)


def _is_card(path: Path) -> bool:
    return path.is_file() and os.access(path, os.R_OK) and CARD_NUMBERS.matches(head_of(path))


def _pairs(
    measurements: Sequence[Measurement], paths: Sequence[Path], profile: str | None, allow_import: bool
) -> Iterator[Pair]:
    for number, (path, measurement) in enumerate(zip(paths, measurements, strict=True), start=1):
        with doing("measurement", number, len(paths)):
            pair = _pair(measurement, str(path), profile, allow_import)
        yield pair


def _told_apart(directory: Path, paths: list[Path]) -> list[Measurement]:
    """The measurements; those of one case in several folders are named with their folder."""
    measurements = [load_measurement(path) for path in paths]
    counts = Counter(measurement.name for measurement in measurements)
    return [
        measurement
        if counts[measurement.name] == 1
        else measurement.model_copy(update={"name": f"{measurement.name} ({path.parent.relative_to(directory)})"})
        for path, measurement in zip(paths, measurements, strict=True)
    ]


def predict_measurements(
    measurements: Iterable[Measurement], *, allow_import: bool = False, folder: Path | None = None
) -> list[Pair]:
    """Predict measurements that are at hand.

    Parameters
    ----------
    measurements : iterable of Measurement
        The measurements.
    allow_import : bool
        As in :func:`perfmodel.prediction.predict.predict`.
    folder : Path, optional
        Where models of the scenarios' own are looked for first.

    Raises
    ------
    PerfModelError
        If one cannot be predicted; the sentence begins with its name.
    """
    return [_pair(measurement, measurement.name, None, allow_import, folder) for measurement in measurements]


def _pair(
    measurement: Measurement, where: str, profile_name: str | None, allow_import: bool, folder: Path | None = None
) -> Pair:
    scenario = parse_scenario(measurement.scenario, where).found_in(folder)
    with naming(where):
        profile = load_profile(find_profile(profile_name or scenario.hardware.profile))
        prediction = predict(scenario, profile, allow_import=allow_import)
    without_s = None
    with suppress(PerfModelError):  # an operator that no curve covers; the card counts these
        without_s = predict(scenario, profile, exact=False, allow_import=allow_import).step_time_s
    host_reference_s = measurement.median_host_reference_s
    at_host_s = None
    if host_reference_s is not None and REFERENCE in profile.host:
        at_host = predict(scenario, profile, allow_import=allow_import, host_reference_s=host_reference_s)
        at_host_s = at_host.step_time_s
    return Pair(measurement, _for_cards(prediction), without_s, at_host_s)


def _for_cards(prediction: Prediction) -> Prediction:
    """Drop what takes most of the memory and no card or picture of measurements shows: hundreds are held at once.

    Columns of programs are computed once more when they are asked for.
    """

    def without_history(memory: MemoryTimeline) -> MemoryTimeline:
        unlimited = None if memory.unlimited is None else replace(memory.unlimited, history=())
        return replace(memory, history=(), unlimited=unlimited)

    every = {id(each): each for each in (*prediction.rank_memories, prediction.memory) if each is not None}
    memories = {key: without_history(each) for key, each in every.items()}
    return replace(
        prediction,
        program=replace(prediction.program),
        rank_programs=tuple(map(replace, prediction.rank_programs)),
        memory=None if prediction.memory is None else memories[id(prediction.memory)],
        rank_memories=tuple(memories[id(each)] for each in prediction.rank_memories),
    )
