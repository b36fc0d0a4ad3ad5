from __future__ import annotations

import json
import statistics
from collections.abc import Callable

import pytest

from calibrate.device.cache import CALL_BYTES, SETS, cache_from_ladder, measure_code_miss
from calibrate.timing.samples import Samples
from perfmodel.cost.l2_cache import held_share
from perfmodel.hardware.profile import Cache, find_profile, load_profile
from perfmodel.units import MIB
from tests.places import TESTS

MB = 1e6
ROW = 12


class Told:
    """Readings in the order in which they are taken."""

    def __init__(self, *medians_s: float) -> None:
        self.medians_s = list(medians_s)
        self.calls: list[int] = []

    def measure(self, call: Callable[[], object]) -> Samples:
        call()
        (calls,) = call.args  # type: ignore[attr-defined]
        self.calls.append(len(calls))
        return Samples((self.medians_s.pop(0),), 1)


def test_a_code_miss_is_what_a_kernel_of_a_row_takes_more_behind_a_flush() -> None:
    told = Told(50e-6, 80e-6, 24e-6)
    assert measure_code_miss(told, "cpu", 1024) == pytest.approx((80e-6 - 50e-6 - 24e-6) / ROW)
    assert told.calls == [2, 2 + ROW, ROW]


def test_a_code_miss_is_never_less_than_nothing() -> None:
    assert measure_code_miss(Told(50e-6, 70e-6, 24e-6), "cpu", 1024) == 0.0


def test_the_models_own_ladder_gives_its_capacity_back() -> None:
    footprints = [count * CALL_BYTES for count in SETS]
    times_s = [1e-6 + CALL_BYTES * (1 - float(held_share(size, 40 * MB))) / 4e12 for size in footprints]
    found = cache_from_ladder(footprints, times_s, CALL_BYTES)
    assert found.capacity_bytes == pytest.approx(40 * MB)
    assert found.miss_s_per_byte == pytest.approx(1 / 4e12)


def test_one_outlier_at_an_end_changes_nothing() -> None:
    times_s = [1.0, 9.0, 1.0, 1.0, 3.0, 3.0, 3.0]
    assert cache_from_ladder([1, 2, 3, 6, 9, 12, 15], times_s, 1.0) == Cache(capacity_bytes=5.0, miss_s_per_byte=2.0)


def test_a_cache_that_cannot_be_seen_has_no_capacity() -> None:
    assert cache_from_ladder([1, 2, 3, 4, 5, 6], [1.0, 1.0, 1.0, 1.04, 1.04, 1.04], 1.0) == Cache()


SWEEP = json.loads((TESTS / "data" / "cache" / "h200-code-miss.json").read_text())


def test_code_of_an_h200_ages_as_its_data_does() -> None:
    """What a call misses behind a flush of so many bytes, by the capacity that sums of vectors found there."""
    cache = load_profile(find_profile("h200-sxm-x4")).cache
    assert cache.code_miss_s == pytest.approx(statistics.median(SWEEP["readings_us"]) * 1e-6)
    for flushed_mib, readings_us in SWEEP["by_flush_mib_us"].items():
        gone = 1 - float(held_share(int(flushed_mib) * MIB, cache.capacity_bytes))
        assert statistics.median(readings_us) == pytest.approx(gone * cache.code_miss_s * 1e6, abs=0.06), flushed_mib
