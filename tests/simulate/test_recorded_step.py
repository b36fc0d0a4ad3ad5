"""What a recorded step on two H200s shows of kernels beside other streams (tests/data/cuda_sharded), and what the engine
makes of it. Seconds in microseconds.
"""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import numpy as np
import pytest

from perfmodel.cost.contention import Slowdown
from perfmodel.hardware.profile import Launch, find_profile, load_profile
from perfmodel.simulate.device_clock import DeviceClock
from perfmodel.simulate.rendezvous import run_alone
from perfmodel.simulate.tasks import StreamTask
from tests.places import TESTS

from .streams import INF

STEP = TESTS / "data" / "cuda_sharded" / "gpt-large-zero2.kernels.json.gz"
COMPUTE, GATHER = 7, 22
LARGER_US = 300.0  # other products of that name
PRODUCT = "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stag"


class Kernel(NamedTuple):
    stream: int
    name: str
    start_us: float
    end_us: float

    @property
    def lasts_us(self) -> float:
        return self.end_us - self.start_us


@pytest.fixture(scope="module")
def step() -> list[Kernel]:
    data = json.loads(gzip.decompress(STEP.read_bytes()))
    return [
        Kernel(stream, data["names"][name], start * 1e-3, (start + duration) * 1e-3)
        for stream, name, start, duration in data["rows"]
    ]


def test_gaps_are_longer_while_two_streams_wait(step: list[Kernel]) -> None:
    """Copies into gathers, and gathers, wait for each other from the first to the last of the gathers."""
    starts_us = [each.start_us for each in step if each.stream == GATHER]
    computing = [each for each in step if each.stream == COMPUTE]
    pairs = list(pairwise(computing))
    beside_us = [b.start_us - a.end_us for a, b in pairs if starts_us[0] <= a.start_us and b.start_us <= starts_us[-1]]
    after_us = [b.start_us - a.end_us for a, b in pairs if a.start_us > starts_us[-1]]
    found_us = median(beside_us) - median(after_us)
    assert (median(beside_us), median(after_us)) == pytest.approx((2.71, 1.54), abs=0.01)
    profile = load_profile(find_profile("h200-sxm-x4"))
    assert profile.launch.gap_beside_s(2) * 1e6 == pytest.approx(found_us, rel=0.1)
    assert profile.launch.gap_beside_s(1) == 0


def test_gaps_beside_waiting_streams_and_a_gather_do_not_add_up(step: list[Kernel]) -> None:
    gathers = [each for each in step if each.stream == GATHER]
    computing = [each for each in step if each.stream == COMPUTE]
    beside_us, alone_us = [], []
    for before, after in pairwise(computing):
        if any(each.start_us <= before.end_us and after.start_us <= each.end_us for each in gathers[:-1]):
            beside_us.append(after.start_us - before.end_us)
        elif before.start_us > gathers[-1].end_us:
            alone_us.append(after.start_us - before.end_us)
    found_us = median(beside_us) - median(alone_us)
    assert (median(beside_us), median(alone_us)) == pytest.approx((3.07, 1.54), abs=0.05)
    profile = load_profile(find_profile("h200-sxm-x2"))
    pause = profile.interconnects["nvlink"].couplings["pause"]
    parts_us = (profile.launch.gap_beside_s(2) * 1e6, (pause.compute_factor - 1) * pause.kernel_s * 1e6)
    assert max(parts_us) < found_us < sum(parts_us)
    assert found_us - max(parts_us) < sum(parts_us) - found_us


def test_a_product_stays_slow_when_the_gather_beside_it_ends(step: list[Kernel]) -> None:
    gathers = [each for each in step if each.stream == GATHER]
    alone_us, first_part_us, gather_us, whole_us = [], [], [], []
    products = (each for each in step if each.name == PRODUCT and each.lasts_us < LARGER_US)
    for product in (each for each in products if each.start_us < gathers[-1].end_us):
        beside_us = [
            (max(each.start_us - product.start_us, 0.0), min(each.end_us, product.end_us) - product.start_us)
            for each in gathers
            if each.start_us < product.end_us and each.end_us > product.start_us
        ]
        if not beside_us:
            alone_us.append(product.lasts_us)
        elif len(beside_us) == 1 and beside_us[0][0] == 0 and 125 < beside_us[0][1] < 140:
            first_part_us.append(product.lasts_us)
            gather_us.append(beside_us[0][1])
        elif len(beside_us) == 1 and beside_us[0] == (0, pytest.approx(product.lasts_us)):
            whole_us.append(product.lasts_us)
    recorded = tuple(map(median, (alone_us, first_part_us, whole_us)))
    assert recorded == pytest.approx((155, 211, 200), abs=1)
    by_itself, first_part, whole = recorded
    factor, gather = whole / by_itself, median(gather_us)
    without, kept = (lasts(by_itself, factor, gather, wave) for wave in (0.0, by_itself))
    assert without == pytest.approx(gather + by_itself - gather / factor)
    assert kept == pytest.approx(whole)
    assert without + 10 < kept < first_part  # it takes even longer: blocks crowd the multiprocessors that are free


def lasts(by_itself: float, factor: float, gather: float, wave: float) -> float:
    """Of a product beside a gather that begins with it."""
    slowed = Slowdown(np.array([factor]), np.ones(1), np.full(1, INF), np.array([wave]))
    device = DeviceClock(Launch(), [slowed], 1, np.ones(1))
    device.reserve(1)
    device.issue(np.zeros(1), np.array([by_itself]))
    device.add(StreamTask(1, gather, 0, 0.0))
    run_alone(device.run_all())
    return float(device.end_s[0])
