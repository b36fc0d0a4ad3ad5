"""What is refused before any work is done."""

from __future__ import annotations

import pytest

from perfmodel.api import predict
from perfmodel.errors import PerfModelError
from perfmodel.hardware.interconnect import TransferRecord
from perfmodel.simulate.provenance import assumptions
from perfmodel.support import check_supported
from perfmodel.workload.scenario import Scenario
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
        (
            {"strategy": "zero3", "fsdp": {"replicate": 2}},
            r"fsdp.replicate must divide .*dp=2 .* \(got 2\).*, or use strategy ddp",
        ),
        ({"strategy": "zero3", "fsdp": {"replicate": 3}}, r"fsdp.replicate must divide parallelism.dp=2 .* \(got 3\)"),
        (
            {"strategy": "zero3", "fsdp": {"wrap": "root", "forward_prefetch": 1}},
            r"forward_prefetch must be left out with wrap root \(got 1\)",
        ),
        (
            {"strategy": "zero3", "fsdp": {"wrap": "root", "backward_prefetch": 2}},
            r"backward_prefetch must be left out with wrap root \(got 2\)",
        ),
        ({"strategy": "zero3", "fsdp": {"offload": True}}, "toy: .* measured h2d pinned transfers"),
        (
            {"strategy": "zero2", "fsdp": {"reshard_after_forward": 3}},
            r"reshard_after_forward must divide the 2 ranks .* \(got 3\)",
        ),
    ],
)
def test_settings_that_would_do_nothing_are_refused(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(PerfModelError, match=sentence):
        predict(asked(**changes), wired())


def test_a_gradient_scaler_would_see_one_shard_alone() -> None:
    flat = asked(strategy="zero1", zero1_form="reduce-scatter").model_copy(update={"precision": "amp-fp16"})
    with pytest.raises(PerfModelError, match="precision must not be amp-fp16 with zero1_form reduce-scatter"):
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
        with pytest.raises(PerfModelError, match=r"fsdp.offload must be false with gradient clipping or amp-fp16"):
            check_supported(plain.model_copy(update=changes), profile)
    on_cpu = profile.model_copy(update={"device": profile.device.model_copy(update={"kind": "cpu"})})
    with pytest.raises(PerfModelError, match=r"fsdp.offload must be false on the CPU"):
        check_supported(plain, on_cpu)


def test_one_rank_has_nothing_to_offload() -> None:
    alone = {"hardware": {"profile": "toy.json"}, "parallelism": {"dp": 1} | OFFLOADED}
    with pytest.raises(PerfModelError, match=r"fsdp.offload must be left out with dp=1"):
        check_supported(Scenario.model_validate(RANKS | alone), wired())


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
    with pytest.raises(
        PerfModelError, match=r"precision must be fp32 with parallelism.fsdp.mixed_precision \(got bf16\)"
    ):
        predict(asked(**BF16).model_copy(update={"precision": "bf16"}), wired())
