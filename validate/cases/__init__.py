"""Lists of cases: scenarios to be measured, each fixed as tuning or held-out before it is run.

A list is a YAML sequence of ``{name, split, class, scenario}``. The lists of this folder are the ones the accuracy card
is made from; ``one-gpu.yaml`` was written before any of its held-out cases was measured.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from perfmodel.errors import PerfModelError, did_you_mean
from perfmodel.files.validation import shortened
from perfmodel.scenario.scenario import Scenario
from perfmodel.scenario.yaml_file import load_scenario, on_device, parse_scenario, read_yaml

HERE = Path(__file__).parent
KEYS = ("name", "split", "class", "scenario")
REMEDY = "validate/cases/one-gpu.yaml shows how one is written."

Split = Literal["tuning", "held-out"]


@dataclass(frozen=True)
class Case:
    """One scenario to measure; ``group`` is the class that the accuracy card lists it under."""

    name: str
    split: Split
    group: str
    scenario: Scenario


def load(path: Path) -> list[Case]:
    """Return the cases in ``path``, in order.

    Raises
    ------
    PerfModelError
        If the file is no list of cases, a name comes twice or is no file name, or a scenario breaks a rule.
    """
    data = read_yaml(path, "a case list")
    if not isinstance(data, list) or not data:
        raise PerfModelError(f"{path}: a case list must be a list of cases (got {shortened(data)}). {REMEDY}")
    cases = [_case(row, f"{path}: case {index}") for index, row in enumerate(data, 1)]
    names = [case.name for case in cases]
    for name in names:
        if names.count(name) > 1:
            raise PerfModelError(f"{path}: case names must differ (got {name!r} twice). Rename one.")
    return cases


def choose_cases(
    path: Path, assignments: Sequence[str] = (), device: str | None = None, only: Sequence[str] = ()
) -> list[Case]:
    """Return what `perfmodel validate` runs: the cases of a list, or a scenario file as one case of class ``own``.

    A scenario without a name is called after its file.

    Parameters
    ----------
    path : Path
        A list of cases or a scenario.
    assignments, device
        As in :func:`perfmodel.scenario.yaml_file.load_question`; a list of cases takes no assignments.
    only : sequence of str
        Names of the cases to keep; all if empty.

    Raises
    ------
    PerfModelError
        If the file breaks a rule or a name in ``only`` is not in it.
    """
    if isinstance(read_yaml(path, "a scenario or a list of cases"), list):
        if assignments:
            raise PerfModelError(
                f"{path}: --set must be left out with a list of cases (got {assignments[0]!r}). Edit it."
            )
        cases = load(path)
    else:
        scenario = load_scenario(path, assignments)
        name = scenario.name if "name" in scenario.model_fields_set else path.stem
        cases = [Case(_checked_name(name, str(path)), "tuning", "own", scenario)]
    names = [case.name for case in cases]
    for name in only:
        if name not in names:
            raise PerfModelError(f"{path}: --only must name a case (got {name!r}). {did_you_mean(name, names)}")
    folder = path.resolve().parent
    return [
        replace(case, scenario=on_device(case.scenario, device).found_in(folder))
        for case in cases
        if not only or case.name in only
    ]


def _case(row: Any, where: str) -> Case:
    if not isinstance(row, dict):
        raise PerfModelError(f"{where} must be a mapping of keys to values (got {shortened(row)}). {REMEDY}")
    for key in KEYS:
        if key not in row:
            raise PerfModelError(f"{where}: {key} must be given. Add it.")
    for key in row:
        if key not in KEYS:
            raise PerfModelError(f"{where}: {key} must be a key of a case. {did_you_mean(str(key), KEYS)}")
    name, split = _checked_name(row["name"], where), row["split"]
    if split not in get_args(Split):
        raise PerfModelError(f"{where}: split must be tuning or held-out (got {split!r}). Choose one.")
    if not isinstance(row["scenario"], dict):
        raise PerfModelError(f"{where}: scenario must be a mapping (got {shortened(row['scenario'])}). {REMEDY}")
    return Case(name, split, str(row["class"]), parse_scenario({"name": name} | row["scenario"], f"{where} ({name})"))


def _checked_name(name: Any, where: str) -> str:
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise PerfModelError(
            f"{where}: name must be of letters, digits, dots, dashes and underscores (got {name!r}). "
            "It names the measurement's file too."
        )
    return name


def resolved_scenario(scenario: Scenario) -> dict[str, Any]:
    """Return the scenario as plain data with all defaults and dimensions, which loads as an equal workload."""
    data = scenario.model_dump(mode="json", exclude_none=True)
    if scenario.model.family is not None:
        model = scenario.model.resolved().model_dump(mode="json", exclude_none=True)
        for name in ("arguments", "inputs", "loss", "blocks"):  # a family refuses a target's keys
            model.pop(name, None)
        data["model"] = model | ({"size": scenario.model.size} if scenario.model.size is not None else {})
    return data
