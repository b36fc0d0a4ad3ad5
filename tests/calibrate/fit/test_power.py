"""What kinds of work draw and how they follow the clock, from loops made up and loops read on an H200."""

from __future__ import annotations

import json

import pytest

from calibrate.device.power import operations
from calibrate.fit.power import fit_power, fitted, full_times_s, loop_error
from perfmodel.cost.kernels.lookup import kernel_costs
from perfmodel.cost.power import PRODUCT, Load, clock_ratio, draw_share, lengthening
from perfmodel.hardware.power import Power, PowerLoop, PowerReading
from perfmodel.hardware.profile import find_profile, load_profile
from tests.places import TESTS

DATA = TESTS / "data" / "power"
H200 = DATA / "h200.json"
RAW_NAMES = {  # of the kinds in h200-raw.json, which was read before the stage had its form
    "gemm_bf16": "gemm_bf16",
    "gemm_fp32": "gemm_fp32",
    "attention_forward": "attention",
    "attention_backward": "attention_bwd",
    "row": "layer_norm",
    "pointwise": "add_bf16",
    "optimizer": "adamw",
}
IDLE_W, LIMIT_W, FULL_HZ = 100.0, 700.0, 2e9
# By kind: draw at full clock, clock_share, seconds of a call.
TRUTH = {"gemm_bf16": (1100.0, 0.8, 1e-3), "row": (650.0, 0.5, 1e-4), "attention": (740.0, 0.9, 2e-4)}


def loop(name: str, products: int, calls: int) -> PowerLoop:
    """As the model has it; the driver's clock is exact."""
    counts = {name: calls} | ({"gemm_bf16": products + (calls if name == "gemm_bf16" else 0)} if products else {})
    loads = [
        Load(count * TRUTH[each][2], count * TRUTH[each][2] * (TRUTH[each][0] - IDLE_W), TRUTH[each][1])
        for each, count in counts.items()
    ]
    ratio = clock_ratio(loads, IDLE_W, LIMIT_W)

    def slowed_s(kind: str) -> float:
        return TRUTH[kind][2] * lengthening(TRUTH[kind][1], ratio)

    draw_w = IDLE_W + (TRUTH[name][0] - IDLE_W) * draw_share(TRUTH[name][1], ratio)
    return PowerLoop(
        products=products,
        calls=calls,
        time_s=slowed_s(name),
        product_s=slowed_s("gemm_bf16") if products else None,
        clock_hz=ratio * FULL_HZ,
        draw_w=None if products else draw_w,
    )


def made_up() -> dict[str, PowerReading]:
    return {
        name: PowerReading(alone_s=truth[2], flops=1e9, loops=tuple(loop(name, products, 10) for products in (0, 2, 8)))
        for name, truth in TRUTH.items()
    }


def test_what_the_loops_were_made_from_is_found() -> None:
    kinds, spread = fit_power(made_up(), IDLE_W, LIMIT_W, FULL_HZ)
    for name, (draw_w, clock_share, time_s) in TRUTH.items():
        assert kinds[name].clock_share == pytest.approx(clock_share, abs=0.002)
        assert kinds[name].draw_w == pytest.approx(draw_w, rel=0.015)
        assert kinds[name].flops_per_s == pytest.approx(1e9 / time_s)
    assert spread < 0.003


def test_without_products_there_is_no_fit() -> None:
    readings = made_up()
    del readings["gemm_bf16"]
    assert fit_power(readings, IDLE_W, LIMIT_W, FULL_HZ) == ({}, 0.0)
    assert fitted(Power(readings=made_up(), full_clock_hz=FULL_HZ)).kinds == {}


def test_a_device_that_never_lowers_its_clock() -> None:
    cool = (PowerLoop(time_s=1e-3, clock_hz=FULL_HZ, draw_w=300.0),)
    reading = PowerReading(alone_s=1e-3, loops=cool)
    kinds, spread = fit_power({"gemm_bf16": reading}, IDLE_W, LIMIT_W, FULL_HZ)
    assert kinds["gemm_bf16"].draw_w == pytest.approx(300)
    assert (kinds["gemm_bf16"].clock_share, spread) == (0, 0)


def h200(*products: int) -> Power:
    """Only loops with so many products a round."""
    data = json.loads(H200.read_text())
    for reading in data["readings"].values():
        reading["loops"] = [each for each in reading["loops"] if each.get("products", 0) in products]
    return Power.model_validate(data)


def test_loops_of_an_h200() -> None:
    """Products follow the clock, memory does not; products would draw far more than the limit of 700 W."""
    power = fitted(h200(0, 2, 8))
    shares = {name: kind.clock_share for name, kind in power.kinds.items()}
    assert 0.6 < shares["gemm_bf16"] < 0.9
    assert 0.8 < shares["gemm_fp32"] < 0.95
    assert shares["pointwise"] < 0.02
    assert 0.05 < shares["optimizer"] < 0.2
    assert 950 < power.kinds["gemm_bf16"].draw_w < 1300
    assert power.kinds["pointwise"].draw_w == pytest.approx(542, abs=1)
    assert power.spread < 0.013


@pytest.mark.parametrize(("known", "held_out"), [(2, 8), (8, 2)])
def test_loops_that_were_held_out_are_predicted(known: int, held_out: int) -> None:
    power = fitted(h200(0, known))
    full_s = full_times_s(power.readings, 1.98e9)
    error = loop_error(h200(held_out).readings, power.kinds, full_s, power.idle_w, 700.0)
    assert error < 0.02
    assert error < 0.4 * loop_error(  # of keeping the full clock
        h200(held_out).readings, power.kinds, full_s, power.idle_w, 1e6
    )


def test_the_shipped_profile_has_what_these_loops_tell() -> None:
    shipped = load_profile(find_profile("h200-sxm-x4")).power
    found = fitted(Power.model_validate(json.loads(H200.read_text())))
    assert shipped.readings == found.readings
    assert shipped.kinds.keys() == found.kinds.keys()
    for name, kind in found.kinds.items():
        assert shipped.kinds[name].draw_w == pytest.approx(kind.draw_w, rel=1e-6)
        assert shipped.kinds[name].clock_share == pytest.approx(kind.clock_share, rel=1e-6)


def test_these_loops_are_what_was_read() -> None:
    """Time, clock and draw to five digits. Of products, which the loop itself slowed, the time alone is that of the
    curve of their kernels.
    """
    raw = json.loads((DATA / "h200-raw.json").read_text())
    found = json.loads(H200.read_text())
    assert found["readings"].keys() == RAW_NAMES.keys()
    assert (found["idle_w"], found["limit_w"]) == (pytest.approx(raw["idle_w"], rel=1e-4), raw["limit_w"])
    for name, reading in found["readings"].items():
        read = raw[RAW_NAMES[name]]
        alone, *beside = reading["loops"]
        for key in ("time_s", "clock_hz", "draw_w"):
            assert alone[key] == pytest.approx(read["sustained"][key], rel=1e-4)
        assert [each["products"] for each in beside] == [each["products"] for each in read["hot"]]
        for one, other in zip(beside, read["hot"], strict=True):
            assert (one["time_s"], one["product_s"]) == pytest.approx((other["time_s"], other["gemm_s"]), rel=1e-4)
            assert one["clock_hz"] == other["clock_hz"]
        if name != PRODUCT:
            assert reading["alone_s"] == alone["time_s"]
    product = operations()[PRODUCT]
    (cost,) = kernel_costs((product,), load_profile(find_profile("h200-sxm-x4")), False)
    assert found["readings"][PRODUCT]["alone_s"] == pytest.approx(cost.time_s, rel=1e-3)
