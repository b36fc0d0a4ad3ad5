"""Readings of the management library: units, what the driver refuses, and machines without one."""

from __future__ import annotations

import sys

import pytest

from calibrate.this_machine.nvml import Nvml, find_device
from tests.calibrate.this_machine.fake_nvml import FakeNvml


def test_readings_are_in_si_units() -> None:
    library = FakeNvml()
    device = find_device("1-2", library)
    assert device is not None
    assert library.asked_uuid == "GPU-1-2"
    assert (device.draw_w(), device.power_limit_w(), device.set_power_limit_w()) == (650.5, 600.0, 700.0)
    assert device.energy_j() == 5e6
    assert (device.clock_hz(), device.memory_clock_hz(), device.most_clock_hz()) == (1.98e9, 3.201e9, 2.01e9)
    assert (device.temperature_c(), device.driver()) == (45.0, "580.1")


def test_what_the_driver_refuses_is_not_known() -> None:
    library = FakeNvml("nvmlDeviceGetEnforcedPowerLimit", "nvmlSystemGetDriverVersion")
    device = Nvml(library, object())
    assert (device.power_limit_w(), device.driver()) == (None, None)
    assert device.set_power_limit_w() == 700.0


@pytest.mark.parametrize("function", ["nvmlInit", "nvmlDeviceGetHandleByUUID"])
def test_without_a_driver_or_the_device_there_are_no_readings(function: str) -> None:
    assert find_device("1-2", FakeNvml(function)) is None


def test_without_the_package_there_are_no_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert find_device("1-2") is None


def test_the_package_has_what_is_asked_of_it() -> None:
    pynvml = pytest.importorskip("pynvml")
    assert [name for name in vars(FakeNvml()) if name.startswith("nvml") and not hasattr(pynvml, name)] == []
    constants = [name for name in vars(FakeNvml) if name.startswith("NVML_")]
    assert {name: getattr(FakeNvml, name) for name in constants} == {name: getattr(pynvml, name) for name in constants}
    assert issubclass(pynvml.NVMLError, Exception)
