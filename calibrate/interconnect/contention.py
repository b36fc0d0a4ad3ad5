"""Kernels and collectives side by side: what each takes beside the other, over what it takes alone.

Two loops run on two streams from one point of time; of the loop that is timed only what ran while the other still did
counts. A pair takes about 0.35 s (40 of them 13 to 15 s on four H200, whatever the wiring), so one of a scenario's own
kernels, which is measured beside two collectives, about 0.7 s.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn import functional

from calibrate.interconnect.collectives import ELSEWHERE, Wanted, collective_call
from calibrate.interconnect.own_contention import OwnKernel
from calibrate.kernels.arguments import Call, materialise
from calibrate.kernels.bench import FAILURES, failure, tf32
from calibrate.timing.cuda_stopwatch import LONGEST_HOLD_S, MARGIN, SLACK_S, CudaStream
from perfmodel.hardware.interconnect import ContentionRecord
from perfmodel.units import MIB

REPEATS = 3
LOOP_S = 0.012  # of what is timed
MOST_LAUNCHES = 350  # device launches of a loop that must be queued whole: both together must fit the launch queue
MOST_FED = 4000  # calls of one whose launches last at least FED_S each: the host queues them faster than they run
FED_S = 20e-6
LONG_S = 1e-3  # a few of such calls give the host enough time to queue the rest
HOST_S = 60e-6  # a launch takes the host at most about so long
FAST_BYTES = (25 * MIB, 256 * MIB)  # of a small and a large collective
SLOW_BYTES = (4 * MIB, 32 * MIB)
SLOW_S = 1e-3  # of an all-reduce of the first of FAST_BYTES
BESIDE = 2.5  # times as long as what is timed runs what is beside it, were both alone
MARKS = 16  # stretches of the loop that is timed
ATTEMPTS = 4  # at loops that were queued in time and ran side by side


def kernels(device: str) -> dict[str, Callable[[], Any]]:
    """Calls that stand for the kinds of operators of a step (:data:`calibrate.fit.couplings.KIND_OF_KERNEL`)."""

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


def beside(ranks: int, short_s: float) -> tuple[Wanted, ...]:
    """Collectives that kernels are measured beside: smaller ones where the wire is slow.

    short_s: what an all-reduce of 25 MiB takes.
    """
    short, long = FAST_BYTES if short_s < SLOW_S else SLOW_BYTES
    return (
        Wanted("all_reduce", ranks, "float32", short),
        Wanted("all_reduce", ranks, "float32", long),
        Wanted("all_gather", ranks, "float32", long),
        Wanted("reduce_scatter", ranks, "float32", long),
    )


def beside_own(kind: str, ranks: int, short_s: float) -> tuple[Wanted, ...]:
    """Collectives that a scenario's own kernels are measured beside: a long and a short one of that kind."""
    short, long = FAST_BYTES if short_s < SLOW_S else SLOW_BYTES
    return Wanted(kind, ranks, "float32", long), Wanted(kind, ranks, "float32", short)


class Loops(NamedTuple):
    """How often the loop that is timed and the one beside it run; calls between two marks of the first; and how many of
    the other are queued before the device goes on.
    """

    own: int
    other: int
    stride: int
    held: int


def loops(own_s: float, other_s: float, own_launches: int = 1, other_launches: int = 1) -> Loops:
    """The other loop lasts ``BESIDE`` times as long as the timed one, which is shortened where that cannot be had.

    own_launches, other_launches: device launches of one call.

    >>> loops(1e-3, 1e-3), loops(8e-3, 25e-6)
    (Loops(own=12, other=30, stride=1, held=12), Loops(own=4, other=3200, stride=1, held=350))
    """
    most_own, most_held = (max(4, MOST_LAUNCHES // launches) for launches in (own_launches, other_launches))
    own = max(4, min(most_own, math.ceil(LOOP_S / own_s - 1e-9)))
    most = MOST_FED if other_s >= FED_S * other_launches else most_held
    other = max(4, min(most, math.ceil(BESIDE * own * own_s / other_s - 1e-9)))
    if other == most:
        own = max(3, min(own, int(other * other_s / (BESIDE * own_s))))
    stride = max(1, own // MARKS)
    held = most_held if other_s < LONG_S else max(4, math.ceil(LOOP_S / other_s - 1e-9))
    return Loops(own - own % stride, other, stride, min(other, held))


def overlapped_s(marks_s: Sequence[float], stride: int, until_s: float) -> float | None:
    """Seconds of one call, from those stretches that ended before the other loop did, the first left out.

    The first began together with the other loop, which none of a step does. None where fewer than two are left.

    Parameters
    ----------
    marks_s : sequence of float
        When the loop began, and the end of each stretch of ``stride`` calls.
    until_s : float
        When the other loop ended.

    Examples
    --------
    >>> overlapped_s([0.0, 3.0, 5.0, 7.0, 8.0], 2, 7.5)
    1.0
    >>> overlapped_s([0.0, 3.0, 5.0, 7.0, 8.0], 2, 6.0) is None
    True
    """
    inside = [mark for mark in marks_s if mark <= until_s][1:]
    return None if len(inside) < 3 else (inside[-1] - inside[0]) / (stride * (len(inside) - 1))


class Wire(NamedTuple):
    """A collective: its key, and what it takes alone."""

    key: str
    call: Callable[[], Any]
    alone_s: float


class ContentionBench:
    """Every rank runs the same loops at the same time.

    is_computing: whether this rank is one of those whose times count. repeats: of each loop.
    """

    device = "cuda"
    is_computing = True
    repeats = REPEATS

    def __init__(self, group: Any) -> None:
        self.group = group
        self._stream, self._side = CudaStream(), torch.cuda.Stream()
        self._flag = torch.zeros(1, device="cuda")

    def records(self, report: Callable[[str], None]) -> dict[str, ContentionRecord]:
        """All pairs that could be made to overlap."""
        found: dict[str, ContentionRecord] = {}
        with torch.no_grad():
            calls = kernels(self.device)
            alone_s = {name: self._alone_s(call) for name, call in calls.items()}
            for wanted in beside(dist.get_world_size(self.group), self._short_s()):
                call = collective_call(wanted, self.group, self.device)
                wire_s = self._alone_s(call)
                for name, kernel in calls.items():
                    report(f"contention: {name} beside {wanted.key}")
                    pair = self._pair(kernel, call, alone_s[name], wire_s)
                    if pair is not None:
                        found[f"{name} {wanted.key}"] = pair
        return found

    def own_records(
        self, wanted: Sequence[OwnKernel], budget_s: float, report: Callable[[str], None]
    ) -> dict[str, dict[str, ContentionRecord]]:
        """Pairs of scenarios' own kernels, by kernel key and collective key; of those that could be run and be made to
        overlap.

        Parameters
        ----------
        wanted
            The same on all ranks. Each is made, measured, and freed before the next.
        budget_s
            Seconds after which none is begun, nor one that would not end by then if it takes as long as the last.
        report
            Told of every kernel that is left out, and why.
        """
        began_s, last_s = time.perf_counter(), 0.0
        found: dict[str, dict[str, ContentionRecord]] = {}
        with torch.no_grad():
            wires = {kind: self._wires(kind) for kind in dict.fromkeys(each.collective for each in wanted)}
            for index, kernel in enumerate(wanted):
                kernel_began_s = time.perf_counter()
                if self._largest(kernel_began_s - began_s + last_s) > budget_s:
                    report(f"{len(wanted) - index} of {len(wanted)} kernels left out for time")
                    break
                pairs, reason = self._own_pairs(kernel, wires[kernel.collective])
                if pairs:
                    found[kernel.job.key] = pairs
                else:
                    report(f"{kernel.job.key} left out: {reason}")
                torch.cuda.empty_cache()
                last_s = time.perf_counter() - kernel_began_s
        return found

    def _wires(self, kind: str) -> list[Wire]:
        """Collectives of that kind for :meth:`own_records`."""
        chosen = beside_own(kind, dist.get_world_size(self.group), self._short_s())
        return [self._wire(wanted) for wanted in chosen]

    def _wire(self, wanted: Wanted) -> Wire:
        call = collective_call(wanted, self.group, self.device)
        return Wire(wanted.key, call, self._alone_s(call))

    def _own_pairs(self, kernel: OwnKernel, wires: list[Wire]) -> tuple[dict[str, ContentionRecord], str]:
        """By collective key, and why there are none."""
        found: dict[str, ContentionRecord] = {}
        with tf32(self.device, kernel.job.tf32):
            run, reason = self._made(kernel)
            if run is None:
                return {}, reason
            compute_s = self._alone_s(run, kernel.launches)
            for wire in wires:
                pair = self._own_pair(run, wire, compute_s, kernel.launches)
                if pair is not None:
                    found[wire.key] = pair
        return found, "it and a collective could not be made to overlap"

    def _own_pair(self, run: Call, wire: Wire, compute_s: float, launches: int) -> ContentionRecord | None:
        return self._pair(run, wire.call, compute_s, wire.alone_s, launches)

    def _made(self, kernel: OwnKernel) -> tuple[Call | None, str]:
        """The call, once it has run on every rank."""
        call: Call | None = None
        reason = ELSEWHERE
        try:
            call = materialise(kernel.job.operation, self.device)
            call()
            self._stream.drain()
        except FAILURES as error:
            call, reason = None, failure(error)
        return (call, "") if self._largest(float(call is None)) == 0 else (None, reason)

    def _short_s(self) -> float:
        """Seconds of an all-reduce of the first of FAST_BYTES."""
        short = Wanted("all_reduce", dist.get_world_size(self.group), "float32", FAST_BYTES[0])
        return self._alone_s(collective_call(short, self.group, self.device))

    def _pair(
        self,
        kernel: Callable[[], Any],
        call: Callable[[], Any],
        compute_s: float,
        communication_s: float,
        launches: int = 1,
    ) -> ContentionRecord | None:
        """launches: of one call of the kernel."""
        computing = loops(compute_s, communication_s, launches, 1)
        communicating = loops(communication_s, compute_s, 1, launches)
        slowed_s = self._several_s(kernel, call, computing, False)
        slowed_wire_s = self._several_s(call, kernel, communicating, True)
        if not slowed_s or not slowed_wire_s:
            return None
        return ContentionRecord(
            compute_factor=statistics.median(slowed_s) / compute_s,
            communication_factor=statistics.median(slowed_wire_s) / communication_s,
            compute_s=compute_s,
            communication_s=communication_s,
            spread=max(half_range(slowed_s), half_range(slowed_wire_s)),
            samples=min(len(slowed_s), len(slowed_wire_s)),
        )

    def _several_s(
        self, own: Callable[[], Any], other: Callable[[], Any], counts: Loops, is_collective: bool
    ) -> list[float]:
        """Of :meth:`_beside`, those that there are."""
        found = [self._beside(own, other, counts, is_collective) for _ in range(self.repeats)]
        return [value for value in found if value is not None]

    def _agreed(self, values_s: list[float], operator: Any = dist.ReduceOp.SUM) -> list[float]:
        values = torch.tensor(values_s, dtype=torch.float64, device="cuda")
        dist.all_reduce(values, op=operator, group=self.group)
        return [float(value) for value in values.tolist()]

    def _averages(self, values_s: Sequence[float]) -> list[float]:
        """Over the ranks that compute."""
        weight = float(self.is_computing)
        *sums_s, ranks = self._agreed([*(weight * value for value in values_s), weight])
        return [value / ranks for value in sums_s]

    def _largest(self, value: float) -> float:
        return self._agreed([value], dist.ReduceOp.MAX)[0]

    def _alone_s(self, run: Callable[[], Any], launches: int = 1) -> float:
        """Seconds of one alone, marked as it is beside others."""
        return statistics.median(self._averages(self._loops_alone_s(run, launches)))

    def _loops_alone_s(self, run: Callable[[], Any], launches: int = 1) -> list[float]:
        """This rank's."""
        run()
        (once_s,) = self._averages([self._loop_s(run, 4)])
        count = loops(once_s, once_s, launches).own
        return [self._loop_s(run, count) for _ in range(REPEATS)]

    def _loop_s(self, run: Callable[[], Any], count: int) -> float:
        stride = max(1, count // MARKS)
        marks_s, _ = self._side_by_side(run, None, Loops(count - count % stride, 0, stride, 0), False)
        return (marks_s[-1] - marks_s[1]) / (stride * (len(marks_s) - 2))

    def _beside(
        self, own: Callable[[], Any], other: Callable[[], Any], counts: Loops, is_collective: bool
    ) -> float | None:
        """Seconds of one of ``own``, the other running all the while."""
        for _ in range(ATTEMPTS):
            marks_s, until_s = self._side_by_side(own, other, counts, is_collective)
            found_s = overlapped_s(marks_s, counts.stride, until_s)
            if self._largest(float(self.is_computing and found_s is None)) == 0:
                return self._averages([found_s or 0.0])[0]
            counts = counts._replace(other=min(2 * counts.other, MOST_FED))
        return None

    def _side_by_side(
        self, own: Callable[[], Any], other: Callable[[], Any] | None, counts: Loops, is_collective: bool
    ) -> tuple[list[float], float]:
        """Marks of the own loop, and the end of the other, in seconds after the own loop's beginning."""
        main = torch.cuda.current_stream()
        own_stream, other_stream = (self._side, main) if is_collective else (main, self._side)
        hold_s = HOST_S * (counts.own + counts.held + 10)
        for _ in range(ATTEMPTS):
            self._stream.drain()
            self._stream.hold(min(hold_s, LONGEST_HOLD_S))
            began_s = time.perf_counter()
            dist.all_reduce(self._flag, group=self.group)
            gate = self._stream.mark()
            self._side.wait_event(gate)
            marks = self._queue(own, counts.own, counts.stride, own_stream)
            ends = [] if other is None else self._queue(other, counts.held, counts.held, other_stream)
            late = self._stream.passed(gate)
            hold_s = MARGIN * (time.perf_counter() - began_s) + SLACK_S
            if other is not None and counts.other > counts.held:
                rest = counts.other - counts.held
                ends = self._queue(other, rest, rest, other_stream)
            self._stream.drain()
            if self._largest(float(late)) == 0:
                break
        first = marks[0]
        until_s = self._stream.between_s(first, ends[-1]) if ends else math.inf
        return [self._stream.between_s(first, mark) for mark in marks], until_s

    def _queue(self, run: Callable[[], Any], count: int, stride: int, stream: Any) -> list[Any]:
        with torch.cuda.stream(stream):
            marks = [self._stream.mark()]
            for index in range(count):
                run()
                if (index + 1) % stride == 0:
                    marks.append(self._stream.mark())
        return marks


def half_range(values: Sequence[float]) -> float:
    """Half of what lies between the smallest and the largest, over the median.

    >>> half_range([1.0, 2.0, 3.0])
    0.5
    """
    return (max(values) - min(values)) / (2 * statistics.median(values))
