"""What is said of work that takes long: nothing at first, then what is done and since when; seconds are given, not waited for."""

from __future__ import annotations

import io
import sys
import threading

import pytest

from perfmodel import progress
from perfmodel.progress import doing, shown, what_is_done


class Stream(io.StringIO):
    """A stderr that says when it was written to."""

    def __init__(self, is_terminal: bool = False) -> None:
        super().__init__()
        self.written, self._is_terminal = threading.Event(), is_terminal

    def isatty(self) -> bool:
        return self._is_terminal

    def write(self, text: str) -> int:
        count = super().write(text)
        if text.strip():
            self.written.set()
        return count


def over_after(pauses: int, waited: list[float]):  # type: ignore[no-untyped-def]
    """What :func:`progress._in_lines` waits by: the work ends within the pause of that number."""

    def wait(seconds: float) -> bool:
        waited.append(seconds)
        return len(waited) > pauses

    return wait


def test_details_follow_what_they_are_of_and_end_with_it() -> None:
    with doing("configuration", 3, 1200):
        with doing("tracing the model"):
            assert what_is_done() == "configuration 3 of 1,200: tracing the model"
        assert what_is_done() == "configuration 3 of 1,200"
    assert what_is_done() == ""


def test_what_failed_is_done_no_more() -> None:
    with pytest.raises(ZeroDivisionError), doing("dividing"):
        raise ZeroDivisionError
    assert what_is_done() == ""


def test_lines_come_ever_more_rarely() -> None:
    stream, waited = io.StringIO(), list[float]()
    with doing("simulating"):
        progress._in_lines(stream, over_after(7, waited))
    assert waited == [2, 2, 4, 8, 16, 32, 60, 60]
    assert stream.getvalue().splitlines() == [f"simulating, {since_s} s" for since_s in (2, 4, 8, 16, 32, 64, 124)]


def test_nothing_is_said_of_what_is_over_soon() -> None:
    for draw in (progress._in_lines, progress._on_terminal):
        stream = io.StringIO()
        draw(stream, over_after(0, []))
        assert stream.getvalue() == ""


@pytest.mark.parametrize("is_terminal", [False, True])
def test_work_that_takes_long_is_shown_on_stderr_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_terminal: bool
) -> None:
    stream = Stream(is_terminal)
    monkeypatch.delenv("PERFMODEL_PROGRESS")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress, "AFTER_S", 0.01)
    monkeypatch.setattr(sys, "stderr", stream)
    with shown(), doing("tracing \x1b[31mthe model"), shown():
        assert stream.written.wait(60)
    assert "tracing \\x1b[31mthe model, 0 s" in stream.getvalue()
    assert capsys.readouterr().out == ""
    assert not [thread for thread in threading.enumerate() if thread.name == "progress"]


def test_it_can_be_kept_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "AFTER_S", 0.0)
    with shown():
        assert not [thread for thread in threading.enumerate() if thread.name == "progress"]
