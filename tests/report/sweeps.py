"""A sweep with a tie and a refusal, made by hand."""

from __future__ import annotations

from typing import Any

from perfmodel.prediction.sweep_result import Configuration, SweepOutcome, SweepResult

GIB = 2**30


def outcome(step_s: float, samples: int, exposed_s: float = 0.0, in_use: int | None = 3 * GIB) -> SweepOutcome:
    return SweepOutcome(
        step_time_s=step_s,
        interval_s=(0.9 * step_s, 1.1 * step_s),
        samples_per_step=samples,
        throughput_samples_per_s=samples / step_s,
        exposed_s=exposed_s,
        fits=None if in_use is None else True,
        peak_allocated_bytes=None if in_use is None else in_use // 2,
        device_bytes=in_use,
        capacity_bytes=8 * GIB,
        bottleneck="the wire",
    )


def values(cap: float | None, size: int) -> dict[str, Any]:
    return {"parallelism.bucket_cap_mb": cap, "batch.size": size}


RESULT = SweepResult(
    "toy",
    "gpu",
    {"parallelism.bucket_cap_mb": (None, 25), "batch.size": (8, 16)},
    ("precision=bf16",),
    (
        Configuration(values(25, 16), 1, outcome(0.010, 16, 0.001)),
        Configuration(values(None, 16), 1, outcome(0.0104, 16, 0.0015)),
        Configuration(values(25, 8), 3, outcome(0.008, 8)),
        Configuration(values(None, 8), None, None, "the wire must hold. Mend it."),
    ),
)
