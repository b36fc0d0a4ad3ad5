"""Shards in host memory: what the device keeps of them, what copies are of, and what the host does itself."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from perfmodel.hardware.host_calls import COPY_TO_DEVICE, COPY_TO_HOST
from perfmodel.hardware.profile import find_profile, load_profile
from perfmodel.prediction.predict import predict
from perfmodel.program.program import BY_HOST, HOST, WAIT, Program
from perfmodel.program.ranks import rank_programs
from perfmodel.program.sharding import padded_shard_of, shard_of
from perfmodel.scenario.scenario import Scenario
from perfmodel.simulate.memory.walk import simulate_memory
from perfmodel.trace.trace import EventKind, StorageKind
from perfmodel.units import MIB
from tests.program.strategies.fsdp.fsdp_scripts import rounded, tiny
from tests.refusals import refused


def offloaded(ranks: int, options: dict[str, Any] | None = None, **sections: Any) -> Scenario:
    section = {"dp": ranks, "strategy": "zero3", "fsdp": {"offload": True} | (options or {})}
    return tiny("zero3", ranks, parallelism=section, **sections)


def calls(made: Program, phase: str) -> Counter[str]:
    columns = made.instructions
    found: Counter[str] = Counter()
    for position in np.flatnonzero(columns.call >= 0).tolist():
        if made.runs[columns.run[position]].phase == phase:
            found[columns.calls[columns.call[position]]] += columns.share[position]
    return found


@pytest.mark.parametrize(("name", "implementation"), [("adamw", "foreach"), ("adamw", "fused"), ("sgd", "for-loop")])
def test_the_optimizer_is_work_of_the_host_alone(name: str, implementation: str) -> None:
    (each,) = rank_programs(offloaded(2, optimizer={"name": name, "implementation": implementation}))
    made, columns = each.program, each.program.instructions
    in_optimizer = np.array([made.runs[run].phase == "optimizer" for run in columns.run])
    assert set(columns.kind[in_optimizer].tolist()) == {HOST}
    shards = [shard_of(parameter.tensor, 2, 0) for parameter in made.trace.parameters]
    prefix = f"cpu optimizer {name} {implementation}"
    assert calls(made, "optimizer") == {
        prefix: 1.0,
        f"{prefix} parameter": len(shards),
        f"{prefix} MiB": pytest.approx(sum(shard.bytes for shard in shards) / MIB),
    }


def test_each_parameter_is_copied_in_for_forward_and_backward_and_its_gradient_out_and_awaited() -> None:
    (each,) = rank_programs(offloaded(2))
    made, columns = each.program, each.program.instructions
    names = [parameter.name for parameter in made.trace.parameters]
    in_blocks = sum(name.startswith("layers.") for name in names)
    assert 0 < in_blocks < len(names)
    assert calls(made, "forward")[COPY_TO_DEVICE] == len(names)
    assert calls(made, "backward")[COPY_TO_DEVICE] == in_blocks
    assert calls(made, "backward")[COPY_TO_HOST] == len(names)
    awaited = np.flatnonzero((columns.kind == WAIT) & (columns.stream == BY_HOST))
    assert len(awaited) == len(names)
    work = np.flatnonzero((columns.kind == EventKind.OP) & (columns.call >= 0))
    copied = [at for at in work.tolist() if columns.calls[columns.call[at]] == COPY_TO_HOST]
    assert max(copied) < min(awaited)


def test_a_rank_copies_out_the_rows_that_it_has() -> None:
    """Shards that are sent are padded; those of gradients that are kept are not."""
    for each in rank_programs(offloaded(3)):
        made, (rank, *_) = each.program, each.ranks
        copies = [operation for operation in made.extra_operations if operation.base_name == "_to_copy"]
        found = {False: set[int](), True: set[int]()}
        for operation in copies:
            found[operation.outputs[0].device == "cpu"].add(operation.outputs[0].numel)
        tensors = [parameter.tensor for parameter in made.trace.parameters]
        assert found[False] == {padded_shard_of(tensor, 3).numel for tensor in tensors}
        assert found[True] == {shard_of(tensor, 3, rank).numel for tensor in tensors} - {0}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"replicate": 2},
        {"replicate": 2, "mixed_precision": {"param": "bf16"}},
        {"reshard_after_forward": 2},
        {"mixed_precision": {"param": "bf16", "reduce": "fp32"}},
    ],
    ids=str,
)
@pytest.mark.parametrize("accumulation", [1, 3])
def test_nothing_of_the_model_is_on_the_device_between_steps(options: dict[str, Any], accumulation: int) -> None:
    asked = offloaded(4, options, training={"gradient_accumulation": accumulation})
    (each,) = rank_programs(asked)
    memory = simulate_memory(each.program, load_profile(find_profile("h200-sxm-x4")))
    held = {kind: int(memory.kind_bytes[kind][0]) for kind in StorageKind}
    for kind in (StorageKind.PARAMETER, StorageKind.GRADIENT, StorageKind.OPTIMIZER_STATE, StorageKind.ACTIVATION):
        assert held[kind] == 0
    ends = [int(columns.allocated_bytes[-1]) for step, columns in memory.history if step in ("first", "steady")]
    assert len(ends) >= 3
    assert {*ends} == {memory.steady.allocated_before_bytes}
    assert (memory.kind_bytes[:, 0] == memory.kind_bytes[:, -1]).all()


def test_the_model_is_whole_on_the_device_until_it_is_wrapped() -> None:
    (each,) = rank_programs(offloaded(2))
    memory = simulate_memory(each.program, load_profile(find_profile("h200-sxm-x4")))
    (wrapping,) = (columns for step, columns in memory.history if step == "wrapping")
    whole = rounded([parameter.tensor.bytes for parameter in each.program.trace.parameters])
    (model, *_) = (columns for step, columns in memory.history if step == "model")
    before, after = int(model.allocated_bytes[-1]), int(wrapping.allocated_bytes[-1])
    assert before - after == whole
    assert wrapping.allocated_bytes.max() > before


def test_what_is_not_kept_in_float32_was_not_measured() -> None:
    with refused("parallelism.fsdp.offload", "float32", "bfloat16"):
        rank_programs(offloaded(2, precision="bf16"))


def test_a_slower_host_is_not_slower_where_memory_paces_it() -> None:
    wired = {"profile": "h200-sxm-x2", "gpus": 2, "interconnect": "nvlink"}
    scenario, profile = offloaded(2, hardware=wired), load_profile(find_profile("h200-sxm-x2"))
    host_s = profile.host["reference"].time_s
    once, twice = (predict(scenario, profile, host_reference_s=each * host_s) for each in (1, 2))
    parts_mib = sum(shard_of(each.tensor, 2, 0).bytes for each in once.program.trace.parameters) / MIB
    memory_s = parts_mib * profile.interconnects["nvlink"].host["cpu optimizer adamw foreach MiB"].time_s
    busy_s = once.timeline.host_busy_s
    assert twice.timeline.host_busy_s == pytest.approx(2 * busy_s - memory_s, rel=1e-9)
    assert memory_s > 1e-4 * busy_s
