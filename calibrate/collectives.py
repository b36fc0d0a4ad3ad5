"""Timing of collectives: how long one takes from the last rank's arrival to its end.

CUDA: launches are queued behind a sleeping kernel, so that the host does not count; a small all-reduce brings all ranks
to one point of time; then the collective runs several times in a row between two events. CPU (gloo): the host's clock
between barriers. A sample is what the slowest rank saw.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from perfmodel.hardware.interconnect import CollectiveRecord

MOST_IN_A_ROW, REPEATS = 20, 5
TARGET_S = 0.06  # of one sample
HOST_S = 60e-6  # a launch takes the host at most about so long
SLEEP_CYCLES_PER_S = 2e9  # at least what the clock makes of torch.cuda._sleep


@dataclass(frozen=True)
class Wanted:
    """A collective to be timed."""

    kind: str
    ranks: int
    dtype: str
    size_bytes: int


def collective_call(wanted: Wanted, group: Any, device: str) -> Callable[[], Any]:
    """The collective on tensors of its own; size as nccl-tests counts it."""
    dtype = getattr(torch, wanted.dtype)
    count = max(wanted.size_bytes // dtype.itemsize, 1)
    each = max(count // wanted.ranks, 1)
    if wanted.kind == "all_gather":
        whole, part = torch.zeros(each * wanted.ranks, dtype=dtype, device=device), _random(each, dtype, device)
        return lambda: dist.all_gather_into_tensor(whole, part, group=group)
    if wanted.kind == "reduce_scatter":
        whole, part = _random(each * wanted.ranks, dtype, device), torch.zeros(each, dtype=dtype, device=device)
        return lambda: dist.reduce_scatter_tensor(part, whole, group=group)
    tensor = _random(each * wanted.ranks if wanted.kind == "all_to_all" else count, dtype, device)
    if wanted.kind == "all_reduce":
        return lambda: dist.all_reduce(tensor, group=group)
    if wanted.kind == "broadcast":
        return lambda: dist.broadcast(tensor, dist.get_global_rank(group, 0), group=group)
    if wanted.kind == "all_to_all":
        received = torch.empty_like(tensor)
        return lambda: dist.all_to_all_single(received, tensor, group=group)
    return _send_recv(tensor, group)


def _random(count: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.randn(count, device=device).mul_(1e-3).to(dtype)


def _send_recv(tensor: torch.Tensor, group: Any) -> Callable[[], Any]:
    """From the group's first rank to its second."""
    first, second = (dist.get_global_rank(group, index) for index in (0, 1))
    if dist.get_rank() == first:
        return lambda: dist.send(tensor, second, group=group)
    return lambda: dist.recv(tensor, first, group=group)


class CollectiveBench:
    """Times collectives of one group; every member asks for the same ones in the same order."""

    def __init__(self, group: Any, device: str) -> None:
        self.group, self.device = group, device
        self._flag = torch.zeros(1, device=device)

    def record(self, wanted: Wanted, origin: str = "grid") -> CollectiveRecord:
        """Its median and spread; an error if it does not fit in memory."""
        try:
            samples_s = self.samples_s(collective_call(wanted, self.group, self.device))
        except torch.OutOfMemoryError:
            return CollectiveRecord.model_validate({"error": "out of memory", "origin": origin})
        finally:
            if self.device == "cuda":
                torch.cuda.empty_cache()
        return record_of(samples_s, origin)

    def samples_s(self, call: Callable[[], Any]) -> list[float]:
        """Seconds of one, of several samples, each the slowest rank's."""
        call()
        once_s = self._slowest([self._run(call, 1)])[0]
        count = max(1, min(MOST_IN_A_ROW, math.ceil(TARGET_S / max(once_s, 1e-6))))
        repeats = REPEATS if once_s < 1.0 else 2
        return self._slowest([self._run(call, count) for _ in range(repeats)])

    def _slowest(self, values_s: list[float]) -> list[float]:
        values = torch.tensor(values_s, dtype=torch.float64, device=self.device)
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group)
        return [float(value) for value in values.tolist()]

    def agree(self, value: float) -> float:
        """The largest that any rank gives."""
        return self._slowest([value])[0]

    def _run(self, call: Callable[[], Any], count: int) -> float:
        if self.device == "cpu":
            dist.barrier(group=self.group)
            began_s = time.perf_counter()
            for _ in range(count):
                call()
            return (time.perf_counter() - began_s) / count
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(int(HOST_S * (count + 3) * SLEEP_CYCLES_PER_S))
        dist.all_reduce(self._flag, group=self.group)
        began.record()
        for _ in range(count):
            call()
        ended.record()
        torch.cuda.synchronize()
        return began.elapsed_time(ended) * 1e-3 / count


def record_of(samples_s: list[float], origin: str = "grid") -> CollectiveRecord:
    """Median and relative standard deviation."""
    values = torch.tensor(samples_s, dtype=torch.float64)
    middle = float(values.median())
    spread = float(values.std() / middle) if len(samples_s) > 1 else 0.0
    data = {"time_s": middle, "spread": spread, "samples": len(samples_s), "origin": origin}
    return CollectiveRecord.model_validate(data)
