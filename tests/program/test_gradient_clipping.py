"""Clipping of sharded gradients: DTensors' against what torch issues, flat shards' in closed form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce, wait_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from perfmodel.hardware.profile import find_profile, load_profile
from perfmodel.program.program import COLLECTIVE, COMPUTE, HOST, WAIT
from perfmodel.program.ranks import rank_programs
from perfmodel.simulate.memory.walk import simulate_memory
from perfmodel.trace.store import get_optimizer_trace, get_trace
from perfmodel.trace.trace import EventKind, Trace
from tests.program.strategies.fsdp.fsdp_scripts import first_step, ours, program, tiny, variant_of
from tests.program.strategies.fsdp.issued import issued
from tests.program.strategies.fsdp.variants import CLIPPED, SCALED


@pytest.mark.parametrize("fields", CLIPPED, ids=str)
def test_clipping_of_dtensors_is_what_torch_issues(fields: dict[str, Any]) -> None:
    variant = variant_of(fields | {"clip": True})
    made, (first, second) = program(variant), issued(variant)
    assert any("all_reduce" in line for line in second["clip"])
    for phase in ("clip", "optimizer"):
        assert ours(made, phase) == second[phase]
        assert ours(first_step(made), phase) == first[phase]


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("fields", SCALED, ids=str)
def test_scaling_of_dtensors_is_undone_as_torch_does(fields: dict[str, Any], clip: bool) -> None:
    """Forward differs: it is not under autocast when it is recorded."""
    variant = variant_of(fields | {"scaled": True, "clip": clip})
    made, (first, second) = program(variant), issued(variant)
    sent = [line for line in (*second["clip"], *second["optimizer"]) if line.startswith("all_reduce")]
    assert sent[0] == f"all_reduce float32 4 of {variant.ranks // variant.replicas} @communicator"
    assert len(sent) == 1 + clip
    for phase in ("clip", "optimizer"):
        assert ours(made, phase) == second[phase]
        assert ours(first_step(made), phase) == first[phase]


def test_a_functional_collective_copies_what_it_sends() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with torch.profiler.profile() as profiler:
            wait_tensor(all_reduce(torch.ones(3), "sum", dist.group.WORLD))
    finally:
        dist.destroy_process_group()
    assert [event.name for event in profiler.events() if event.name == "aten::clone"] == ["aten::clone"]
    made = program(variant_of({"clip": True}))
    assert [each.inputs[0].shape for each in made.operations if each.name == "aten.clone.default"] == [(15,)]  # type: ignore[union-attr]


def test_what_dtensors_cost_the_host_is_that_of_all_parameters_together() -> None:
    made = program(variant_of({"clip": True}))
    rows = [
        row
        for insertion in made.insertions
        if made.runs[insertion.run].phase == "clip"
        for row in insertion.instructions
        if row.kind == HOST
    ]
    shares = {call: sum(row.share for row in rows if row.call == call) for call in {row.call for row in rows}}
    assert shares == pytest.approx({"dtensor clip": 1.0, "dtensor clip parameter": 15.0})


@pytest.mark.parametrize("ranks", [2, 4])
def test_flat_parts_sum_one_number_where_the_host_calls(ranks: int) -> None:
    sections: dict[str, Any] = {
        "optimizer": {"max_grad_norm": 1.0},
        "parallelism": {"dp": ranks, "strategy": "zero1", "zero1_form": "reduce-scatter"},
    }
    (each,) = rank_programs(tiny("zero1", ranks, **sections))
    made, columns = each.program, each.program.instructions
    clip = [at for at in range(len(columns.kind)) if made.runs[columns.run[at]].phase == "clip"]
    work = [
        made.operations[columns.a[at]].name.split(".")[1] if columns.kind[at] == EventKind.OP else "all_reduce"
        for at in clip
        if columns.kind[at] in (EventKind.OP, COLLECTIVE)
    ]
    assert work == [
        *("_foreach_norm", "stack", "linalg_vector_norm", "pow", "all_reduce", "sqrt"),
        *("add", "reciprocal", "mul", "clamp", "_foreach_mul_"),
    ]
    (shard,) = made.trace.optimized or ()
    norm, *_, scale = (made.operations[columns.a[at]] for at in clip if columns.kind[at] == EventKind.OP)
    assert [norm.input_tensors()[0].shape, scale.input_tensors()[0].shape] == [shard.tensor.shape] * 2
    (at,) = (at for at in clip if columns.kind[at] == COLLECTIVE)
    called = made.collectives[columns.a[at]]
    assert (called.kind, called.dtype, called.size_bytes, called.ranks) == ("all_reduce", "float32", 4, ranks)
    assert columns.stream[at] == COMPUTE
    assert not [at for at in clip if columns.kind[at] == WAIT]


# What DDP and ZeroRedundancyOptimizer make of a gradient scaler


@pytest.mark.parametrize("norm", [None, 1.0])
@pytest.mark.parametrize("implementation", ["foreach", "fused", "for-loop"])
def test_zero1_unscales_all_gradients_and_steps_over_its_own(implementation: str, norm: float | None) -> None:
    """As on one device between the scaler's operators, where the optimizer is not fused; and as one that is not, where
    it is.
    """
    sections: dict[str, Any] = {
        "precision": "amp-fp16",
        "optimizer": {"implementation": implementation, "max_grad_norm": norm},
        "parallelism": {"dp": 2, "strategy": "zero1"},
    }
    asked = tiny("zero1", 2, **sections)
    plain = "foreach" if implementation == "fused" else implementation
    alone = get_trace(tiny("none", 1, **sections | {"optimizer": {"implementation": plain, "max_grad_norm": norm}}))
    everything = operators(alone, "optimizer")
    read = everything.index("aten._local_scalar_dense.default")
    for each in rank_programs(asked):
        trace = each.program.trace
        assert trace.optimized is not None
        stepped = get_optimizer_trace(asked, tuple(shard.tensor for shard in trace.optimized))
        assert operators(trace, "clip") == operators(alone, "clip")
        expected = [*everything[: read + 1], *operators(stepped, "optimizer"), everything[-1]]
        assert operators(trace, "optimizer") == expected
        assert len(expected) < len(everything) or implementation != "for-loop"
        assert trace.workload["optimizer"]["implementation"] == implementation


def operators(trace: Trace, phase: str) -> list[str]:
    segment, events = trace.segment(phase), trace.steady
    at = () if segment is None else range(segment.start, segment.stop)
    return [trace.operations[events.a[i]].name for i in at if events.kind[i] == EventKind.OP]


SECTIONS: list[dict[str, Any]] = [
    {"strategy": "zero3"},
    {"strategy": "zero1", "zero1_form": "reduce-scatter"},
    {"strategy": "zero1"},
]


@pytest.mark.parametrize("norm", [None, 1.0])
@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_a_gradient_scaler_leaves_nothing_behind(strategy: str, norm: float | None) -> None:
    sections = {"precision": "amp-fp16", "optimizer": {"max_grad_norm": norm}}
    (each, *_) = rank_programs(tiny(strategy, 2, **sections))
    memory = simulate_memory(each.program, load_profile(find_profile("h200-sxm-x4")))
    ends = [int(columns.allocated_bytes[-1]) for step, columns in memory.history if step in ("first", "steady")]
    assert {*ends[1:]} == {memory.steady.allocated_before_bytes} == {int(memory.allocated_bytes[0])}


@pytest.mark.parametrize("section", SECTIONS, ids=str)
def test_clipping_leaves_nothing_behind(section: dict[str, Any]) -> None:
    profile = load_profile(find_profile("h200-sxm-x4"))
    held = []
    for norm in (None, 1.0):
        sections = {"optimizer": {"max_grad_norm": norm}, "parallelism": {"dp": 4} | section}
        (each, *_) = rank_programs(tiny("", 4, **sections))
        memory = simulate_memory(each.program, profile)
        held.append((int(memory.allocated_bytes[0]), int(memory.allocated_bytes[-1])))
    assert held[0] == held[1]
    assert len(set(held[0])) == 1
