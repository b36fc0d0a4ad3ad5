"""Programs of several streams, and a short way to run them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from perfmodel.cost.contention import Slowdown
from perfmodel.hardware.profile import Launch
from perfmodel.program.program import COLLECTIVE, RECORD, WAIT, Collective, Edit, Inserted, Program
from perfmodel.simulate.engine import simulate
from perfmodel.simulate.step_work import launched_positions, step_work
from perfmodel.simulate.timeline import Timeline

WIRE = 1
INF = float("inf")
FAST_HOST = Launch(latency_s=0.0, queue_depth=16)


def reduce_async(number: int, marks: int, stream: int = WIRE) -> tuple[Inserted, ...]:
    """What c10d does for an asynchronous collective; its end is mark ``marks + 1``."""
    return (
        Inserted(RECORD, marks),
        Inserted(WAIT, marks, stream=stream),
        Inserted(COLLECTIVE, number, stream=stream),
        Inserted(RECORD, marks + 1, stream=stream),
    )


def with_edits(program: Program, *edits: Edit, groups: tuple[str, ...] = ("dp",)) -> Program:
    """groups: of each collective."""
    made = tuple(Collective("all_reduce", "float32", 4 * (index + 1), 2, group) for index, group in enumerate(groups))
    return replace(program, edits=edits, collectives=made)


def run(
    program: Program,
    device_s: list[float],
    collective_s: list[float],
    slowed: list[tuple[list[float], list[float], list[float]]] | None = None,
    host_s: float | np.ndarray = 1e-6,
    launch: Launch = FAST_HOST,
    simulator=None,
) -> Timeline:
    """slowed: by collective, compute factor, communication factor and tail of each operation. host_s: of each
    instruction.
    """
    launched = np.array([1 if seconds > 0 else 0 for seconds in device_s])
    operation = program.instructions.a[launched_positions(program, launched)]
    slowdowns = tuple(Slowdown(*(np.array(column)[operation] for column in each)) for each in slowed or ())
    host = np.full(len(program.instructions.kind), host_s)
    work = step_work(program, np.array(device_s)[operation], launched, host, np.array(collective_s), slowdowns)
    return simulator(program, work) if simulator else simulate(program, work, launch)


def near(value: float) -> object:
    return pytest.approx(value, abs=1e-3)
