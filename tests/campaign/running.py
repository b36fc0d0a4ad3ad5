"""One example run in this process, and what is held against it."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import tempfile
import time
import traceback
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from unittest import mock

from click.testing import CliRunner, Result

import cli
from perfmodel.trace import store
from tests.campaign.commands import CACHED, Example
from tests.campaign.documents import ROOT, cached_path, lay

LIMIT_S = 10.0  # of this process's computing, so that a busy machine fails no example
WAITING_LIMIT_S = 20.0  # in which it computes nothing
LONGEST_SENTENCE = 2100  # letters
STEERING = re.compile(r"[^\n\t\x20-\x7e\xa0-\U0010ffff]|[\u202a-\u202e\u2066-\u2069]")
NOT_FINITE = re.compile(r"\b(?:nan|inf) (?:[num]?s|%|[KMGT]?i?B|[KMGTP]?FLOP|samples|tokens)(?:\b|$|(?=\W))")


@dataclass(frozen=True)
class Outcome:
    """fault: None where the command ended as it should. exit_code: None after an exception or the limit. cpu_s: what
    it took.
    """

    fault: str | None
    exit_code: int | None
    cpu_s: float
    output: str


class _OverLimitError(Exception):
    """Raised in whatever runs when the limit is reached."""


def run(example: Example) -> Outcome:
    """The example's command in a folder of its own."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            for name, file in example.files.items():
                lay(file, Path(CACHED) / cached_path("tiny") if name == CACHED else Path(name))
            with _nothing_is_measured(example.command), _own_cache(CACHED in example.files), _limited() as reached:
                start_s = time.process_time()
                result = CliRunner().invoke(cli.main, list(example.arguments), env={"COLUMNS": "100"})
                cpu_s = time.process_time() - start_s
        finally:
            os.chdir(before)
    fault = f"{reached[0]}{_place(result)}" if reached else _fault(result)
    return Outcome(fault, None if reached else result.exit_code, cpu_s, result.output)


@contextmanager
def _nothing_is_measured(command: str) -> Iterator[None]:
    """calibrate and validate read and refuse, and end before they would measure."""
    if command not in ("calibrate", "validate"):
        yield
        return
    from validate.run import Outcome as Measured

    with ExitStack() as stack:
        for name, answer in (
            ("calibrate.session.calibrate", None),
            ("calibrate.interconnect.session.calibrate_interconnect", None),
            ("validate.run.measure_cases", Measured(measured=[], failures=[])),
        ):
            stack.enter_context(mock.patch(name, return_value=answer))
        yield


@contextmanager
def _own_cache(wanted: bool) -> Iterator[None]:
    """The cache is a folder of the example's, and nothing is found anywhere else."""
    with ExitStack() as stack:
        if wanted:
            stack.enter_context(mock.patch.dict(os.environ, {"PERFMODEL_CACHE": CACHED}))
            stack.enter_context(mock.patch.object(store, "SHIPPED", Path("nowhere")))
            stack.enter_context(mock.patch.object(store, "_remembered", OrderedDict()))
        yield


@contextmanager
def _limited() -> Iterator[list[str]]:
    """Yields a list that holds what was reached: the limit of computing, or of waiting."""
    reached: list[str] = []
    computed_s = time.process_time()

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal computed_s
        before_s, computed_s = computed_s, time.process_time()
        if number == signal.SIGALRM and computed_s - before_s > 0.1 and not reached:
            return
        reached[:] = reached or ["over 10 s of computing" if number == signal.SIGPROF else "waits for ever"]
        raise _OverLimitError

    handlers = {number: signal.signal(number, stop) for number in (signal.SIGPROF, signal.SIGALRM)}
    others = signal.setitimer(signal.ITIMER_REAL, WAITING_LIMIT_S, WAITING_LIMIT_S)
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S, 1)
    try:
        yield reached
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, *others)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _fault(result: Result) -> str | None:
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return f"{type(result.exception).__name__}{_place(result)}"
    if result.exit_code not in (0, 1, 2):
        return f"exit code {result.exit_code}"
    steering = STEERING.search(result.output)
    if steering:
        return f"steering character {steering[0]!r} in the output"
    if result.exit_code == 0:
        return _wrong_answer(result.stdout)
    if result.exit_code == 2 and result.stderr.startswith("Usage: ") and "Error: " not in result.stderr:
        return None  # the help of a group without a command
    return _wrong_sentence(result.stderr)


def _wrong_sentence(stderr: str) -> str | None:
    """What is printed on failure: one line that begins with ``Error:``, and nothing of Python's."""
    lines = [line for line in stderr.splitlines() if line.startswith("Error: ")]
    if len(lines) != 1 or stderr.splitlines()[-1:] != lines:
        return f"{len(lines)} sentences, or more after them"
    if len(lines[0]) > LONGEST_SENTENCE:
        return f"a sentence of over {LONGEST_SENTENCE} letters"
    python = re.search(r"Traceback|Error\(|<class|object at 0x|pydantic|must be Unable|Keys should be", lines[0])
    return f"a sentence with {python[0]!r}" if python else None


def _wrong_answer(stdout: str) -> str | None:
    if not stdout.startswith("{"):
        found = NOT_FINITE.search(stdout)
        return f"{found[0]} in the report" if found else None
    try:
        answer = json.loads(stdout, parse_constant=lambda word: 1 / 0)
    except ZeroDivisionError:
        return "NaN or Infinity in JSON"
    time_s = answer.get("step_time_s")
    return f"step_time_s={time_s}" if isinstance(time_s, (int, float)) and time_s < 0 else None


def _place(result: Result) -> str:
    """The innermost place in this repository that the exception came through."""
    if result.exc_info is None or isinstance(result.exception, SystemExit):
        return ""
    frames = traceback.extract_tb(result.exc_info[2])
    own = [frame for frame in frames if frame.filename.startswith(str(ROOT)) and "/tests/" not in frame.filename]
    return f" in {Path(own[-1].filename).relative_to(ROOT)}:{own[-1].name}" if own else ""


def limit_memory(bytes_more: int) -> None:
    """Let this process take so much more than it has."""
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + bytes_more, resource.RLIM_INFINITY))
