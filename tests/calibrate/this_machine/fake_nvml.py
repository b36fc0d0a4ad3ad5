"""NVIDIA's management library as ``pynvml`` offers it, with one device."""

from __future__ import annotations

from typing import Any


class FakeNvml:
    """Answers in milliwatts, millijoules and megahertz, as the management library does; some readings it refuses.

    refuses: names of functions that raise the library's error.
    """

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    class NVMLError(Exception):
        """What every function raises that fails."""

    def __init__(self, *refuses: str) -> None:
        self.asked_uuid: str | None = None
        answers: dict[str, Any] = {
            "nvmlInit": lambda: None,
            "nvmlDeviceGetHandleByUUID": self._handle,
            "nvmlDeviceGetPowerUsage": lambda handle: 650_500,
            "nvmlDeviceGetTotalEnergyConsumption": lambda handle: 5_000_000_000,
            "nvmlDeviceGetEnforcedPowerLimit": lambda handle: 600_000,
            "nvmlDeviceGetPowerManagementLimit": lambda handle: 700_000,
            "nvmlDeviceGetClockInfo": lambda handle, kind: {1: 1980, 2: 3201}[kind],
            "nvmlDeviceGetMaxClockInfo": lambda handle, kind: {1: 2010}[kind],
            "nvmlDeviceGetTemperature": lambda handle, sensor: {0: 45}[sensor],
            "nvmlSystemGetDriverVersion": lambda: "580.1",
        }
        for name, answer in answers.items():
            setattr(self, name, self._refuse if name in refuses else answer)

    def _handle(self, uuid: str) -> object:
        self.asked_uuid = uuid
        return self

    def _refuse(self, *_: object) -> None:
        raise self.NVMLError
