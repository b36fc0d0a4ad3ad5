"""Gradients kept over micro-batches in another dtype; what is issued is compared with torch's in test_fsdp."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from perfmodel.hardware.profile import find_profile, load_profile
from perfmodel.program.ranks import rank_programs
from perfmodel.simulate.memory.walk import simulate_memory
from perfmodel.trace.trace import EventKind, StorageKind
from tests.program.strategies.fsdp.fsdp_scripts import rounded, tiny

POLICIES = [{"param": "bf16", "reduce": "fp32"}, {"reduce": "bf16"}, {"param": "fp16", "reduce": "fp32"}]


def accumulating(policy: dict[str, str], micro_batches: int, strategy: str = "zero3") -> Any:
    sections: dict[str, Any] = {
        "training": {"gradient_accumulation": micro_batches},
        "parallelism": {"dp": 4, "strategy": strategy, "fsdp": {"mixed_precision": policy}},
    }
    (each,) = rank_programs(tiny(strategy, 4, **sections))
    return each.program


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
@pytest.mark.parametrize("micro_batches", [2, 4])
def test_steps_end_as_they_began(strategy: str, policy: dict[str, str], micro_batches: int) -> None:
    made = accumulating(policy, micro_batches, strategy)
    memory = simulate_memory(made, load_profile(find_profile("h200-sxm-x4")))
    ends = [int(columns.allocated_bytes[-1]) for step, columns in memory.history if step in ("first", "steady")]
    assert {*ends} == {memory.steady.allocated_before_bytes} == {int(memory.allocated_bytes[0])}


@pytest.mark.parametrize("micro_batches", [2, 3])
def test_sums_are_made_once_and_added_to_in_every_other_micro_batch(micro_batches: int) -> None:
    made = accumulating({"param": "bf16", "reduce": "fp32"}, micro_batches)
    columns, parameters = made.instructions, made.trace.parameters
    names = [
        made.operations[a].name
        for kind, a, event in zip(columns.kind, columns.a, columns.event, strict=True)
        if kind == EventKind.OP and event < 0
    ]
    assert names.count("aten._to_copy.default") == len(parameters)
    assert names.count("aten.add_.Tensor") == (micro_batches - 1) * len(parameters)


def test_sums_are_held_between_micro_batches() -> None:
    """As large as they are in the dtype of the reduction, each a block of its own."""
    made = accumulating({"param": "bf16", "reduce": "fp32"}, 2)
    columns, parameters = made.instructions, made.trace.parameters
    memory = simulate_memory(made, load_profile(find_profile("h200-sxm-x4")))
    runs = [made.runs[run] for run in columns.run.tolist()]
    second = next(i for i, run in enumerate(runs) if (run.phase, run.micro_batch) == ("forward", 1))
    sample = int(np.searchsorted(memory.event, second)) - 1  # the last before it
    assert int(memory.kind_bytes[StorageKind.GRADIENT][sample]) == rounded(4 * each.tensor.numel for each in parameters)
