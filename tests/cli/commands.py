"""Commands run in this process, and the folder and the answers that they are given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

import cli
from perfmodel.hardware.profile import Profile
from perfmodel.scenario.scenario import Scenario
from tests.accuracy.cards import measurement

TINY = "name: toy\nmodel: {family: gpt, size: tiny}\nbatch: {size: 2, sequence_length: 16}\nhardware: {profile: toy.json}\n"
Asked = list[tuple[Scenario, Profile, dict[str, Any]]]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli.main, [str(argument) for argument in arguments], env={"COLUMNS": "120"})


def failure(*arguments: object) -> str:
    """The one line on stderr of a command that must fail."""
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    return line


def write_measurement(path: Path, **changes: Any) -> None:
    known = {"model": {"family": "gpt", "size": "tiny"}, "batch": {"size": 2, "sequence_length": 16}, "hardware": {"profile": "toy.json"}}  # fmt: skip
    path.parent.mkdir(exist_ok=True)
    path.write_text(measurement(scenario=known | changes).model_dump_json())
