"""What each form of data parallelism puts into a program: whole lists of instructions."""

from __future__ import annotations

import pytest

from perfmodel.program.program import COLLECTIVE
from perfmodel.program.strategies.data_parallel import data_parallel_program
from perfmodel.trace.trace import EventKind
from tests.program.forms import READY, SIZES, program, scenario, spelt, trace


def test_one_rank_talks_to_nobody() -> None:
    made = data_parallel_program(scenario("ddp", dp=1), trace())
    assert (made.insertions, made.collectives, made.setup, made.rebuild) == ((), (), (), None)


def test_naive_reduces_each_gradient_after_backward() -> None:
    made = program("naive")
    assert [run.phase for run in made.runs] == ["forward", "backward", "reduce", "optimizer"]
    assert spelt(made)[7:] == [
        "reduce 400 <all_reduce>",
        "reduce 1200 <all_reduce>",
        "reduce 200 <all_reduce>",
        "op2",
    ]


def test_flat_copies_all_gradients_into_one_buffer_and_back() -> None:
    made = program("flat")
    storage = next(
        row.a for insertion in made.insertions for row in insertion.instructions if row.kind == EventKind.ALLOC
    )
    assert spelt(made)[7:] == [
        f"alloc {storage}",
        "cat <flatten>",
        "reduce 1800 <all_reduce>",
        "_foreach_copy_ <unflatten>",
        f"free {storage}",
        "op2",
    ]
    assert made.first_insertions[0].instructions == made.insertions[0].instructions


def test_overlap_reduces_each_gradient_as_it_becomes_ready() -> None:
    made = program("overlap")
    expected = ["op0"]
    for order, size in enumerate((200, 400, 1200)):
        before, after = 2 * order, 2 * order + 1
        expected += ["op1", f"grad_ready {READY[order]}", f"record {before}", f"@wait {before}"]
        expected += [f"@reduce {size} <all_reduce async>", f"@record {after}"]
    assert spelt(made) == [*expected, "wait 1 <wait>", "wait 3 <wait again>", "wait 5 <wait again>", "op2"]


@pytest.mark.parametrize("strategy", ["naive", "flat", "overlap", "ddp"])
def test_accumulation_reduces_once_in_the_last_micro_batch(strategy: str) -> None:
    made = program(strategy, accumulation=3)
    columns = made.instructions
    reduced = {
        made.runs[run].phase + str(made.runs[run].micro_batch) for run in columns.run[columns.kind == COLLECTIVE]
    }
    assert reduced == ({"reduce-1"} if strategy in ("naive", "flat") else {"backward2"})
    total = sum(made.collectives[a].size_bytes for a in columns.a[columns.kind == COLLECTIVE])
    assert total == 4 * sum(SIZES)


def test_trace_events_keep_their_places() -> None:
    made = program("ddp")
    columns = made.instructions
    assert columns.event[columns.event >= 0].tolist() == list(range(len(made.trace.steady.kind)))
