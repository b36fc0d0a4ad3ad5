"""Kernels and collectives side by side: what each takes beside the other, over what it takes alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from calibrate.collectives import SLEEP_CYCLES_PER_S, Wanted, collective_call
from perfmodel.hardware.interconnect import ContentionRecord, collective_key

REPEATS = 3
LOOP_S = 0.012  # of what is timed
MOST_LAUNCHES = 350  # of one loop: both together must fit the launch queue
HOST_S = 60e-6
SHORT_BYTES, LONG_BYTES = 32 << 20, 256 << 20
SLOW_S = 1e-3  # of an all-reduce of SHORT_BYTES
BESIDE = 2.5  # times as long as what is timed runs what is beside it, were both alone


def kernels(device: str) -> dict[str, Callable[[], Any]]:
    """Calls that stand for the kinds of operators of a step (:data:`calibrate.coupling.KIND_OF_KERNEL`)."""

    def matrices(rows: int, inner: int, columns: int, dtype: torch.dtype) -> Callable[[], Any]:
        a, b = (torch.randn(shape, device=device).to(dtype) for shape in ((rows, inner), (inner, columns)))
        out = torch.empty(rows, columns, device=device, dtype=dtype)
        return lambda: torch.mm(a, b, out=out)

    x, y = (torch.randn(64 << 20, device=device) for _ in range(2))
    heads = [torch.randn(4, 16, 2048, 64, device=device, dtype=torch.bfloat16) for _ in range(3)]
    rows = torch.randn(16384, 2048, device=device)
    parameters = [torch.nn.Parameter(torch.randn(2048, 2048, device=device)) for _ in range(24)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW(parameters, lr=0.0, foreach=True)
    return {
        "gemm_fp32_4096": matrices(4096, 4096, 4096, torch.float32),
        "gemm_bf16_8192": matrices(8192, 8192, 8192, torch.bfloat16),
        "gemm_bf16_2048": matrices(2048, 2048, 2048, torch.bfloat16),
        "gemm_fp32_2048x5120x1280": matrices(2048, 5120, 1280, torch.float32),
        "add_256MiB": lambda: x.add_(y),
        "attention_bf16": lambda: functional.scaled_dot_product_attention(*heads, is_causal=True),
        "layer_norm": lambda: functional.layer_norm(rows, (2048,)),
        "adamw_foreach": optimizer.step,
    }


def beside(ranks: int, short_s: float) -> tuple[Wanted, ...]:
    """Collectives that kernels are measured beside: smaller ones where the wire is slow.

    short_s: what an all-reduce of SHORT_BYTES takes.
    """
    short, long = (SHORT_BYTES, LONG_BYTES) if short_s < SLOW_S else (SHORT_BYTES // 8, SHORT_BYTES)
    return (
        Wanted("all_reduce", ranks, "float32", short),
        Wanted("all_reduce", ranks, "float32", long),
        Wanted("all_gather", ranks, "float32", long),
        Wanted("reduce_scatter", ranks, "float32", long),
    )


class ContentionBench:
    """Every rank runs the same loops at the same time."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self._side = torch.cuda.Stream()
        self._flag = torch.zeros(1, device="cuda")

    def records(self, report: Callable[[str], None]) -> dict[str, ContentionRecord]:
        """All pairs."""
        found: dict[str, ContentionRecord] = {}
        with torch.no_grad():
            calls = kernels("cuda")
            alone_s = {name: self._loop_s(call, None) for name, call in calls.items()}
            ranks = dist.get_world_size(self.group)
            short = Wanted("all_reduce", ranks, "float32", SHORT_BYTES)
            short_s = self._loop_s(None, collective_call(short, self.group, "cuda"))
            for wanted in beside(ranks, short_s):
                call = collective_call(wanted, self.group, "cuda")
                wire_s = self._loop_s(None, call)
                key = collective_key(wanted.kind, wanted.ranks, wanted.dtype, wanted.size_bytes)
                for name, kernel in calls.items():
                    report(f"contention: {name} beside {key}")
                    found[f"{name} {key}"] = self._pair(kernel, call, alone_s[name], wire_s)
        return found

    def _pair(
        self, kernel: Callable[[], Any], call: Callable[[], Any], compute_s: float, communication_s: float
    ) -> ContentionRecord:
        computing = [self._together(kernel, call, compute_s, communication_s, True) for _ in range(REPEATS)]
        communicating = [self._together(kernel, call, compute_s, communication_s, False) for _ in range(REPEATS)]
        slowed_s, slowed_wire_s = (sorted(self._agreed(values)) for values in (computing, communicating))
        middle = REPEATS // 2
        spreads = [(values[-1] - values[0]) / (2 * values[middle]) for values in (slowed_s, slowed_wire_s)]
        return ContentionRecord(
            compute_factor=slowed_s[middle] / compute_s,
            communication_factor=slowed_wire_s[middle] / communication_s,
            compute_s=compute_s,
            communication_s=communication_s,
            spread=max(spreads),
            samples=REPEATS,
        )

    def _agreed(self, values_s: list[float]) -> list[float]:
        values = torch.tensor(values_s, dtype=torch.float64, device="cuda")
        dist.all_reduce(values, op=dist.ReduceOp.AVG, group=self.group)
        return [float(value) for value in values.tolist()]

    def _loop_s(self, kernel: Callable[[], Any] | None, call: Callable[[], Any] | None) -> float:
        """Seconds of one alone."""
        run = kernel or call
        assert run is not None
        run()
        once_s = self._agreed([self._timed(run, 3)])[0]
        count = max(3, min(MOST_LAUNCHES, math.ceil(LOOP_S / once_s)))
        return sorted(self._agreed([self._timed(run, count) for _ in range(REPEATS)]))[REPEATS // 2]

    def _timed(self, run: Callable[[], Any], count: int) -> float:
        self._gate(count)
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        for _ in range(count):
            run()
        ended.record()
        torch.cuda.synchronize()
        return began.elapsed_time(ended) * 1e-3 / count

    def _gate(self, launches: int) -> None:
        """All that follows is queued while the device sleeps; ranks go on together."""
        torch.cuda.synchronize()
        torch.cuda._sleep(int(HOST_S * (launches + 10) * SLEEP_CYCLES_PER_S))
        dist.all_reduce(self._flag, group=self.group)

    def _together(
        self,
        kernel: Callable[[], Any],
        call: Callable[[], Any],
        compute_s: float,
        communication_s: float,
        times_kernel: bool,
    ) -> float:
        """Seconds of one of both, the other running for as long and longer."""
        own_s, other_s = (compute_s, communication_s) if times_kernel else (communication_s, compute_s)
        own = max(4, min(MOST_LAUNCHES, math.ceil(LOOP_S / own_s)))
        other = max(4, min(MOST_LAUNCHES, math.ceil(BESIDE * own * own_s / other_s)))
        if other == MOST_LAUNCHES:
            own = max(2, int(other * other_s / (BESIDE * own_s)))
        kernel_count, call_count = (own, other) if times_kernel else (other, own)
        self._gate(kernel_count + call_count)
        gate = torch.cuda.Event()
        gate.record()
        self._side.wait_event(gate)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        self._queue(kernel, kernel_count, torch.cuda.current_stream(), events if times_kernel else None)
        self._queue(call, call_count, self._side, None if times_kernel else events)
        torch.cuda.synchronize()
        return events[0].elapsed_time(events[1]) * 1e-3 / own

    def _queue(self, run: Callable[[], Any], count: int, stream: Any, events: list[Any] | None) -> None:
        with torch.cuda.stream(stream):
            if events is not None:
                events[0].record()
            for _ in range(count):
                run()
            if events is not None:
                events[1].record()
