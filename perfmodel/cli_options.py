"""What the commands of the command line share: how they fail, what they are asked, how they print."""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from perfmodel.errors import PerfModelError, PerfModelWarning

FILE = click.Path(path_type=Path)
ABOVE_0 = click.FloatRange(min=0, min_open=True)


class OneLineErrors(click.Group):
    """What a user can mend is one line on stderr and exit code 1; anything else keeps its traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with _warnings_in_one_line():
                return super().invoke(ctx)
        except PerfModelError as error:
            raise click.ClickException(str(error)) from error


@contextmanager
def _warnings_in_one_line() -> Iterator[None]:
    """A :class:`PerfModelWarning` is a line on stderr, without the place in the code that it came from."""
    with warnings.catch_warnings():
        show = warnings.showwarning

        def shown(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
            if issubclass(category, PerfModelWarning):
                click.echo(f"Warning: {message}", err=True)
            else:
                show(message, category, *place, **more)

        warnings.showwarning = shown
        warnings.simplefilter("default", PerfModelWarning)
        yield


def question_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options of every command that reads a scenario."""
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
        "assignments",
        multiple=True,
        metavar="KEY=VALUE",
        help="Change a scenario or hardware value; repeatable.",
    )(command)


def sweep_command(
    scenario_file: Path,
    vary: str,
    *,
    assignments: tuple[str, ...] = (),
    device: str | None = None,
    allow_import: bool = False,
    no_exact_keys: bool = False,
) -> str:
    """The command that asks the same question with other values. vary: ``key=value,value...``; the key may be among the
    assignments, which then say nothing of it.

    >>> sweep_command(Path("my gpt.yaml"), "batch.size=2,4", assignments=("batch.size=8", "precision=bf16"))
    "perfmodel sweep 'my gpt.yaml' --vary batch.size=2,4 --set precision=bf16"
    """
    key = vary.partition("=")[0]
    words = ["perfmodel", "sweep", str(scenario_file), "--vary", vary]
    words += [word for each in assignments if each.partition("=")[0].strip() != key for word in ("--set", each)]
    words += [] if device is None else ["--device", device]
    words += ["--allow-import"] if allow_import else []
    words += ["--no-exact-keys"] if no_exact_keys else []
    return shlex.join(words)


def print_rich(renderable: Any) -> None:
    """A table, or whatever rich renders, on stdout."""
    from rich.console import Console

    Console(highlight=False).print(renderable)


def wrote(paths: list[Path], of: str = "") -> None:
    """Name on stderr the files that were written. of: whose they are, to follow the names."""
    for path in paths:
        click.echo(f"wrote {path}{of}", err=True)


@contextmanager
def torch_needed(command: str) -> Iterator[None]:
    """Around the imports of commands that run models."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "scipy", "transformers", "sympy"):
            raise
        raise PerfModelError(
            f"perfmodel {command}: {error.name} must be installed (it is not). Run pip install '.[torch]'."
        ) from error
