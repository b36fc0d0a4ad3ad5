"""Programs of several streams, and a short way to run them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from perfmodel.cost.contention import Slowdown
from perfmodel.hardware.profile import Launch
from perfmodel.program.program import COLLECTIVE, RECORD, WAIT, Collective, Insertion, Instruction, Program
from perfmodel.simulate.engine import simulate
from perfmodel.simulate.timed_step import launched_positions, timed_step
from perfmodel.simulate.timeline import Timeline

Slowed = tuple[list[float], ...]

WIRE = 1
INF = float("inf")
FAST_HOST = Launch(latency_s=0.0, queue_depth=16)


def reduce_async(number: int, marks: int, stream: int = WIRE) -> tuple[Instruction, ...]:
    """What c10d does for an asynchronous collective; its end is mark ``marks + 1``."""
    return (
        Instruction(RECORD, marks),
        Instruction(WAIT, marks, stream=stream),
        Instruction(COLLECTIVE, number, stream=stream),
        Instruction(RECORD, marks + 1, stream=stream),
    )


def with_edits(program: Program, *insertions: Insertion, groups: tuple[str, ...] = ("dp",)) -> Program:
    """groups: of each collective."""
    made = tuple(Collective("all_reduce", "float32", 4 * (index + 1), 2, group) for index, group in enumerate(groups))
    return replace(program, insertions=insertions, collectives=made)


def run(
    program: Program,
    device_s: list[float],
    collective_s: list[float],
    slowed: list[Slowed] | None = None,
    host_s: float | np.ndarray = 1e-6,
    launch: Launch = FAST_HOST,
    simulator=None,
    sharing: dict[int, Slowed] | None = None,
) -> Timeline:
    """slowed: by collective, compute factor, communication factor, tail and (if any keeps its pace) wave of each
    operation. host_s: of each instruction. sharing: likewise, by operation of another stream.
    """
    launched = np.array([1 if seconds > 0 else 0 for seconds in device_s])
    operation = program.instructions.a[launched_positions(program, launched)]

    def by_launch(each: Slowed) -> Slowdown:
        return Slowdown(*(np.array(column)[operation] for column in each))

    slowdowns = tuple(map(by_launch, slowed or ()))
    beside = {number: by_launch(each) for number, each in (sharing or {}).items()}
    host = np.full(len(program.instructions.kind), host_s)
    work = timed_step(program, np.array(device_s)[operation], launched, host, np.array(collective_s), slowdowns, beside)
    return simulator(program, work) if simulator else simulate(program, work, launch)


def near(value: float) -> object:
    return pytest.approx(value, abs=1e-3)
