"""What is refused before any work is done."""

from __future__ import annotations

import pytest

from perfmodel.api import predict
from perfmodel.errors import PerfModelError
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
        ({"strategy": "zero3"}, "strategy must be one of"),
    ],
)
def test_settings_that_would_do_nothing_are_refused(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(PerfModelError, match=sentence):
        predict(asked(**changes), wired())


def test_zero1_has_no_gradient_scaler() -> None:
    with pytest.raises(PerfModelError, match="precision must not be amp-fp16 with strategy zero1"):
        predict(asked(strategy="zero1").model_copy(update={"precision": "amp-fp16"}), wired())


def test_clipping_of_flat_shards_is_refused() -> None:
    clipped = {
        "optimizer": {"max_grad_norm": 1.0},
        "parallelism": {"strategy": "zero1", "zero1_form": "reduce-scatter"},
    }
    whole = asked().model_dump(mode="json")
    whole["parallelism"] |= clipped["parallelism"]
    whole["optimizer"] |= clipped["optimizer"]
    with pytest.raises(PerfModelError, match="max_grad_norm must be left out with zero1_form reduce-scatter"):
        predict(Scenario.model_validate(whole), wired())
