from __future__ import annotations

from pathlib import Path

import pytest

from calibrate.this_machine import facts as machine
from perfmodel.hardware.datasheets import DATASHEETS, find_datasheet


def test_facts_name_hardware_and_libraries_but_no_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    monkeypatch.setenv("TORCH_HOME", "/somewhere")
    monkeypatch.setenv("HOSTNAME", "node-17")
    facts = machine.machine_facts("cpu")
    assert {"device", "cpu", "cpu_cores", "python", "torch", "environment"} <= set(facts)
    assert facts["environment"]["NCCL_NVLS_ENABLE"] == "0"
    assert "TORCH_HOME" not in facts["environment"]
    assert "node-17" not in str(facts)
    assert "/" not in str(facts["environment"])


def test_the_cpu_section() -> None:
    device = machine.device_section("cpu")
    assert (device.kind, device.name) == ("cpu", machine.cpu_name())
    assert device.memory_bytes > 2**28


@pytest.mark.parametrize(
    ("name", "bf16", "memory"),
    [
        ("NVIDIA H200", 989.5e12, 4.8e12),
        ("NVIDIA H100 80GB HBM3", 989.5e12, 3.35e12),
        ("NVIDIA H100 PCIe", 756e12, 2.0e12),
        ("NVIDIA A100-SXM4-80GB", 312e12, 2.039e12),
        ("NVIDIA A100-SXM4-40GB", 312e12, 1.555e12),
        ("NVIDIA A100 80GB PCIe", 312e12, 1.935e12),
        ("Tesla V100-SXM2-16GB", None, 0.9e12),
        ("NVIDIA B200", 2250e12, 7.7e12),
        ("NVIDIA L4", 121e12, 0.3e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12, 1.008e12),
    ],
)
def test_datasheets_by_driver_name(name: str, bf16: float | None, memory: float) -> None:
    sheet = find_datasheet(name)
    assert sheet is not None
    assert sheet.peak_flops_per_s.get("bf16") == bf16
    assert sheet.peak_memory_bytes_per_s == memory


@pytest.mark.parametrize("name", ["NVIDIA L40S", "NVIDIA GeForce RTX 4090x", "Radeon", ""])
def test_other_devices_have_no_datasheet(name: str) -> None:
    assert find_datasheet(name) is None


def test_datasheet_rates_are_ordered() -> None:
    for _, sheet in DATASHEETS:
        rates = sheet.peak_flops_per_s
        assert rates["fp32"] <= rates.get("tf32", rates["fp32"]) <= rates.get("bf16", rates["fp16"]) <= rates["fp16"]


def test_a_cpu_without_a_model_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda self: "processor: 0\n")
    assert machine.cpu_name() == machine.platform.machine()
