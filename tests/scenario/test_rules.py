"""Each rule of scenario keys: what it refuses, by the key and the values it names, and what is next to it and passes.

Every refusal is asked of ``predict`` and of ``validate``, which refuse the same scenario in the same sentence.
"""

from __future__ import annotations

from typing import Any

import pytest

from perfmodel.errors import PerfModelError
from perfmodel.prediction.support import check_supported
from perfmodel.scenario.families import FAMILIES
from perfmodel.scenario.rules import check_scenario, check_workload
from perfmodel.scenario.scenario import SPLITTING, Scenario
from tests.prediction.toys import wired
from tests.refusals import refused
from validate.run import measure

GPT = {"family": "gpt", "size": "tiny", "layers": 6}


def asked(device: str = "cuda", **keys: Any) -> None:
    """Apply the rules to a scenario that, but for ``keys``, one GPU can run."""
    check_scenario(scenario_of(**keys), device)


def scenario_of(**keys: Any) -> Scenario:
    plain = {"model": GPT, "batch": {"size": 8, "sequence_length": 8}, "hardware": {"profile": "toy.json"}}
    return Scenario.model_validate(plain | keys)


def two(strategy: str = "ddp", **section: Any) -> dict[str, Any]:
    return {
        "parallelism": {"dp": 2, "strategy": strategy, **section},
        "hardware": {"profile": "toy.json", "gpus": 2},
    }


def one(strategy: str, **fsdp: Any) -> dict[str, Any]:
    return {"parallelism": {"strategy": strategy, "fsdp": fsdp}}


def pipeline(dp: int = 1, strategy: str = "none", static_graph: bool = False, **section: Any) -> dict[str, Any]:
    section = {"stages": 2, "micro_batches": 4, **section}
    return {
        "parallelism": {"dp": dp, "strategy": strategy, "static_graph": static_graph, "pp": section},
        "hardware": {"profile": "toy.json", "gpus": dp * section["stages"]},
    }


def vision(**keys: Any) -> dict[str, Any]:
    return {"model": {"family": "vgg16"}, "batch": {"size": 4}} | keys


CLIPPED = {"optimizer": {"max_grad_norm": 1.0}}
FUSED_SGD = {"name": "sgd", "implementation": "fused"}
BF16_POLICY = {"mixed_precision": {"param": "bf16", "reduce": "fp32"}}

WORKLOADS: list[tuple[dict[str, Any], tuple[object, ...]]] = [
    ({"model": {}}, ("model", "model.family", "model.target")),
    ({"model": GPT | {"target": "package:Model"}}, ("model", "model.family", "model.target")),
    ({"model": {"family": "gtp"}}, ("model.family", "'gtp'", "'gpt'")),
    ({"model": {"family": "gpt", "size": "tinny"}}, ("model.size", "gpt", "'tinny'", "'tiny'")),
    ({"model": {"family": "vgg16", "size": "a"}}, ("model.size", "vgg16", "give dimensions")),
    ({"model": GPT | {"dropout": 0.1}}, ("model.dropout", "gpt", 0.1, "attention")),
    ({"model": GPT | {"blocks": "layers"}}, ("model.blocks", "'gpt'", "model.target")),
    ({"model": GPT | {"layers": 10**6}}, ("model.layers", "1,000,000")),
    ({"model": {"family": "gpt", "layers": 2}}, ("model.width", "model.size", "heads")),
    ({"model": GPT | {"heads": 5}}, ("model.heads", "model.width=64", 5, 32)),
    ({"model": {"family": "llama", "size": "1b", "kv_heads": 5}}, ("model.kv_heads", "model.heads=32", 5, 16)),
    ({"batch": {"size": 1}}, ("batch.sequence_length", "gpt")),
    (vision(batch={"size": 1, "sequence_length": 8}), ("batch.sequence_length", "vgg16", 8, "model.image_size")),
    (
        {
            "model": {"target": "p:M", "inputs": {"x": {"shape": ["batch", "sequence"], "dtype": "int64", "high": 9}}},
            "batch": {"size": 1},
        },
        ("batch.sequence_length", "model.inputs"),
    ),
    ({"training": {"compile": True}}, ("training.compile", "false", "true")),
    (
        vision(training={"activation_checkpointing": "full"}),
        ("training.activation_checkpointing", "none", "vgg16", "'full'", "model.blocks"),
    ),
    (
        {"model": {"target": "p:M"}, "training": {"activation_checkpointing": {"every": 2}}},
        ("training.activation_checkpointing", "none", "p:M", "every=2"),
    ),
]

RANKS: list[tuple[dict[str, Any], tuple[object, ...]]] = [
    ({"hardware": {"profile": "p", "gpus": 2}}, ("parallelism.dp", "hardware.gpus", "dp=1", "gpus=2")),
    ({"hardware": {"profile": "p", "nodes": 2}}, ("hardware.nodes", 1, 2)),
    (
        two() | {"hardware": {"profile": "p", "gpus": 2, "gpu_speeds": [1, 1, 1]}},
        ("hardware.gpu_speeds", "hardware.gpus=2", 3),
    ),
    (two("none"), ("parallelism.strategy", 2, "none", "ddp")),
    *(
        (two(strategy) | {"mode": "forward"}, ("mode", "train", strategy, "forward"))
        for strategy in ("zero1", "zero2", "zero3")
    ),
    (
        two(static_graph=True) | {"training": {"gradient_accumulation": 3}},
        ("parallelism.static_graph", "false", "true", "training.gradient_accumulation=3"),
    ),
    (
        two("zero1", zero1_form="reduce-scatter") | {"precision": "amp-fp16"},
        ("precision", "amp-fp16", "parallelism.zero1_form", "reduce-scatter", "broadcast"),
    ),
]

SETTINGS: list[tuple[dict[str, Any], tuple[object, ...]]] = [
    (two("ddp", zero1_form="broadcast"), ("parallelism.zero1_form", "ddp", "broadcast", "zero1")),
    (two("flat", bucket_cap_mb=5.0), ("parallelism.bucket_cap_mb", "flat", 5.0, "ddp")),
    (two("flat", gradient_as_bucket_view=True), ("parallelism.gradient_as_bucket_view", "flat", "true")),
    (two("flat", static_graph=True), ("parallelism.static_graph", "flat", "true")),
    (two("ddp", parameters_as_bucket_view=True), ("parallelism.parameters_as_bucket_view", "ddp", "zero1")),
    (two("zero1", fsdp={}), ("parallelism.fsdp", "zero1", "zero2", "zero3")),
    (two("ddp", fsdp={"wrap": "root", "offload": True}), ("parallelism.fsdp", "ddp", "offload", "wrap")),
]

SHARDING: list[tuple[dict[str, Any], tuple[object, ...]]] = [
    (two("zero3", fsdp={"replicate": 2}), ("parallelism.fsdp.replicate", "parallelism.dp=2", "got 2", "ddp")),
    (two("zero2", fsdp={"replicate": 3}), ("parallelism.fsdp.replicate", "parallelism.dp=2", 3)),
    (two("zero2", fsdp={"reshard_after_forward": 3}), ("parallelism.fsdp.reshard_after_forward", 2, 3)),
    (
        two("zero3", fsdp={"wrap": "root", "forward_prefetch": 1}),
        ("parallelism.fsdp.forward_prefetch", "root", 1, "blocks"),
    ),
    (
        two("zero3", fsdp={"wrap": "root", "backward_prefetch": 2}),
        ("parallelism.fsdp.backward_prefetch", "root", 2, "blocks"),
    ),
    (two("zero3", fsdp=BF16_POLICY) | {"precision": "bf16"}, ("precision", "fp32", "bf16")),
    (two("zero3", fsdp={"offload": True}) | CLIPPED, ("parallelism.fsdp.offload", "clipping", "amp-fp16", "true")),
    (two("zero3", fsdp={"offload": True}) | {"precision": "amp-fp16"}, ("parallelism.fsdp.offload", "clipping")),
    *(
        (
            two(strategy) | {"optimizer": FUSED_SGD | {"momentum": momentum}},
            ("optimizer.implementation", "sgd", strategy, "fused", "foreach"),
        )
        for strategy in ("zero2", "zero3")
        for momentum in (0.0, 0.9)
    ),
    *(
        (one(strategy, **{name: given}), (f"parallelism.fsdp.{name}", "dp=1", shown))
        for strategy in ("zero2", "zero3")
        for name, given, shown in [
            ("offload", True, "true"),
            ("mixed_precision", {"param": "bf16"}, "param"),
            ("mixed_precision", {"reduce": "bf16", "param": "fp32"}, "param, reduce"),
            ("replicate", 2, 2),
            ("reshard_after_forward", 1, 1),
            ("reshard_after_forward", 3, 3),
        ]
    ),
]

PIPELINES: list[tuple[dict[str, Any], tuple[object, ...]]] = [
    (pipeline() | vision(), ("parallelism.pp", "vgg16", 2, "gpt", "llama")),
    (pipeline() | {"model": {"target": "package:callable"}}, ("parallelism.pp", "package:callable", 2)),
    (pipeline(micro_batches=3), ("parallelism.pp.micro_batches", "batch.size=8", 3)),
    (pipeline(layers=[4, 3]), ("parallelism.pp.layers", 6, 7)),
    (pipeline(layers=[4, 1, 1]), ("parallelism.pp.layers", "stages=2", "virtual_stages=1", 3)),
    (pipeline(stages=7, micro_batches=8), ("parallelism.pp.stages x virtual_stages", 6, 7)),
    (pipeline(virtual_stages=2), ("parallelism.pp.virtual_stages", 1, "1f1b", 2)),
    (pipeline() | {"hardware": {"profile": "p"}}, ("hardware.gpus", "stages=2", "dp=1", "gpus=1")),
    (pipeline() | {"mode": "forward"}, ("mode", "train", "forward")),
    (pipeline() | {"training": {"gradient_accumulation": 2}}, ("training.gradient_accumulation", 1, 2)),
    (pipeline() | CLIPPED, ("optimizer.max_grad_norm", "left out", 1.0)),
    (pipeline() | {"precision": "amp-fp16"}, ("precision", "amp-fp16", "amp-bf16")),
    (pipeline(dp=2, strategy="zero1"), ("parallelism.strategy", "ddp", "zero1")),
    *(
        (
            pipeline(dp=2, strategy="ddp", schedule=schedule, virtual_stages=2),
            ("parallelism.pp.schedule", "dp=2", schedule, "interleaved-1f1b"),
        )
        for schedule in SPLITTING
    ),
    (pipeline(dp=2, strategy="zero2"), ("parallelism.strategy", "ddp", "zero2")),
    (
        pipeline(dp=2, strategy="ddp") | {"hardware": {"profile": "p", "gpus": 2}},
        ("hardware.gpus", "dp=2", "gpus=2", 4),
    ),
    (pipeline(dp=2, strategy="ddp", static_graph=True), ("parallelism.static_graph", "false", "true")),
    (pipeline(dp=2), ("parallelism.strategy", 2, "none", "ddp")),
]

REFUSED = [*WORKLOADS, *RANKS, *SETTINGS, *SHARDING, *PIPELINES]


@pytest.mark.parametrize(("keys", "named"), REFUSED)
def test_refused(keys: dict[str, Any], named: tuple[object, ...]) -> None:
    with refused(*named):
        asked(**keys)


@pytest.mark.parametrize(("keys", "named"), WORKLOADS)
def test_a_workload_is_refused_by_itself(keys: dict[str, Any], named: tuple[object, ...]) -> None:
    with refused(*named):
        check_workload(scenario_of(**keys))


@pytest.mark.parametrize(("keys", "named"), REFUSED)
def test_what_is_predicted_and_what_is_run_is_refused_in_one_sentence(
    keys: dict[str, Any], named: tuple[object, ...]
) -> None:
    scenario, sentences = scenario_of(**keys), []
    for refuse in (lambda: check_supported(scenario, wired()), lambda: measure(scenario, name="case")):
        with pytest.raises(PerfModelError) as caught:
            refuse()
        sentences.append(str(caught.value))
    assert sentences[1] == f"case: {sentences[0]}"


def test_offloading_is_refused_on_the_cpu_alone() -> None:
    keys = two("zero3", fsdp={"offload": True})
    asked(**keys)
    with refused("parallelism.fsdp.offload", "false", "CPU", "true"):
        asked("cpu", **keys)


@pytest.mark.parametrize(
    "keys",
    [
        *({"model": {"family": name, "size": next(iter(row.sizes))}} for name, row in FAMILIES.items() if row.sizes),
        vision(mode="forward", training={"activation_checkpointing": "full"}),
        {"model": {"target": "p:M", "blocks": "h"}, "training": {"activation_checkpointing": "full"}},
        {"training": {"activation_checkpointing": "full"}},
        two() | {"mode": "forward"},
        two(static_graph=True),
        two("zero1", zero1_form="reduce-scatter") | CLIPPED,
        *(two(strategy) | CLIPPED | {"precision": "amp-fp16"} for strategy in ("zero1", "zero2", "zero3")),
        two("zero1") | {"optimizer": FUSED_SGD},
        two("zero3") | {"optimizer": {"name": "sgd"}},
        two("zero3") | {"optimizer": {"implementation": "fused"}},
        two("zero3", fsdp=BF16_POLICY),
        two("zero3", fsdp={"reshard_after_forward": 1, "forward_prefetch": 1}),
        one("zero3", wrap="root", replicate=1, offload=False, reshard_after_forward=True),
        one("zero3") | {"mode": "forward"},
        pipeline(),
        pipeline(layers=[4, 2]),
        pipeline(schedule="looped-bfs", virtual_stages=3),
        pipeline(schedule="zbv-zero-bubble", virtual_stages=2),
        pipeline(dp=2, strategy="ddp", schedule="interleaved-1f1b", virtual_stages=2),
    ],
)
def test_what_passes(keys: dict[str, Any]) -> None:
    asked(**keys)
