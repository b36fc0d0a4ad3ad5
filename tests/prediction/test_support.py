"""What is refused before any work is done, because the profile has not measured it."""

from __future__ import annotations

from typing import Any

import pytest

from perfmodel.hardware.interconnect import TransferRecord
from perfmodel.hardware.profile import Profile
from perfmodel.prediction.predict import predict
from perfmodel.prediction.provenance import assumptions
from perfmodel.prediction.support import check_supported
from perfmodel.scenario.scenario import Scenario
from tests.prediction.toys import RANKS, wired
from tests.refusals import refused

OFFLOADED = {"strategy": "zero3", "fsdp": {"offload": True}}


def asked(parallelism: dict[str, Any], **keys: Any) -> Scenario:
    hardware = {"profile": "toy.json", "gpus": 2}
    return Scenario.model_validate(RANKS | {"hardware": hardware, "parallelism": parallelism} | keys)


def on_cpu(profile: Profile) -> Profile:
    return profile.model_copy(update={"device": profile.device.model_copy(update={"kind": "cpu"})})


def test_rules_of_scenarios_are_applied_to_the_profile_s_device() -> None:
    with refused("parallelism.fsdp.offload", "false", "CPU"):
        check_supported(asked({"dp": 2, **OFFLOADED}), on_cpu(wired()))


def test_offloading_needs_measured_copies() -> None:
    plain = asked({"dp": 2, **OFFLOADED})
    with refused("toy", "h2d pinned"):
        predict(plain, wired())
    transfers = {f"{direction} pinned 1024": TransferRecord(time_s=1e-6) for direction in ("h2d", "d2h")}
    check_supported(plain, wired().model_copy(update={"transfers": transfers}))
    assert assumptions(plain, None) == (
        "copies between each GPU and the host as fast as those of one GPU alone in one direction",
    )


def test_a_pipeline_needs_a_gpu_s_messages() -> None:
    """One clock does not say when messages arrive."""
    cut = asked({"pp": {"stages": 2, "micro_batches": 2}}, batch={"size": 2, "sequence_length": 4})
    with refused("parallelism.pp", "left out", "CPU", "ddp"):
        predict(cut, on_cpu(wired()))


@pytest.mark.parametrize("parallelism", [{"dp": 2, "strategy": "ddp"}, {"dp": 2, "strategy": "zero1"}])
def test_what_is_measured_passes(parallelism: dict[str, Any]) -> None:
    check_supported(asked(parallelism), wired())
