"""Options, endings and messages that commands share."""

from __future__ import annotations

import io
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from perfmodel.cli.help import TaughtGroup
from perfmodel.errors import PerfModelError, PerfModelWarning, Terminated
from perfmodel.terminal import INTERRUPTED, TERMINATED, safe_stderr, safe_stdout, sentence, sigterm_raises, write

FILE = click.Path(path_type=Path)
ABOVE_0 = click.FloatRange(min=0, min_open=True)


class OneLineErrors(TaughtGroup):
    """A command group that ends in one of a few ways.

    =====================================  =========================  =========
    cause                                  standard error             exit code
    =====================================  =========================  =========
    an error that a user can correct       one line                   1
    a wrong option                         click's usage              2
    Ctrl-C                                 one line                   130
    SIGTERM                                one line                   143
    a reader that has gone                 nothing                    141
    =====================================  =========================  =========

    Any other exception keeps its traceback.
    """

    group_class = TaughtGroup

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        if not standalone_mode:  # whoever calls sees to the rest
            return super().main(*args, **extra | {"standalone_mode": False})
        with sigterm_raises(), safe_stderr():
            text, code = self._ending(*args, **extra)
            usage, mark, message = text.partition("Error: ")
            write(f"{usage}{mark}{sentence(message)}\n" if mark else usage, to_stderr=True)
        sys.exit(code)

    def _ending(self, *args: Any, **extra: Any) -> tuple[str, int]:
        """Run the command; return the text that is still to be printed, and the exit code."""
        try:
            with safe_stdout():
                return "", super().main(*args, **extra | {"standalone_mode": False}) or 0  # that of --help
        except PerfModelError as error:
            return f"Error: {error}", 1
        except click.ClickException as error:
            shown = io.StringIO()
            error.show(shown)
            return shown.getvalue(), error.exit_code
        except click.Abort as error:
            if isinstance(error.__cause__, EOFError):  # of a file that was cut off: no command asks for input
                raise error.__cause__ from None
            return "Stopped.\n", INTERRUPTED
        except Terminated:
            return "Stopped.\n", TERMINATED

    def invoke(self, ctx: click.Context) -> Any:
        with _warnings_in_one_line():
            return super().invoke(ctx)


@contextmanager
def _warnings_in_one_line() -> Iterator[None]:
    """A :class:`PerfModelWarning` is a line on stderr, without the place in the code that it came from."""
    with warnings.catch_warnings():
        show = warnings.showwarning

        def shown(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
            if issubclass(category, PerfModelWarning):
                write(f"Warning: {sentence(str(message))}\n", to_stderr=True)
            else:
                show(message, category, *place, **more)

        warnings.showwarning = shown
        warnings.simplefilter("default", PerfModelWarning)
        yield


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


@contextmanager
def torch_needed(command: str) -> Iterator[None]:
    """Turn a missing package into a sentence, around the imports of commands that run models."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "scipy", "transformers"):
            raise
        raise PerfModelError(
            f"perfmodel {command}: {error.name} must be installed (it is not). Run pip install '.[torch]'."
        ) from error
