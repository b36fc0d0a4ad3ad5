"""What a person sees while a machine is measured: what is measured now, what is left, seconds. On standard error."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from perfmodel.terminal import visible_console

REFRESH_S = 0.2
LONGEST_TEXT = 60


class Progress:
    """A bar a stage. Drawn only between measurements, never from a thread: a second thread would disturb host times."""

    def __init__(self, shown: bool) -> None:
        self._bar: Any = None
        self._task: Any = None
        self._drawn_s = 0.0
        self._warnings = visible_console(stderr=True)
        if shown:
            self._bar = _bar()

    @contextmanager
    def __call__(self) -> Iterator[Progress]:
        if self._bar is None:
            yield self
            return
        with self._bar:
            yield self

    def stage(self, title: str, total: int | None) -> None:
        """Begin a stage of ``total`` steps (None: unknown)."""
        if self._bar is None:
            return
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task(title, total=total, now="")
        self._draw(force=True)

    def now(self, text: str) -> None:
        """Say what is measured now."""
        if self._bar is None or self._task is None:
            return
        self._bar.update(self._task, now=text[:LONGEST_TEXT])
        self._draw()

    def at(self, text: str, done: int, total: int) -> None:
        """Say what is measured now, and how much is done."""
        if self._bar is None or self._task is None:
            return
        self._bar.update(self._task, now=text[:LONGEST_TEXT], completed=done, total=total)
        self._draw()

    def advance(self) -> None:
        """Say that one step is done."""
        if self._bar is None or self._task is None:
            return
        self._bar.advance(self._task)
        self._draw()

    def say(self, line: str) -> None:
        """Print a line that stays."""
        if self._bar is not None:
            self._bar.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def warn(self, line: str) -> None:
        """Print a line that stays, whether or not progress is shown."""
        console = self._warnings if self._bar is None else self._bar.console
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _draw(self, force: bool = False) -> None:
        if force or time.monotonic() - self._drawn_s > REFRESH_S:
            self._drawn_s = time.monotonic()
            self._bar.refresh()


def _bar() -> Any:
    from rich import progress

    return progress.Progress(
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(bar_width=24),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TextColumn("left"),
        progress.TimeRemainingColumn(),
        progress.TextColumn("{task.fields[now]}", markup=False),
        console=visible_console(stderr=True),
        auto_refresh=False,
        transient=True,
    )
