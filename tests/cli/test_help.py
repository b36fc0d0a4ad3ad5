"""Help teaches: every command shows two examples that can be run, and the names that it takes."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import cli
from perfmodel.cli.help import TAUGHT
from perfmodel.hardware.profile import CATALOG, load_profile
from tests.places import ROOT

ANSWERED = {"predict", "sweep", "formula", "show", "topology", "schema"}  # without a GPU, in a second or two


def commands(group: click.Group = cli.main, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield *path, name


COMMANDS = list(commands())
EXAMPLES = [(name, example) for name, taught in TAUGHT.items() for example in taught.examples]


def help_of(*command: str, width: int = 80) -> str:
    result = CliRunner().invoke(cli.main, [*command, "--help"], terminal_width=width)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_shows_two_examples_of_itself(command: tuple[str, ...]) -> None:
    lines = [line.strip() for line in help_of(*command).partition("\nExamples:\n")[2].splitlines()]
    shown = [line for line in lines if line.startswith(f"perfmodel {' '.join(command)}")]
    assert len(shown) == len(lines) == 2
    assert set(TAUGHT) == {name for *_, name in COMMANDS}


@pytest.mark.parametrize(("name", "example"), EXAMPLES, ids=[example for _, example in EXAMPLES])
def test_examples_can_be_run(name: str, example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that need a GPU or an hour are read; their files must be there unless they are the user's own."""
    words = shlex.split(example)
    for word in words:
        folder = Path(word).parts[0]
        assert (
            folder not in ("scenarios", "validate", "results")
            or word == name
            or (ROOT / word).exists()
            or word == "results/mine"
        )
    for shared in ("scenarios", "results"):
        (tmp_path / shared).symlink_to(ROOT / shared)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-gpus.json").write_bytes((CATALOG / "h200-sxm-x4.json").read_bytes())
    if name in ANSWERED:
        result = CliRunner().invoke(cli.main, words)
        assert result.exit_code == 0, result.output
    else:
        command: click.Command = cli.main
        context = click.Context(cli.main)
        while isinstance(command, click.Group):
            command = command.commands[words.pop(0)]
        command.make_context(name, words, parent=context)


def test_names_come_from_the_code() -> None:
    from calibrate.stage_names import GENERAL, OTHER_STAGES
    from calibrate.this_machine.wirings import INTERCONNECTS
    from perfmodel.hardware.profile import catalog_names
    from perfmodel.scenario.families import FAMILIES

    in_question = [
        *FAMILIES,
        *catalog_names(),
        "adamw",
        "zbv-zero-bubble",
        "zero3",
        "selective",
        "amp-bf16",
        "for-loop",
    ]
    in_question += load_profile(CATALOG / "h200-sxm-x4.json").interconnects
    in_calibration = [*INTERCONNECTS, *GENERAL, *OTHER_STAGES, "full-reductions"]
    expected = {"predict": in_question, "sweep": in_question, "calibrate": in_calibration, "schema": ["measurement"]}
    for command, names in expected.items():
        shown = help_of(command).partition("\nNames:\n")[2].replace(",", " ").split()
        for name in names:
            assert all(word in " ".join(shown) for word in name.split()), (command, name)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_names_are_never_broken(width: int) -> None:
    assert not any(line.endswith("-") for line in help_of("predict", width=width).splitlines())


def test_the_help_of_all_says_where_examples_are() -> None:
    assert "COMMAND --help" in help_of()
    assert "COMMAND --help" in help_of("profile")
