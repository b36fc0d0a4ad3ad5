"""The programs of fully_shard, instruction by instruction against what torch issues for the same model.

What both issue is spelt alike, a line each: operators with the elements of their tensors, collectives, waits, and
memory that fully_shard asks for and gives up. A wait says whose work it is for: ``gather waits copy-in after 2`` waits
for the first two things that the stream copy-in was given in this step.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any

import pytest
import torch

from perfmodel.hardware.profile import find_profile, load_profile
from perfmodel.program.fsdp import COPY_IN, GATHER, SCATTER
from perfmodel.program.program import COLLECTIVE, COMPUTE, RECORD, WAIT, Program
from perfmodel.program.ranks import rank_programs
from perfmodel.program.shards import padded_shard_of
from perfmodel.simulate.memory import simulate_memory
from perfmodel.workload.ops import Operation, TensorSpec
from perfmodel.workload.scenario import Scenario
from perfmodel.workload.trace_file import EventKind, StorageKind, gradient_storages
from tests.program.fsdp_recorder import Record
from tests.program.recorded_fsdp import TOKENS, VOCABULARY, Variant, record_steps

STREAMS = {COMPUTE: "compute", COPY_IN: "copy-in", GATHER: "gather", SCATTER: "scatter"}
TORCHS_STREAMS = {
    "compute": "compute",
    "all_gather_copy_in": "copy-in",
    "all_gather": "gather",
    "reduce_scatter": "scatter",
}
STORAGES = (EventKind.ALLOC, EventKind.FREE)
KERNELS = {  # torch's names, and the program's
    "fsdp.all_gather_copy_in": "copy in",
    "fsdp.split_with_sizes_copy": "copy out",
    "fsdp.chunk_cat": "join",
    "_foreach_copy_": "copy in",
    "split_with_sizes_copy.out": "copy out",
    "_chunk_cat.out": "join",
    "add.Tensor": "add",  # autograd's sum of two gradients is in place, but not under the recorder
    "add_.Tensor": "add",
}
LEFT_OUT = "div.Tensor"  # the program takes the mean over micro-batches, the recorder does not
ROLES = {  # by the stream of the allocation and what it holds
    (COPY_IN, StorageKind.PARAMETER): "gathered",
    (COMPUTE, StorageKind.PARAMETER): "unsharded",
    (COMPUTE, StorageKind.GRADIENT): "reduced",
    (SCATTER, StorageKind.GRADIENT): "scattered",
}
TORCHS_ROLES = {
    "all-gather inputs": "gathered",
    "all-gather output": "gathered",
    "unsharded": "unsharded",
    "reduce-scatter input": "reduced",
    "reduce-scatter output": "scattered",
    "sharded gradient": "scattered",
    "gradient": "gradient",
}
SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16"}
WIDENING = 4  # makes groups of unlike sizes, so that sizes say which group it is


def summed(module: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The recorder's loss."""
    return module(inputs["tokens"]).sum()


class Script:
    """Lines as they are issued."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._given: Counter[str] = Counter()
        self._marks: dict[int, tuple[str, int]] = {}

    def work(self, text: str, stream: str) -> None:
        self._given[stream] += 1
        self.lines.append(f"{text} @{stream}")

    def kernel(self, name: str, elements: Iterable[int], stream: str) -> None:
        """elements: of tensors, since shapes of their views differ. One of nothing but empty tensors launches nothing,
        and one of no tensor makes the recorder's tokens.
        """
        if name != LEFT_OUT and (found := [count for count in elements if count]):
            self.work(f"{KERNELS.get(name, name)} {found}", stream)

    def record(self, mark: int, stream: str) -> None:
        self._marks[mark] = (stream, self._given[stream])

    def wait(self, mark: int, stream: str) -> None:
        source, count = self._marks[mark]
        self.lines.append(f"{stream} waits {source} after {count}")

    def memory(self, kind: str, role: str, size_bytes: int, stream: str = "") -> None:
        self.lines.append(f"{kind} {role} {size_bytes}{stream and f' @{stream}'}")


# What torch issues


@cache
def recorded(variant: Variant) -> list[list[Record]]:
    return record_steps(variant, 2)


def torchs(records: list[Record], *phases: str) -> list[str]:
    script = Script()
    for row in (row for row in records if row.phase in phases):
        stream = TORCHS_STREAMS[row.stream]
        if row.kind == "collective":
            script.work(f"{row.name} {row.dtype} {row.size_bytes} of {row.ranks}", stream)
        elif row.kind == "op":
            script.kernel(row.name, _operands(row), stream)
        elif row.kind == "record":
            script.record(row.event, stream)
        elif row.kind == "wait":
            script.wait(row.event, stream)
        elif row.kind in ("alloc", "free") and row.name in TORCHS_ROLES:
            script.memory(row.kind, TORCHS_ROLES[row.name], row.size_bytes, stream if row.kind == "alloc" else "")
    return script.lines


def _operands(row: Record) -> list[int]:
    found = [prod(map(int, re.findall(r"\d+", text[text.index("[") :]))) for text in row.inputs]
    if row.name == "fsdp.all_gather_copy_in":
        found.pop()  # what is gathered
    if row.name == "_foreach_copy_":
        found = found[: len(found) // 2]  # what is copied into
    return found


# What the program has


@cache
def program(variant: Variant) -> Program:
    """Of the variant's rank."""
    options: dict[str, Any] = {"wrap": "blocks" if variant.wrap_blocks else "root"}
    section: dict[str, Any] = {"dp": variant.ranks, "strategy": "zero3", "fsdp": options}
    if variant.reshard_after_forward is False:
        section["strategy"] = "zero2"
    elif variant.reshard_after_forward is not None:
        options["reshard_after_forward"] = variant.reshard_after_forward
    if variant.param_dtype is not None or variant.reduce_dtype is not None:
        options["mixed_precision"] = {
            "param": variant.param_dtype and SHORT[variant.param_dtype],
            "reduce": variant.reduce_dtype and SHORT[variant.reduce_dtype],
        }
    scenario = Scenario.model_validate(
        {
            "model": {
                "target": "tests.program.recorded_fsdp:Model",
                "arguments": {
                    "blocks": variant.blocks,
                    "checkpoint_blocks": False,
                    "widening": variant.widening,
                    "tied": variant.tied,
                    "frozen": variant.frozen,
                },
                "inputs": {"tokens": {"shape": [TOKENS], "dtype": "int64", "high": VOCABULARY}},
                "loss": "tests.program.test_fsdp:summed",
                "blocks": "blocks",
            },
            "batch": {"size": 1},
            "training": {
                "gradient_accumulation": variant.micro_batches,
                "activation_checkpointing": "full" if variant.checkpoint else "none",
            },
            "parallelism": section,
            "hardware": {"profile": "any", "gpus": variant.ranks},
        }
    )
    found = rank_programs(scenario, allow_import=True)
    return next(each.program for each in found if variant.rank in each.ranks)


def first_step(made: Program) -> Program:
    """The first step as if it were the steady one."""
    trace = replace(made.trace, steady=made.trace.first)
    return replace(made, trace=trace, runs=made.first_runs, edits=made.first_edits)


def ours(made: Program, *phases: str) -> list[str]:
    script, columns = Script(), made.instructions
    roles, held = _roles(made), _held_after(made)
    rows = zip(columns.kind, columns.a, columns.stream, columns.run, strict=True)
    for kind, a, stream_number, run in (tuple(map(int, row)) for row in rows):
        if made.runs[run].phase not in phases:
            continue
        stream = STREAMS[stream_number]
        if kind == EventKind.OP and made.operations[a].runs_on_device:
            _spell_kernel(script, made.operations[a], stream)
        elif kind == COLLECTIVE:
            called = made.collectives[a]
            script.work(f"{called.kind} {called.dtype} {called.size_bytes} of {called.ranks}", stream)
        elif kind == RECORD:
            script.record(a, stream)
        elif kind == WAIT:
            script.wait(a, stream)
        elif kind == EventKind.ALLOC and a in roles:
            held.add(a)
            script.memory("alloc", *roles[a], stream)
        elif kind == EventKind.FREE and a in held:
            held.discard(a)
            script.memory("free", *roles[a])
    return script.lines


def _roles(made: Program) -> dict[int, tuple[str, int]]:
    """What storages that fully_shard asks for or gives up hold, and their bytes."""
    inserted = [row for edit in made.edits for row in edit.instructions if row.kind == EventKind.ALLOC]
    found = {row.a: (ROLES[row.stream, row.holds], row.b) for row in inserted}
    events, gradients = made.trace.steady, set(gradient_storages(made.trace, made.trace.steady).values())
    traced = zip(events.kind.tolist(), events.a.tolist(), events.b.tolist(), strict=True)
    return found | {a: ("gradient", b) for kind, a, b in traced if kind == EventKind.ALLOC and a in gradients}


def _held_after(made: Program) -> set[int]:
    """Storages of which a step leaves the last word with an allocation: what the next step begins with."""
    columns = made.instructions
    last = {int(a): kind for kind, a in zip(columns.kind, columns.a, strict=True) if kind in STORAGES}
    return {storage for storage, kind in last.items() if kind == EventKind.ALLOC}


def _spell_kernel(script: Script, operation: Operation, stream: str) -> None:
    name = operation.name.removeprefix("aten.").removesuffix(".default")
    tensors = operation.input_tensors()
    if name == "_foreach_copy_":
        tensors = [each for each in operation.inputs[0] if isinstance(each, TensorSpec)]  # type: ignore[union-attr]
    script.kernel(name, [tensor.numel for tensor in tensors], stream)


VARIANTS: list[dict[str, Any]] = [
    {},
    {"reshard_after_forward": False},
    {"reshard_after_forward": True},
    {"wrap_blocks": False},
    {"wrap_blocks": False, "reshard_after_forward": True},
    {"ranks": 2},
    {"ranks": 5, "rank": 4},  # has no row of most parameters
    {"blocks": 1},
    {"micro_batches": 2},
    {"micro_batches": 2, "reshard_after_forward": False},
    {"micro_batches": 2, "reshard_after_forward": True},
    {"micro_batches": 3},
    {"checkpoint": "inside"},
    {"checkpoint": "inside", "reshard_after_forward": False},
    {"tied": True, "micro_batches": 2},
    {"param_dtype": torch.bfloat16},
    {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16, "reshard_after_forward": False},
    {"param_dtype": torch.bfloat16, "micro_batches": 2},
    {"reduce_dtype": torch.bfloat16},
]
# Inputs that take no gradient leave a group's turn to the end of backward; parameters that take none are not reduced.
FROZEN: list[dict[str, Any]] = [
    {"frozen": ("embedding",), "micro_batches": 2},
    {"frozen": ("embedding", "blocks.0.up")},
    {"frozen": ("embedding", "blocks.0"), "micro_batches": 2},  # which is gathered for a backward that does not come
    {"frozen": ("embedding", "blocks.0"), "reshard_after_forward": False},
    {"frozen": ("blocks.1",)},
    {"frozen": ("head", "embedding")},
]


def variant_of(fields: dict[str, Any]) -> Variant:
    return Variant(**({"widening": WIDENING} | fields))


@pytest.mark.parametrize("fields", [*VARIANTS, *FROZEN], ids=str)
def test_forward_and_backward_are_what_torch_issues(fields: dict[str, Any]) -> None:
    variant = variant_of(fields)
    made, (first, second) = program(variant), recorded(variant)
    assert ours(made, "forward", "backward") == torchs(second, "forward", "backward")
    assert ours(first_step(made), "forward", "backward") == torchs(first, "forward", "backward")
    assert ours(made, "zero_grad") == torchs(second, "zero_grad")


@pytest.mark.parametrize("fields", [*VARIANTS, *FROZEN], ids=str)
def test_the_optimizer_steps_over_the_ranks_parts(fields: dict[str, Any]) -> None:
    variant = variant_of(fields)
    made, (first, second) = program(variant), recorded(variant)
    assert ours(made, "optimizer") == torchs(second, "optimizer")
    assert ours(first_step(made), "optimizer") == torchs(first, "optimizer")


@pytest.mark.parametrize("ranks", [3, 5])
def test_every_ranks_parts_are_torchs(ranks: int) -> None:
    """Their shapes, but for the empty ones, which cost nothing."""
    for rank in range(ranks):
        variant = variant_of({"ranks": ranks, "rank": rank})
        optimized = program(variant).trace.optimized
        assert optimized is not None
        (steps,) = (row for row in recorded(variant)[1] if row.name == "_foreach_sqrt")
        shapes = [re.findall(r"\d+", text.removeprefix("float32")) for text in steps.inputs]
        assert [[str(size) for size in part.tensor.shape] for part in optimized] == [
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
        states = 2 * rounded([part.tensor.bytes for part in trace.optimized])
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
    assert {part.tensor.dtype for part in half.program.trace.optimized or ()} == {"float32"}


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_steps_end_as_they_began(strategy: str, checkpointing: str, accumulation: int) -> None:
    training = {"gradient_accumulation": accumulation, "activation_checkpointing": checkpointing}
    (each,) = rank_programs(tiny(strategy, 4, training=training))
    memory = simulate_memory(each.program, load_profile(find_profile("h200-sxm-x4")))
    ends = [int(columns.allocated_bytes[-1]) for part, columns in memory.history if part in ("first", "steady")]
    assert len(ends) >= 3
    assert {*ends} == {memory.steady.allocated_before_bytes} == {int(memory.allocated_bytes[0])}
    assert (memory.kind_bytes[:, 0] == memory.kind_bytes[:, -1]).all()


def tiny(strategy: str, ranks: int, **sections: Any) -> Scenario:
    return Scenario.model_validate(
        {
            "model": {"family": "gpt", "size": "tiny"},
            "batch": {"size": 2, "sequence_length": 8},
            "parallelism": {"dp": ranks, "strategy": strategy},
            "hardware": {"profile": "any", "gpus": ranks},
            **sections,
        }
    )


def rounded(sizes: Iterable[int]) -> int:
    return sum(-(-size // 512) * 512 for size in sizes)
