"""What DistributedDataParallel puts into a program, and the memory that it asks for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from perfmodel.program.program import Instruction
from perfmodel.program.strategies.data_parallel import data_parallel_program
from perfmodel.trace.operation import TensorSpec
from perfmodel.trace.trace import (
    EventKind,
    Parameter,
    Storage,
    StorageKind,
    Trace,
    gradient_storages,
)
from perfmodel.units import MIB
from tests.builders import step_events
from tests.program.forms import program, scenario, spelt, trace


def test_ddp_copies_gradients_into_buckets_and_out_again() -> None:
    cap_mb = 500 / 2**20  # 200 + 400 bytes fill the first bucket
    made = program("ddp", bucket_cap_mb=cap_mb)
    assert spelt(made) == [
        "host 0 <ddp forward>",
        "op0",
        "op1",
        "grad_ready 2",
        "mul <ddp parameter>",
        "op1",
        "grad_ready 0",
        "mul <ddp parameter>",
        "record 0",
        "@wait 0",
        "@reduce 600 <ddp bucket>",
        "@record 1",
        "op1",
        "grad_ready 1",
        "mul <ddp parameter>",
        "record 2",
        "@wait 2",
        "@reduce 1200 <ddp bucket>",
        "@record 3",
        "wait 1 <wait>",
        "copy_ <ddp parameter>",
        "copy_ <ddp parameter>",
        "wait 3 <wait>",
        "copy_ <ddp parameter>",
        "op2",
    ]


def bytes_of(rows: tuple[Instruction, ...]) -> list[int]:
    """What is asked for, and of what is given up the storage, negative."""
    return [row.b if row.kind == EventKind.ALLOC else -row.a for row in rows]


def test_ddp_sends_its_state_makes_one_bucket_and_rebuilds_it_in_the_second_step() -> None:
    made = program("ddp", bucket_cap_mb=500 / 2**20)
    shared, _, bucket = (row.a for row in made.setup)
    assert bytes_of(made.setup) == [1800, -shared, 1800]
    assert made.rebuild is not None
    assert made.rebuild.step == 2
    (rebuilt,) = made.rebuild.made
    assert made.runs[rebuilt.run].phase == "forward"
    assert rebuilt.event == made.runs[rebuilt.run].segment.start
    assert bytes_of(rebuilt.instructions) == [600, 1200]
    assert bytes_of(made.rebuild.replaced) == [-bucket]


def test_a_static_graph_is_recorded_first_so_that_buckets_are_rebuilt_a_step_later() -> None:
    plain = program("ddp", bucket_cap_mb=500 / 2**20)
    made = program("ddp", bucket_cap_mb=500 / 2**20, static_graph=True)
    shared, _, bucket, used = (row.a for row in made.setup)
    assert bytes_of(made.setup) == [1800, -shared, 1800, 3 * 4]
    assert made.rebuild is not None
    assert made.rebuild.step == 3
    (rebuilt,) = made.rebuild.made
    assert bytes_of(rebuilt.instructions) == [600, 1200]
    assert bytes_of(made.rebuild.replaced) == [-bucket]
    assert used not in [-row for row in bytes_of(made.rebuild.replaced)]
    assert spelt(made) == spelt(plain)


def test_state_is_sent_in_copies_of_which_two_are_there_at_once() -> None:
    large = tuple(Parameter(f"p{index}", TensorSpec.parse(f"float32[{70 * 2**20}]"), index) for index in range(3))
    made = data_parallel_program(scenario("ddp"), replace(trace(), parameters=large))
    first, second, third = (row.a for row in made.setup if row.kind == EventKind.ALLOC and row.b == 280 * MIB)
    assert [(row.kind, row.a) for row in made.setup[:6]] == [
        (EventKind.ALLOC, first),
        (EventKind.ALLOC, second),
        (EventKind.FREE, first),
        (EventKind.ALLOC, third),
        (EventKind.FREE, second),
        (EventKind.FREE, third),
    ]


def test_a_gradient_that_becomes_a_view_gives_its_own_memory_back() -> None:
    step = traced_gradients()
    made = data_parallel_program(scenario("ddp", gradient_as_bucket_view=True), step)
    words = spelt(made)
    assert [word for word in words if word.startswith(("alloc", "mul", "free"))] == [
        "alloc 52", "alloc 50", "mul <ddp parameter>", "free 52", "mul <ddp parameter>", "free 50",
        "alloc 51", "mul <ddp parameter>", "free 51",
    ]  # fmt: skip
    assert [row.a for insertion in made.first_insertions for row in insertion.instructions] == [52, 50, 51]
    assert gradient_storages(step, step.steady) == {0: 50, 1: 51, 2: 52}


def test_a_static_graphs_first_gradients_become_views_at_the_end_of_backward() -> None:
    made = data_parallel_program(scenario("ddp", gradient_as_bucket_view=True, static_graph=True), traced_gradients())
    (insertion,) = made.first_insertions
    assert insertion.event == made.first_runs[insertion.run].segment.stop
    assert [(row.kind, row.a) for row in insertion.instructions] == [(EventKind.FREE, each) for each in (50, 51, 52)]
    later = [row.a for insertion in made.insertions for row in insertion.instructions if row.kind == EventKind.FREE]
    assert later == [52, 50, 51]  # as they are ready


@pytest.mark.parametrize("as_view", [False, True])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_each_copy_costs_the_host_half_a_parameter(as_view: bool, micro_batches: int) -> None:
    """A copy in and a copy out are what a parameter's cost was measured with; views have no copy out."""
    columns = program("ddp", micro_batches, gradient_as_bucket_view=as_view).instructions
    shares = columns.share[columns.call == columns.calls.index("ddp parameter")]
    assert shares.tolist() == [0.5] * (3 if as_view else 6)


def traced_gradients() -> Trace:
    """Gradients of parameters 0, 1, 2 in storages 50, 51, 52."""
    rows = [(EventKind.ALLOC, 52, 200), (EventKind.ALLOC, 50, 400), (EventKind.GRAD_READY, 2, 0)]
    rows += [(EventKind.GRAD_READY, 0, 0), (EventKind.ALLOC, 51, 1200), (EventKind.GRAD_READY, 1, 0)]
    step = step_events(("forward", 0, []), ("backward", 0, rows))
    kinds = dict.fromkeys((50, 51, 52), StorageKind.GRADIENT)
    return replace(trace(), first=step, steady=step, storage_kinds=kinds)


def test_gradients_that_are_views_of_buckets_are_not_copied_out() -> None:
    words = spelt(program("ddp", bucket_cap_mb=500 / 2**20, gradient_as_bucket_view=True))
    assert words[-3:] == ["wait 1 <wait>", "wait 3 <wait>", "op2"]
    assert not any(word.startswith("copy_") for word in words)


def test_ddp_shares_the_buffers_of_rank_0_before_the_first_forward() -> None:
    buffers = (Storage(90, 400, StorageKind.BUFFER), Storage(91, 8, StorageKind.BUFFER))
    made = data_parallel_program(scenario("ddp", 2), replace(trace(2), persistent=buffers))
    words = spelt(made)
    start = words.index("host 0 <ddp forward>")
    storage = words[start + 1].split()[1]
    assert words[start : start + 12] == [
        "host 0 <ddp forward>",
        f"alloc {storage}",
        "cat <flatten>",
        "record 0",
        "@wait 0",
        "@reduce 408 <all_reduce async>",
        "@record 1",
        "wait 1 <wait>",
        "copy_ <copy>",
        "copy_ <copy>",
        f"free {storage}",
        "op0",
    ]
    assert [each.kind for each in made.collectives] == ["broadcast", "all_reduce"]
    assert words.count("cat <flatten>") == 1  # not again in the second micro-batch
