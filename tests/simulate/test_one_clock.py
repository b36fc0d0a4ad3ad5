"""Host and device on one clock: sums of host costs and operators, and collectives that run meanwhile."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from perfmodel.program.program import COLLECTIVE, RECORD, WAIT, Collective, Insertion, Instruction, Program
from perfmodel.simulate.one_clock import simulate_one_clock
from perfmodel.simulate.timed_step import timed_step
from perfmodel.simulate.timeline import Timeline
from tests.builders import ops, program_of

OPERATOR_S, HOST_S = 1.0, 0.25
SIDE = 1


def simulated(program: Program, collective_s: float = 0.0) -> Timeline:
    count = len(program.instructions.kind)
    launches = len(program.instructions.launches)
    work = timed_step(
        program,
        np.full(launches, OPERATOR_S),
        np.ones(len(program.operations), dtype=np.int64),
        np.full(count, HOST_S),
        np.full(len(program.collectives), collective_s),
    )
    return simulate_one_clock(program, work)


def with_collective(wait_at: int) -> Program:
    """Three operators; a collective after the first, waited for before event ``wait_at``."""
    program = program_of(("forward", 0, ops(0, 0, 0)))
    issue = (
        Instruction(RECORD, 0),
        Instruction(WAIT, 0, stream=SIDE),
        Instruction(COLLECTIVE, 0, stream=SIDE),
        Instruction(RECORD, 1, stream=SIDE),
    )
    insertions = (Insertion(0, 1, issue), Insertion(0, wait_at, (Instruction(WAIT, 1),)))
    return replace(program, insertions=insertions, collectives=(Collective("all_reduce", "float32", 4, 2, "dp"),))


def test_operators_and_host_costs_add_up() -> None:
    found = simulated(program_of(("forward", 0, ops(0, 1)), ("backward", 0, ops(1))))
    assert found.step_time_s == found.synced_step_time_s == 3 * (OPERATOR_S + HOST_S)
    assert found.end_s.tolist() == [1.25, 2.5, 3.75]
    assert found.start_s.tolist() == [0.25, 1.5, 2.75]
    assert [(each.phase, each.start_s, each.end_s) for each in found.phases] == [
        ("forward", 0.0, 2.5),
        ("backward", 2.5, 3.75),
    ]
    assert found.host_busy_s == 3 * HOST_S


@pytest.mark.parametrize(("collective_s", "waited_s"), [(0.5, 0.0), (4.0, 1.0)])
def test_a_collective_costs_what_is_left_of_it_where_it_is_waited_for(collective_s: float, waited_s: float) -> None:
    """It starts when it is issued, after an operator and four host costs, at 2.0 s. What follows until the wait's end,
    with its own host cost, takes 3.0 s.
    """
    found = simulated(with_collective(wait_at=3), collective_s)
    (communication,) = found.communications
    assert (communication.issue_s, communication.start_s, communication.end_s) == (2.0, 2.0, 2.0 + collective_s)
    assert found.step_time_s == pytest.approx(3 * OPERATOR_S + 8 * HOST_S + waited_s)


def test_a_collective_that_is_waited_for_at_once_hides_nothing() -> None:
    found = simulated(with_collective(wait_at=1), 4.0)
    assert found.step_time_s == pytest.approx(3 * OPERATOR_S + 6 * HOST_S + 4.0)
