"""What is still in the cache: closed forms on hand-made steps, and that a larger cache never holds less."""

from __future__ import annotations

import gc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.cost import l2_cache
from perfmodel.cost.l2_cache import resident_shares
from perfmodel.program.program import Insertion, Instruction, Program
from perfmodel.trace.operation import Operation, TensorSpec
from perfmodel.trace.trace import EventKind, StepEvents, Storage, StorageKind
from tests.builders import Event, program_of, step_events

SCALE = 1024  # of bytes, so that rounding of blocks does not matter


def op(touched: dict[int, int], operation: int = 0) -> Event:
    return EventKind.OP, operation, -1, {storage: size * SCALE for storage, size in touched.items()}


def alloc(storage: int, size: int) -> Event:
    return EventKind.ALLOC, storage, size * SCALE, {}


def free(storage: int) -> Event:
    return EventKind.FREE, storage, 0, {}


def program(
    *phases: tuple[str, int, list[Event]],
    accumulation: int = 1,
    operations: tuple[Operation, ...] = (Operation("aten.op.default"),),
    first: StepEvents | None = None,
) -> Program:
    persistent = tuple(Storage(number, 10 * SCALE, StorageKind.PARAMETER) for number in range(10))
    return program_of(*phases, accumulation=accumulation, operations=operations, first=first, persistent=persistent)


def shares(made: Program, capacity: float) -> list[float]:
    launches = made.instructions.launches
    return [round(share, 6) for share in resident_shares(made, capacity * SCALE, launches).data.tolist()]


def shares_of_code(made: Program, capacity: float) -> list[float]:
    launches = made.instructions.launches
    return [round(share, 6) for share in resident_shares(made, capacity * SCALE, launches).code.tolist()]


def forward(*events: Event) -> tuple[str, int, list[Event]]:
    return "forward", 0, list(events)


def test_what_fits_with_all_that_came_between_stays() -> None:
    # Each finds its own from the step before: D = 20, own = 10.
    made = program(forward(op({0: 10}), op({1: 10}), op({2: 10})))
    assert shares(made, 30) == [1, 1, 1]
    assert shares(made, 20) == [0.5, 0.5, 0.5]  # 1 - (30 - 20) / 20
    assert shares(made, 15) == [0, 0, 0]


def test_a_storage_touched_again_at_once_stays_longest() -> None:
    # The second: D = 0. The others come back after 20 and 30 bytes of others.
    made = program(forward(op({0: 10}), op({0: 10}), op({1: 10}), op({2: 10})))
    assert shares(made, 20) == [0.5, 1, 0, 0]


def test_shares_are_by_bytes() -> None:
    # 0 (10 bytes): D = 0, own = 40. 1 (30 bytes): D = 10 + 100 of the others.
    made = program(forward(op({2: 100}), op({0: 10}), op({0: 10, 1: 30})))
    assert shares(made, 40)[2] == 0.25


def test_the_share_is_of_what_the_call_finds_alone() -> None:
    # own = 15 of a cache of 10: alone it finds 1 - 5 / 10, and so it does here.
    assert shares(program(forward(op({0: 15}))), 10) == [1]
    # D = 2: 1 - 7 / 10 of 0.5.
    assert shares(program(forward(op({0: 15}), op({1: 2}))), 10)[0] == 0.6
    # own = 2 capacities: nothing is found, alone or not.
    assert shares(program(forward(op({0: 20}))), 10) == [0]


def test_launches_that_touch_nothing_are_as_warm_as_alone() -> None:
    assert shares(program(forward(op({}), op({0: 1}))), 10) == [1, 1]


def test_without_a_cache_nothing_is_found() -> None:
    assert shares(program(forward(op({0: 1}))), 0) == [0]


def test_new_storages_lie_where_the_last_of_their_size_was_freed() -> None:
    # 10 is freed and 11 lies in its block: warm. 10 gets it back from the step before: D = 4 + 60, own = 8.
    made = program(
        forward(
            op({10: 8}), alloc(10, 8), free(10), op({11: 8}), alloc(11, 8), op({12: 4}), alloc(12, 4), op({0: 60}),
            free(11), free(12),
        )
    )  # fmt: skip
    assert shares(made, 40) == [0.2, 1, 0, 0]


def test_the_block_freed_last_comes_first() -> None:
    # 10 and 11 are freed in this order, so 12 gets 11's block, 8 bytes ago, and 13 10's, 24 ago.
    made = program(
        forward(
            op({10: 8}), alloc(10, 8), op({11: 8}), alloc(11, 8), free(10), free(11),
            op({12: 8}), alloc(12, 8), op({13: 8}), alloc(13, 8), op({0: 60}), free(12), free(13),
        )
    )  # fmt: skip
    assert shares(made, 16) == [0, 0, 1, 0.5, 0]  # 13: D + own = 24


def test_gradients_of_the_step_before_are_freed_under_their_own_name() -> None:
    # Every step frees what the one before left (20 in the first, 21 in the second) and gets its block back.
    made = program(
        ("zero_grad", -1, [free(20)]),
        ("backward", 0, [op({21: 8}), alloc(21, 8)]),
        first=step_events(("backward", 0, [op({20: 8}), alloc(20, 8)])),
    )
    assert shares(made, 10) == [1]


def test_a_table_counts_for_the_rows_that_are_read() -> None:
    table, rows = TensorSpec.parse("float32[10240,256]"), TensorSpec.parse("float32[4,256]")
    embedding = Operation("aten.embedding.default", (table, TensorSpec.parse("int64[4]")), (), (rows,))
    made = program(
        forward(op({0: 10240, 10: 4}, 1), alloc(10, 4), op({1: 5}), free(10)),
        operations=(Operation("aten.op.default"), embedding),
    )
    assert shares(made, 10) == [0.7, 0.7]  # 4 + 4 bytes, then 5


def test_later_micro_batches_find_what_the_third_finds() -> None:
    phases = [("forward", 0, [op({0: 4})]), ("forward", 1, [op({0: 4}), op({1: 8})]), ("optimizer", -1, [op({0: 4})])]
    made = program(*phases, accumulation=5)
    # 0 comes back after 8 bytes of 1, 1 after 4 of 0; in the second micro-batch 1 comes back after 12.
    assert shares(made, 10) == [1, 1, 0, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8]


def test_shares_are_remembered_as_long_as_their_trace() -> None:
    made = program(forward(op({0: 10})))
    shares(made, 10), shares(made, 20)
    assert shares(made, 10) == shares(made, 10)
    gc.collect()
    known = len(l2_cache._SHARES)
    assert len(l2_cache._SHARES.of(made.trace, dict)) == 2
    del made
    gc.collect()
    assert len(l2_cache._SHARES) == known - 1


touched = st.dictionaries(st.integers(0, 5), st.integers(1, 20), max_size=3)


@given(launches=st.lists(touched, min_size=1, max_size=20), capacity=st.integers(1, 100), more=st.floats(1, 3))
def test_a_larger_cache_never_holds_less(launches: list[dict[int, int]], capacity: int, more: float) -> None:
    made = program(forward(*(op(part) for part in launches)))
    small, large = np.array(shares(made, capacity)), np.array(shares(made, capacity * more))
    assert np.all((small >= 0) & (small <= 1))
    assert np.all(large >= small - 1e-6)


@pytest.mark.parametrize("accumulation", [1, 2, 7])
def test_there_is_a_share_for_every_launch(accumulation: int) -> None:
    phases = [("forward", i, [op({0: 4}), op({1: 4})]) for i in range(min(accumulation, 2))]
    assert len(shares(program(*phases, accumulation=accumulation), 10)) == 2 * accumulation


def test_micro_batches_may_run_in_any_order() -> None:
    # The fourth before the first three: of each of its phases it is the first, and found as such.
    made = program(("forward", 0, [op({0: 10})]), ("forward", 1, [op({1: 10}), op({2: 10})]))
    runs = {run.segment.micro_batch: run for run in made.runs}
    order = [replace(runs[1], micro_batch=3), runs[0], runs[1], replace(runs[1], micro_batch=2)]
    found = shares(replace(made, runs=tuple(order)), 25)
    # 1 2, 0, 1 2, and (as the first) 1 2, of 10 each: between two of a kind lie 10 at the step's begin, 40 and 20.
    assert found == [1.0, 1.0, 0.0, 0.8, 0.8, 1.0, 1.0]


def test_code_ages_by_what_passes_since_it_last_ran() -> None:
    # The first comes back after 25 bytes, the second after the first's 5, the third at once.
    kinds = (Operation("aten.add.Tensor"), Operation("aten.mul.Tensor"))
    made = program(forward(op({0: 5}), op({1: 15}, 1), op({2: 10}, 1)), operations=kinds)
    assert shares_of_code(made, 20) == [0.75, 1, 1]
    assert shares_of_code(made, 4) == [0, 0.75, 1]


def test_products_of_two_shapes_are_two_codes_and_types_are() -> None:
    mm = [Operation("aten.mm.default", (TensorSpec.parse(f"float32[{n},8]"),) * 2) for n in (8, 16)]
    add = [
        Operation("aten.add.Tensor", (TensorSpec.parse(f"{kind}[{n}]"),))
        for kind, n in (("float32", 8), ("float32", 9), ("bfloat16", 8))
    ]
    made = program(forward(*(op({number: 10}, number) for number in range(5))), operations=(*mm, *add))
    # Forty bytes since each ran in the step before; the second addition's code ran just before it.
    assert shares_of_code(made, 20) == [0, 0, 0.5, 1, 0]


def test_without_a_cache_code_costs_nothing() -> None:
    assert shares_of_code(program(forward(op({0: 1}))), 0) == [1]


def test_what_a_strategy_inserts_finds_its_code_and_none_of_its_data() -> None:
    kinds = (Operation("aten.add.Tensor"), Operation("aten.mul.Tensor"))
    made = program(forward(op({0: 5}), op({1: 50}, 1)), operations=kinds)
    copy = Instruction(EventKind.OP, len(made.trace.operations), -1)
    made = replace(made, insertions=(Insertion(0, 1, (copy,)),), extra_operations=(Operation("aten.copy_.default"),))
    assert shares(made, 20) == [0, 0, 0]
    assert shares_of_code(made, 20) == [0, 1, 1]
