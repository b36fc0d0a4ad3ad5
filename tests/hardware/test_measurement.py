"""Measurement files with and without samples of the host's speed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from perfmodel.errors import PerfModelError
from perfmodel.hardware.measurement import (
    BucketLayout,
    Measurement,
    RankCommunication,
    RankSamples,
    StepMemory,
    load_measurement,
    save_measurement,
)

PLAIN = Measurement(
    name="toy",
    split="tuning",
    group="own",
    scenario={},
    provenance={},
    warmup_steps=5,
    step_s=(0.01, 0.02, 0.03),
    synced_step_s=(0.02,),
    phases_s={"forward": (0.01, 0.02, 0.03)},
)


def test_a_file_without_the_host_s_speed_loads(tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    data = json.loads(PLAIN.model_dump_json(exclude_none=True))
    del data["blocks"], data["host_reference_s"]
    path.write_text(json.dumps(data))
    assert load_measurement(path) == PLAIN
    assert load_measurement(path).median_host_reference_s is None


def test_the_host_s_speed_is_kept(tmp_path: Path) -> None:
    known = PLAIN.model_copy(update={"blocks": (2, 1), "host_reference_s": (2e-3, 4e-3)})
    save_measurement(known, tmp_path / "new.json")
    assert load_measurement(tmp_path / "new.json") == known
    assert known.median_host_reference_s == 3e-3


def test_the_host_s_speed_is_that_of_all_ranks() -> None:
    rank = RankSamples(step_s=(1.0,), synced_step_s=(1.0,), phases_s={}, host_reference_s=(2e-3, 4e-3))
    slower = rank.model_copy(update={"host_reference_s": (5e-3,)})
    several = PLAIN.model_copy(update={"host_reference_s": rank.host_reference_s, "ranks": (rank, slower)})
    assert several.median_host_reference_s == 4e-3


def test_what_ranks_saw_is_kept(tmp_path: Path) -> None:
    memory = tuple(
        StepMemory(allocated_before_bytes=0, peak_allocated_bytes=peak, peak_reserved_bytes=9) for peak in (8, 3, 5)
    )
    rank = RankSamples(step_s=(0.01,), synced_step_s=(0.02,), phases_s={"reduce": (0.01,)}, memory=memory)
    ranked = PLAIN.model_copy(
        update={
            "ranks": (rank, rank),
            "ddp_buckets": BucketLayout(initial_bytes=(30,), rebuilt_bytes=(10, 20), rebuilt=True),
            "communication": (RankCommunication(communication_s=0.5, exposed_s=0.1, overlap_ratio=0.8),) * 2,
        }
    )
    save_measurement(ranked, tmp_path / "ranks.json")
    assert load_measurement(tmp_path / "ranks.json") == ranked
    assert rank.steady_memory == memory[-1]
    assert rank.model_copy(update={"memory": memory[:2]}).steady_memory is None


def test_the_peak_is_that_of_the_rank_that_takes_most() -> None:
    def steps(*peaks: int) -> tuple[StepMemory, ...]:
        return tuple(
            StepMemory(allocated_before_bytes=0, peak_allocated_bytes=peak, peak_reserved_bytes=2 * peak)
            for peak in peaks
        )

    timing = {"step_s": (0.01,), "synced_step_s": (0.02,), "phases_s": {}}
    ranks = tuple(RankSamples(**timing, memory=steps(9, 9, peak)) for peak in (5, 7))
    ranked = PLAIN.model_copy(update={"memory": ranks[0].memory, "ranks": ranks})
    assert (ranked.peak_allocated_bytes, ranked.peak_reserved_bytes) == (7, 14)
    assert PLAIN.model_copy(update={"memory": steps(9, 9)}).peak_allocated_bytes is None


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"step_s": []}, "step_s must have"),
        ({"step_s": [0.1, 0.0]}, "step_s.1 must be greater than 0"),
        ({"step_s": [0.1, "nan"]}, "step_s.1 must be a finite number"),
        ({"step_s": [1e300]}, "step_s.0 must be less than or equal to 1000000"),
        ({"step_s": 1.0}, "step_s must be a list"),
        ({"synced_step_s": []}, "synced_step_s must have"),
        ({"phases_s": {"forward": []}}, "phases_s.forward must have"),
        ({"phases_s": {"forward": [-1.0]}}, "phases_s.forward.0 must be greater than or equal to 0"),
        ({"host_reference_s": [0.0]}, "host_reference_s.0 must be greater than 0"),
        ({"blocks": [-1]}, "blocks.0 must be greater than or equal to 0"),
        ({"device_bytes": 0}, "device_bytes must be greater than or equal to 1"),
        ({"warmup_steps": -1}, "warmup_steps must be greater than or equal to 0"),
        ({"scenario": []}, "scenario must be a"),
    ],
)
def test_a_damaged_measurement_is_refused_with_its_key(tmp_path: Path, changes: dict[str, Any], rule: str) -> None:
    path = tmp_path / "m.json"
    path.write_text(json.dumps(json.loads(PLAIN.model_dump_json(exclude_none=True)) | changes))
    with pytest.raises(PerfModelError) as raised:
        load_measurement(path)
    assert str(raised.value).startswith(f"{path}: {rule}")
