"""Everything that `perfmodel predict --json` promises."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from perfmodel.cost.power import Clock
from perfmodel.hardware.measurement import StepMemory
from perfmodel.report.json_report import json_report
from perfmodel.simulate.memory.walk import simulate_memory
from tests.report.pipelines import pipeline, with_larger_last
from tests.report.synthetic import MIB, prediction, profile

PEAKS = {"peak_allocated_bytes": 8 * MIB, "peak_reserved_bytes": 20 * MIB}


def test_contracted_keys() -> None:
    report = json_report(prediction())
    assert report["memory"] == {
        "rank": None,
        **PEAKS,
        "device_bytes": 20 * MIB,
        "allocated_at_peak_bytes": {
            "parameter": 2 * MIB,
            "buffer": 0,
            "input": 0,
            "gradient": 2 * MIB,
            "optimizer_state": 0,
            "activation": 4 * MIB,
            "temporary": 0,
        },
        "retries": 0,
        "step_retries": 0,
        "out_of_memory": None,
        "first_step": PEAKS,
        "rebuild_step": None,
        "ranks": [{"rank": 0, **PEAKS, "device_bytes": 20 * MIB}],
    }
    assert report["fits"] is True
    numbers = {key: report[key] for key in ("version", "step_time_s", "synced_step_time_s", "step_time_interval_s")}
    assert numbers == {
        "version": 2,
        "step_time_s": pytest.approx(38e-6),
        "synced_step_time_s": pytest.approx(43e-6),
        "step_time_interval_s": [pytest.approx(36e-6), pytest.approx(40e-6)],
    }
    assert set(report) == {
        "version", "scenario", "profile", "step_time_s", "step_time_interval_s", "synced_step_time_s",
        "throughput_samples_per_s", "mfu", "clock", "memory", "fits", "what_fits", "breakdown", "pipeline", "communication_bytes",
        "bottleneck", "provenance", "kernels", "warnings",
    }  # fmt: skip


def test_a_lowered_clock_is_told_with_what_it_does() -> None:
    factors = {"gemm_bf16": 1.05, "pointwise": 1.0}
    clock = Clock(0.9, 2e9, 700.0, factors, np.array([1.05, 1.0]), 1e-6)
    expected = {"hz": 1.8e9, "full_hz": 2e9, "power_limit_w": 700.0, "time_factors": factors}
    assert json_report(prediction(clock=clock))["clock"] == expected
    assert json_report(prediction())["clock"] is None


def test_the_step_that_rebuilds_says_which_it_is() -> None:
    rebuilding = StepMemory(allocated_before_bytes=0, peak_allocated_bytes=5, peak_reserved_bytes=6)
    known = prediction()
    memory = replace(known.memory, rebuilding=rebuilding, rebuild_step=3)  # type: ignore[type-var]
    expected = {"step": 3, "peak_allocated_bytes": 5, "peak_reserved_bytes": 6}
    assert json_report(replace(known, memory=memory))["memory"]["rebuild_step"] == expected


def test_parts_add_up_to_the_step() -> None:
    report = json_report(prediction())
    assert sum(seconds for part, seconds in report["breakdown"].items() if part != "communication_s") == pytest.approx(
        report["step_time_s"]
    )


def test_is_plain_json_and_null_where_unknown() -> None:
    report = json_report(prediction("cpu"))
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert (report["memory"], report["fits"], report["mfu"]) == (None, None, None)


def test_provenance_holds_collectives_and_assumptions() -> None:
    shares = {"exact": 0.25, "curve": 0.0, "extrapolated": 0.75}
    said = {"collective_provenance": shares, "scaled_share": 0.5, "assumptions": ("GPU speeds 1, 0.5",)}
    found = json_report(prediction(**said))["provenance"]
    also = {"collectives": shares, "scaled": 0.5, "assumptions": ["GPU speeds 1, 0.5"]}
    assert found == prediction().provenance | also
    assert json_report(prediction())["provenance"]["collectives"] == {}


def test_ranks_of_a_pipeline() -> None:
    found = json_report(pipeline())["pipeline"]
    assert found["bubble_share"] == pytest.approx(9 / 50)
    assert found["ranks"] == [
        {
            "rank": rank,
            "stages": [rank],
            "blocks": [1],
            "busy_s": pytest.approx(busy_us * 1e-6),
            "bubble_s": pytest.approx(bubble_us * 1e-6),
            "exposed_communication_s": pytest.approx(2e-6),
            "host_bound_s": pytest.approx(host_us * 1e-6),
            "peak_allocated_bytes": peak_bytes,
        }
        for rank, busy_us, bubble_us, host_us, peak_bytes in ((0, 15, 4, 4, 8 * MIB), (1, 16, 5, 2, MIB))
    ]
    assert (found["blocks"], found["shown_rank"]) == ([1, 1], 0)
    assert json_report(pipeline())["memory"]["rank"] == 0
    assert json_report(with_larger_last())["memory"]["rank"] == 1
    assert json.loads(json.dumps(found)) == found
    assert json_report(prediction())["pipeline"] is None


def test_a_step_that_does_not_fit_says_where_and_what_it_needs() -> None:
    small = profile().model_copy(update={"device": profile().device.model_copy(update={"memory_bytes": 3 * MIB})})
    report = json_report(prediction(profile=small, memory=simulate_memory(prediction().program, small)))
    assert report["fits"] is False
    assert report["memory"]["out_of_memory"] == {
        "needed_bytes": 20 * MIB,
        "missing_bytes": 17 * MIB,
        "unlimited_bytes": 20 * MIB,
        "step": 0,
        "phase": "",
        "micro_batch": -1,
        "operator": "",
        "module": "",
        "holds": "parameter",
        "is_inserted": False,
        "requested_bytes": 2 * MIB,
        "allocated_bytes": 0,
        "reserved_bytes": 0,
        "limit_bytes": 3 * MIB,
    }
    json.dumps(report)
