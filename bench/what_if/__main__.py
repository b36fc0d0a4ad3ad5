"""How far off a what-if is: `python -m bench.what_if`. It reports, and judges nothing.

The first nineteen cases of `validate/cases/one-gpu.yaml` were measured on an H100 (bench/what_if/h100, by `perfmodel
validate`; the time on that machine ended there). Here they are predicted from the H200's profile, with what differs in
the H100's datasheet set as a user would set it. The scaling was written before any of them ran, and uses none of them.

A datasheet says nothing about a host: steps that wait for theirs are predicted with the H200 node's, and stand apart.
The bound between the two, HOST_BOUND, was chosen after the errors had been seen, so the row of all cases counts.

The two devices have the same peak FLOP/s: nothing here says how well times scale with those.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from perfmodel.hardware.measurement import load_measurement
from perfmodel.hardware.profile import find_profile, load_profile
from perfmodel.prediction.predict import predict
from perfmodel.scenario.yaml_file import parse_scenario, with_assignments

FOLDER = Path(__file__).parent / "h100"
PROFILE = "h200-sxm-x4"
# NVIDIA's datasheet of the H100 SXM (2023), and what its driver reports as memory and cache.
H100 = (
    "hardware.device.peak_memory_bytes_per_s=3.35e12",
    "hardware.device.memory_bytes=85017493504",
    "hardware.device.l2_bytes=52428800",
)
HOST_BOUND = 0.1  # of the step that waits for the host


def summary(kind: str, errors: Sequence[float]) -> str:
    absolute = [abs(error) for error in errors]
    return (
        f"{len(errors)} {kind}: median error {statistics.median(absolute):.1%}, mean {statistics.fmean(absolute):.1%}, "
        f"worst {max(errors, key=abs):+.1%}, bias {statistics.fmean(errors):+.1%}"
    )


def main() -> None:
    h200 = load_profile(find_profile(PROFILE))
    h100 = with_assignments(h200, H100)
    errors: dict[str, list[float]] = {"cases": [], "device-bound": [], "host-bound": []}
    unscaled: dict[str, list[float]] = {kind: [] for kind in errors}
    inside: dict[str, int] = dict.fromkeys(errors, 0)
    print(f"{'case':20} {'on H200':>9} {'as H100':>9} {'measured':>9} {'error':>7}  step time in ms")
    for path in sorted(FOLDER.glob("*.json")):
        measurement = load_measurement(path)
        scenario = parse_scenario(measurement.scenario, str(path))
        there, here = predict(scenario, h200), predict(scenario, h100)
        measured_s = measurement.median_step_s
        kind = "host-bound" if here.breakdown["host_bound_s"] > HOST_BOUND * here.step_time_s else "device-bound"
        low_s, high_s = here.interval_s
        for each in ("cases", kind):
            errors[each].append(here.step_time_s / measured_s - 1)
            unscaled[each].append(there.step_time_s / measured_s - 1)
            inside[each] += low_s <= measured_s <= high_s
        times_ms = " ".join(f"{1e3 * time_s:9.2f}" for time_s in (there.step_time_s, here.step_time_s, measured_s))
        print(f"{measurement.name:20} {times_ms} {errors[kind][-1]:+7.1%}  {kind}")
    for kind, found in errors.items():
        if found:
            print(summary(kind, found) + f", {inside[kind]} within the 90 % interval")
            print(summary(f"{kind}, times of the H200 left as they are", unscaled[kind]))


if __name__ == "__main__":
    main()
