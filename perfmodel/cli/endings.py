"""How the command ends: exit codes, errors and warnings of one line, signals."""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from perfmodel.cli.help import TaughtGroup
from perfmodel.errors import PerfModelError, PerfModelWarning, Terminated
from perfmodel.terminal import INTERRUPTED, TERMINATED, safe_stderr, safe_stdout, sentence, sigterm_raises, write


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
