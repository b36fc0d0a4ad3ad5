"""The programs of fully_shard, instruction by instruction against what torch issues for the same model."""

from __future__ import annotations

import re
from typing import Any

import pytest

from perfmodel.hardware.profile import find_profile, load_profile
from perfmodel.program.ranks import rank_programs
from perfmodel.program.sharding import padded_shard_of
from perfmodel.simulate.memory.walk import simulate_memory
from perfmodel.trace.trace import StorageKind
from tests.program.strategies.fsdp.fsdp_scripts import (
    first_step,
    ours,
    program,
    recorded,
    rounded,
    tiny,
    variant_of,
)
from tests.program.strategies.fsdp.issued import issued, lines_of
from tests.program.strategies.fsdp.variants import ALL, OFFLOADED


@pytest.mark.parametrize("fields", [*ALL, *OFFLOADED], ids=str)
def test_forward_and_backward_are_what_torch_issues(fields: dict[str, Any]) -> None:
    variant = variant_of(fields)
    made, (first, second) = program(variant), issued(variant)
    assert ours(made, "forward", "backward") == second["forward and backward"]
    assert ours(first_step(made), "forward", "backward") == first["forward and backward"]
    assert ours(made, "zero_grad") == second["zero_grad"]


@pytest.mark.parametrize("fields", ALL, ids=str)
def test_the_optimizer_steps_over_the_ranks_parts(fields: dict[str, Any]) -> None:
    variant = variant_of(fields)
    made, (first, second) = program(variant), issued(variant)
    assert ours(made, "optimizer") == second["optimizer"]
    assert ours(first_step(made), "optimizer") == first["optimizer"]


@pytest.mark.parametrize("ranks", [3, 5])
def test_every_ranks_parts_are_torchs(ranks: int) -> None:
    """Their shapes, but for the empty ones, which cost nothing."""
    for rank in range(ranks):
        variant = variant_of({"ranks": ranks, "rank": rank})
        optimized = program(variant).trace.optimized
        assert optimized is not None
        (steps,) = (row for row in recorded(variant)[1] if row.name == "_foreach_sqrt")
        shapes = [re.findall(r"\d+", text.removeprefix("float32")) for text in steps.inputs]
        assert [[str(size) for size in shard.tensor.shape] for shard in optimized] == [
            shape for shape in shapes if "0" not in shape
        ]


def test_sizes_say_which_group_it_is() -> None:
    """Or a program that gathers the wrong one would be spelt alike."""
    for ranks in (2, 4, 5):
        lines = ours(program(variant_of({"ranks": ranks})), "forward")
        sizes = [line.split()[2] for line in lines if line.startswith("all_gather")]
        assert len(set(sizes)) == len(sizes) == 4


# What is held


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_between_steps_only_parts_are_held(strategy: str, ranks: int) -> None:
    """Blocks are whole multiples of 512 bytes, a group's gradients lie in one."""
    for each in rank_programs(tiny(strategy, ranks)):
        trace, memory = each.program.trace, simulate_memory(each.program, load_profile(find_profile("h200-sxm-x4")))
        shards = [padded_shard_of(parameter.tensor, ranks).bytes for parameter in trace.parameters]
        assert trace.optimized is not None
        states = 2 * rounded([shard.tensor.bytes for shard in trace.optimized])
        groups: dict[str, int] = {}
        for parameter, size in zip(trace.parameters, shards, strict=True):
            block = re.match(r"layers\.\d+", parameter.name)
            groups[block[0] if block else ""] = groups.get(block[0] if block else "", 0) + size
        held = {kind: int(memory.kind_bytes[kind][0]) for kind in StorageKind}
        assert held[StorageKind.PARAMETER] == rounded(shards)
        assert held[StorageKind.OPTIMIZER_STATE] == states
        assert held[StorageKind.GRADIENT] == rounded(groups.values())
        assert held[StorageKind.ACTIVATION] == 0


def test_a_policy_keeps_shards_states_and_gradients_whole_and_computes_in_half() -> None:
    options = {"mixed_precision": {"param": "bf16"}}
    profile = load_profile(find_profile("h200-sxm-x4"))
    section = {"dp": 4, "strategy": "zero3"}
    asked = ({}, {"parallelism": section | {"fsdp": options}})
    (plain,), (half,) = (rank_programs(tiny("zero3", 4, **sections)) for sections in asked)
    before, after = (simulate_memory(each.program, profile) for each in (plain, half))
    for kind in (StorageKind.PARAMETER, StorageKind.GRADIENT, StorageKind.OPTIMIZER_STATE):
        assert before.kind_bytes[kind][0] == after.kind_bytes[kind][0]
    assert after.peak_allocated_bytes < before.peak_allocated_bytes
    sizes = [[each.size_bytes for each in made.program.collectives] for made in (plain, half)]
    assert sizes[0] == [2 * size for size in sizes[1]]
    assert {each.dtype for each in half.program.collectives} == {"bfloat16"}
    assert {shard.tensor.dtype for shard in half.program.trace.optimized or ()} == {"float32"}


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_steps_end_as_they_began(strategy: str, checkpointing: str, accumulation: int) -> None:
    training = {"gradient_accumulation": accumulation, "activation_checkpointing": checkpointing}
    (each,) = rank_programs(tiny(strategy, 4, training=training))
    memory = simulate_memory(each.program, load_profile(find_profile("h200-sxm-x4")))
    ends = [int(columns.allocated_bytes[-1]) for step, columns in memory.history if step in ("first", "steady")]
    assert len(ends) >= 3
    assert {*ends} == {memory.steady.allocated_before_bytes} == {int(memory.allocated_bytes[0])}
    assert (memory.kind_bytes[:, 0] == memory.kind_bytes[:, -1]).all()


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"replicate": 2},
        {"replicate": 2, "mixed_precision": {"param": "bf16"}},
        {"reshard_after_forward": 2},
        {"reshard_after_forward": 2, "mixed_precision": {"param": "bf16"}},
        {"forward_prefetch": 2, "backward_prefetch": 2},
    ],
    ids=str,
)
def test_steps_of_every_kind_end_as_they_began(options: dict[str, Any], accumulation: int) -> None:
    section = {"dp": 4, "strategy": "zero3", "fsdp": options}
    asked = tiny("zero3", 4, parallelism=section, training={"gradient_accumulation": accumulation})
    (each,) = rank_programs(asked)
    memory = simulate_memory(each.program, load_profile(find_profile("h200-sxm-x4")))
    ends = [int(columns.allocated_bytes[-1]) for step, columns in memory.history if step in ("first", "steady")]
    assert len(ends) >= 3
    assert {*ends} == {memory.steady.allocated_before_bytes}
    assert (memory.kind_bytes[:, 0] == memory.kind_bytes[:, -1]).all()


def test_shards_that_no_backward_comes_for_are_replaced_by_those_of_the_next_forward() -> None:
    """Which torch makes just before it gives the earlier ones up, and the program just after."""
    variant = variant_of({"reshard_after_forward": 2, "frozen": ("embedding", "blocks.0")})
    made, torchs_lines = program(variant), lines_of(variant)[1]["forward and backward"]
    assert sorted(ours(made, "forward", "backward")) == sorted(torchs_lines)
    memory = simulate_memory(made, load_profile(find_profile("h200-sxm-x4")))
    before = {int(columns.allocated_bytes[-1]) for step, columns in memory.history if step in ("first", "steady")}
    assert before == {memory.steady.allocated_before_bytes}
