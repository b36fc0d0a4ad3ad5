"""Settings with which a step would fit that does not; they are tried if their traces are stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from pydantic import BaseModel

from perfmodel.errors import PerfModelError
from perfmodel.prediction.pipeline_ranks import with_largest_memory
from perfmodel.prediction.predict import predict_memories
from perfmodel.scenario.scenario import MICRO_BATCHES
from perfmodel.scenario.stage_split import pipeline_of
from perfmodel.trace.store import TraceNotKeptError, only_kept_traces
from perfmodel.trace.trace import StorageKind

if TYPE_CHECKING:
    from perfmodel.prediction.prediction import Prediction
    from perfmodel.scenario.scenario import Scenario

BATCH_SIZE = "batch.size"
CHECKPOINTING = "training.activation_checkpointing"
OPTIMIZER, FUSED = "optimizer.implementation", "fused"
ACCUMULATION, MOST_ACCUMULATED = "training.gradient_accumulation", 1024
STRATEGY = "parallelism.strategy"
OF_ACTIVATIONS = frozenset({BATCH_SIZE, MICRO_BATCHES, CHECKPOINTING, ACCUMULATION})
OF_THE_BATCH = (StorageKind.INPUT, StorageKind.ACTIVATION)

SettingValues = dict[str, int | str]
Section = TypeVar("Section", bound=BaseModel)


@dataclass(frozen=True)
class Remedy:
    """Settings in place of the scenario's own.

    Attributes
    ----------
    values : dict
        SettingValues by key, as ``--set`` takes them.
    fits : bool or None
        Whether the step fits with them; None if its trace is not stored.
    needed_bytes : int or None
        Of the rank that takes most: what the device has in use at the peak where it fits, else the smallest device
        memory in which it would.
    """

    values: SettingValues
    fits: bool | None
    needed_bytes: int | None


@dataclass(frozen=True)
class Fitting:
    """What is known about settings with which a step would fit.

    Attributes
    ----------
    fixed_bytes : int
        See :func:`fixed_memory_bytes`.
    capacity_bytes : int
        The device's.
    remedies : tuple of Remedy
        Those that fit come first, then those whose trace is not stored, then those that do not fit; each of these in
        order of what they need, else of what helps most as a rule. Of the same keys values are tried from the mildest
        on, up to the first that is known to fit. Where ``fixed_bytes`` alone are too much, settings that change
        activations alone are not tried.
    """

    fixed_bytes: int
    capacity_bytes: int
    remedies: tuple[Remedy, ...]

    @property
    def is_fixed_too_much(self) -> bool:
        """Whether the step fits with no batch size and no checkpointing."""
        return self.fixed_bytes > self.capacity_bytes


def what_fits(prediction: Prediction) -> Fitting:
    """Try what a user would try first, without making a trace.

    Raises
    ------
    ValueError
        If the step fits, or its memory is not predicted.

    Notes
    -----
    Tried are sharding over the ranks that there are; checkpointing of all blocks; half the batch size (and half of
    that), with the global batch kept by gradient accumulation and without; smaller micro-batches of a pipeline; and the
    fused optimizer, which needs no temporaries. Where none of them is known to fit, those that change activations are
    tried once more with the fused optimizer.
    """
    memory = prediction.largest_memory
    if memory is None or memory.fits:
        raise ValueError("this step is not known not to fit")
    shown, _ = with_largest_memory(prediction)
    fixed_bytes, capacity_bytes = fixed_memory_bytes(shown), prediction.profile.device.memory_bytes
    settings = list(_settings(prediction.scenario))
    of_activations = [values for values in settings if OF_ACTIVATIONS.issuperset(values[0])]
    alone = [each for each in settings if fixed_bytes <= capacity_bytes or each not in of_activations]
    tried = [remedy for values in alone for remedy in _up_to_fitting(prediction, values)]
    if [{OPTIMIZER: FUSED}] in settings and not any(each.fits for each in tried):
        fused = ([{OPTIMIZER: FUSED, **each} for each in values] for values in of_activations)
        tried += [remedy for values in fused for remedy in _up_to_fitting(prediction, values)]
    return Fitting(fixed_bytes, capacity_bytes, tuple(sorted(tried, key=_least_first)))


def _up_to_fitting(prediction: Prediction, settings: list[SettingValues]) -> Iterator[Remedy]:
    """Yield what becomes of the settings, up to the first that is known to fit."""
    for values in settings:
        remedy = _tried(prediction, values)
        if remedy is not None:
            yield remedy
            if remedy.fits:
                return


def _least_first(remedy: Remedy) -> tuple[int, int]:
    return (True, None, False).index(remedy.fits), remedy.needed_bytes or 0


def fixed_memory_bytes(prediction: Prediction) -> int:
    """Return the least bytes that the rank of a prediction has in use, however few activations it keeps; 0 on a CPU.

    Notes
    -----
    It is the most that is allocated at any moment, less inputs and activations and, while micro-batches run,
    temporaries: what is left neither depends on the batch nor on what is checkpointed. What is reserved is not less.
    """
    if prediction.memory is None:
        return 0
    memory, program = prediction.memory.unlimited or prediction.memory, prediction.program
    in_micro_batch = np.array([run.micro_batch >= 0 for run in program.runs])[program.instructions.run[memory.event]]
    held = memory.kind_bytes.sum(axis=0) - memory.kind_bytes[list(OF_THE_BATCH)].sum(axis=0)
    held = held - np.where(in_micro_batch, memory.kind_bytes[StorageKind.TEMPORARY], 0)
    return int(held.max()) + memory.outside_bytes


def _settings(scenario: Scenario) -> Iterator[list[SettingValues]]:
    """Yield what could be set instead, each list mildest first, that first which helps most as a rule."""
    parallelism, trains = scenario.parallelism, scenario.mode == "train"
    if trains and parallelism.pp is None and parallelism.dp > 1 and parallelism.strategy != "zero3":
        yield [{STRATEGY: "zero3"}]
    if trains and scenario.training.activation_checkpointing == "none":
        yield [{CHECKPOINTING: "full"}]
    yield from filter(None, _smaller_batches(scenario))
    if trains and scenario.optimizer.implementation != FUSED:
        yield [{OPTIMIZER: FUSED}]


def _smaller_batches(scenario: Scenario) -> Iterator[list[SettingValues]]:
    """Yield what makes less go through the model at once; only the last list of a single model changes the result."""
    size, accumulated = scenario.batch.size, scenario.training.gradient_accumulation
    if scenario.parallelism.pp is not None:
        micro_batches = pipeline_of(scenario).micro_batches
        more = (micro_batches << n for n in range(1, size.bit_length()))
        yield [{MICRO_BATCHES: count} for count in more if size % count == 0]
        return
    halvings = range(1, size.bit_length())
    if scenario.mode == "train":
        yield [
            {BATCH_SIZE: size >> n, ACCUMULATION: accumulated << n}
            for n in halvings
            if size % (1 << n) == 0 and accumulated << n <= MOST_ACCUMULATED
        ]
    yield [{BATCH_SIZE: size >> n} for n in halvings]


def _tried(prediction: Prediction, values: Mapping[str, int | str]) -> Remedy | None:
    """Predict the memory with these values; None if the scenario cannot have them."""
    scenario = prediction.scenario
    for key, value in values.items():
        scenario = _with_value(scenario, key, value)
    try:
        with only_kept_traces():
            memories = predict_memories(scenario, prediction.profile)
    except TraceNotKeptError:
        return Remedy(dict(values), None, None)
    except PerfModelError:
        return None
    return Remedy(dict(values), all(each.fits for each in memories), max(each.needed_bytes for each in memories))


def _with_value(section: Section, key: str, value: int | str) -> Section:
    name, _, rest = key.partition(".")
    return section.model_copy(update={name: _with_value(getattr(section, name), rest, value) if rest else value})
