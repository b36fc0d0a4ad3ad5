"""What a measurement says about the machine it was taken on."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import torch

from calibrate.this_machine import nvml
from calibrate.this_machine.facts import machine_facts

UNKNOWN = "[N/A]"  # as nvidia-smi prints what the driver does not give


def machine(device: torch.device) -> dict[str, Any]:
    """Return hardware, library versions, the environment variables that matter, and when this was."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return machine_facts(device.type) | {"threads": torch.get_num_threads(), "measured_at": now}


def gpu_readings(managed: nvml.Nvml | None) -> dict[str, str]:
    """Return driver, clocks (MHz), power (W) and temperature (degrees Celsius), to be read while the device is warm.

    Names and formats are those of ``nvidia-smi --query-gpu``, which measurements have always kept. Empty without a
    device.
    """
    if managed is None:
        return {}
    return {
        "driver_version": managed.driver() or UNKNOWN,
        "clocks.sm": _printed(managed.clock_hz(), 1e-6),
        "clocks.mem": _printed(managed.memory_clock_hz(), 1e-6),
        "clocks.max.sm": _printed(managed.most_clock_hz(), 1e-6),
        "power.draw": _printed(managed.draw_w(), digits=2),
        "power.limit": _printed(managed.set_power_limit_w(), digits=2),
        "temperature.gpu": _printed(managed.temperature_c()),
    }


def _printed(value: float | None, unit: float = 1.0, digits: int = 0) -> str:
    return UNKNOWN if value is None else f"{value * unit:.{digits}f}"
