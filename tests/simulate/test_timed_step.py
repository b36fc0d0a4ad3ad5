"""Columns of a step: the order of its entries, and sums until each."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from perfmodel.program.program import COLLECTIVE, Collective, Insertion, Instruction
from perfmodel.simulate.timed_step import BLOCKING, LAUNCH, MARK, launched_positions, run_starts, timed_step
from perfmodel.trace.trace import EventKind
from tests.builders import ops, program_of

PROGRAM = program_of(("forward", 0, ops(0, 1)), ("backward", 0, ops(2)))
SUM = Collective("all_reduce", "float32", 4, 2, "dp")


def test_marks_stand_where_phases_begin_and_at_the_end() -> None:
    found = timed_step(PROGRAM, np.array([1.0, 2.0, 3.0]), np.array([1, 2, 3]), np.array([0.1, 0.2, 0.3]))
    assert found.source.tolist() == [MARK, LAUNCH, LAUNCH, MARK, LAUNCH, MARK]
    assert found.duration_s.tolist() == [0, 1.0, 2.0, 0, 3.0, 0]
    assert found.kernels.tolist() == [0, 1, 2, 0, 3, 0]
    assert (found.launched_kernels, found.launches.tolist(), found.marks.tolist()) == (6, [1, 2, 4], [0, 3, 5])
    assert run_starts(PROGRAM).tolist() == [0, 2]
    np.testing.assert_allclose(found.entry_host_s, [0, 0.1, 0.3, 0.3, 0.6, 0.6])


def test_operators_that_launch_nothing_are_no_entries() -> None:
    assert launched_positions(PROGRAM, np.array([1, 0, 1])).tolist() == [0, 2]
    found = timed_step(PROGRAM, np.array([1.0, 3.0]), np.array([1, 0, 1]), np.array([0.1, 0.2, 0.3]))
    assert found.source.tolist() == [MARK, LAUNCH, MARK, LAUNCH, MARK]
    np.testing.assert_allclose(found.entry_host_s, [0, 0.1, 0.3, 0.6, 0.6])


def test_a_collective_on_the_compute_stream_is_an_entry_with_its_own_seconds() -> None:
    insertion = Insertion(0, 1, (Instruction(COLLECTIVE, 0),))
    program = replace(PROGRAM, insertions=(insertion,), collectives=(SUM,))
    found = timed_step(program, np.array([1.0, 2.0, 3.0]), np.array([1, 1, 1]), np.zeros(4), np.array([7.0]))
    assert found.source.tolist() == [MARK, LAUNCH, BLOCKING, LAUNCH, MARK, LAUNCH, MARK]
    assert found.duration_s.tolist() == [0, 1.0, 7.0, 2.0, 0, 3.0, 0]
    assert found.kernels.tolist() == [0, 1, 1, 1, 0, 1, 0]


def test_operators_of_other_streams_are_side_work_that_the_queue_holds_too() -> None:
    """The second operator runs on a side stream: its launches are queued ahead of the entry after it."""
    number = len(PROGRAM.trace.operations)
    insertion = Insertion(0, 2, (Instruction(EventKind.OP, number, -1, 1),))
    operation = PROGRAM.trace.operations[0]
    program = replace(PROGRAM, insertions=(insertion,), extra_operations=(operation,))
    found = timed_step(program, np.array([1.0, 2.0, 5.0, 3.0]), np.array([1, 1, 1, 4]), np.full(4, 0.1))
    assert found.side.position.tolist() == [2]
    assert (found.side.duration_s.tolist(), found.side.kernels.tolist(), found.side.slowdown.tolist()) == (
        [5.0],
        [4],
        [-1],
    )
    assert found.actions == (2,)
    assert found.kernels.tolist() == [0, 1, 1, 0, 1, 0]
    assert found.queued.tolist() == [0, 1, 1, 4, 1, 0]
    assert found.queued_until_side.tolist() == [6]
