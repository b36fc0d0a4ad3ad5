"""Provenance: what is named, which variables are kept, and what the management library's readings become."""

import torch

from calibrate.this_machine.nvml import Nvml
from tests.calibrate.this_machine.fake_nvml import FakeNvml
from validate import machine
from validate.machine import gpu_readings


def test_a_cpu_names_libraries_and_only_the_variables_that_matter(monkeypatch):
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    monkeypatch.setenv("SOME_PASSWORD", "x")
    found = machine.machine(torch.device("cpu"))
    assert found["torch"] == torch.__version__
    assert found["environment"]["NCCL_P2P_DISABLE"] == "1"
    assert "SOME_PASSWORD" not in found["environment"]
    assert not {"gpu", "cuda", "nccl"} & set(found)


def test_readings_are_named_and_printed_as_nvidia_smi_does():
    assert gpu_readings(Nvml(FakeNvml("nvmlDeviceGetTemperature"), object())) == {
        "driver_version": "580.1",
        "clocks.sm": "1980",
        "clocks.mem": "3201",
        "clocks.max.sm": "2010",
        "power.draw": "650.50",
        "power.limit": "700.00",
        "temperature.gpu": "[N/A]",
    }


def test_without_a_device_there_are_no_readings():
    assert gpu_readings(None) == {}
