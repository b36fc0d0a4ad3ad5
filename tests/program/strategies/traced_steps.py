"""Steps that two H200s ran (tests/data/cuda_sharded) and the programs for them, spelt alike, a line each: operators that
launched something with the tensors they were given, collectives, and where the host recorded events and waited for them.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from perfmodel.cost.transfers import pinned_copy
from perfmodel.program.program import BY_HOST, COLLECTIVE, RECORD, WAIT, Program
from perfmodel.program.ranks import rank_programs
from perfmodel.scenario.scenario import Scenario
from perfmodel.trace.operation import Argument, Operation, TensorSpec
from perfmodel.trace.trace import EventKind
from tests.places import TESTS
from tests.program.strategies.fsdp.fsdp_scripts import STREAMS

DATA = TESTS / "data" / "cuda_sharded"
SUFFIX = ".trace.json.gz"
RANKS = 2
HOST_WAITS = "host waits"
CASES = tuple(f"tiny-{name}" for name in ("zero1", "zero2", "zero3", "zero3-mixed", "zero3-clipped", "zero3-offload"))


class Line(NamedTuple):
    """What the host issued. stream: that it was given to; empty for events, of which a trace does not tell it."""

    phase: str
    text: str
    stream: str = ""


class Traced(NamedTuple):
    """A line of a trace. launched_us: when the host called for it. start_us, end_us: when what it launched ran; where the
    host waited, both are the end of that. launches: ``kernel`` and its name, or ``memcpy``, which way, and bytes.
    """

    line: Line
    launched_us: float = 0.0
    start_us: float = 0.0
    end_us: float = 0.0
    launches: tuple[tuple[str | int, ...], ...] = ()


class Wait(NamedTuple):
    """``stream`` does what follows its first ``given`` when ``source`` has done its first ``done`` of this step. Of the
    host ``given`` counts its waits.
    """

    stream: str
    given: int
    source: str
    done: int


# What ran


@cache
def recorded(case: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(gzip.decompress((DATA / f"{case}{SUFFIX}").read_bytes()))
    return found


@cache
def traced(case: str, rank: int) -> tuple[Traced, ...]:
    data = recorded(case)
    found, times = data["ranks"][rank], _times_us(data["ranks"][rank]["times"])
    return tuple(_traced(data["lines"][number], times) for number in found["rows"])


def _times_us(columns: list[list[int]]) -> Iterator[tuple[float, float, float]]:
    """When launched, started and ended. columns: tenths of microseconds: since the launch before, until the start, and
    from there to the end.
    """
    launched = 0
    for since, until, took in zip(*columns, strict=True):
        launched += since
        yield launched / 10, (launched + until) / 10, (launched + until + took) / 10


def _traced(row: list[Any], times: Iterator[tuple[float, float, float]]) -> Traced:
    phase, kind, *rest = row
    if kind in ("record", "wait"):
        return Traced(Line(phase, kind))
    if kind == HOST_WAITS:
        return Traced(Line(phase, kind), *next(times))
    name, given, stream, launches = rest
    if kind == "collective":
        text = "{} {} {} of {}".format(name, *given)
    else:
        tensors = (each if isinstance(each, str) else _list(each) for each in given)
        text = " ".join([name.removeprefix("aten::"), *tensors])
    return Traced(Line(phase, text, stream), *next(times), tuple(map(tuple, launches)))


def _list(shapes: list[str]) -> str:
    return "(" + ", ".join(shapes) + ")"


# What the program says


@cache
def programs(case: str) -> tuple[Program, ...]:
    """Of each rank."""
    found = rank_programs(Scenario.model_validate(recorded(case)["scenario"]))
    return tuple(next(each.program for each in found if rank in each.ranks) for rank in range(RANKS))


def said(made: Program) -> list[Line]:
    return [_said(made, *row) for row in _rows(made)]


def _rows(made: Program) -> Iterator[tuple[str, int, int, str]]:
    """Phase, kind, what the instruction is about, and stream, of those that a trace shows."""
    columns = made.instructions
    for kind, a, stream, run in zip(columns.kind, columns.a, columns.stream, columns.run, strict=True):
        launches = kind == EventKind.OP and made.operations[a].runs_on_device
        if launches or kind in (COLLECTIVE, RECORD, WAIT):
            yield made.runs[run].phase, int(kind), int(a), STREAMS[int(stream)]


def _said(made: Program, phase: str, kind: int, a: int, stream: str) -> Line:
    if kind == RECORD:
        return Line(phase, "record")
    if kind == WAIT:
        return Line(phase, HOST_WAITS if stream == STREAMS[BY_HOST] else "wait")
    if kind == COLLECTIVE:
        called = made.collectives[a]
        return Line(phase, f"{called.kind} {called.dtype} {called.size_bytes} of {called.ranks}", stream)
    return Line(phase, _called(made.operations[a]), stream)


def _called(operation: Operation) -> str:
    """As a profiler has it: lists of tensors without their dtypes, and no numbers, of tensors either."""
    arguments = [*operation.inputs, *(value for _, value in operation.keywords)]
    return " ".join([operation.base_name, *(text for each in arguments if (text := _argument(each)))])


def _argument(argument: Argument) -> str:
    if isinstance(argument, TensorSpec):
        return f"{argument.dtype}[{_shape(argument)}]" if argument.shape else ""
    if isinstance(argument, tuple) and any(isinstance(each, TensorSpec) for each in argument):
        return _list([f"[{_shape(each)}]" for each in argument if isinstance(each, TensorSpec) and each.shape])
    return ""


def _shape(tensor: TensorSpec) -> str:
    return ",".join(map(str, tensor.shape))


def pinned_copies(made: Program) -> list[tuple[str, int]]:
    """Which way, and bytes, of copies between the device and pinned memory."""
    called = (made.operations[a] for _, kind, a, _ in _rows(made) if kind == EventKind.OP)
    return [(way, each.outputs[0].bytes) for each in called if (way := pinned_copy(each)) is not None]


def waits(made: Program) -> list[Wait]:
    """Of streams and of the host, in order."""
    found, marks = [], {}
    given = dict.fromkeys(STREAMS.values(), 0)
    for _, kind, a, stream in _rows(made):
        if kind == RECORD:
            marks[a] = (stream, given[stream])
            continue
        if kind == WAIT:
            found.append(Wait(stream, given[stream], *marks[a]))
        if kind != WAIT or stream == STREAMS[BY_HOST]:
            given[stream] += 1
    return found
