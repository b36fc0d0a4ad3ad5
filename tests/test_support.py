"""What is refused before any work is done."""

from __future__ import annotations

import pytest

from perfmodel.api import predict
from perfmodel.errors import PerfModelError
from perfmodel.workload.scenario import Scenario, TrainingSection
from tests.test_api import RANKS, wired


def asked(**parallelism: object) -> Scenario:
    hardware = {"profile": "toy.json", "gpus": 2}
    return Scenario.model_validate(RANKS | {"hardware": hardware, "parallelism": {"dp": 2} | parallelism})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"strategy": "ddp", "zero1_form": "broadcast"}, "parallelism.zero1_form must be left out with strategy ddp"),
        ({"strategy": "flat", "bucket_cap_mb": 5.0}, r"left out with strategy flat \(got 5.0\). It belongs to ddp and"),
        ({"strategy": "zero1", "fsdp": {}}, "parallelism.fsdp must be left out with strategy zero1"),
        ({"strategy": "none"}, "parallelism.strategy must say how 2 ranks work together"),
        ({"strategy": "zero3", "fsdp": {"replicate": 2}}, r"fsdp.replicate must be left out in this version \(got 2\)"),
        ({"strategy": "zero3", "fsdp": {"offload": True}}, "fsdp.offload must be left out"),
        ({"strategy": "zero2", "fsdp": {"reshard_after_forward": 2}}, "fsdp.reshard_after_forward must be left out"),
        ({"strategy": "zero2", "fsdp": {"mixed_precision": {"param": "fp16"}}}, r"must be fp32 or bf16 .* \(got fp16,"),
    ],
)
def test_settings_that_would_do_nothing_are_refused(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(PerfModelError, match=sentence):
        predict(asked(**changes), wired())


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_sharded_optimizers_have_no_gradient_scaler(strategy: str) -> None:
    with pytest.raises(PerfModelError, match=f"precision must not be amp-fp16 with strategy {strategy}"):
        predict(asked(strategy=strategy).model_copy(update={"precision": "amp-fp16"}), wired())


@pytest.mark.parametrize(
    ("parallelism", "sentence"),
    [
        ({"strategy": "zero1", "zero1_form": "reduce-scatter"}, "left out with zero1_form reduce-scatter"),
        ({"strategy": "zero2"}, "left out with strategy zero2"),
    ],
)
def test_clipping_of_shards_is_refused(parallelism: dict[str, object], sentence: str) -> None:
    whole = asked(**parallelism)
    optimizer = whole.optimizer.model_copy(update={"max_grad_norm": 1.0})
    with pytest.raises(PerfModelError, match=f"max_grad_norm must be {sentence}"):
        predict(whole.model_copy(update={"optimizer": optimizer}), wired())


BF16 = {"strategy": "zero3", "fsdp": {"mixed_precision": {"param": "bf16", "reduce": "fp32"}}}


def test_a_policy_says_what_is_computed_in() -> None:
    with pytest.raises(
        PerfModelError, match=r"precision must be fp32 with parallelism.fsdp.mixed_precision \(got bf16\)"
    ):
        predict(asked(**BF16).model_copy(update={"precision": "bf16"}), wired())


def test_gradients_kept_in_two_dtypes_are_refused() -> None:
    training = TrainingSection(gradient_accumulation=2)
    with pytest.raises(
        PerfModelError, match="gradient_accumulation must be 1 where mixed_precision reduces in another"
    ):
        predict(asked(**BF16).model_copy(update={"training": training}), wired())
