"""Choices that a prediction would have made among measured configurations, and what they cost.

Measurements that differ in one setting alone are one choice: buckets of several sizes, or several strategies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, takewhile
from typing import TYPE_CHECKING, Any

from perfmodel.scenario.scenario import MICRO_BATCHES, workload_digest

if TYPE_CHECKING:
    from perfmodel.accuracy.cases import CardCase

SETTINGS = ("parallelism.bucket_cap_mb", "parallelism.strategy", MICRO_BATCHES)
DEFAULT = "default"
NEAR = 0.01  # measured values that lie no further apart are as good as each other


def settings_of(scenario: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Return, by setting, a digest of all other settings and the setting's value.

    Settings of a pipeline are left out of scenarios without one.

    >>> settings_of({"parallelism": {"strategy": "ddp"}})["parallelism.strategy"][1]
    'ddp'
    """
    found = {}
    for setting in SETTINGS:
        *sections, key = setting.split(".")
        rest = {name: value for name, value in scenario.items() if name != "name"}
        values = rest
        for section in sections:
            values[section] = dict(values.get(section) or {})
            values = values[section]
        if len(sections) > 1 and key not in values:
            continue
        value = values.pop(key, DEFAULT)
        shown = f"{value:g}" if isinstance(value, (int, float)) else str(value)
        found[setting] = (workload_digest(rest), shown)
    return found


@dataclass(frozen=True)
class Choice:
    """Cases that differ in one setting.

    Attributes
    ----------
    setting : str
        The setting in which the cases differ.
    cases : dict of str to CardCase
        By the setting's value, in order of the measured time.
    """

    setting: str
    cases: dict[str, CardCase]

    @property
    def best(self) -> str:
        """The value that is fastest."""
        return next(iter(self.cases))

    @property
    def chosen(self) -> str:
        """The value that is predicted to be fastest."""
        return min(self.cases, key=lambda value: self.cases[value].predicted["step"])

    @property
    def costs(self) -> float:
        """Share by which the measured step of the chosen value is longer than the best."""
        return self.cases[self.chosen].measured["step"] / self.cases[self.best].measured["step"] - 1

    @property
    def order_is_right(self) -> bool:
        """True if the prediction puts all values into the measured order."""
        return not swaps(self.cases, "step")


@dataclass(frozen=True)
class Swap:
    """Two cases that are predicted in another order than measured.

    Attributes
    ----------
    smaller, larger : str
        Their names, by their measured values.
    apart : float
        By how much the larger measured value exceeds the smaller, as a share of the smaller.
    """

    smaller: str
    larger: str
    apart: float


def swaps(cases: Mapping[str, CardCase], quantity: str) -> list[Swap]:
    """Return all pairs of cases whose quantity is predicted in the opposite order than measured.

    Cases without a measured or predicted value are left out. Values that are equal on either side are in no wrong
    order.
    """
    known = {
        name: (case.measured[quantity], case.predicted[quantity])
        for name, case in cases.items()
        if quantity in case.measured and quantity in case.predicted
    }
    found = []
    for pair in combinations(known, 2):
        smaller, larger = sorted(pair, key=lambda name: known[name][0])
        (least, least_predicted), (most, most_predicted) = known[smaller], known[larger]
        if least < most and least_predicted > most_predicted:
            found.append(Swap(smaller, larger, most / least - 1))
    return found


def choices(cases: Iterable[CardCase]) -> list[Choice]:
    """Return all choices with at least two values; of several measurements of one value the earliest counts."""
    by_setting: dict[tuple[str, str], dict[str, CardCase]] = {}
    for case in sorted(cases, key=lambda case: case.measured_at):
        for setting, (digest, value) in case.settings.items():
            by_setting.setdefault((setting, digest), {}).setdefault(value, case)
    several = [
        Choice(setting, dict(sorted(values.items(), key=lambda item: item[1].measured["step"])))
        for (setting, _), values in by_setting.items()
        if len(values) > 1
    ]
    return sorted(several, key=lambda each: (each.setting, min(case.name for case in each.cases.values())))


def common_words(names: Sequence[str]) -> str:
    """Return the words that all names begin with, without the folders that distinguish measurements of one case.

    >>> common_words(["gpt-large-ddp2", "gpt-large-ddp4 (node)"])
    'gpt-large'
    """
    columns = zip(*(name.partition(" (")[0].split("-") for name in names), strict=False)
    return "-".join(column[0] for column in takewhile(lambda column: len(set(column)) == 1, columns))
