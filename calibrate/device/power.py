"""Keeping the device in its working state, and reading what sustained work draws and how a lowered clock slows it.

Kinds of work run without pause, then in turns with GEMMs, which make the device lower its clock. Calls are
those of kernel keys, made and timed alone as they are. CUDA only; what the readings say is :mod:`calibrate.fit.power`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from calibrate.fit.power import fitted
from calibrate.jobs import Job, job
from calibrate.kernels import operators
from calibrate.kernels.bench import Bench, tf32
from calibrate.this_machine import nvml
from perfmodel.cost.kernels.classify import classify
from perfmodel.cost.kernels.work import arithmetic_kind, physical_flops
from perfmodel.cost.power import PRODUCT
from perfmodel.hardware.power import Power, PowerLoop, PowerReading
from perfmodel.trace.operation import Operation

ALONE_S = 1.2
LOADED_S = 0.6
SETTLING = 0.5  # of a loop's time, at its beginning: not read
GEMMS = (2, 8)  # in a round
ROUND_S = 2e-3  # of a kind's own calls in a round
MOST_QUEUED = 6  # rounds that the host may have queued
IDLE_S = 0.4
REST_S = 0.5  # after which a clock that work has lowered is back: GEMMs keep it down for calls that follow them
ARITHMETIC_CLASSES = ("gemm", "attention_forward", "attention_backward", "convolution_forward")


def operations() -> dict[str, Operation]:
    """Return a call for each kind of work (:func:`perfmodel.cost.power.power_kind`), large enough to fill a device."""
    vector = operators.tensor("bfloat16", 2**27)
    forward, backward = operators.attention("flash", "bfloat16", 4, 32, 32, 2048, 64, causal=True)
    return {
        PRODUCT: operators.mm("bfloat16", 8192, 8192, 8192),
        "gemm_fp32": operators.mm("float32", 4096, 4096, 4096),
        "attention_forward": forward,
        "attention_backward": backward,
        "row": operators.layer_norm("bfloat16", 4, 2048, 4096)[0],
        "pointwise": operators.binary("add.Tensor", vector, vector),
        "optimizer": operators.fused_adamw([operators.tensor("float32", 2**24)] * 4),
        "convolution": operators.convolution("float32", 32, 128, 112, 128, 3, 1, last=False, bias=False)[0],
    }


def soak(seconds: float) -> None:
    """Mixed work for that long, so that clocks and temperature are those of training."""
    wide = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    plain = torch.randn(4096, 4096, device="cuda")
    bytes_ = torch.randint(0, 255, (2**29,), device="cuda", dtype=torch.uint8)
    target = torch.empty_like(bytes_)
    stop_s = time.perf_counter() + seconds
    while time.perf_counter() < stop_s:
        torch.mm(wide, wide)
        torch.mm(plain, plain)
        target.copy_(bytes_)
        torch.cuda.synchronize()


def measure_power(bench: Bench, report: Callable[[str], None]) -> Power:
    """Return readings of every kind of work that runs here, with what follows from them; empty where the driver does
    not tell.

    The device should be warm.
    """
    managed = nvml.current_device()
    if managed is None:
        return Power()
    jobs = {name: job(operation, "grid") for name, operation in operations().items()}
    alone_s, clocks_hz = _alone(managed, bench, jobs)
    if PRODUCT not in alone_s:
        return Power()
    idle_w = _idle_w(managed)
    gemm = bench.make(jobs[PRODUCT])
    readings: dict[str, PowerReading] = {}
    for name, time_s in alone_s.items():
        report(name)
        found = _reading(managed, bench, jobs[name], time_s, gemm)
        if found is not None:
            readings[name] = found
    clocks_hz += [loop.clock_hz for each in readings.values() for loop in each.loops]
    return fitted(
        Power(
            idle_w=idle_w or 0.0,
            limit_w=managed.power_limit_w(),
            full_clock_hz=max(clocks_hz, default=None),
            readings=readings,
        )
    )


def _alone(managed: nvml.Nvml, bench: Bench, jobs: Mapping[str, Job]) -> tuple[dict[str, float], list[float]]:
    """Return seconds of each kind's call as kernel keys are timed, where it runs, and clocks read in between."""
    found: dict[str, float] = {}
    clocks_hz: list[float] = []
    for name, item in jobs.items():
        torch.cuda.synchronize()
        time.sleep(REST_S)
        record, _ = bench.time(item)
        clock_hz = managed.clock_hz()
        found |= {} if record.time_s is None else {name: record.time_s}
        clocks_hz += [] if clock_hz is None else [clock_hz]
    return found, clocks_hz


def _idle_w(managed: nvml.Nvml) -> float | None:
    torch.cuda.synchronize()
    time.sleep(IDLE_S / 2)
    meter = _Meter(managed)
    time.sleep(IDLE_S)
    return meter.draw_w()


def _reading(
    managed: nvml.Nvml, bench: Bench, item: Job, alone_s: float, gemm: Callable[[], Any]
) -> PowerReading | None:
    """Return a kind's reading; None where the driver does not report the clock."""
    count = max(1, round(ROUND_S / alone_s))
    with tf32("cuda", item.tf32), torch.no_grad():
        call = bench.make(item)
        loops = [_loop(managed, call, count, gemm, gemms, ALONE_S if gemms == 0 else LOADED_S) for gemms in (0, *GEMMS)]
    known = tuple(loop for loop in loops if loop is not None)
    if len(known) < len(loops):
        return None
    return reading(item.operation, alone_s, known)


def reading(operation: Operation, alone_s: float, loops: Sequence[PowerLoop]) -> PowerReading:
    """Return what was read of a kind of work for which ``operation`` stands, with FLOPs if it is arithmetic."""
    if classify(operation) not in ARITHMETIC_CLASSES:
        return PowerReading(alone_s=alone_s, loops=tuple(loops))
    arithmetic = arithmetic_kind(operation, matmul_tf32=False)
    return PowerReading(alone_s=alone_s, flops=physical_flops(operation), arithmetic=arithmetic, loops=tuple(loops))


class Round(NamedTuple):
    """Seconds of a round's GEMMs together, and of its calls."""

    products_s: float
    calls_s: float


def loop_of(
    rounds: Sequence[Round], gemms: int, count: int, clocks_hz: Sequence[float], draw_w: float | None
) -> PowerLoop | None:
    """Return a loop's medians; None without rounds or readings of the clock."""
    if not rounds or not clocks_hz:
        return None
    products_s = statistics.median(each.products_s for each in rounds)
    return PowerLoop(
        products=gemms,
        calls=count,
        time_s=statistics.median(each.calls_s for each in rounds) / count,
        product_s=products_s / gemms if gemms else None,
        clock_hz=statistics.median(clocks_hz),
        draw_w=draw_w,
    )


def _loop(
    managed: nvml.Nvml, call: Callable[[], Any], count: int, gemm: Callable[[], Any], gemms: int, seconds: float
) -> PowerLoop | None:
    """Run rounds of GEMMs and calls for that long, the stream never empty; those of the beginning are not read."""
    queued: list[tuple[torch.cuda.Event, ...]] = []
    rounds: list[Round] = []
    clocks_hz: list[float] = []
    meter: _Meter | None = None
    began_s = time.perf_counter()
    while (elapsed_s := time.perf_counter() - began_s) < seconds:
        queued.append(_round(call, count, gemm, gemms))
        if len(queued) <= MOST_QUEUED:
            continue
        ended = _seconds(queued.pop(0))
        if elapsed_s < SETTLING * seconds:
            continue
        meter = meter or _Meter(managed)
        rounds.append(ended)
        clock_hz = managed.clock_hz()
        clocks_hz += [] if clock_hz is None else [clock_hz]
    draw_w = None if meter is None else meter.draw_w()
    torch.cuda.synchronize()
    return loop_of(rounds, gemms, count, clocks_hz, draw_w)


def _round(call: Callable[[], Any], count: int, gemm: Callable[[], Any], gemms: int) -> tuple[torch.cuda.Event, ...]:
    marks = tuple(torch.cuda.Event(enable_timing=True) for _ in range(3))
    marks[0].record()
    for _ in range(gemms):
        gemm()
    marks[1].record()
    for _ in range(count):
        call()
    marks[2].record()
    return marks


def _seconds(marks: Sequence[torch.cuda.Event]) -> Round:
    marks[2].synchronize()
    first, second = (a.elapsed_time(b) * 1e-3 for a, b in pairwise(marks))
    return Round(first, second)


class _Meter:
    """Average draw since it was made: by the counter of energy, or else the driver's own average."""

    def __init__(self, managed: nvml.Nvml) -> None:
        self._managed = managed
        self._began_s, self._began_j = time.perf_counter(), managed.energy_j()

    def draw_w(self) -> float | None:
        ended_j = self._managed.energy_j()
        if ended_j is None or self._began_j is None:
            return self._managed.draw_w()
        return (ended_j - self._began_j) / (time.perf_counter() - self._began_s)
