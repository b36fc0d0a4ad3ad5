"""Cost curves as functions: the function that calibration fits is the function that predicts.

A form turns numbers (bytes, rows, m, n, k ...) and labels (layout, path, operator ...) of many calls into seconds. Its
parameters are positive; one that is ``labelled`` has a general value and, for each label seen in the fit, its own,
which the fit pulls towards the general one. They travel flat: ``{"start_s": 2e-6, "elements_per_s [gelu 2]": 1e12}``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Numbers = dict[str, Array]
Values = dict[str, Array]
SHARPNESS = 4.0  # of the soft maximum of two limits: sum of powers, then root


@dataclass(frozen=True)
class Calls:
    """Many calls of one curve: equally long columns of numbers and of labels."""

    numbers: Numbers
    labels: dict[str, list[str]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(next(iter(self.numbers.values())))

    def take(self, chosen: NDArray[np.intp]) -> Calls:
        """The rows at these positions."""
        numbers = {name: column[chosen] for name, column in self.numbers.items()}
        return Calls(numbers, {name: [column[i] for i in chosen] for name, column in self.labels.items()})

    @classmethod
    def of(cls, rows: list[tuple[dict[str, float], dict[str, str]]]) -> Calls:
        """Collect one (numbers, labels) pair for each call; all pairs have the same names."""
        numbers = {name: np.array([row[0][name] for row in rows], dtype=np.float64) for name in rows[0][0]}
        return cls(numbers, {name: [row[1][name] for row in rows] for name in rows[0][1]})


@dataclass(frozen=True)
class Parameter:
    """One positive parameter of a form.

    Parameters
    ----------
    name : str
        In formulas and profiles.
    prior : float
        Standard deviation of its logarithm around the starting value: how far the fit may go for how much evidence.
    labelled : str or None
        Name of the label by which it varies.
    label_prior : float
        Standard deviation of one label's logarithm around the general value.
    """

    name: str
    prior: float = 2.0
    labelled: str | None = None
    label_prior: float = 0.5


@dataclass(frozen=True)
class Form:
    """A cost curve's shape.

    Parameters
    ----------
    name : str
        In profiles.
    parameters : tuple of Parameter
        What is fitted.
    time_s : callable
        Returns seconds from numbers and parameter values of calls.
    starts : callable
        Returns starting values from numbers and measured seconds.
    coordinates, places : tuple of str
        Numbers whose logarithms place a call for the correction of what the form leaves over, and labels that do so,
        too. Without coordinates there is no correction.
    """

    name: str
    parameters: tuple[Parameter, ...]
    time_s: Callable[[Numbers, Values], Array]
    starts: Callable[[Numbers, Array], dict[str, float]]
    coordinates: tuple[str, ...] = ()
    places: tuple[str, ...] = ()


def parameter_key(name: str, label: str | None = None) -> str:
    """Return the name in a profile of a parameter, or of its value for one label.

    >>> parameter_key("elements_per_s", "gelu 2")
    'elements_per_s [gelu 2]'
    """
    return name if label is None else f"{name} [{label}]"


def spread_out(form: Form, parameters: Mapping[str, float], calls: Calls) -> Values:
    """Each parameter's value for each call; a label the fit has not seen gets the general value."""
    values = {}
    for parameter in form.parameters:
        general = parameters[parameter.name]
        if parameter.labelled is None:
            values[parameter.name] = np.full(len(calls), general)
        else:
            found = [
                parameters.get(parameter_key(parameter.name, label), general)
                for label in calls.labels[parameter.labelled]
            ]
            values[parameter.name] = np.array(found)
    return values


def form_time_s(form: Form, parameters: Mapping[str, float], calls: Calls) -> Array:
    """Seconds of each call by the form alone, without the correction of its leftovers."""
    return form.time_s(calls.numbers, spread_out(form, parameters, calls))


def soft_maximum(*limits: Array) -> Array:
    """A smooth maximum, a little above the larger where two are equal.

    >>> round(float(soft_maximum(np.array(1.0), np.array(10.0))), 3)
    10.0
    """
    top = np.maximum.reduce(limits)
    scaled = sum(((limit / top) ** SHARPNESS for limit in limits), start=np.zeros_like(top))
    return np.asarray(top * scaled ** (1 / SHARPNESS))


def transfer_s(numbers: Numbers, values: Values) -> Array:
    """Seconds to move a call's bytes, which are partly in the cache.

    t = (bytes + (w - 1) written) (h / B_cache + (1 - h) / B_memory) + (1 - h) ramp
    h = 1 / (1 + (footprint / capacity)^4)

    h: repeats of a call find in the cache what the call touches if that fits there. w: what a written byte costs over a
    read one. ramp: filling and draining the path to memory.
    """
    held = 1 / (1 + (numbers["footprint_bytes"] / values["cache_bytes"]) ** 4)
    moved = numbers["bytes"] + (values["write_weight"] - 1) * numbers["written_bytes"]
    rates = held / values["cache_bytes_per_s"] + (1 - held) / values["memory_bytes_per_s"]
    return np.asarray(moved * rates + (1 - held) * values["ramp_s"])


def memory_parameters(label: str | None = None) -> tuple[Parameter, ...]:
    """The parameters of a start and :func:`transfer_s`; bandwidths vary by ``label`` where one is named."""
    return (
        Parameter("start_s", 1.0),
        Parameter("memory_bytes_per_s", 1.0, label, 0.2),
        Parameter("cache_bytes_per_s", 1.0, label, 0.3),
        Parameter("cache_bytes", 0.3),
        Parameter("write_weight", 0.1),
        Parameter("ramp_s", 0.7),
    )


def memory_starts(numbers: Numbers, time_s: Array) -> dict[str, float]:
    """Starting values read off the data: the least time, the largest calls' bandwidth, the best bandwidth at all."""
    rates = numbers["bytes"] / time_s
    largest = numbers["bytes"] >= np.quantile(numbers["bytes"], 0.85)
    memory = float(np.median(rates[largest])) * 1.05
    return {
        "start_s": float(np.min(time_s)) * 0.95,
        "memory_bytes_per_s": memory,
        "cache_bytes_per_s": max(1.7 * memory, float(np.max(rates))),
        "cache_bytes": float(np.max(numbers["cache_bytes"])) * 0.9,
        "write_weight": 1.15,
        "ramp_s": float(np.min(time_s)) * 0.5,
    }
