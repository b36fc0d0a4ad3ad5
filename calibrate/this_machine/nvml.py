"""Power, energy and clock of the current CUDA device, as NVIDIA's management library reads them; none without it."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

_SM_CLOCK = 1  # NVML_CLOCK_SM


class Nvml:
    """One device. Every reading is None where the driver does not give it."""

    def __init__(self, library: Any, handle: ctypes.c_void_p) -> None:
        self._library = library
        self._handle = handle

    def draw_w(self) -> float | None:
        """Electrical power at this moment."""
        return self._read("nvmlDeviceGetPowerUsage", ctypes.c_uint, 1e-3)

    def energy_j(self) -> float | None:
        """Electrical energy since the driver was loaded."""
        return self._read("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong, 1e-3)

    def power_limit_w(self) -> float | None:
        return self._read("nvmlDeviceGetEnforcedPowerLimit", ctypes.c_uint, 1e-3)

    def clock_hz(self) -> float | None:
        """Of the multiprocessors at this moment."""
        return self._read("nvmlDeviceGetClockInfo", ctypes.c_uint, 1e6, ctypes.c_int(_SM_CLOCK))

    def most_clock_hz(self) -> float | None:
        return self._read("nvmlDeviceGetMaxClockInfo", ctypes.c_uint, 1e6, ctypes.c_int(_SM_CLOCK))

    def driver(self) -> str | None:
        text = ctypes.create_string_buffer(96)
        failed = self._library.nvmlSystemGetDriverVersion(text, ctypes.c_uint(96))
        return None if failed else text.value.decode()

    def _read(self, function: str, kind: Any, unit: float, *arguments: Any) -> float | None:
        value = kind()
        failed = getattr(self._library, function)(self._handle, *arguments, ctypes.byref(value))
        return None if failed else value.value * unit


@cache
def current_device() -> Nvml | None:
    """The management handle of torch's current device; None without the library."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    handle = ctypes.c_void_p()
    identity = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}".encode()
    if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(identity, ctypes.byref(handle)):
        return None
    return Nvml(library, handle)
