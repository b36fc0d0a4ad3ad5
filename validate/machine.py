"""What a measurement says about the machine it was taken on."""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime
from typing import Any

import torch

from calibrate.this_machine.facts import machine_facts

GPU_FIELDS = (
    "driver_version",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "power.draw",
    "power.limit",
    "temperature.gpu",
)


def machine(device: torch.device) -> dict[str, Any]:
    """Names and versions of hardware and libraries, the environment variables that matter, and when this was."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return machine_facts(device.type) | {"threads": torch.get_num_threads(), "measured_at": now}


class GpuReading:
    """``nvidia-smi`` asked for driver, clocks and power while the device works; it answers in its own time."""

    def __init__(self, device: torch.device) -> None:
        command = ["nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader,nounits"]
        uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
        command += ["-i", f"GPU-{uuid}"] if uuid is not None else []
        try:
            self.process: subprocess.Popen[str] | None = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        except OSError:
            self.process = None

    def values(self) -> dict[str, str]:
        """By ``nvidia-smi`` field (MHz, W, degrees Celsius); empty where the command is not there."""
        if self.process is None:
            return {}
        try:
            output, _ = self.process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
            return {}
        if self.process.returncode != 0:
            return {}
        return dict(zip(GPU_FIELDS, map(str.strip, output.splitlines()[0].split(",")), strict=False))
