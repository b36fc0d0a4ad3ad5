"""Three calls measured at the start, in the middle and at the end: whether the machine stayed the same meanwhile."""

from __future__ import annotations

from typing import Any

from calibrate.jobs import Job, job
from calibrate.kernels import operators
from calibrate.kernels.bench import Bench
from perfmodel.hardware.profile import Profile
from perfmodel.trace.operation import Operation

DRIFT = {"cuda": 0.01, "cpu": 0.10}  # relative: slowest over fastest, less one


def _operations(device: str) -> dict[str, Operation]:
    if device == "cpu":
        vector = operators.tensor("float32", 2**20)
        return {
            "gemm_fp32": operators.mm("float32", 256, 256, 256),
            "add": operators.binary("add.Tensor", vector, vector),
        }
    vector = operators.tensor("float32", 2**26)
    return {
        "gemm_bf16": operators.mm("bfloat16", 4096, 4096, 4096),
        "gemm_fp32": operators.mm("float32", 2048, 2048, 2048),
        "add": operators.binary("add.Tensor", vector, vector),
    }


def measure(bench: Bench) -> dict[str, float]:
    """Return seconds of each sentinel now."""
    jobs: dict[str, Job] = {name: job(operation, "grid") for name, operation in _operations(bench.device).items()}
    records = {name: bench.time(item)[0] for name, item in jobs.items()}
    return {name: record.time_s for name, record in records.items() if record.time_s is not None}


def noted(provenance: dict[str, Any], times_s: dict[str, float], when: str) -> dict[str, Any]:
    """Return the provenance with these times added to the earlier ones."""
    sentinels_s = {name: dict(known) for name, known in provenance.get("sentinels_s", {}).items()}
    for name, time_s in times_s.items():
        sentinels_s.setdefault(name, {})[when] = time_s
    return provenance | {"sentinels_s": sentinels_s}


def change(profile: Profile, times_s: dict[str, float]) -> float:
    """Return by how much the slowest of these times is longer, or the fastest shorter, than at the profile's start, as
    a share; 0 where it has none.
    """
    before = profile.provenance.get("sentinels_s", {})
    ratios = [time_s / before[name]["start"] - 1 for name, time_s in times_s.items() if "start" in before.get(name, {})]
    return max(ratios, key=abs, default=0.0)


def drift_lines(profile: Profile) -> list[str]:
    """Return a sentence for every sentinel that drifted by more than the named threshold."""
    limit = DRIFT[profile.device.kind]
    found = []
    for name, times_s in profile.provenance.get("sentinels_s", {}).items():
        drift = max(times_s.values()) / min(times_s.values()) - 1
        if drift > limit:
            found.append(
                f"the machine drifted meanwhile: {name} by {drift:.1%} (want {limit:.0%}). Measure when it is idle."
            )
    return found
