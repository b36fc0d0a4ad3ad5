"""Reading a scenario: YAML without code, aliases to itself or surprises, ``--set`` on top, checked key by key.

Nothing in the file is executed. Every refusal is one sentence: file, key, rule, value, what to do.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from perfmodel.errors import PerfModelError, naming
from perfmodel.files.reading import read_bytes, refuse_not_finite
from perfmodel.files.validation import sentence_of, shortened, validated
from perfmodel.files.versions import check_version
from perfmodel.hardware.profile import DEFAULT_CPU_PROFILE, Profile, find_profile, load_profile
from perfmodel.hardware.rescaling import rescaled
from perfmodel.hardware.settings import refuse_settings
from perfmodel.limits import LARGEST_YAML_BYTES, MOST_YAML_VALUES
from perfmodel.scenario.rules import check_workload
from perfmodel.scenario.scenario import SCENARIO_VERSION, HardwareSection, Scenario

DEEPEST = 50
REMEDY = "The files in scenarios/ show how one is written."
WRITE_NUMBER = "Write a number."
INTERCONNECT = "hardware.interconnects."  # begins keys that change one

Assignments = Iterable[str] | Mapping[str, Any]  # "key=value" each, or values by key

_PLAIN_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("map", "seq", "str", "int", "float", "bool", "null", "merge")}


class _Loader(yaml.SafeLoader):
    """YAML's safe types, and numbers such as 80e9, which YAML 1.1 would take for text; stops at too many values."""

    def __init__(self, text: str, where: str) -> None:
        super().__init__(text)
        self._where = where
        self._values = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._values += 1
        if self._values > MOST_YAML_VALUES:
            line = self.line + 1
            raise PerfModelError(
                f"{self._where}: YAML must hold at most {MOST_YAML_VALUES} values (got more by line {line}). {REMEDY}"
            )
        return super().compose_node(parent, index)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+|\d*\.\d+|\d+\.)[eE][-+]?\d+"), list("-+.0123456789")
)


def load_question(
    scenario: Scenario | str | os.PathLike[str],
    set: Assignments = (),
    device: str | None = None,
    *,
    profile: Profile | str | os.PathLike[str] | None = None,
    others: bool = False,
) -> tuple[Scenario, Profile]:
    """Return the scenario and the profile it names, both with their ``--set`` values.

    Parameters
    ----------
    scenario : Scenario, str or path
        A scenario, or the YAML file of one.
    set : iterable of str or mapping
        ``key=value`` with dotted keys, or values by such keys; ``hardware.device...`` and the like change the profile.
    device : str, optional
        As in :func:`on_device`.
    profile : Profile, str or path, optional
        As in :func:`~perfmodel.hardware.profile.load_profile`; by default the one that the scenario names.
    others : bool
        Values may be of interconnects that this scenario does not use, as when several are tried in turn.

    Raises
    ------
    PerfModelError
        If scenario or profile break a rule, or a value changes an interconnect that is not in use.
    """
    texts = assignment_texts(set)
    asked = asked_scenario(scenario, texts, device)
    if not isinstance(profile, Profile):
        profile = load_profile(asked.hardware.profile if profile is None else profile)
    if not others:
        refuse_idle("--set", assigned_keys(texts), [interconnect_in_use(asked, profile)])
    return asked, with_assignments(profile, texts)


def asked_scenario(
    scenario: Scenario | str | os.PathLike[str], assignments: tuple[str, ...], device: str | None
) -> Scenario:
    """Return the scenario of :func:`load_question`, without its profile."""
    if isinstance(scenario, Scenario):
        return on_device(with_own_assignments(scenario, assignments), device)
    return on_device(load_scenario(scenario, assignments), device)


def assignment_texts(set: Assignments) -> tuple[str, ...]:
    """Return assignments as ``--set`` takes them.

    >>> assignment_texts({"batch.size": 8, "precision": "bf16"}), assignment_texts("batch.size=8")
    (('batch.size=8', 'precision="bf16"'), ('batch.size=8',))
    """
    if isinstance(set, str):
        return (set,)
    if isinstance(set, Mapping):
        return tuple(f"{key}={json.dumps(value)}" for key, value in set.items())
    return tuple(set)


def interconnect_in_use(scenario: Scenario, profile: Profile) -> str | None:
    """Return the name of the interconnect between the scenario's ranks; None for a single rank."""
    return None if scenario.parallelism.ranks == 1 else scenario.hardware.interconnect or profile.interconnect


def assigned_keys(assignments: Iterable[str]) -> list[str]:
    """Return what stands left of each ``=``."""
    return [key for key, _ in map(_split_assignment, assignments)]


def refuse_idle(option: str, keys: Iterable[str], in_use: Iterable[str | None]) -> None:
    """Refuse a key that changes an interconnect nobody uses, and so nothing.

    Parameters
    ----------
    option : str
        ``--set`` or ``--vary``.
    keys : iterable of str
    in_use : iterable of str or None
        Names of interconnects; None stands for none.

    Raises
    ------
    PerfModelError
        If there is such a key.
    """
    names = sorted({name for name in in_use if name is not None})
    for key in keys:
        if key.startswith(INTERCONNECT) and not any(f"{key}.".startswith(f"{INTERCONNECT}{name}.") for name in names):
            raise PerfModelError(
                f"{option} {key} must change an interconnect that is in use (in use: {', '.join(names) or 'none'})."
                " Choose it by hardware.interconnect and parallelism.dp, or leave it out."
            )


def on_device(scenario: Scenario, device: str | None) -> Scenario:
    """Ask the same question to this machine's CPU if ``device`` is ``cpu``: cpu.json, unless it names a CPU already."""
    if device != "cpu" or _names_a_cpu(scenario.hardware.profile):
        return scenario
    hardware = scenario.hardware.model_copy(update={"profile": DEFAULT_CPU_PROFILE, "gpus": 1, "nodes": 1})
    return scenario.model_copy(update={"hardware": hardware})


def _names_a_cpu(name: str) -> bool:
    path = find_profile(name)
    return name == DEFAULT_CPU_PROFILE or (os.path.exists(path) and load_profile(path).device.kind == "cpu")


def load_scenario(path: str | os.PathLike[str], set: Assignments = ()) -> Scenario:
    """Read and check one scenario file.

    Parameters
    ----------
    path : str or path
        A YAML scenario.
    set : iterable of str or mapping
        As in :func:`load_question`; values of the profile are left out here.

    Raises
    ------
    PerfModelError
        If it is unreadable, not a mapping, newer than this perfmodel, or breaks a rule (the sentence names the key).

    Examples
    --------
    >>> load_scenario("scenarios/gpt2.7b.yaml", {"batch.size": 2}).batch.size
    2
    """
    path = Path(path)
    data = {"version": 1} | _read_mapping(path)
    _assign_own(data, assignment_texts(set))
    refuse_not_finite(data, str(path), WRITE_NUMBER)
    check_version(path, data, SCENARIO_VERSION, REMEDY)
    return parse_scenario(data, str(path)).found_in(path.resolve().parent)


def with_own_assignments(scenario: Scenario, assignments: Iterable[str]) -> Scenario:
    """Return the scenario with its own values of ``--set``; those of the profile are left out.

    Raises
    ------
    PerfModelError
        If a key is unknown or a value breaks a rule.
    """
    assignments = tuple(assignments)
    if all(map(_is_of_profile, assigned_keys(assignments))):
        return scenario
    data = scenario.model_dump(mode="json", exclude_unset=True)
    _assign_own(data, assignments)
    refuse_not_finite(data, "--set", WRITE_NUMBER)
    return parse_scenario(data, "--set").found_in(scenario.folder)


def _assign_own(data: dict[str, Any], assignments: Iterable[str]) -> None:
    for key, value in map(parse_assignment, assignments):
        if not _is_of_profile(key):
            _assign(data, key, value, key)


def parse_scenario(data: dict[str, Any], where: str) -> Scenario:
    """Return a scenario given as plain data, if its keys and its workload are such as can be.

    Parameters
    ----------
    data : dict
        The keys of a scenario file.
    where : str
        What every sentence begins with.

    Raises
    ------
    PerfModelError
        If a key is unknown or has a wrong value, or if :func:`~perfmodel.scenario.rules.check_workload` refuses it.
    """
    with naming(where):
        scenario = validated(Scenario, data, "scenario")
        check_workload(scenario)
        return scenario


def parse_assignment(text: str) -> tuple[str, Any]:
    """Return key and value of ``key=value``; the value is read as YAML.

    >>> parse_assignment("batch.size=8"), parse_assignment("model.size=2.7b"), parse_assignment("x=80e9")
    (('batch.size', 8), ('model.size', '2.7b'), ('x', 80000000000.0))
    """
    key, value = _split_assignment(text)
    return key, _parsed(key, value)


def _split_assignment(text: str) -> tuple[str, str]:
    is_kernel_key = "(" in text.partition("=")[0]  # and may hold '=' itself
    key, equals, value = text.rpartition("=") if is_kernel_key else text.partition("=")
    if not equals or not key.strip():
        raise PerfModelError(f"--set must read key=value (got {text!r}). For example --set batch.size=8.")
    return key.strip(), value.strip()


def _parsed(key: str, text: str) -> Any:
    return parse_yaml(text, f"--set {key}")


def with_assignments(profile: Profile, assignments: Iterable[str]) -> Profile:
    """Return the profile with the ``hardware.``... values of ``--set``; its provenance lists their texts under ``set``.

    Raises
    ------
    PerfModelError
        If a key is unknown or a value breaks a rule.
    """
    return _changed(profile, {key: text for key, text in map(_split_assignment, assignments) if _is_of_profile(key)})


def settings_left_out(profile: Profile, keys: Collection[str] | None = None) -> Iterator[tuple[str, Profile]]:
    """Yield each key that ``--set`` gave, with the profile as it is without that one.

    Parameters
    ----------
    profile : Profile
    keys : collection of str, optional
        The keys to leave out; all if not given.
    """
    changes = {} if profile.original is profile else profile.provenance["set"]
    for key in changes:
        if keys is None or key in keys:
            yield key, _changed(profile.original, {other: changes[other] for other in changes if other != key})


def _changed(profile: Profile, changes: Mapping[str, str]) -> Profile:
    """Return the profile with other values, which are given by key as text."""
    if not changes:
        return profile
    data = profile.model_dump()
    for key, text in changes.items():
        value = _parsed(key, text)
        refuse_not_finite(value, "--set", WRITE_NUMBER, key)
        _assign(data, key.removeprefix("hardware."), value, key)
    try:
        asked = Profile.model_validate(data)
    except ValidationError as error:
        raise PerfModelError(f"--set hardware.{sentence_of(error, Profile, data, 'profile')}") from error
    refuse_settings(profile, asked)
    provenance = asked.provenance | {"set": dict(changes)}
    return rescaled(profile, asked.model_copy(update={"provenance": provenance}))


def _is_of_profile(key: str) -> bool:
    section, _, rest = key.partition(".")
    first = rest.partition(".")[0]
    return section == "hardware" and first not in HardwareSection.model_fields and first in Profile.model_fields


def _assign(data: dict[str, Any], rest: str, value: Any, key: str) -> None:
    """Set one value, making sections on the way; names with dots in them (kernel keys) are taken whole."""
    here = data
    while True:
        whole = max((name for name in here if rest == name or rest.startswith(f"{name}.")), key=len, default="")
        name = whole or rest.partition(".")[0]
        rest = rest[len(name) + 1 :]
        if not rest:
            here[name] = value
            return
        if here.get(name) is None:
            here[name] = {}
        here = here[name]
        if not isinstance(here, dict):
            raise PerfModelError(
                f"--set {key}: {name} must be a section to hold {rest} (got {shortened(here)}). Set {name} itself."
            )


def _read_mapping(path: Path) -> dict[str, Any]:
    data = read_yaml(path, "a scenario")
    if data is None:
        raise PerfModelError(f"{path}: a scenario must hold model, batch and hardware (got nothing). {REMEDY}")
    if not isinstance(data, dict):
        kind = type(data).__name__
        raise PerfModelError(f"{path}: a scenario must be a mapping of keys to values (got a {kind}). {REMEDY}")
    return data


def read_yaml(path: Path, what: str) -> Any:
    """Return the plain data in a YAML file of reasonable size; ``what`` it should be is named in errors.

    Raises
    ------
    PerfModelError
        If it cannot be read or breaks a rule of :func:`parse_yaml`.
    """
    content = read_bytes(path, what, REMEDY, LARGEST_YAML_BYTES)
    try:
        return parse_yaml(content.decode("utf-8-sig"), str(path))
    except UnicodeDecodeError as error:
        raise PerfModelError(f"{path}: {what} must be UTF-8 text (byte {error.start} is not). {REMEDY}") from error


def parse_yaml(text: str, where: str) -> Any:
    """Return YAML text as plain data: no tags, no alias into itself, no key twice, bounded in size and depth.

    Raises
    ------
    PerfModelError
        If it is anything else; the sentence begins with ``where``.
    """
    loader = None
    try:
        loader = _Loader(text, where)
        node = loader.get_single_node()
        if node is None:
            return None
        for count, _ in enumerate(_walk(node, where, ())):
            if count > MOST_YAML_VALUES:
                raise PerfModelError(
                    f"{where}: YAML must hold at most {MOST_YAML_VALUES} values once aliases are followed. {REMEDY}"
                )
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        raise PerfModelError(f"{where}: must be whole YAML ({_one_line(error)}). {REMEDY}") from error
    except RecursionError as error:
        raise PerfModelError(f"{where}: YAML must nest at most {DEEPEST} levels (got more). {REMEDY}") from error
    except ValueError as error:  # an integer of thousands of digits, a date that does not exist
        raise PerfModelError(f"{where}: must hold values that can be read ({error}). {REMEDY}") from error
    finally:
        if loader is not None:
            loader.dispose()


def _walk(node: yaml.Node, where: str, above: tuple[int, ...]) -> Iterator[yaml.Node]:
    line = node.start_mark.line + 1
    if id(node) in above:
        raise PerfModelError(
            f"{where}: an alias must not stand inside what it names (got one in line {line}). Write it out."
        )
    if len(above) > DEEPEST:
        raise PerfModelError(f"{where}: YAML must nest at most {DEEPEST} levels (got more in line {line}). {REMEDY}")
    if node.tag not in _PLAIN_TAGS:
        tag = shortened(node.tag.removeprefix("tag:yaml.org,2002:"))
        raise PerfModelError(
            f"{where}: values must be plain text, numbers, lists or mappings (got {tag} in line {line}). "
            "Remove the tag, or quote it."
        )
    yield node
    above = (*above, id(node))
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _walk(item, where, above)
    elif isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise PerfModelError(
                    f"{where}: keys must be plain text (got a list or mapping in line {line}). {REMEDY}"
                )
            if key.value in seen:
                raise PerfModelError(
                    f"{where}: {shortened(key.value)} must be given once (got it again in line {line}). Remove one."
                )
            seen.add(key.value)
            yield from _walk(value, where, above)


def _one_line(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return place + " ".join(str(problem).split())
