"""Strategies side by side: measured cases that differ only in how they are spread over the same GPUs.

FSDP's mixed precision counts as precision, not as a setting of the strategy, and a pipeline as other work: its batch is
spread over all ranks. One GPU that runs the batch of a rank alone joins the group as ``none``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, get_args

from perfmodel.accuracy.cases import CardCase, Layout
from perfmodel.accuracy.choices import common_words
from perfmodel.scenario.scenario import FsdpSection, ParallelismSection, workload_digest

FEWEST_CASES = 3
STRATEGIES: tuple[str, ...] = get_args(ParallelismSection.model_fields["strategy"].annotation)
SPREAD = ("gpus", "nodes", "interconnect")  # of hardware: what one GPU does without
NOT_SETTINGS = ("dp", "strategy", "fsdp", "pp")  # of parallelism; what fsdp holds is listed by itself, pp is work


@dataclass(frozen=True)
class StrategyGroup:
    """Cases of the same work on the same GPUs.

    Attributes
    ----------
    place : str
        The GPUs, in words.
    cases : dict of str to CardCase
        By label, in order of strategy, ``none`` first.
    """

    place: str
    cases: dict[str, CardCase]

    @property
    def name(self) -> str:
        """The words that names of the cases on several GPUs have in common."""
        return common_words(self._names) or self._names[0]

    @property
    def profiles(self) -> list[str]:
        """Names of the profiles that the cases were predicted with."""
        return sorted({case.profile for case in self.cases.values()})

    @property
    def _names(self) -> list[str]:
        return [case.name for case in self.cases.values() if case.layout is not None and case.layout.place]


def layout_of(scenario: dict[str, Any]) -> Layout:
    """Return the layout of a scenario as a measurement holds it, without defaults.

    >>> layout = layout_of({"parallelism": {"strategy": "ddp", "bucket_cap_mb": 5}, "hardware": {"gpus": 4}})
    >>> layout.place, layout.label
    ('4 GPUs', 'ddp bucket_cap_mb 5')
    """
    section, hardware = dict(scenario.get("parallelism", {})), dict(scenario.get("hardware", {}))
    fsdp = dict(section.get("fsdp") or {})
    policy = _policy(fsdp.pop("mixed_precision", None) or {}, scenario.get("precision", "fp32"))
    spread = {key: hardware.pop(key, None) for key in SPREAD}
    rest = {key: value for key, value in scenario.items() if key not in ("name", "parallelism", "hardware")}
    if section.get("pp") is not None:
        rest["pp"] = section["pp"]
    work, place = workload_digest(rest | {"policy": policy, "hardware": hardware}), _place(**spread)
    if not place:
        return Layout(work, place, strategy=STRATEGIES[0], settings="")
    settings = [*_changed(section, ParallelismSection), *_changed(fsdp, FsdpSection)]
    return Layout(work, place, section.get("strategy", STRATEGIES[0]), ", ".join(settings))


def _policy(given: dict[str, Any], precision: str) -> list[str] | None:
    """Return the dtypes that FSDP computes and reduces in; None if they change nothing."""
    own = "fp32" if precision == "fp32" else None
    computed = given.get("param") or own
    reduced = given.get("reduce") or computed
    return None if (computed, reduced) == (own, own) else [str(computed), str(reduced)]


def _place(gpus: int | None, nodes: int | None, interconnect: str | None) -> str:
    if gpus in (None, 1):
        return ""
    over = f" over {interconnect}" if interconnect else ""
    return f"{gpus} GPUs{over}" + (f" on {nodes} nodes" if nodes not in (None, 1) else "")


def _changed(given: dict[str, Any], section: type[ParallelismSection] | type[FsdpSection]) -> list[str]:
    """Return the settings that differ from their defaults, in the order of the schema."""
    fields = {name: field.default for name, field in section.model_fields.items() if name not in NOT_SETTINGS}
    changed = {name: given[name] for name, default in fields.items() if given.get(name) not in (None, default)}
    return [name if value is True else f"{name} {_shown(value)}" for name, value in changed.items()]


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, (int, float)) else str(value)


def strategy_groups(cases: Iterable[CardCase]) -> list[StrategyGroup]:
    """Return all groups of at least :data:`FEWEST_CASES` layouts of at least two strategies.

    Of several measurements of one layout the earliest counts.
    """
    by_work: dict[tuple[str, str], dict[str, CardCase]] = {}
    for case in sorted(cases, key=lambda case: case.measured_at):
        if case.layout is not None:
            key = (case.layout.work, case.layout.place)
            by_work.setdefault(key, {}).setdefault(case.layout.label, case)
    groups = []
    for (work, place), spread in by_work.items():
        if not place:
            continue
        together = by_work.get((work, ""), {}) | spread
        strategies = {case.layout.strategy for case in together.values() if case.layout is not None}
        if len(together) >= FEWEST_CASES and len(strategies) > 1:
            groups.append(StrategyGroup(place, dict(sorted(together.items(), key=lambda item: _order(item[1].layout)))))
    return sorted(groups, key=lambda group: (group.name, group.place, group.profiles))


def _order(layout: Layout | None) -> tuple[int, list[tuple[float, str]]]:
    """Sort by strategy as the schema lists them, then default settings first, then by names and values of settings."""
    assert layout is not None
    words = re.split(r"(\d[\d.]*)", layout.settings)  # every second is a number
    in_order = [(float(word.rstrip(".")), "") if index % 2 else (0.0, word) for index, word in enumerate(words)]
    return STRATEGIES.index(layout.strategy), in_order
