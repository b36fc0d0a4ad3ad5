"""What torch's fully_shard issues and what the program does, spelt alike, a line each: operators with the elements of their
tensors, collectives, waits, and memory that fully_shard asks for and gives up. A wait says whose work it is for:
``gather waits copy-in after 2`` waits for the first two things that the stream copy-in was given in this step.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any

import torch

from perfmodel.cost.transfers import pinned_copy
from perfmodel.program.builder import COMMUNICATION
from perfmodel.program.program import BY_HOST, COLLECTIVE, COMPUTE, RECORD, WAIT, Program
from perfmodel.program.ranks import rank_programs
from perfmodel.program.strategies.fsdp.step import COPY_IN, GATHER, REDUCE, SCATTER
from perfmodel.scenario.scenario import Scenario
from perfmodel.trace.operation import Operation, TensorSpec
from perfmodel.trace.trace import EventKind, StorageKind, gradient_storages
from tests.program.strategies.fsdp.fsdp_recorder import Record
from tests.program.strategies.fsdp.recorded_fsdp import TOKENS, VOCABULARY, Variant, record_steps

STREAMS = {
    BY_HOST: "host",
    COMPUTE: "compute",
    COMMUNICATION: "communicator",
    COPY_IN: "copy-in",
    GATHER: "gather",
    SCATTER: "scatter",
    REDUCE: "reduce",
}
TORCHS_STREAMS = {
    "host": "host",
    "compute": "compute",
    "all_gather_copy_in": "copy-in",
    "all_gather": "gather",
    "reduce_scatter": "scatter",
    "all_reduce": "reduce",
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
COPIES: dict[str | None, str] = {"h2d": "copy to device", "d2h": "copy to host"}
LEFT_OUT = "div.Tensor"  # the program takes the mean over micro-batches, the recorder does not
BELOW = [
    (phase, "aten.clone.default") for phase in ("clip", "optimizer")
]  # a functional collective copies below the recorder
ROLES = {  # by the stream of the allocation and what it holds
    (COPY_IN, StorageKind.PARAMETER): "gathered",
    (COMPUTE, StorageKind.PARAMETER): "unsharded",
    (COMPUTE, StorageKind.GRADIENT): "reduced",
    (SCATTER, StorageKind.GRADIENT): "scattered",
    (REDUCE, StorageKind.GRADIENT): "scattered",
}
TORCHS_ROLES = {
    "all-gather inputs": "gathered",
    "all-gather output": "gathered",
    "unsharded": "unsharded",
    "sharded post forward": "unsharded",
    "reduce-scatter input": "reduced",
    "reduce-scatter output": "scattered",
    "sharded gradient": "scattered",
    "gradient": "gradient",
    "accumulated gradient": "reduced",
}
SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
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

    def beside(self, text: str, stream: str) -> None:
        """A collective on the communicator's own stream, which first waits for the one it is called on."""
        self.lines.append(f"communicator waits {stream} after {self._given[stream]}")
        self.work(text, "communicator")

    def await_communicator(self, stream: str) -> None:
        self.lines.append(f"{stream} waits communicator after {self._given['communicator']}")

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
            issue = script.beside if row.is_async else script.work
            issue(f"{row.name} {row.dtype} {row.size_bytes} of {row.ranks}", stream)
        elif row.kind == "op":
            script.kernel(row.name, _operands(row), stream)
        elif row.kind == "record":
            script.record(row.event, stream)
        elif row.kind == "wait" and row.source == "communicator":
            script.await_communicator(stream)
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
    for name in ("forward_prefetch", "backward_prefetch"):
        options[name] = getattr(variant, name) or None
    options["replicate"] = variant.replicas
    options["offload"] = variant.offload
    if variant.param_dtype is not None or variant.reduce_dtype is not None:
        options["mixed_precision"] = {
            "param": variant.param_dtype and SHORT[variant.param_dtype],
            "reduce": variant.reduce_dtype and SHORT[variant.reduce_dtype],
        }
    scenario = Scenario.model_validate(
        {
            "model": {
                "target": "tests.program.strategies.fsdp.recorded_fsdp:Model",
                "arguments": {
                    "blocks": variant.blocks,
                    "checkpoint_blocks": False,
                    "widening": variant.widening,
                    "tied": variant.tied,
                    "frozen": variant.frozen,
                },
                "inputs": {"tokens": {"shape": [TOKENS], "dtype": "int64", "high": VOCABULARY}},
                "loss": "tests.program.strategies.fsdp.fsdp_scripts:summed",
                "blocks": "blocks",
            },
            "batch": {"size": 1},
            "precision": "amp-fp16" if variant.scaled else "fp32",
            "optimizer": {
                "max_grad_norm": 1.0 if variant.clip else None,
                "implementation": "fused" if variant.fused else "foreach",
            },
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
    return replace(made, trace=trace, runs=made.first_runs, insertions=made.first_insertions)


def ours(made: Program, *phases: str) -> list[str]:
    script, columns = Script(), made.instructions
    roles, held = _roles(made), _held_after(made)
    rows = zip(columns.kind, columns.a, columns.b, columns.stream, columns.run, strict=True)
    for kind, a, b, stream_number, run in (tuple(map(int, row)) for row in rows):
        phase = made.runs[run].phase
        if phase not in phases or (kind == EventKind.OP and (phase, made.operations[a].name) in BELOW):
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
            held[a] = b
            script.memory("alloc", roles[a], b, stream)
        elif kind == EventKind.FREE and a in roles and a in held:
            script.memory("free", roles[a], held.pop(a))
    return script.lines


def _roles(made: Program) -> dict[int, str]:
    """What storages that fully_shard asks for or gives up hold."""
    inserted = [row for insertion in made.insertions for row in insertion.instructions if row.kind == EventKind.ALLOC]
    found = {row.a: ROLES[row.stream, row.holds] for row in inserted if row.holds != StorageKind.TEMPORARY}
    events, gradients = made.trace.steady, set(gradient_storages(made.trace, made.trace.steady).values())
    allocated = set(events.a[events.kind == EventKind.ALLOC].tolist())
    return found | dict.fromkeys(allocated & gradients, "gradient")


def _held_after(made: Program) -> dict[int, int]:
    """Storages of which a step leaves the last word with an allocation, and their bytes: what the next step begins with."""
    columns = made.instructions
    rows = zip(columns.kind, columns.a, columns.b, strict=True)
    last = {int(a): (kind, int(b)) for kind, a, b in rows if kind in STORAGES}
    return {storage: size_bytes for storage, (kind, size_bytes) in last.items() if kind == EventKind.ALLOC}


def _spell_kernel(script: Script, operation: Operation, stream: str) -> None:
    name = operation.name.removeprefix("aten.").removesuffix(".default")
    tensors = operation.input_tensors()
    name = COPIES.get(pinned_copy(operation), name)
    if name == "_foreach_copy_":
        tensors = [each for each in operation.inputs[0] if isinstance(each, TensorSpec)]  # type: ignore[union-attr]
    script.kernel(name, [tensor.numel for tensor in tensors], stream)


def variant_of(fields: dict[str, Any]) -> Variant:
    return Variant(**({"widening": WIDENING} | fields))


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
