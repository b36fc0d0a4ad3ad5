"""Kernels and collectives at the same time: what each takes then, over what it takes alone.

A pair takes about 0.35 s (40 of them 13 to 15 s on four H200, whatever the interconnect), so one of a scenario's own
kernels, which is measured with two collectives, about 0.7 s.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from calibrate.interconnect.collectives import ELSEWHERE, Wanted
from calibrate.interconnect.concurrent_loops import (
    CudaGroup,
    CudaStreams,
    Group,
    LoopTimer,
    Run,
    Streams,
    half_range,
    loops,
)
from calibrate.interconnect.own_contention import OwnKernel
from calibrate.kernels.arguments import Call, materialise
from calibrate.kernels.bench import FAILURES, failure, tf32
from perfmodel.hardware.interconnect import ContentionRecord
from perfmodel.trace.operation import Operation
from perfmodel.units import MIB

FAST_BYTES = (25 * MIB, 256 * MIB)  # of a small and a large collective
SLOW_BYTES = (4 * MIB, 32 * MIB)
SLOW_S = 1e-3  # of an all-reduce of the first of FAST_BYTES


def kernels(device: str) -> dict[str, Callable[[], Any]]:
    """Return calls that stand for the kinds of operators of a step, see
    :data:`calibrate.fit.couplings.KIND_OF_KERNEL`.
    """

    def matrices(rows: int, inner: int, columns: int, dtype: torch.dtype) -> Callable[[], Any]:
        a, b = (torch.randn(shape, device=device).to(dtype) for shape in ((rows, inner), (inner, columns)))
        out = torch.empty(rows, columns, device=device, dtype=dtype)
        return lambda: torch.mm(a, b, out=out)

    x, y = (torch.randn(64 << 20, device=device) for _ in range(2))
    query, key, value = (torch.randn(4, 16, 2048, 64, device=device, dtype=torch.bfloat16) for _ in range(3))
    images, filters = torch.randn(32, 128, 112, 112, device=device), torch.randn(128, 128, 3, 3, device=device)
    rows, one = torch.randn(16384, 2048, device=device), torch.zeros(1, device=device)
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
        "conv_tf32": lambda: functional.conv2d(images, filters, padding=1),  # torch's default for float32
        "attention_bf16": lambda: functional.scaled_dot_product_attention(query, key, value, is_causal=True),
        "layer_norm": lambda: functional.layer_norm(rows, (2048,)),
        "adamw_foreach": optimizer.step,
        "add_one": lambda: one.add_(1),  # next to no work: what it costs is to follow another kernel
    }


def general_collectives(ranks: int, short_s: float) -> tuple[Wanted, ...]:
    """Return the collectives that general kernels are measured with: smaller ones where the interconnect is slow.

    Parameters
    ----------
    short_s : float
        Seconds of an all-reduce of 25 MiB.
    """
    short, long = FAST_BYTES if short_s < SLOW_S else SLOW_BYTES
    return (
        Wanted("all_reduce", ranks, "float32", short),
        Wanted("all_reduce", ranks, "float32", long),
        Wanted("all_gather", ranks, "float32", long),
        Wanted("reduce_scatter", ranks, "float32", long),
    )


def own_collectives(kind: str, ranks: int, short_s: float) -> tuple[Wanted, ...]:
    """Return the collectives that a scenario's own kernels are measured with: a long and a short one of a kind.

    Parameters
    ----------
    short_s : float
        Seconds of an all-reduce of 25 MiB.
    """
    short, long = FAST_BYTES if short_s < SLOW_S else SLOW_BYTES
    return Wanted(kind, ranks, "float32", long), Wanted(kind, ranks, "float32", short)


class TimedCollective(NamedTuple):
    """A collective by its key, a call of it, and the seconds that it takes alone."""

    key: str
    call: Run
    alone_s: float


class ContentionBench:
    """Times kernels and collectives at the same time; every rank runs the same loops.

    Parameters
    ----------
    timer : LoopTimer
        Runs the loops on the ranks' devices.
    device : str
        Arguments of kernels lie there.
    make : callable
        Makes a call of an operation on the device.
    clock : callable
        Returns the host's time in seconds, for budgets.
    """

    def __init__(
        self,
        timer: LoopTimer,
        device: str = "cuda",
        make: Callable[[Operation, str], Call] = materialise,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.timer, self.device = timer, device
        self._make, self._clock = make, clock

    @classmethod
    def on_gpus(cls, group: Any) -> ContentionBench:
        """Return a bench for a process group whose ranks have a GPU each."""
        return cls(LoopTimer(CudaStreams(), CudaGroup(group)))

    @property
    def group(self) -> Group:
        """The ranks that measure together."""
        return self.timer.group

    @property
    def streams(self) -> Streams:
        """The streams that the loops run on."""
        return self.timer.streams

    def records(self, report: Callable[[str], None]) -> dict[str, ContentionRecord]:
        """Return all general pairs that could be made to overlap, and report each before it is measured."""
        found: dict[str, ContentionRecord] = {}
        with torch.no_grad():
            calls = kernels(self.device)
            alone_s = {name: self.timer.alone_s(call) for name, call in calls.items()}
            for wanted in general_collectives(self.group.size, self.short_s()):
                collective = self.timed(wanted)
                for name, kernel in calls.items():
                    report(f"contention: {name} beside {wanted.key}")
                    pair = self.pair(kernel, collective.call, alone_s[name], collective.alone_s)
                    if pair is not None:
                        found[f"{name} {wanted.key}"] = pair
        return found

    def own_records(
        self, wanted: Sequence[OwnKernel], budget_s: float, report: Callable[[str], None]
    ) -> dict[str, dict[str, ContentionRecord]]:
        """Return pairs of scenarios' own kernels that could be run and be made to overlap.

        Parameters
        ----------
        wanted : sequence of OwnKernel
            Equal on all ranks. Each is made, measured, and freed before the next.
        budget_s : float
            Seconds after which none is begun, nor one that would not end by then if it takes as long as the last.
        report : callable
            Is given every kernel that is left out, and why.

        Returns
        -------
        dict
            Records by kernel key and collective key.
        """
        began_s, last_s = self._clock(), 0.0
        found: dict[str, dict[str, ContentionRecord]] = {}
        with torch.no_grad():
            collectives = {kind: self.collectives(kind) for kind in dict.fromkeys(each.collective for each in wanted)}
            for index, kernel in enumerate(wanted):
                kernel_began_s = self._clock()
                if self.timer.largest(kernel_began_s - began_s + last_s) > budget_s:
                    report(f"{len(wanted) - index} of {len(wanted)} kernels left out for time")
                    break
                pairs, reason = self._own_pairs(kernel, collectives[kernel.collective])
                if pairs:
                    found[kernel.job.key] = pairs
                else:
                    report(f"{kernel.job.key} left out: {reason}")
                self.streams.empty_cache()
                last_s = self._clock() - kernel_began_s
        return found

    def collectives(self, kind: str) -> list[TimedCollective]:
        """Return the collectives of a kind that :meth:`own_records` measures kernels with."""
        return [self.timed(wanted) for wanted in own_collectives(kind, self.group.size, self.short_s())]

    def timed(self, wanted: Wanted) -> TimedCollective:
        """Return a collective with what it takes alone."""
        call = self.group.collective(wanted)
        return TimedCollective(wanted.key, call, self.timer.alone_s(call))

    def short_s(self) -> float:
        """Return the seconds of an all-reduce of the first of FAST_BYTES."""
        return self.timed(Wanted("all_reduce", self.group.size, "float32", FAST_BYTES[0])).alone_s

    def own_pair(
        self, run: Call, collective: TimedCollective, compute_s: float, launches: int
    ) -> ContentionRecord | None:
        """Return the record of a scenario's own kernel and a collective; None if they could not be made to overlap."""
        return self.pair(run, collective.call, compute_s, collective.alone_s, launches)

    def pair(
        self, kernel: Run, call: Run, compute_s: float, communication_s: float, launches: int = 1
    ) -> ContentionRecord | None:
        """Return how a kernel and a collective slow each other; None if they could not be made to overlap.

        Parameters
        ----------
        compute_s, communication_s : float
            Seconds that each takes alone.
        launches : int
            Device launches of one call of the kernel.
        """
        computing = loops(compute_s, communication_s, launches, 1)
        communicating = loops(communication_s, compute_s, 1, launches)
        slowed_s = self.timer.concurrent_s(kernel, call, computing, False)
        slowed_collective_s = self.timer.concurrent_s(call, kernel, communicating, True)
        if not slowed_s or not slowed_collective_s:
            return None
        return ContentionRecord(
            compute_factor=statistics.median(slowed_s) / compute_s,
            communication_factor=statistics.median(slowed_collective_s) / communication_s,
            compute_s=compute_s,
            communication_s=communication_s,
            spread=max(half_range(slowed_s), half_range(slowed_collective_s)),
            samples=min(len(slowed_s), len(slowed_collective_s)),
        )

    def _own_pairs(
        self, kernel: OwnKernel, collectives: list[TimedCollective]
    ) -> tuple[dict[str, ContentionRecord], str]:
        """Return records by collective key, and why there are none."""
        found: dict[str, ContentionRecord] = {}
        with tf32(self.device, kernel.job.tf32):
            run, reason = self._made(kernel)
            if run is None:
                return {}, reason
            compute_s = self.timer.alone_s(run, kernel.launches)
            for collective in collectives:
                pair = self.own_pair(run, collective, compute_s, kernel.launches)
                if pair is not None:
                    found[collective.key] = pair
        return found, "it and a collective could not be made to overlap"

    def _made(self, kernel: OwnKernel) -> tuple[Call | None, str]:
        """Return the kernel's call, once it has run on every rank, or else why it has not."""
        call: Call | None = None
        reason = ELSEWHERE
        try:
            call = self._make(kernel.job.operation, self.device)
            call()
            self.streams.drain()
        except FAILURES as error:
            call, reason = None, failure(error)
        return (call, "") if self.timer.largest(float(call is None)) == 0 else (None, reason)
