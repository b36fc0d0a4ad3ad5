"""What is installed is this checkout, and what it needs is shipped with it."""

from __future__ import annotations

import importlib
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from perfmodel.program.ranks import optimizer_shares
from perfmodel.scenario.yaml_file import load_scenario
from perfmodel.trace.store import SHIPPED, find_trace, optimizer_trace_name, trace_name
from perfmodel.trace.trace import load_trace
from tests.places import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SCENARIOS = sorted((ROOT / "scenarios").glob("*.yaml"))


@pytest.mark.parametrize("name", ["cli", "perfmodel", "calibrate", "validate"])
def test_modules_come_from_this_checkout(name: str) -> None:
    """Another package may ship a top-level module of the same name, and would win without a warning."""
    found = importlib.import_module(name).__file__
    assert found is not None
    assert Path(found).resolve().is_relative_to(ROOT)


def test_the_command_is_ours() -> None:
    (command,) = (entry for entry in metadata.entry_points(group="console_scripts") if entry.name == "perfmodel")
    assert command.value == "cli:main"


def test_is_not_for_upload() -> None:
    assert "Private :: Do Not Upload" in PROJECT["project"]["classifiers"]


def test_every_requirement_is_pinned_for_the_two_commands() -> None:
    pinned = {
        line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    }
    extras = PROJECT["project"]["optional-dependencies"]
    asked = [*PROJECT["project"]["dependencies"], *extras["torch"], *extras["dev"]]
    assert [name for name in asked if name.partition(">=")[0].lower() not in pinned] == []


def test_every_package_is_installed() -> None:
    """A folder with modules but no __init__.py would be left out of the package."""
    for top in ("perfmodel", "calibrate", "validate"):
        for module in (ROOT / top).rglob("*.py"):
            assert (module.parent / "__init__.py").exists(), module.parent


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenarios_are_named_after_their_file_and_ask_a_question(path: Path) -> None:
    assert load_scenario(path).name == path.stem
    assert "?" in path.read_text().splitlines()[0] or path.stem == "tiny-cpu"


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenarios_need_no_torch(path: Path) -> None:
    trace = find_trace(trace_name(load_scenario(path)))
    assert trace is not None
    assert trace.parent == SHIPPED
    for each in optimizer_shares(load_scenario(path), load_trace(trace)):
        share = find_trace(optimizer_trace_name(load_scenario(path), each.tensors, each.before_step))
        assert share is not None
        assert share.parent == SHIPPED
