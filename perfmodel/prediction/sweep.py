"""Predict every combination of some values and rank them, so that a person can choose."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import product
from os import PathLike
from pathlib import Path
from typing import Any

from perfmodel.errors import PerfModelError
from perfmodel.files.validation import shortened
from perfmodel.hardware.profile import load_profile
from perfmodel.limits import MOST_CONFIGURATIONS
from perfmodel.prediction.figures_of_merit import samples_per_step, throughput_samples_per_s
from perfmodel.prediction.memory_text import refusal_text, shortage_text
from perfmodel.prediction.pipeline_ranks import bubble_share, largest_rank
from perfmodel.prediction.predict import predict
from perfmodel.prediction.prediction import Prediction
from perfmodel.prediction.sweep_result import Configuration, SweepOutcome, SweepResult, label
from perfmodel.prediction.what_if import own_value_warnings
from perfmodel.progress import doing, shown
from perfmodel.scenario.scenario import Scenario
from perfmodel.scenario.yaml_file import (
    INTERCONNECT,
    Assignments,
    asked_scenario,
    assigned_keys,
    assignment_texts,
    interconnect_in_use,
    load_question,
    parse_yaml,
    refuse_idle,
)

GPUS = "hardware.gpus"
MOST_REASONS = 3  # in one error


@dataclass(frozen=True)
class _Question:
    """What all configurations of a sweep share.

    Attributes
    ----------
    assignments : tuple of str
        ``key=value``, as ``--set`` takes them.
    exact, allow_import
        As in :func:`perfmodel.prediction.predict.predict`.
    """

    scenario: Scenario | str | PathLike[str]
    assignments: tuple[str, ...]
    device: str | None
    exact: bool
    allow_import: bool

    @property
    def name(self) -> str:
        """Name of the scenario in errors."""
        return self.scenario.name if isinstance(self.scenario, Scenario) else str(Path(self.scenario))

    def with_values(self, values: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the shared assignments and those of one configuration."""
        return (*self.assignments, *assignment_texts(values))

    def asked(self, assignments: tuple[str, ...]) -> Scenario:
        """Return the scenario with these assignments."""
        return asked_scenario(self.scenario, assignments, self.device)


def sweep(
    scenario: Scenario | str | PathLike[str],
    vary: Mapping[str, Sequence[Any]],
    set: Assignments = (),
    *,
    device: str | None = None,
    exact: bool = True,
    allow_import: bool = False,
    progress: bool = False,
) -> SweepResult:
    """Predict a scenario with every combination of values and rank the configurations by samples a second.

    Parameters
    ----------
    scenario : Scenario, str or path
        A scenario, or the YAML file of one.
    vary : mapping of str to sequence
        Values by dotted key, of the scenario or (``hardware.device...``) of the profile; see :func:`parse_vary`.
    set : iterable of str or mapping
        Values that all configurations share, as in :func:`perfmodel.prediction.predict.predict`.
    device, exact, allow_import
        As in :func:`perfmodel.prediction.predict.predict`.
    progress : bool
        Show on stderr what is done, once it takes long; see :mod:`perfmodel.progress`.

    Returns
    -------
    SweepResult
        All configurations, best first.

    Raises
    ------
    PerfModelError
        If there is nothing to vary or too much, a key is varied twice, or every configuration fails: then with the
        sentence of each. One that fails among others is listed with its sentence, also where the failure is a defect.

    Notes
    -----
    Configurations tie where 90 % intervals of samples a second overlap: each joins the rank of the configuration before
    it if it overlaps with the first of that rank. Errors that two configurations share are counted as if each had its
    own, so ties are called too often rather than too rarely.

    ``hardware.gpus`` follows the ranks of each configuration, data-parallel ones x stages, where it is that number in
    the scenario and is neither assigned nor varied.

    Examples
    --------
    >>> import perfmodel
    >>> result = perfmodel.sweep("scenarios/gpt2.7b.yaml", {"precision": ["fp32", "amp-bf16"]})
    >>> [(each.rank, each.values["precision"]) for each in result.configurations]
    [(1, 'amp-bf16'), (2, 'fp32')]
    """
    question = _Question(scenario, assignment_texts(set), device, exact, allow_import)
    _check_vary(vary, question.assignments)
    _check_interconnects(question, vary)
    with shown() if progress else nullcontext():
        names, configurations = _configurations(question, vary)
    if names is None:
        raise PerfModelError(f"{question.name}: {_reasons(configurations)}")
    vary_values = {key: tuple(values) for key, values in vary.items()}
    return SweepResult(*names, vary_values, question.assignments, _ranked(configurations))


def _configurations(
    question: _Question, vary: Mapping[str, Sequence[Any]]
) -> tuple[tuple[str, str] | None, list[Configuration]]:
    """Predict every combination of values.

    Returns
    -------
    names : tuple of str or None
        Names of the scenario and the profile; None if every configuration fails.
    configurations : list of Configuration
        In the order in which they were asked.
    """
    follows = _gpus_follow(question, vary)
    configurations: list[Configuration] = []
    names: tuple[str, str] | None = None
    effective: set[str] = set()  # settings that were seen to change an answer
    count = math.prod(map(len, vary.values()))
    for number, values in enumerate(_combinations(vary), start=1):
        with doing("configuration", number, count):
            try:
                prediction = _predicted(question, values, follows, effective)
            except PerfModelError as error:
                reason = str(error).removeprefix(f"{question.name}: ")
                configurations.append(Configuration(values, None, None, reason))
            except Exception as error:  # a defect must not lose what other configurations took long to find
                configurations.append(Configuration(values, None, None, _defect(error)))
            else:
                names = names or (prediction.scenario.name, prediction.profile.name)
                configurations.append(_configuration(values, prediction))
    return names, configurations


def _predicted(question: _Question, values: Mapping[str, Any], follows: bool, effective: set[str]) -> Prediction:
    """Predict one configuration.

    Parameters
    ----------
    question : _Question
        What all configurations share.
    values : mapping
        The configuration's values by key.
    follows : bool
        Whether ``hardware.gpus`` is the configuration's number of ranks.
    effective : set of str
        Settings that were seen to change an answer, which are not tried again; those of this configuration are added.
    """
    assignments = question.with_values(values)
    scenario, profile = load_question(question.scenario, assignments, question.device, others=True)
    if follows:
        hardware = scenario.hardware.model_copy(update={"gpus": scenario.parallelism.ranks})
        scenario = scenario.model_copy(update={"hardware": hardware})
    doubted = profile.provenance.get("set", {}).keys() - effective
    prediction = predict(scenario, profile, exact=question.exact, allow_import=question.allow_import, doubted=doubted)
    effective |= doubted.difference(prediction.idle_settings, prediction.own_settings)
    return prediction


def _gpus_follow(question: _Question, vary: Mapping[str, Sequence[Any]]) -> bool:
    """Return whether the scenario has a GPU for each rank, and nothing else says how many each configuration has."""
    if any(key in ("hardware", GPUS) for key in (*vary, *assigned_keys(question.assignments))):
        return False
    with suppress(PerfModelError):  # of a scenario that its varied values make whole
        scenario = question.asked(question.assignments)
        return scenario.hardware.gpus == scenario.parallelism.ranks
    return False


def parse_vary(texts: Iterable[str]) -> dict[str, tuple[Any, ...]]:
    """``key=value,value...`` of each ``--vary``; values are read as YAML.

    Raises
    ------
    PerfModelError
        If there is no key or no value, or a key is given twice.

    Examples
    --------
    >>> parse_vary(["batch.size=8,16", "model.size=small,2.7b", "parallelism.bucket_cap_mb=null,25"])
    {'batch.size': (8, 16), 'model.size': ('small', '2.7b'), 'parallelism.bucket_cap_mb': (None, 25)}
    """
    found: dict[str, tuple[Any, ...]] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        key = key.strip()
        if not equals or not key or not values.strip():
            raise PerfModelError(
                f"--vary must read key=value,value... (got {text!r}). For example --vary batch.size=8,16."
            )
        if key in found:
            raise PerfModelError(f"--vary {key}: a key must be varied once (got it twice). Give all values at once.")
        found[key] = tuple(parse_yaml(f"[{values}]", f"--vary {key}"))
    return found


def _check_vary(vary: Mapping[str, Sequence[Any]], assignments: tuple[str, ...]) -> None:
    if not vary:
        raise PerfModelError("--vary must be given (got none). For example --vary batch.size=8,16.")
    for key, values in vary.items():
        if not values:
            raise PerfModelError(f"--vary {key}: there must be a value (got none). Write {key}=value,value...")
        texts = [json.dumps(value) for value in values]
        twice = next((text for index, text in enumerate(texts) if text in texts[:index]), None)
        if twice is not None:
            raise PerfModelError(f"--vary {key}: values must differ (got {twice} twice). Leave one out.")
    both = [key for key in assigned_keys(assignments) if key in vary]
    if both:
        raise PerfModelError(f"--vary {both[0]}: a varied key must not be in --set as well (it is). Leave one out.")
    count = math.prod(map(len, vary.values()))
    if count > MOST_CONFIGURATIONS:
        raise PerfModelError(
            f"--vary must make at most {MOST_CONFIGURATIONS} configurations (got {count}). Vary fewer values at once."
        )


def _combinations(vary: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Return every combination of the varied values, by key."""
    return (dict(zip(vary, values, strict=True)) for values in product(*vary.values()))


def _check_interconnects(question: _Question, vary: Mapping[str, Sequence[Any]]) -> None:
    """Refuse to change an interconnect that no configuration uses."""
    keys = assigned_keys(question.assignments)
    if not any(key.startswith(INTERCONNECT) for key in (*vary, *keys)):
        return
    in_use = []
    for values in _combinations(vary):
        with suppress(PerfModelError):  # of a configuration, which is listed with its reason
            scenario = question.asked(question.with_values(values))
            in_use.append(interconnect_in_use(scenario, load_profile(scenario.hardware.profile)))
    if in_use:
        refuse_idle("--vary", vary, in_use)
        refuse_idle("--set", keys, in_use)


def _defect(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    return f"fails with {shortened(text)}, a defect of perfmodel. `perfmodel predict` with these values shows where."


def _reasons(failed: Sequence[Configuration]) -> str:
    """Join the sentences that differ in more than the value they got: the first, and some others with their values."""
    distinct: dict[str, Configuration] = {}
    for each in failed:
        distinct.setdefault(re.sub(r"\(got .*?\)", "", each.reason or ""), each)
    first, *others = distinct.values()
    shown = [f"With {label(each.values)}: {each.reason}" for each in others[: MOST_REASONS - 1]]
    left = len(others) - len(shown)
    return " ".join([first.reason or "", *shown, *([f"There are {left} more reasons."] if left else [])])


def _configuration(values: dict[str, Any], prediction: Prediction) -> Configuration:
    memory = prediction.largest_memory
    reason = None
    if memory is not None and not memory.fits:
        short = shortage_text(memory, prediction.profile.device.memory_bytes, largest_rank(prediction))
        reason = f"does not fit, {short} (runs out: {refusal_text(memory)[0]})"
    elif retries := prediction.step_retries:
        reason = (
            f"fits only with {retries} allocator retries a step, which wait for the device: its time is not predicted"
        )
    return Configuration(values, None, _outcome(prediction, values), reason)


def _outcome(prediction: Prediction, values: Mapping[str, Any]) -> SweepOutcome:
    """Keep what ranks a prediction; that one of several values is the profile's own is no warning."""
    varied_to_own = set(own_value_warnings(prediction.profile, values.keys() & set(prediction.own_settings)))
    memory = prediction.largest_memory
    complete = memory if memory is not None and memory.fits else None
    return SweepOutcome(
        step_time_s=prediction.step_time_s,
        interval_s=prediction.interval_s,
        samples_per_step=samples_per_step(prediction),
        throughput_samples_per_s=throughput_samples_per_s(prediction),
        exposed_s=prediction.breakdown["exposed_communication_s"],
        gpus=prediction.scenario.hardware.gpus,
        bubble_share=bubble_share(prediction) if prediction.rank_timelines else None,
        fits=None if memory is None else memory.fits,
        peak_allocated_bytes=None if complete is None else complete.peak_allocated_bytes,
        device_bytes=None if complete is None else complete.device_bytes,
        needed_bytes=None if memory is None or memory.fits else memory.needed_bytes,
        capacity_bytes=prediction.profile.device.memory_bytes,
        bottleneck=prediction.bottleneck,
        assumptions=prediction.assumptions,
        warnings=tuple(text for text in prediction.warnings if text not in varied_to_own),
    )


def _ranked(found: list[Configuration]) -> tuple[Configuration, ...]:
    """Sort configurations, best first, with ranks as in a race: 1, 1, 3."""
    in_order = sorted(
        ((each, each.outcome) for each in found if each.outcome is not None and each.reason is None),
        key=lambda pair: -pair[1].throughput_samples_per_s,
    )
    ranked: list[Configuration] = []
    rank, least_samples_per_s = 0, math.inf
    for place, (each, outcome) in enumerate(in_order, start=1):
        low_s, high_s = outcome.interval_s
        if outcome.samples_per_step / low_s < least_samples_per_s:
            rank, least_samples_per_s = place, outcome.samples_per_step / high_s
        ranked.append(replace(each, rank=rank))
    return (*ranked, *(each for each in found if each.outcome is None or each.reason is not None))
