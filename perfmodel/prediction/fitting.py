"""Settings with which a step would fit that does not; they are tried if their traces are stored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
OF_ACTIVATIONS = (BATCH_SIZE, MICRO_BATCHES, CHECKPOINTING)
OF_THE_BATCH = (StorageKind.INPUT, StorageKind.ACTIVATION)

SettingValues = dict[str, int | str]
Section = TypeVar("Section", bound=BaseModel)


@dataclass(frozen=True)
class Remedy:
    """Settings in place of the scenario's own.

    Attributes
    ----------
    values : dict
        Values by key, as ``--set`` takes them.
    fits : bool or None
        Whether the step fits with them; None if its trace is not stored.
    needed_bytes : int or None
        Bytes that the rank with most memory needs, as in :class:`~perfmodel.simulate.memory.walk.MemoryTimeline`.
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
        For each key, values from the mildest on, up to the first that is known to fit. If ``fixed_bytes`` alone are too
        much, there is none that changes only activations.
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
    Tried are half the batch size, and half of that; smaller micro-batches of a pipeline; the fused optimizer, which
    needs no temporaries; checkpointing of all blocks; and sharding over the ranks that there are. Where none of them is
    known to fit, those that change activations are tried once more with the fused optimizer.
    """
    memory = prediction.largest_memory
    if memory is None or memory.fits:
        raise ValueError("this step is not known not to fit")
    shown, _ = with_largest_memory(prediction)
    fixed_bytes, capacity_bytes = fixed_memory_bytes(shown), prediction.profile.device.memory_bytes
    settings = list(_settings(prediction.scenario))
    of_activations = [(key, values) for key, values in settings if key in OF_ACTIVATIONS]
    alone = [each for each in settings if fixed_bytes <= capacity_bytes or each not in of_activations]
    found = [remedy for key, values in alone for remedy in _first_fitting(prediction, key, values)]
    if (OPTIMIZER, [FUSED]) in settings and not any(each.fits for each in found):
        fused: SettingValues = {OPTIMIZER: FUSED}
        found += [each for key, values in of_activations for each in _first_fitting(prediction, key, values, fused)]
    return Fitting(fixed_bytes, capacity_bytes, tuple(found))


def _first_fitting(
    prediction: Prediction, key: str, values: Sequence[int | str], others: SettingValues | None = None
) -> Iterator[Remedy]:
    """Yield remedies up to the first that is known to fit; ``others`` are values that all of them change as well."""
    for value in values:
        remedy = _tried(prediction, {**(others or {}), key: value})
        if remedy is not None:
            yield remedy
            if remedy.fits:
                return


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


def _settings(scenario: Scenario) -> Iterator[tuple[str, list[int | str]]]:
    """Yield keys with other values that they could have, mildest first."""
    size, parallelism = scenario.batch.size, scenario.parallelism
    if parallelism.pp is None:
        yield BATCH_SIZE, [size >> n for n in range(1, size.bit_length())]
    else:
        doubled: list[int | str] = []
        micro_batches = 2 * pipeline_of(scenario).micro_batches
        while size % micro_batches == 0:
            doubled.append(micro_batches)
            micro_batches *= 2
        yield MICRO_BATCHES, doubled
    if scenario.mode != "train":
        return
    if scenario.optimizer.implementation != FUSED:
        yield OPTIMIZER, [FUSED]
    if scenario.training.activation_checkpointing == "none":
        yield CHECKPOINTING, ["full"]
    if parallelism.pp is None and parallelism.dp > 1 and parallelism.strategy != "zero3":
        yield "parallelism.strategy", ["zero3"]


def _tried(prediction: Prediction, values: SettingValues) -> Remedy | None:
    """Predict the memory with these values; None if the scenario cannot have them."""
    scenario = prediction.scenario
    for key, value in values.items():
        scenario = _with_value(scenario, key, value)
    try:
        with only_kept_traces():
            memories = predict_memories(scenario, prediction.profile)
    except TraceNotKeptError:
        return Remedy(values, None, None)
    except PerfModelError:
        return None
    return Remedy(values, all(each.fits for each in memories), max(each.needed_bytes for each in memories))


def _with_value(section: Section, key: str, value: int | str) -> Section:
    name, _, rest = key.partition(".")
    return section.model_copy(update={name: _with_value(getattr(section, name), rest, value) if rest else value})
