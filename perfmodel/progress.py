"""What a person sees while a command works: what it does now and since when, on standard error.

Library code says what it does by :func:`doing`, which costs next to nothing and shows nothing by itself. A command
shows it by :func:`shown`: nothing in the first two seconds; then one line that changes, on a terminal, and elsewhere
lines, ever more rarely. ``PERFMODEL_PROGRESS=off`` keeps it quiet.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO

from perfmodel.terminal import visible

AFTER_S = 2.0
RAREST_S = 60.0  # between two lines where there is no terminal
REFRESH_S = 0.5

_stack: list[str] = []
_is_shown = False


@contextmanager
def doing(what: str, done: int | None = None, total: int | None = None) -> Iterator[None]:
    """Say what is done inside, as a detail of what is being done around it.

    Parameters
    ----------
    what : str
        For example ``tracing the model``.
    done, total : int, optional
        The how-manieth of how many it is, from 1.
    """
    _stack.append(what if done is None else f"{what} {done:,} of {total:,}")
    try:
        yield
    finally:
        _stack.pop()


def what_is_done() -> str:
    """All that is being done, the outermost first; empty for nothing.

    >>> with doing("configuration", 3, 12), doing("tracing the model"):
    ...     what_is_done()
    'configuration 3 of 12: tracing the model'
    """
    return ": ".join(tuple(_stack))


@contextmanager
def shown() -> Iterator[None]:
    """Show on standard error what is done inside, once it takes long. Not twice, where a command calls another."""
    global _is_shown
    if _is_shown or os.environ.get("PERFMODEL_PROGRESS") == "off":
        yield
        return
    stream, over = sys.stderr, threading.Event()
    can_change = stream.isatty() and os.environ.get("TERM") not in (None, "dumb", "unknown")
    draw = _on_terminal if can_change else _in_lines
    drawing = threading.Thread(target=draw, args=(stream, over.wait), name="progress", daemon=True)
    _is_shown = True
    drawing.start()
    try:
        yield
    finally:
        over.set()
        drawing.join()
        _is_shown = False


def _on_terminal(stream: IO[str], wait: Callable[[float], bool]) -> None:
    """wait: for so many seconds; whether the work was over by then."""
    if wait(AFTER_S):
        return
    from rich.console import Console
    from rich.text import Text

    since_s = AFTER_S
    with Console(file=stream).status(Text(_line(since_s)), spinner="line") as status:
        while not wait(REFRESH_S):
            since_s += REFRESH_S
            status.update(Text(_line(since_s)))


def _in_lines(stream: IO[str], wait: Callable[[float], bool]) -> None:
    """After 2, 4, 8, ... seconds, and then every minute. wait: as above."""
    pause_s, since_s = AFTER_S, 0.0
    while not wait(pause_s):
        since_s += pause_s
        stream.write(f"{_line(since_s)}\n")
        stream.flush()
        pause_s = min(since_s, RAREST_S)


def _line(since_s: float) -> str:
    """
    >>> with doing("tracing the model"):
    ...     _line(75.2)
    'tracing the model, 75 s'
    """
    return f"{visible(what_is_done()) or 'working'}, {since_s:.0f} s"
