"""The answer of a sweep: every configuration with its rank."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

# Format history
# 1  first
SWEEP_VERSION = 1
LONGEST_VALUE = 44


@dataclass(frozen=True)
class SweepOutcome:
    """What is kept of the prediction of one configuration.

    Attributes
    ----------
    step_time_s : float
        Seconds of the steady step.
    interval_s : tuple of float
        90 % interval of the step, in seconds.
    samples_per_step, throughput_samples_per_s
        Samples of all GPUs together.
    exposed_s : float
        Exposed communication, in seconds.
    fits : bool or None
        Whether it fits into memory; None if memory is not predicted (on a CPU).
    peak_allocated_bytes, device_bytes : int or None
        Allocated, and in use on the device at the peak, of the rank that needs most; None unless it fits.
    capacity_bytes : float
        Memory of the device.
    bottleneck : str
        What to change first.
    gpus : int
        Number of GPUs.
    bubble_share : float or None
        Share of the step over all ranks of a pipeline in which they wait for their turns; None without a pipeline.
    needed_bytes : int or None
        The smallest device memory into which it would fit; None if it fits.
    assumptions, warnings : tuple of str
        As in :class:`~perfmodel.prediction.prediction.Prediction`.
    """

    step_time_s: float
    interval_s: tuple[float, float]
    samples_per_step: int
    throughput_samples_per_s: float
    exposed_s: float
    fits: bool | None
    peak_allocated_bytes: int | None
    device_bytes: int | None
    capacity_bytes: float
    bottleneck: str
    gpus: int = 1
    bubble_share: float | None = None
    needed_bytes: int | None = None
    assumptions: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Configuration:
    """One combination of the varied values.

    Attributes
    ----------
    values : dict
        Values by varied key.
    rank : int or None
        1 is best, ties share a rank; None if the configuration cannot be ranked.
    outcome : SweepOutcome or None
        None if the configuration was refused.
    reason : str or None
        Why there is no rank, in one sentence.
    """

    values: dict[str, Any]
    rank: int | None
    outcome: SweepOutcome | None
    reason: str | None = None


@dataclass(frozen=True)
class SweepResult:
    """All configurations of a sweep.

    Attributes
    ----------
    scenario, profile : str
        Their names.
    vary : dict of str to tuple
        The varied values by key.
    assignments : tuple of str
        The ``--set`` values that all configurations share.
    configurations : tuple of Configuration
        Best first; those without a rank come last, in the order in which they were asked.
    """

    scenario: str
    profile: str
    vary: dict[str, tuple[Any, ...]]
    assignments: tuple[str, ...]
    configurations: tuple[Configuration, ...]

    @property
    def ranked(self) -> tuple[Configuration, ...]:
        """Configurations that have a rank, best first."""
        return tuple(each for each in self.configurations if each.rank is not None)

    @property
    def unranked(self) -> tuple[Configuration, ...]:
        """Configurations that do not fit, whose time is not predicted, or that were refused."""
        return tuple(each for each in self.configurations if each.rank is None)

    @property
    def same_work(self) -> bool:
        """Whether a step consumes as many samples in every configuration."""
        return len({each.outcome.samples_per_step for each in self.configurations if each.outcome is not None}) <= 1

    def to_json(self) -> dict[str, Any]:
        """Return plain data, as `perfmodel sweep --json` prints it."""
        return {"version": SWEEP_VERSION, **asdict(self)}


def label(values: dict[str, Any]) -> str:
    """``batch.size 8, precision fp32``."""
    return ", ".join(f"{key} {value_text(value)}" for key, value in values.items())


def value_text(value: Any) -> str:
    """Write a value as in YAML; of a long mapping or list, only both ends.

    >>> value_text(None), value_text(150e9), value_text("amp-bf16")
    ('null', '150000000000', 'amp-bf16')
    """
    if isinstance(value, float):
        return f"{value:.12g}"
    text = value if isinstance(value, str) else json.dumps(value)
    half = LONGEST_VALUE // 2
    return text if len(text) <= LONGEST_VALUE else f"{text[:half]}…{text[-half:]}"
