"""The clock at which a step draws the limit, and what that does to its kernels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from perfmodel.cost.kernels.kernel_cost import KernelCost
from perfmodel.cost.power import (
    Load,
    above_idle_w,
    clock_ratio,
    draw_share,
    lengthening,
    lowered_clock,
    power_kind,
)
from perfmodel.hardware.power import Power, PowerKind, PowerLoop, PowerReading
from perfmodel.hardware.profile import Device, KernelRecord, Profile
from perfmodel.prediction.predict import predict
from perfmodel.scenario.scenario import Scenario
from perfmodel.trace.kernel_key import kernel_key
from perfmodel.trace.operation import Operation, TensorSpec
from perfmodel.trace.store import get_trace

IDLE_W, LIMIT_W = 100.0, 700.0
DEVICE = Device(
    kind="cuda",
    name="G",
    memory_bytes=2**36,
    power_limit_w=LIMIT_W,
    peak_flops_per_s={"fp32": 60e12, "tf32": 500e12, "bf16": 1000e12},
    peak_memory_bytes_per_s=4e12,
)
PRODUCT = PowerKind(draw_w=1000.0, clock_share=1.0, flops_per_s=800e12, arithmetic="bf16")
COPY = PowerKind(draw_w=500.0, clock_share=0.0)
POWER = Power(
    idle_w=IDLE_W, limit_w=LIMIT_W, full_clock_hz=2e9, kinds={"gemm_bf16": PRODUCT, "pointwise": COPY}, spread=0.01
)
PROFILE = Profile(name="p", device=DEVICE, power=POWER)
X = TensorSpec.parse("bfloat16[8,8]")
MM, ADD = Operation("aten.mm.default", (X, X)), Operation("aten.add.Tensor", (X, X))


def product(time_s: float = 1.0, rate_per_s: float = 800e12, arithmetic: str = "bf16") -> KernelCost:
    return KernelCost(time_s, 0.0, "exact", "gemm", rate_per_s * time_s, 0.0, arithmetic, 1, time_s)


def copy(time_s: float = 1.0) -> KernelCost:
    return KernelCost(time_s, 0.0, "exact", "pointwise", 0.0, 4e12 * time_s, "bf16", 1, time_s)


def test_work_that_follows_the_clock_wholly_is_slowed_by_a_cube_root() -> None:
    """100 + 900 r^3 = 700."""
    assert clock_ratio([Load(2.0, 2.0 * 900, 1.0)], IDLE_W, LIMIT_W) == pytest.approx((600 / 900) ** (1 / 3))


@pytest.mark.parametrize("draw_w", [699.0, 700.0])
def test_up_to_the_limit_nothing_changes(draw_w: float) -> None:
    assert clock_ratio([Load(1.0, draw_w - IDLE_W, 1.0)], IDLE_W, LIMIT_W) == 1


def test_kinds_together_draw_the_limit() -> None:
    loads = [Load(3.0, 3.0 * 900, 0.8), Load(1.0, 400.0, 0.1)]
    ratio = clock_ratio(loads, IDLE_W, LIMIT_W, waits_s=0.2)
    times_s = [load.busy_s * lengthening(load.clock_share, ratio) for load in loads]
    above_j = sum(
        load.above_idle_j * lengthening(load.clock_share, ratio) * draw_share(load.clock_share, ratio) for load in loads
    )
    assert 0.5 < ratio < 1
    assert above_j / (sum(times_s) + 0.2) + IDLE_W == pytest.approx(LIMIT_W)


def test_time_in_which_the_device_idles_raises_the_clock() -> None:
    """900 J above idle in 1.5 s are 600 W above it: the limit."""
    load = [Load(1.0, 900.0, 1.0)]
    assert clock_ratio(load, IDLE_W, LIMIT_W, waits_s=0.5) == 1
    assert clock_ratio(load, IDLE_W, LIMIT_W, least_s=1.5) == 1
    assert clock_ratio(load, IDLE_W, LIMIT_W) < clock_ratio(load, IDLE_W, LIMIT_W, waits_s=0.2) < 1


def test_bubbles_grow_with_what_the_clock_slows() -> None:
    """A fifth of a second for each that the device is busy: 900 r^3 / 1.2 = 600, and a half is 600 W at full clock."""
    load = [Load(1.0, 900.0, 1.0)]
    assert clock_ratio(load, IDLE_W, LIMIT_W, bubbles=0.2) == pytest.approx((1.2 * 600 / 900) ** (1 / 3))
    assert clock_ratio(load, IDLE_W, LIMIT_W, bubbles=0.5) == 1
    clock = lowered_clock([MM], [product()], np.array([1]), np.array([1.0]), PROFILE, bubbles=0.2)
    assert clock is not None
    assert clock.ratio == pytest.approx((1.2 * 600 / 900) ** (1 / 3))


def test_slow_products_draw_less() -> None:
    """By the share of their arithmetic's peak; never more than the measured. Work on memory draws what it draws."""
    assert above_idle_w(product(rate_per_s=400e12), 1.0, PRODUCT, IDLE_W, DEVICE) == pytest.approx(450)
    assert above_idle_w(product(rate_per_s=400e12, arithmetic="tf32"), 1.0, PRODUCT, IDLE_W, DEVICE) == 900
    assert above_idle_w(product(rate_per_s=900e12), 1.0, PRODUCT, IDLE_W, DEVICE) == 900
    assert above_idle_w(copy(), 2.0, COPY, IDLE_W, DEVICE) == 400


@pytest.mark.parametrize(
    ("kind", "arithmetic", "known", "name"),
    [
        ("gemm", "bf16", "gemm_bf16 gemm_fp32", "gemm_bf16"),
        ("gemm", "fp32", "gemm_bf16 gemm_fp32", "gemm_fp32"),
        ("gemm", "fp32", "gemm_bf16", "gemm_bf16"),
        ("convolution_forward", "fp32", "gemm_bf16 gemm_fp32", "gemm_fp32"),
        ("convolution_forward", "tf32", "gemm_bf16 convolution", "convolution"),
        ("attention_backward", "bf16", "attention_backward attention", "attention_backward"),
        ("attention_backward", "bf16", "attention", "attention"),
        ("batch_norm", "fp32", "pointwise row", "row"),
        ("copy", "fp32", "pointwise row", "pointwise"),
        ("copy", "fp32", "row", None),
    ],
)
def test_kind_of_an_operator(kind: str, arithmetic: str, known: str, name: str | None) -> None:
    cost = product(arithmetic=arithmetic)._replace(kind=kind)
    assert power_kind(cost, MM, dict.fromkeys(known.split(), COPY)) == name


def test_only_what_follows_the_clock_takes_longer() -> None:
    """Four products of a second and two additions of half a second."""
    clock = lowered_clock([MM, ADD], [product(), copy(0.5)], np.array([4, 2]), np.array([4.0, 1.0]), PROFILE)
    assert clock is not None
    expected = clock_ratio([Load(4.0, 3600.0, 1.0), Load(1.0, 400.0, 0.0)], IDLE_W, LIMIT_W)
    assert clock.ratio == pytest.approx(expected)
    assert clock.hz == pytest.approx(expected * 2e9)
    assert clock.factor.tolist() == pytest.approx([1 / expected, 1])
    assert list(clock.factors) == ["gemm_bf16", "pointwise"]
    assert clock.term_s == pytest.approx(0.01 * 4.0 / expected)


@pytest.mark.parametrize(
    "changes",
    [
        {"power": Power(draw_w={"gemm_bf16": 690.0}, clock_hz={"gemm_bf16": 1.5e9})},
        {"device": DEVICE.model_copy(update={"power_limit_w": None})},
        {"device": DEVICE.model_copy(update={"power_limit_w": 1000.0})},
    ],
)
def test_the_full_clock_is_kept(changes: dict[str, object]) -> None:
    """Nothing measured, no limit known, or one that is not reached."""
    profile = PROFILE.model_copy(update=changes)
    assert lowered_clock([MM], [product()], np.array([1]), np.array([1.0]), profile) is None


def test_the_clock_is_never_lower_than_seen_in_proportion_to_the_limit() -> None:
    """Work that does not follow the clock draws more than the limit whatever the clock."""
    loops = (PowerLoop(time_s=1.0, clock_hz=1.6e9),)
    power = POWER.model_copy(
        update={
            "kinds": {"pointwise": COPY.model_copy(update={"draw_w": 800.0})},
            "readings": {"gemm_bf16": PowerReading(alone_s=1.0, loops=loops)},
        }
    )
    for limit_w, ratio in ((700.0, 0.8), (350.0, 0.4)):
        device = DEVICE.model_copy(update={"power_limit_w": limit_w})
        profile = PROFILE.model_copy(update={"power": power, "device": device})
        clock = lowered_clock([ADD], [copy()], np.array([1]), np.array([1.0]), profile)
        assert clock is not None
        assert clock.ratio == pytest.approx(ratio)
        assert clock.factor.tolist() == [1]


SCENARIO = Scenario.model_validate(
    {
        "name": "s",
        "model": {"family": "gpt", "size": "tiny"},
        "batch": {"size": 1, "sequence_length": 8},
        "hardware": {"profile": "p.json"},
    }
)


def test_a_step_at_the_limit_takes_longer_and_says_so() -> None:
    """Every kernel takes a millisecond, all follow the clock, and draw 1000 W: the clock falls by a cube root."""
    operations = [operation for operation in get_trace(SCENARIO).operations if operation.runs_on_device]
    kernels = {kernel_key(each): KernelRecord(time_s=1e-3, kernels=1) for each in operations}
    every = PowerKind(draw_w=1000.0, clock_share=1.0)
    names = ("gemm_bf16", "gemm_fp32", "attention", "row", "pointwise", "optimizer")
    power = POWER.model_copy(update={"kinds": dict.fromkeys(names, every)})
    cool = PROFILE.model_copy(update={"kernels": kernels, "power": Power()})
    before, after = (predict(SCENARIO, each) for each in (cool, cool.model_copy(update={"power": power})))
    ratio = (600 / 900) ** (1 / 3)
    assert before.clock is None
    assert after.clock is not None
    assert after.clock.ratio == pytest.approx(ratio, rel=1e-3)
    assert after.step_time_s == pytest.approx(before.step_time_s / ratio, rel=1e-3)
    assert after.memory is not None
    assert before.memory is not None
    assert after.memory.steady == before.memory.steady
    narrow, wide = ((each.interval_s[1] - each.step_time_s) / each.step_time_s for each in (before, after))
    assert wide**2 - narrow**2 == pytest.approx((1.645 * 0.01) ** 2, rel=0.01)


def test_a_prediction_without_power_is_the_same_whatever_was_read_long_ago() -> None:
    old = PROFILE.model_copy(update={"power": Power(draw_w={"copy": 500.0}, clock_hz={"copy": 2e9})})
    bare = PROFILE.model_copy(update={"power": Power()})
    found = [replace(predict(SCENARIO, each), profile=bare).step_time_s for each in (old, bare)]
    assert found[0] == found[1]
