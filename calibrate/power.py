"""Keeping the device in its working state, and reading what sustained work draws. CUDA only."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from calibrate import nvml
from perfmodel.hardware.profile import Power

LOOP_S = 2.0
READ_EVERY_S = 0.05
GEMM_SIZE = 8192
COPY_BYTES = 2**29


def loops() -> dict[str, Callable[[], object]]:
    """Sustained kinds of work by name, each call a few milliseconds at most."""
    wide = torch.randn(GEMM_SIZE, GEMM_SIZE, device="cuda", dtype=torch.bfloat16)
    plain = torch.randn(GEMM_SIZE // 2, GEMM_SIZE // 2, device="cuda")
    bytes_ = torch.randint(0, 255, (COPY_BYTES,), device="cuda", dtype=torch.uint8)
    target = torch.empty_like(bytes_)
    return {
        "gemm_bf16": lambda: torch.mm(wide, wide),
        "gemm_fp32": lambda: torch.mm(plain, plain),
        "copy": lambda: target.copy_(bytes_),
    }


def soak(seconds: float) -> None:
    """Mixed work for that long, so that clocks and temperature are those of training."""
    work = list(loops().values())
    stop_s = time.perf_counter() + seconds
    while time.perf_counter() < stop_s:
        for call in work:
            call()
        torch.cuda.synchronize()


def sustained(report: Callable[[str], None]) -> Power:
    """Draw and clock of each kind of work after it has run a while; empty where the driver does not tell."""
    managed = nvml.current_device()
    draw_w: dict[str, float] = {}
    clock_hz: dict[str, float] = {}
    if managed is None:
        return Power()
    for name, call in loops().items():
        report(name)
        draws, clocks = _readings(managed, call)
        if draws:
            draw_w[name] = statistics.median(draws)
        if clocks:
            clock_hz[name] = statistics.median(clocks)
    return Power(draw_w=draw_w, clock_hz=clock_hz)


def _readings(managed: nvml.Nvml, call: Callable[[], object]) -> tuple[list[float], list[float]]:
    """Readings while the device works; those of the first half, when power still settles, are dropped."""
    draws: list[float] = []
    clocks: list[float] = []
    began_s = time.perf_counter()
    while (elapsed_s := time.perf_counter() - began_s) < LOOP_S:
        working = torch.cuda.Event()
        until_s = time.perf_counter() + READ_EVERY_S
        while time.perf_counter() < until_s:
            call()
            working.record()
            working.synchronize()
        call()
        draw, clock = managed.draw_w(), managed.clock_hz()
        if elapsed_s > LOOP_S / 2:
            draws += [draw] if draw is not None else []
            clocks += [clock] if clock is not None else []
    torch.cuda.synchronize()
    return draws, clocks
