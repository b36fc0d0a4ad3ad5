"""Readings of power, as far as they need no device."""

from __future__ import annotations

import pytest

from calibrate.device import power
from calibrate.device.power import Round, loop_of, measure_power, operations, reading
from calibrate.kernels import operators
from calibrate.kernels.arguments import resolve
from calibrate.kernels.bench import Bench
from calibrate.this_machine import nvml
from calibrate.timing.samples import CpuStopwatch
from perfmodel.cost.kernels.lookup import kernel_costs
from perfmodel.cost.power import power_kind
from perfmodel.hardware.power import Power, PowerLoop
from perfmodel.hardware.profile import Device, Profile

DEVICE = Device(
    kind="cuda",
    name="G",
    memory_bytes=2**36,
    peak_flops_per_s=dict.fromkeys(("fp32", "tf32", "bf16"), 1e15),
    peak_memory_bytes_per_s=1e12,
)


def test_a_call_stands_for_its_own_kind() -> None:
    found = operations()
    profile = Profile(name="p", device=DEVICE)
    for (name, operation), cost in zip(
        found.items(), kernel_costs(list(found.values()), profile, matmul_tf32=False), strict=True
    ):
        resolve(operation.name)
        assert power_kind(cost, operation, dict.fromkeys(found)) == name  # type: ignore[arg-type]


def test_a_loop_s_medians() -> None:
    rounds = [Round(4.0, 1.0), Round(6.0, 3.0), Round(8.0, 2.0)]
    assert loop_of(rounds, 2, 10, [1e9, 3e9, 2e9], 650.0) == PowerLoop(
        products=2, calls=10, time_s=0.2, product_s=3.0, clock_hz=2e9, draw_w=650.0
    )
    assert loop_of([Round(0.0, 1.0)], 0, 1, [1e9], None) == PowerLoop(time_s=1.0, clock_hz=1e9)
    assert loop_of([], 2, 10, [1e9], 650.0) is None
    assert loop_of(rounds, 2, 10, [], 650.0) is None


def test_flops_are_counted_of_what_is_there_for_them() -> None:
    x = operators.tensor("float32", 1000, 1000)
    product = reading(operators.mm("float32", 1000, 1000, 1000), 1.0, [])
    assert (product.flops, product.arithmetic) == (2e9, "fp32")
    addition = reading(operators.binary("add.Tensor", x, x), 1.0, [])
    assert (addition.flops, addition.arithmetic) == (None, None)


class Meter:
    """Counts a joule a reading, or draws 650 W where it has no counter."""

    def __init__(self, counts: bool) -> None:
        self._counts, self._read_j = counts, 0.0

    def energy_j(self) -> float | None:
        self._read_j += 1.0
        return self._read_j if self._counts else None

    def draw_w(self) -> float:
        return 650.0


def test_draw_is_energy_over_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([10.0, 10.5])
    monkeypatch.setattr("time.perf_counter", lambda: next(seconds))
    assert power._Meter(Meter(counts=True)).draw_w() == 2.0  # type: ignore[arg-type]


def test_without_a_counter_draw_is_the_driver_s(monkeypatch: pytest.MonkeyPatch) -> None:
    assert power._Meter(Meter(counts=False)).draw_w() == 650.0  # type: ignore[arg-type]


def test_without_the_management_library_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "current_device", lambda: None)
    assert measure_power(Bench("cpu", CpuStopwatch()), print) == Power()
