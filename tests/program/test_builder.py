"""The builder of programs: where insertions go, and what is numbered once."""

from __future__ import annotations

import pytest

from perfmodel.program.builder import COMMUNICATION, ProgramBuilder, ready_gradients, vector, waits_in_a_row
from perfmodel.program.program import COLLECTIVE, RECORD, WAIT, Collective, Members
from perfmodel.trace.operation import Operation
from perfmodel.trace.trace import EventKind, Storage, StorageKind
from tests.builders import backward_of, ops, parameters_of, program_of, step_events

PHASES = (("forward", 0, ops(0)), ("backward", 0, backward_of((2, 0, 1))), ("optimizer", -1, ops(2)))


def builder() -> ProgramBuilder:
    return ProgramBuilder(program_of(*PHASES, parameters=parameters_of(10, 20, 30)), Members("dp", 4))


def test_gradients_are_ready_in_their_order_each_before_the_next_event() -> None:
    """An operator and its gradient follow each other; forward has one event."""
    assert ready_gradients(step_events(*PHASES)) == [(2, 3), (0, 5), (1, 7)]


def test_equal_collectives_and_operators_are_numbered_once() -> None:
    made = builder()
    rows = [made.blocking("all_reduce", vector(count, "float32")) for count in (5, 7, 5)]
    operation = Operation("aten.cat.default")
    launches = [made.launch(operation, "cat"), made.launch(operation, "cat", 0.5)]
    made.insert(0, 1, *rows, *launches)
    program = made.finish()
    assert [row.a for row in rows] == [0, 1, 0]
    assert program.collectives == tuple(Collective("all_reduce", "float32", size, 4, "dp") for size in (20, 28))
    assert program.extra_operations == (operation,)
    assert [row.a for row in launches] == [len(program.trace.operations)] * 2


def test_an_asynchronous_collective_runs_after_what_was_issued_and_is_waited_for_by_its_mark() -> None:
    made = builder()
    first, first_mark = made.asynchronous("float32", 40, "all_reduce async")
    second, second_mark = made.asynchronous("float32", 80, "all_reduce async")
    assert [row.kind for row in first] == [RECORD, WAIT, COLLECTIVE, RECORD]
    assert [row.stream for row in first] == [0, COMMUNICATION, COMMUNICATION, COMMUNICATION]
    assert (first[0].a, first[1].a, first[3].a, first_mark) == (0, 0, 1, 1)
    assert (second[0].a, second_mark) == (2, 3)


def test_insertions_are_sorted_by_place_and_keep_their_order_there() -> None:
    made = builder()
    for run, event, mark in ((2, 7, 0), (1, 3, 1), (1, 1, 2), (1, 3, 3)):
        made.insert(run, event, *waits_in_a_row([mark]))
    made.insert(0, 0)  # of nothing
    found = made.finish().insertions
    assert [(each.run, each.event, each.instructions[0].a) for each in found] == [
        (1, 1, 2), (1, 3, 1), (1, 3, 3), (2, 7, 0),
    ]  # fmt: skip


def test_a_phase_is_added_after_backward_and_before_the_optimizer() -> None:
    made = builder()
    made.add_phase("reduce", waits_in_a_row([5, 6]))
    program = made.finish()
    assert [run.phase for run in program.runs] == ["forward", "backward", "reduce", "optimizer"]
    assert made.last("reduce") == 2
    (insertion,) = program.insertions
    assert (insertion.run, insertion.event) == (2, 7)
    assert [row.call for row in insertion.instructions] == ["wait", "wait again"]


@pytest.mark.parametrize("persistent_ids", [(), (3, 8)])
def test_storages_are_new(persistent_ids: tuple[int, ...]) -> None:
    persistent = tuple(Storage(number, 4, StorageKind.PARAMETER) for number in persistent_ids)
    made = ProgramBuilder(program_of(*PHASES, persistent=persistent), Members("dp", 2))
    first = made.new_storage()
    assert first > max(persistent_ids, default=0)
    assert made.new_storage() == first + 1


def test_events_of_the_trace_are_left_as_they_are() -> None:
    program = builder().finish()
    assert program.instructions.kind.tolist().count(EventKind.OP) == 5
