"""What the command line prints: text that cannot steer the terminal, in whatever encoding the terminal has.

Names and values come from files and from the command line, so they may hold escape sequences, and letters that an
ASCII terminal does not have. Everything that is printed goes through :func:`write` or :func:`print_rich`, within
:func:`safe_stdout` and :func:`safe_stderr`.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, TextIO, cast

from perfmodel.errors import PerfModelError, Terminated

if TYPE_CHECKING:
    from rich.console import Console

LONGEST_VALUE = 200  # letters of a word or a quotation in a message
LONGEST_SENTENCE = 2000
CLOSED_PIPE = 128 + signal.SIGPIPE  # what a shell reports of a command that wrote to a reader who had gone
INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM
ENCODING_ERRORS = "perfmodel-stand-ins"
STAND_INS = {
    "█": "#", "▉": "#", "▊": "#", "▋": "#", "▌": "#", "▍": " ", "▎": " ", "▏": " ",
    "…": "~", "±": "+-", "≤": "<=", "≥": ">=", "×": "x", "·": ".", "−": "-", "–": "-", "—": "-", "→": "->",
}  # fmt: skip

_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")  # C0, C1, and what turns text
_QUOTED = [rf"{quote}(?:[^{quote}\\]|\\.){{{LONGEST_VALUE},}}{quote}" for quote in "'\""]
_LONG = re.compile("|".join([*_QUOTED, rf"\S{{{LONGEST_VALUE},}}"]))


def visible(text: str) -> str:
    """The text with control characters as escapes; ends of lines and tabs stay.

    >>> visible("a\\x1b[31mb")
    'a\\\\x1b[31mb'
    """
    return _STEERING.sub(lambda found: ascii(found[0])[1:-1], text)


def sentence(text: str) -> str:
    """A message as one line in which no value is longer than a few lines of a terminal.

    >>> sentence("x must be short (got\\n'" + "y" * 300 + "').")[-30:]
    "yyyyyyyyyyyyyyyyyyyyyyyyyyy')."
    """
    line = visible(" ".join(text.splitlines()))
    return _cut(_LONG.sub(lambda found: _cut(found[0], LONGEST_VALUE), line), LONGEST_SENTENCE)


def _cut(text: str, longest: int) -> str:
    """Both ends of a text that is longer."""
    half = (longest - 3) // 2
    return text if len(text) <= longest else f"{text[:half]}...{text[-half:]}"


def write(text: str, *, to_stderr: bool = False) -> None:
    """Print text, which brings its own line ends, with control characters made visible."""
    (sys.stderr if to_stderr else sys.stdout).write(visible(text))


def print_rich(renderable: Any) -> None:
    """Print a table, or whatever rich renders, on stdout."""
    visible_console().print(renderable)


def visible_console(*, stderr: bool = False) -> Console:
    """One of rich's consoles on which names steer nothing and are never taken for markup."""
    from rich.console import Console
    from rich.segment import Segment

    class Shown(Console):
        """Renders only text that is visible."""

        def render_str(self, text: str, **options: Any) -> Any:
            return super().render_str(visible(text), **options)  # before the width of a column is chosen

        def render(self, renderable: Any, options: Any = None) -> Any:
            for segment in super().render(renderable, options):
                yield segment if segment.control else Segment(visible(segment.text), segment.style)

    return Shown(stderr=stderr, highlight=False, markup=False, emoji=False)


class _Stream:
    """stdout or stderr, where what cannot be written ends the command as a user expects."""

    def __init__(self, stream: TextIO, refuse: Callable[[OSError], object]) -> None:
        self._stream = stream
        self._refuse = refuse
        self._error: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> Any:
        return self._checked(lambda: self._stream.write(text))

    def flush(self) -> None:
        self._checked(self._stream.flush)

    def _checked(self, act: Callable[[], Any]) -> Any:
        """After a failure every call fails, because libraries may ignore the first."""
        if self._error is None:
            try:
                return act()
            except OSError as error:
                self._error = error
                self._drop_buffer()
        self._refuse(self._error)
        return 0

    def _drop_buffer(self) -> None:
        """What is still buffered goes nowhere, so that the interpreter's last flush does not fail once more."""
        with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), self._stream.fileno())


def _refuse_stdout(error: OSError) -> NoReturn:
    if error.errno == errno.EPIPE:
        sys.exit(CLOSED_PIPE)
    raise PerfModelError(f"stdout must be writable ({error.strerror}). Send it to another place.") from error


@contextmanager
def safe_stderr() -> Iterator[None]:
    """Let stderr take every letter, with stand-ins where its encoding lacks it; what it cannot take is lost."""
    codecs.register_error(ENCODING_ERRORS, _stand_in)
    with open(os.devnull, "w") as nowhere:
        stream = _with_stand_ins(sys.stderr or nowhere)
        with contextlib.redirect_stderr(cast("TextIO", _Stream(stream, lambda error: None))):
            yield


@contextmanager
def safe_stdout() -> Iterator[None]:
    """The same for stdout, where nothing may be lost.

    Raises
    ------
    PerfModelError
        If it is closed (the next file to be opened would take its place), or takes nothing more.
    SystemExit
        If whoever reads it has gone, with the exit code that shells give to commands that a closed pipe ends.
    """
    codecs.register_error(ENCODING_ERRORS, _stand_in)
    if sys.stdout is None:
        raise PerfModelError("stdout must be open (it is closed). Send it to /dev/null to print nothing.")
    with contextlib.redirect_stdout(cast("TextIO", _Stream(_with_stand_ins(sys.stdout), _refuse_stdout))):
        try:
            yield
        finally:
            sys.stdout.flush()


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Raise :class:`Terminated` on SIGTERM, so that half-written files and the processes that were started are removed;
    a second SIGTERM ends the process at once. A handler of the caller's own stays.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def stop(number: int, frame: object) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise Terminated(TERMINATED)

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _with_stand_ins(stream: TextIO) -> TextIO:
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors=ENCODING_ERRORS)
    return stream


def _stand_in(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    letters = error.object[error.start : error.end]
    return "".join(STAND_INS.get(letter, ascii(letter)[1:-1]) for letter in letters), error.end
