"""Power, energy, clocks and temperature of a CUDA device, as NVIDIA's management library (NVML) reads them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


class Nvml:
    """One device. Every reading is None where the driver does not give it.

    Parameters
    ----------
    library : module
        ``pynvml``, or what answers as it does.
    handle : object
        The library's handle of the device.
    """

    def __init__(self, library: Any, handle: Any) -> None:
        self._library = library
        self._handle = handle

    def draw_w(self) -> float | None:
        """Return the electrical power: its average over the last second on recent devices, else at this moment."""
        return self._read("nvmlDeviceGetPowerUsage", 1e-3)

    def energy_j(self) -> float | None:
        """Return the electrical energy since the driver was loaded."""
        return self._read("nvmlDeviceGetTotalEnergyConsumption", 1e-3)

    def power_limit_w(self) -> float | None:
        """Return the limit that the device is held to: the lowest of all that are set."""
        return self._read("nvmlDeviceGetEnforcedPowerLimit", 1e-3)

    def set_power_limit_w(self) -> float | None:
        """Return the limit that the driver was told to keep."""
        return self._read("nvmlDeviceGetPowerManagementLimit", 1e-3)

    def clock_hz(self) -> float | None:
        """Return the clock of the multiprocessors at this moment."""
        return self._read("nvmlDeviceGetClockInfo", 1e6, self._library.NVML_CLOCK_SM)

    def most_clock_hz(self) -> float | None:
        """Return the highest clock of the multiprocessors."""
        return self._read("nvmlDeviceGetMaxClockInfo", 1e6, self._library.NVML_CLOCK_SM)

    def memory_clock_hz(self) -> float | None:
        """Return the clock of the device's memory at this moment."""
        return self._read("nvmlDeviceGetClockInfo", 1e6, self._library.NVML_CLOCK_MEM)

    def temperature_c(self) -> float | None:
        """Return the temperature of the chip in degrees Celsius."""
        return self._read("nvmlDeviceGetTemperature", 1.0, self._library.NVML_TEMPERATURE_GPU)

    def driver(self) -> str | None:
        """Return the driver's version."""
        try:
            return str(self._library.nvmlSystemGetDriverVersion())
        except self._library.NVMLError:
            return None

    def _read(self, function: str, unit: float, *arguments: Any) -> float | None:
        try:
            value: float = getattr(self._library, function)(self._handle, *arguments) * unit
        except self._library.NVMLError:
            return None
        return value


def find_device(uuid: str, library: Any = None) -> Nvml | None:
    """Return the device of this UUID; None without nvidia-ml-py, a driver, or such a device.

    Parameters
    ----------
    uuid : str
        As CUDA gives it.
    library : module, optional
        By default ``pynvml``, which nvidia-ml-py installs.
    """
    if library is None:
        try:
            import pynvml
        except ImportError:
            return None
        library = pynvml
    try:
        library.nvmlInit()
        return Nvml(library, library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
    except library.NVMLError:
        return None


@cache
def current_device() -> Nvml | None:
    """Return torch's current device; None where :func:`find_device` finds none."""
    return find_device(str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid))
