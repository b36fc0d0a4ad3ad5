"""Small scenarios of two ranks, by what they send."""

from __future__ import annotations

from typing import Any

from perfmodel.scenario.scenario import Scenario

_SECTIONS: dict[str, Any] = {
    "model": {"family": "gpt", "size": "tiny"},
    "batch": {"size": 1, "sequence_length": 8},
    "parallelism": {"dp": 2, "strategy": "ddp"},
    "hardware": {"profile": "cpu.json", "gpus": 2, "interconnect": "gloo"},
}


def ddp_scenario(**sections: object) -> Scenario:
    """One all-reduce over gloo; the sections given replace its own."""
    return Scenario.model_validate(_SECTIONS | sections)


def sharded_scenario(dp: int = 2, **fsdp: object) -> Scenario:
    """fully_shard over whatever interconnect is asked for."""
    parallelism = {"dp": dp, "strategy": "zero3", "fsdp": fsdp}
    return ddp_scenario(parallelism=parallelism, hardware={"profile": "profile", "gpus": dp})


def pipeline_scenario(dp: int = 1, **hardware: object) -> Scenario:
    """Two stages, four micro-batches."""
    return ddp_scenario(
        batch={"size": 8, "sequence_length": 4},
        precision="bf16",
        parallelism={"pp": {"stages": 2, "micro_batches": 4}} | ({"dp": dp, "strategy": "ddp"} if dp > 1 else {}),
        hardware={"profile": "cpu.json", "gpus": 2 * dp, **hardware},
    )
