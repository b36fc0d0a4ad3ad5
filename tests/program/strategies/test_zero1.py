"""ZeRO stage 1: who owns what, what is sent, and what a rank's optimizer steps over; the partition against torch's."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.optim.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from torch.testing._internal.distributed.fake_pg import FakeStore

from perfmodel.hardware.profile import find_profile, load_profile
from perfmodel.program.program import COLLECTIVE, WAIT
from perfmodel.program.ranks import rank_programs
from perfmodel.program.strategies.zero1 import owned_by_rank, partition
from perfmodel.scenario.scenario import Scenario
from perfmodel.simulate.memory.walk import simulate_memory
from perfmodel.trace.store import get_trace
from perfmodel.trace.trace import EventKind, StorageKind
from tests.refusals import refused


def scenario(ranks: int, strategy: str = "zero1", **parallelism: object) -> Scenario:
    return Scenario.model_validate(
        {
            "name": "tiny",
            "model": {"family": "gpt", "size": "tiny"},
            "batch": {"size": 2, "sequence_length": 8},
            "parallelism": {"dp": ranks, "strategy": strategy} | parallelism,
            "hardware": {"profile": "x", "gpus": ranks},
        }
    )


@settings(max_examples=30)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(1, 5))
def test_the_partition_is_torchs(sizes: list[int], ranks: int) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        parameters = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
        groups = ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1)._partition_parameters()
        number = {id(parameter): index for index, parameter in enumerate(parameters)}
        theirs = tuple(tuple(number[id(each)] for each in rank[0]["params"]) for rank in groups)
    finally:
        dist.destroy_process_group()
    assert partition(sizes, ranks) == theirs


def test_every_rank_sends_what_it_owns_after_its_step_and_awaits_all() -> None:
    asked = scenario(2)
    tensors = [parameter.tensor for parameter in get_trace(asked).parameters]
    owned = owned_by_rank(tensors, 2)
    for each in rank_programs(asked):
        columns, program = each.program.instructions, each.program
        inserted = [at for at in range(len(columns.kind)) if columns.kind[at] == COLLECTIVE]
        sent = [program.collectives[columns.a[at]] for at in inserted]
        broadcasts = [one for one in sent if one.kind == "broadcast"]
        assert [one.size_bytes for one in broadcasts] == [tensors[i].bytes for indices in owned for i in indices]
        first = inserted[len(sent) - len(broadcasts)]
        called = [columns.calls[columns.call[at]] for at in inserted[len(sent) - len(broadcasts) :]]
        assert called == ["broadcast async"] + ["broadcast async again"] * (len(tensors) - 1)
        last_launch = max(at for at in columns.launches.tolist() if program.runs[columns.run[at]].phase == "optimizer")
        assert last_launch < first
        waits = [at for at in range(first, len(columns.kind)) if columns.kind[at] == WAIT and columns.stream[at] == 0]
        assert len(waits) == len(tensors)
        assert [columns.calls[columns.call[at]] for at in waits] == ["wait"] + ["wait again"] * (len(tensors) - 1)
        assert min(waits) > max(inserted)


def test_with_a_bucket_view_each_rank_sends_one_piece_and_parameters_move_there() -> None:
    (program, *_) = [each.program for each in rank_programs(scenario(2, parameters_as_bucket_view=True))]
    parameters = program.trace.parameters
    owned = owned_by_rank([parameter.tensor for parameter in parameters], 2)
    expected = [sum(parameters[index].tensor.bytes for index in indices) for indices in owned]
    assert [one.size_bytes for one in program.collectives if one.kind == "broadcast"] == expected
    moved = [row for row in program.setup if row.kind == EventKind.ALLOC and row.holds == StorageKind.PARAMETER]
    assert [row.b for row in moved] == expected
    freed = [row.a for row in program.setup[program.setup.index(moved[0]) :] if row.kind == EventKind.FREE]
    assert sorted(freed) == sorted(parameter.storage for parameter in parameters)


def test_the_optimizer_of_a_rank_steps_over_what_it_owns() -> None:
    asked = scenario(4)
    tensors = [parameter.tensor for parameter in get_trace(asked).parameters]
    owned = owned_by_rank(tensors, 4)
    seen = []
    for each in rank_programs(asked):
        seen += each.ranks
        expected = [tensors[index] for index in owned[each.ranks[0]]]
        assert [parameter.tensor for parameter in each.program.trace.optimized or ()] == expected
        assert all([tensors[index] for index in owned[rank]] == expected for rank in each.ranks)
    assert sorted(seen) == [0, 1, 2, 3]


@pytest.mark.parametrize("strategy", ["ddp", "none"])
def test_where_ranks_run_alike_there_is_one_program(strategy: str) -> None:
    ranks = 1 if strategy == "none" else 4
    (only,) = rank_programs(scenario(ranks, strategy))
    assert only.ranks == tuple(range(ranks))


def test_the_papers_form_reduces_scatters_steps_over_a_shard_and_gathers() -> None:
    (only,) = rank_programs(scenario(4, zero1_form="reduce-scatter"))
    program = only.program
    elements = sum(parameter.tensor.numel for parameter in program.trace.parameters)
    padded = -(-elements // 4) * 4
    assert only.ranks == (0, 1, 2, 3)
    assert [(each.kind, each.size_bytes) for each in program.collectives] == [
        ("reduce_scatter", 4 * padded),
        ("all_gather", 4 * padded),
    ]
    (shard,) = program.trace.optimized or ()
    assert shard.tensor.shape == (padded // 4,)
    columns = program.instructions
    collectives = [at for at in range(len(columns.kind)) if columns.kind[at] == COLLECTIVE]
    assert [program.runs[columns.run[at]].phase for at in collectives] == ["reduce", "optimizer"]
    assert collectives[1] > max(columns.launches)


def test_gradients_are_given_up_as_they_are_reduced_and_shards_of_them_stay() -> None:
    (only,) = rank_programs(scenario(4, zero1_form="reduce-scatter"))
    (whole,) = rank_programs(scenario(4, "ddp"))
    profile = load_profile(find_profile("h200-sxm-x4"))
    memory, of_ddp = (simulate_memory(each.program, profile) for each in (only, whole))
    kinds = (StorageKind.GRADIENT, StorageKind.OPTIMIZER_STATE, StorageKind.PARAMETER)
    before = {kind: int(memory.kind_bytes[kind][0]) for kind in kinds}
    shard_bytes = (only.program.trace.optimized or ())[0].tensor.bytes
    rounded = -(-shard_bytes // 512) * 512
    assert before[StorageKind.GRADIENT] == rounded
    assert before[StorageKind.OPTIMIZER_STATE] == 2 * rounded
    assert before[StorageKind.OPTIMIZER_STATE] < int(of_ddp.kind_bytes[StorageKind.OPTIMIZER_STATE][0]) / 3
    assert memory.steady.peak_allocated_bytes < of_ddp.steady.peak_allocated_bytes


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_a_rank_that_is_left_with_nothing_is_refused(strategy: str) -> None:
    with refused("parallelism.dp", 4096, strategy):
        rank_programs(scenario(4096, strategy))
