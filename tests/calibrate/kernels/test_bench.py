"""Warm and cold times of one call."""

from __future__ import annotations

import pytest

from calibrate.jobs import job
from calibrate.kernels import bench as measuring
from calibrate.kernels.bench import Bench
from calibrate.timing.samples import CpuStopwatch, Limits
from tests.calibrate.kernels.operations import op, t

QUICK = CpuStopwatch(Limits(fewest=3, most=3, sample_s=1e-5))
ADD = op("add.Tensor", t("float32[50000]"), t("float32[50000]"))
TINY = op("add.Tensor", t("float32[50]"), t("float32[50]"))


def test_only_keys_of_scenarios_are_timed_cold_too() -> None:
    bench = Bench("cpu", QUICK, cache_bytes=2**20)
    record, _ = bench.time(job(ADD, "scenario"))
    assert record.cold_time_s is not None
    assert record.cold_time_s != record.time_s
    assert bench.time(job(ADD, "grid"))[0].cold_time_s is None
    assert Bench("cpu", QUICK).time(job(ADD, "scenario"))[0].cold_time_s is None


def test_what_moves_next_to_nothing_is_as_fast_cold() -> None:
    record, _ = Bench("cpu", QUICK, cache_bytes=2**20).time(job(TINY, "scenario"))
    assert record.cold_time_s == record.time_s


def test_without_room_for_copies_there_is_still_the_warm_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(measuring, "ColdCall", fail)
    record, _ = Bench("cpu", QUICK, cache_bytes=2**20).time(job(ADD, "scenario"))
    assert (record.cold_time_s, record.error) == (None, None)
    assert record.time_s is not None
