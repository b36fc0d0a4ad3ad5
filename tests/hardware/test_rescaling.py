"""What follows for a profile when peaks and caches in its datasheet are changed."""

from __future__ import annotations

from typing import Any

import pytest

from perfmodel.hardware.power import Power, PowerKind
from perfmodel.hardware.profile import Cache, Device, Launch, Profile
from perfmodel.hardware.rescaling import rescaled
from tests.refusals import refused

DEVICE = Device(
    kind="cuda",
    name="GPU",
    memory_bytes=2**36,
    l2_bytes=50_000_000,
    peak_flops_per_s={"fp32": 6e13, "bf16": 1e15},
    peak_memory_bytes_per_s=4e12,
)
KINDS = {
    "gemm": PowerKind(draw_w=700, clock_share=1.0, flops_per_s=8e14, arithmetic="bf16"),
    "pointwise": PowerKind(draw_w=500, clock_share=0.2),
}
ORIGINAL = Profile(
    name="gpu", device=DEVICE, cache=Cache(capacity_bytes=40e6), launch=Launch(gap_s=1e-6), power=Power(kinds=KINDS)
)


def with_device(**changes: Any) -> Profile:
    return ORIGINAL.model_copy(update={"device": DEVICE.model_copy(update=changes)})


def test_what_times_do_not_follow_leaves_them_as_measured() -> None:
    found = rescaled(ORIGINAL, with_device(memory_bytes=2**37))
    assert found.original == ORIGINAL
    assert found.as_measured is None


def test_a_changed_peak_keeps_the_datasheet_that_times_were_measured_with() -> None:
    found = rescaled(ORIGINAL, with_device(peak_memory_bytes_per_s=8e12))
    assert found.as_measured is not None
    assert found.as_measured.device == DEVICE
    assert found.device.peak_memory_bytes_per_s == 8e12


def test_the_caches_capacity_grows_with_its_size_unless_it_is_given() -> None:
    twice = with_device(l2_bytes=100_000_000)
    assert rescaled(ORIGINAL, twice).cache.capacity_bytes == pytest.approx(80e6)
    given = twice.model_copy(update={"cache": Cache(capacity_bytes=60e6)})
    assert rescaled(ORIGINAL, given).cache.capacity_bytes == 60e6
    measured = rescaled(ORIGINAL, twice).as_measured
    assert measured is not None
    assert measured.cache.capacity_bytes == 40e6


def test_power_is_drawn_at_the_same_share_of_the_peak() -> None:
    kinds = rescaled(ORIGINAL, with_device(peak_flops_per_s={"fp32": 6e13, "bf16": 2e15})).power.kinds
    assert kinds["gemm"].flops_per_s == pytest.approx(1.6e15)
    assert (kinds["gemm"].draw_w, kinds["pointwise"]) == (700, KINDS["pointwise"])


def test_peaks_that_are_not_known_are_refused() -> None:
    with refused("hardware.device.peak_memory_bytes_per_s", "None"):
        rescaled(ORIGINAL, with_device(peak_memory_bytes_per_s=None))
    with refused("hardware.device.peak_flops_per_s.fp8", "bf16", "fp32"):
        rescaled(ORIGINAL, with_device(peak_flops_per_s={"fp32": 6e13, "bf16": 1e15, "fp8": 2e15}))
    with refused("hardware.device.peak_flops_per_s", "fp32"):
        rescaled(ORIGINAL, with_device(peak_flops_per_s={"bf16": 1e15}))
