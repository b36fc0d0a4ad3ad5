"""Options and messages that commands share. How a command ends: endings.py."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import click

from perfmodel.terminal import write

FILE = click.Path(path_type=Path)
ABOVE_0 = click.FloatRange(min=0, min_open=True)


def question_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of every command that reads a scenario."""
    command = click.option(
        "--allow-import",
        is_flag=True,
        help="May import (and so execute) the scenario's model.target and model.loss; looked for in its folder first.",
    )(command)
    command = click.option("--device", type=click.Choice(["cuda", "cpu"]), help="cpu: this machine, profile cpu.json.")(
        command
    )
    return click.option(
        "--set",
        multiple=True,
        metavar="KEY=VALUE",
        help="Change a value of the scenario, or of its profile as hardware.KEY; repeatable. `perfmodel schema` and "
        "`perfmodel schema profile` list the keys.",
    )(command)


def sweep_command(
    scenario_file: Path,
    vary: Mapping[str, Sequence[str]],
    *,
    set: tuple[str, ...] = (),
    device: str | None = None,
    allow_import: bool = False,
    no_exact_keys: bool = False,
) -> str:
    """Write the command that asks the same question with several values.

    Parameters
    ----------
    scenario_file : Path
        The scenario that was asked about.
    vary : mapping of str to sequence of str
        Values by key. A key that ``set`` holds as well is left out there.
    set, device, allow_import, no_exact_keys
        Options of the question, as its command was given them.

    Examples
    --------
    >>> sweep_command(Path("my gpt.yaml"), {"batch.size": ["2", "4"]}, set=("batch.size=8", "precision=bf16"))
    "perfmodel sweep 'my gpt.yaml' --vary batch.size=2,4 --set precision=bf16"
    """
    varied = [f"{key}={','.join(values)}" for key, values in vary.items()]
    shared = [text for text in set if text.partition("=")[0].strip() not in vary]
    words = ["perfmodel", "sweep", str(scenario_file)]
    words += [word for text in varied for word in ("--vary", text)]
    words += [word for text in shared for word in ("--set", text)]
    words += [] if device is None else ["--device", device]
    words += ["--allow-import"] if allow_import else []
    words += ["--no-exact-keys"] if no_exact_keys else []
    return shlex.join(words)


def wrote(paths: list[Path], of: str = "") -> None:
    """Name on stderr the files that were written, each followed by ``of``."""
    for path in paths:
        write(f"wrote {' '.join(str(path).splitlines())}{of}\n", to_stderr=True)
