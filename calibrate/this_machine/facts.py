"""What machine this is: for the provenance of profiles and measurements, and for a profile's device section."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import torch

from calibrate.this_machine import nvml
from perfmodel.errors import PerfModelError
from perfmodel.hardware.datasheets import find_datasheet
from perfmodel.hardware.profile import Device

RECORDED_VARIABLES = ("NCCL_", "TORCH_", "PYTORCH_", "NVSHMEM_", "CUBLAS_", "CUDNN_", "OMP_", "MKL_")
RECORDED_EXACTLY = ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING")


def check_device(device: str) -> None:
    """Refuse a device that is not here.

    Raises
    ------
    PerfModelError
        If ``device`` is neither ``cuda`` nor ``cpu``, or is ``cuda`` without a GPU.
    """
    if device not in ("cuda", "cpu"):
        raise PerfModelError(f"--device must be cuda or cpu (got {device!r}). Use one of them.")
    if device == "cuda" and not torch.cuda.is_available():
        raise PerfModelError("--device cuda needs a GPU that torch can use (none found). Use --device cpu.")


def machine_facts(device: str) -> dict[str, Any]:
    """Hardware, driver, library versions and environment; no host name, no path.

    device: ``cuda`` or ``cpu``. Keys whose value is unknown here are left out.
    """
    facts: dict[str, Any] = {
        "device": device,
        "cpu": cpu_name(),
        "cpu_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "host_memory_bytes": host_memory_bytes(),
        "python": platform.python_version(),
        "system": platform.system(),
        "torch": str(torch.__version__),
        "transformers": _version("transformers"),
        "numpy": _version("numpy"),
        "environment": environment(),
    }
    if device == "cuda":
        facts |= _cuda_facts()
    return {key: value for key, value in facts.items() if value is not None}


def _cuda_facts() -> dict[str, Any]:
    managed = nvml.current_device()
    nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else None
    return {
        "gpu": torch.cuda.get_device_name(),
        "gpus": torch.cuda.device_count(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, nccl)) if nccl else None,
        "driver": managed.driver() if managed else None,
        "power_limit_w": managed.power_limit_w() if managed else None,
        "clock_hz": managed.clock_hz() if managed else None,
        "most_clock_hz": managed.most_clock_hz() if managed else None,
    }


def environment() -> dict[str, str]:
    """Return the environment variables that change how torch and NCCL run; values that are paths are left out."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if (name.startswith(RECORDED_VARIABLES) or name in RECORDED_EXACTLY) and "/" not in value
    }


def cpu_name() -> str:
    """Return the processor's model name, or its architecture where the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def host_memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def device_section(device: str) -> Device:
    """Return the profile's device, from the driver and the datasheet."""
    if device == "cpu":
        return Device(kind="cpu", name=cpu_name(), memory_bytes=host_memory_bytes())
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    managed, sheet = nvml.current_device(), find_datasheet(properties.name)
    return Device(
        kind="cuda",
        name=properties.name,
        memory_bytes=properties.total_memory,
        multiprocessors=properties.multi_processor_count,
        l2_bytes=properties.L2_cache_size,
        compute_capability=(properties.major, properties.minor),
        power_limit_w=managed.power_limit_w() if managed else None,
        peak_flops_per_s=sheet.peak_flops_per_s if sheet else {},
        peak_memory_bytes_per_s=sheet.peak_memory_bytes_per_s if sheet else None,
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
