"""Cases and measurements of accuracy cards, made by hand."""

from __future__ import annotations

from dataclasses import replace

from perfmodel.accuracy.cases import Card, CardCase
from perfmodel.hardware.measurement import Measurement, StepMemory
from tests.report.synthetic import MIB


def case(name: str, group: str, split: str, error: float, **changes: object) -> CardCase:
    """A case that is measured at one second and predicted off by ``error``."""
    known = CardCase(
        name=name,
        group=group,
        split=split,
        measured={"step": 1.0},
        predicted={"step": 1.0 + error},
        spread=0.01,
        steps=12,
        in_interval=True,
        profile="toy-gpu",
        versions={"torch": "2.11"},
        scenario_digest=name,
    )
    return replace(known, **changes)  # type: ignore[arg-type]


CARD = Card(
    (
        case("a", "fp32", "tuning", 0.01),
        case("b", "fp32", "held-out", -0.03),
        case("c", "amp", "held-out", 0.05),
        case("d", "amp", "tuning", -0.01),
    )
)


def measurement(name: str = "toy", **changes: object) -> Measurement:
    known = Measurement(
        name=name,
        split="tuning",
        group="own",
        scenario={"name": name, "precision": "fp32"},
        provenance={"torch": "2.11", "gpu": "Toy GPU", "cpus": 3, "nvidia_smi": {"driver_version": "580"}},
        warmup_steps=5,
        step_s=(38.5e-6, 39.5e-6, 40.5e-6),
        synced_step_s=(43e-6,),
        phases_s={"zero_grad": (1e-6,), "forward": (12e-6,), "backward": (25e-6,), "optimizer": (5e-6,)},
        memory=(
            StepMemory(allocated_before_bytes=0, peak_allocated_bytes=99 * MIB, peak_reserved_bytes=99 * MIB),
            StepMemory(allocated_before_bytes=0, peak_allocated_bytes=99 * MIB, peak_reserved_bytes=99 * MIB),
            StepMemory(allocated_before_bytes=0, peak_allocated_bytes=10 * MIB, peak_reserved_bytes=20 * MIB),
        ),
    )
    return known.model_copy(update=changes)
