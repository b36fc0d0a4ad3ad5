"""What is refused before any work is done."""

from __future__ import annotations

import pytest

from perfmodel.errors import PerfModelError
from perfmodel.hardware.interconnect import TransferRecord
from perfmodel.prediction.predict import predict
from perfmodel.prediction.provenance import assumptions
from perfmodel.prediction.support import check_supported
from perfmodel.scenario.scenario import OptimizerSection, Scenario
from tests.prediction.toys import RANKS, wired
from tests.refusals import refused


def asked(**parallelism: object) -> Scenario:
    hardware = {"profile": "toy.json", "gpus": 2}
    return Scenario.model_validate(RANKS | {"hardware": hardware, "parallelism": {"dp": 2} | parallelism})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"strategy": "ddp", "zero1_form": "broadcast"}, ("parallelism.zero1_form", "ddp")),
        ({"strategy": "flat", "bucket_cap_mb": 5.0}, ("parallelism.bucket_cap_mb", "flat", 5.0, "ddp")),
        ({"strategy": "zero1", "fsdp": {}}, ("parallelism.fsdp", "zero1", "zero2", "zero3")),
        (
            {"strategy": "ddp", "fsdp": {"wrap": "root", "offload": True}},
            ("parallelism.fsdp", "ddp", "offload", "wrap"),
        ),
        ({"strategy": "flat", "static_graph": True}, ("parallelism.static_graph", "flat", "true")),
        ({"strategy": "none"}, ("parallelism.strategy", 2)),
        (
            {"strategy": "zero3", "fsdp": {"replicate": 2}},
            ("parallelism.fsdp.replicate", "parallelism.dp=2", "got 2", "ddp"),
        ),
        ({"strategy": "zero3", "fsdp": {"replicate": 3}}, ("parallelism.fsdp.replicate", "parallelism.dp=2", 3)),
        (
            {"strategy": "zero3", "fsdp": {"wrap": "root", "forward_prefetch": 1}},
            ("parallelism.fsdp.forward_prefetch", "root", 1),
        ),
        (
            {"strategy": "zero3", "fsdp": {"wrap": "root", "backward_prefetch": 2}},
            ("parallelism.fsdp.backward_prefetch", "root", 2),
        ),
        ({"strategy": "zero3", "fsdp": {"offload": True}}, ("toy", "h2d pinned")),
        (
            {"strategy": "zero2", "fsdp": {"reshard_after_forward": 3}},
            ("parallelism.fsdp.reshard_after_forward", 2, 3),
        ),
    ],
)
def test_settings_that_would_do_nothing_are_refused(changes: dict[str, object], named: tuple[object, ...]) -> None:
    with refused(*named):
        predict(asked(**changes), wired())


def test_a_gradient_scaler_would_see_one_shard_alone() -> None:
    flat = asked(strategy="zero1", zero1_form="reduce-scatter").model_copy(update={"precision": "amp-fp16"})
    with refused("precision", "amp-fp16", "zero1_form", "reduce-scatter"):
        predict(flat, wired())


OFFLOADED = {"strategy": "zero3", "fsdp": {"offload": True}}


def test_what_torch_cannot_do_with_shards_in_host_memory() -> None:
    transfers = {f"{direction} pinned 1024": TransferRecord(time_s=1e-6) for direction in ("h2d", "d2h")}
    profile = wired().model_copy(update={"transfers": transfers})
    plain = asked(**OFFLOADED)
    check_supported(plain, profile)
    assert assumptions(plain, None) == (
        "copies between each GPU and the host as fast as those of one GPU alone in one direction",
    )
    clipped = plain.optimizer.model_copy(update={"max_grad_norm": 1.0})
    for changes in ({"optimizer": clipped}, {"precision": "amp-fp16"}):
        with refused("parallelism.fsdp.offload", "clipping", "amp-fp16"):
            check_supported(plain.model_copy(update=changes), profile)
    on_cpu = profile.model_copy(update={"device": profile.device.model_copy(update={"kind": "cpu"})})
    with pytest.raises(PerfModelError, match=r"fsdp.offload must be false on the CPU"):
        check_supported(plain, on_cpu)


def alone(strategy: str, **fsdp: object) -> Scenario:
    section = {"dp": 1, "strategy": strategy, "fsdp": fsdp}
    return Scenario.model_validate(RANKS | {"hardware": {"profile": "toy.json"}, "parallelism": section})


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
@pytest.mark.parametrize(
    ("name", "given", "shown"),
    [
        ("offload", True, "true"),
        ("mixed_precision", {"param": "bf16"}, "param"),
        ("mixed_precision", {"reduce": "bf16", "param": "fp32"}, "param, reduce"),
        ("replicate", 2, "2"),
        ("reshard_after_forward", 1, "1"),
        ("reshard_after_forward", 3, "3"),
    ],
)
def test_one_rank_shards_nothing(strategy: str, name: str, given: object, shown: str) -> None:
    with pytest.raises(PerfModelError) as caught:
        check_supported(alone(strategy, **{name: given}), wired())
    assert str(caught.value) == (
        f"parallelism.fsdp.{name} must be left out with dp=1 (got {shown}): nothing is sharded. Leave it out."
    )


def test_one_rank_may_be_told_what_makes_no_difference() -> None:
    check_supported(alone("zero3", wrap="root", replicate=1, offload=False, reshard_after_forward=True), wired())


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_forward_alone_is_refused_where_anything_is_sharded(strategy: str) -> None:
    forward = asked(strategy=strategy).model_copy(update={"mode": "forward"})
    with pytest.raises(PerfModelError, match=rf"^mode must be train with .*strategy {strategy} \(got forward\)"):
        predict(forward, wired())


def test_a_pipeline_on_the_cpu_is_refused() -> None:
    """One clock does not say when messages arrive."""
    changes = {"parallelism": {"pp": {"stages": 2, "micro_batches": 2}}, "hardware": {"profile": "p", "gpus": 2}}
    cut = Scenario.model_validate(RANKS | {"batch": {"size": 2, "sequence_length": 4}} | changes)
    profile = wired()
    on_cpu = profile.model_copy(update={"device": profile.device.model_copy(update={"kind": "cpu"})})
    with pytest.raises(PerfModelError) as caught:
        predict(cut, on_cpu)
    assert str(caught.value) == (
        "parallelism.pp must be left out on the CPU (got a pipeline): messages between ranks are predicted of GPUs "
        "alone. Choose a GPU's profile, or strategy ddp."
    )


@pytest.mark.parametrize("asked_for", [asked(strategy="ddp"), alone("zero3")], ids=["ddp", "one rank"])
def test_forward_alone_is_for_those_that_hold_all(asked_for: Scenario) -> None:
    check_supported(asked_for.model_copy(update={"mode": "forward"}), wired())


FUSED_SGD = OptimizerSection(name="sgd", implementation="fused")


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_torch_cannot_run_fused_sgd_over_shards(strategy: str, momentum: float) -> None:
    plain = asked(strategy=strategy)
    fused = FUSED_SGD.model_copy(update={"momentum": momentum})
    with pytest.raises(PerfModelError, match=rf"must not be fused for sgd with .*strategy {strategy} \(got fused\)"):
        check_supported(plain.model_copy(update={"optimizer": fused}), wired())
    for changes in ({"implementation": "foreach"}, {"name": "adamw"}):
        check_supported(plain.model_copy(update={"optimizer": fused.model_copy(update=changes)}), wired())
    check_supported(asked(strategy="zero1").model_copy(update={"optimizer": fused}), wired())


SHARDED = [{"strategy": "zero1"}, {"strategy": "zero2"}, {"strategy": "zero3"}]


@pytest.mark.parametrize(
    ("parallelism", "precision"),
    [*((section, "amp-fp16") for section in SHARDED), ({"strategy": "zero1", "zero1_form": "reduce-scatter"}, "fp32")],
)
def test_parts_are_clipped_and_scaled(parallelism: dict[str, object], precision: str) -> None:
    plain = asked(**parallelism)
    optimizer = plain.optimizer.model_copy(update={"max_grad_norm": 1.0})
    check_supported(plain.model_copy(update={"optimizer": optimizer, "precision": precision}), wired())


BF16 = {"strategy": "zero3", "fsdp": {"mixed_precision": {"param": "bf16", "reduce": "fp32"}}}


def test_a_policy_says_what_is_computed_in() -> None:
    with refused("precision", "fp32", "bf16", "parallelism.fsdp.mixed_precision"):
        predict(asked(**BF16).model_copy(update={"precision": "bf16"}), wired())
