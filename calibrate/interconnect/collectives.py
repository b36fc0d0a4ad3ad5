"""Timing of collectives: how long one takes from the last rank's arrival to its end, and what its call costs the host.

CUDA: launches are queued while the device is held, so that the host does not count; a small all-reduce brings all ranks
to one point of time; then the collective runs several times in a row between two events. A sample for which any rank's
host was not done queueing when the device went on is thrown away. CPU (gloo): the host's clock between barriers. A
sample is what the slowest rank saw.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from calibrate.host.reference import HostReference, synchronize
from calibrate.timing.cuda_stopwatch import LONGEST_HOLD_S, MARGIN, SLACK_S, CudaStream, Stream
from calibrate.timing.host_stopwatch import timed
from calibrate.timing.paired import Timings, paired_samples, timed_after_work
from calibrate.timing.samples import call_record, relative_spread
from perfmodel.hardware import host_calls
from perfmodel.hardware.interconnect import CallRecord, CollectiveRecord, collective_key
from perfmodel.units import KIB, MIB

MOST_IN_A_ROW, REPEATS = 20, 5
LONG_S, REPEATS_OF_LONG = 1.0, 2
TARGET_S = 0.06  # of one sample
HOST_S = 60e-6  # a launch takes the host at most about so long; then what it took last
ATTEMPTS = 3  # at samples whose host was in time
AGREEMENT, AGREEMENT_S = 0.05, 2e-6  # two passes that differ by more than both are settled by a third
CALL_ROUNDS, CALL_WARM_UP = 25, 3
ROW = 20  # calls right after each other
CONNECTING_BYTES = (KIB, 32 * MIB)
ELSEWHERE = "failed on another rank"


@dataclass(frozen=True)
class Wanted:
    """A collective to be timed."""

    kind: str
    ranks: int
    dtype: str
    size_bytes: int

    @property
    def key(self) -> str:
        """The key under which a profile keeps it."""
        return collective_key(self.kind, self.ranks, self.dtype, self.size_bytes)


class _Run(NamedTuple):
    """Seconds of one collective; whether the device went on before all were queued; host seconds of queueing one."""

    time_s: float
    is_late: bool
    host_s: float


def collective_call(wanted: Wanted, group: Any, device: str) -> Callable[[], Any]:
    """Return the collective on tensors of its own; size as nccl-tests counts it."""
    dtype = getattr(torch, wanted.dtype)
    count = max(wanted.size_bytes // dtype.itemsize, 1)
    each = max(count // wanted.ranks, 1)
    if wanted.kind == "all_gather":
        whole, shard = torch.zeros(each * wanted.ranks, dtype=dtype, device=device), _random(each, dtype, device)
        return lambda: dist.all_gather_into_tensor(whole, shard, group=group)
    if wanted.kind == "reduce_scatter":
        whole, shard = _random(each * wanted.ranks, dtype, device), torch.zeros(each, dtype=dtype, device=device)
        return lambda: dist.reduce_scatter_tensor(shard, whole, group=group)
    tensor = _random(each * wanted.ranks if wanted.kind == "all_to_all" else count, dtype, device)
    if wanted.kind == "all_reduce":
        return lambda: dist.all_reduce(tensor, group=group)
    if wanted.kind == "broadcast":
        return lambda: dist.broadcast(tensor, dist.get_global_rank(group, 0), group=group)
    if wanted.kind == "all_to_all":
        received = torch.empty_like(tensor)
        return lambda: dist.all_to_all_single(received, tensor, group=group)
    return _exchange(tensor, group) if wanted.kind == "exchange" else _send_recv(tensor, group)


def _random(count: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.randn(count, device=device).mul_(1e-3).to(dtype)


def _send_recv(tensor: torch.Tensor, group: Any) -> Callable[[], Any]:
    """Return a call that sends from the group's first rank to its second."""
    first, second = (dist.get_global_rank(group, index) for index in (0, 1))
    if dist.get_rank() == first:
        return lambda: dist.send(tensor, second, group=group)
    return lambda: dist.recv(tensor, first, group=group)


def _exchange(tensor: torch.Tensor, group: Any) -> Callable[[], Any]:
    """Return a call that sends both ways between the group's two ranks, as one batch."""
    peer, received = 1 - dist.get_rank(group), torch.empty_like(tensor)

    def call() -> None:
        batch = [
            dist.P2POp(dist.isend, tensor, group=group, group_peer=peer),
            dist.P2POp(dist.irecv, received, group=group, group_peer=peer),
        ]
        for work in dist.batch_isend_irecv(batch):
            work.wait()

    return call


class CollectiveBench:
    """Times collectives of one group; every member asks for the same ones in the same order."""

    def __init__(self, group: Any, device: str, stream: Stream | None = None) -> None:
        self.group, self.device = group, device
        self._flag = torch.zeros(1, device=device)
        self._stream = CudaStream() if stream is None and device == "cuda" else stream
        self._host_s = HOST_S

    def connect(self, ranks: int) -> None:
        """Run small and large collectives once: NCCL connects only the channels, rings and trees that it uses."""
        for size_bytes in CONNECTING_BYTES if self.device == "cuda" else CONNECTING_BYTES[:1]:
            for kind in ("all_reduce", "all_gather", "reduce_scatter"):
                collective_call(Wanted(kind, ranks, "float32", size_bytes), self.group, self.device)()
        self.agree(0.0)

    def measure(self, wanted: Wanted) -> tuple[list[float], str | None]:
        """Return samples of it, or why there are none: it does not fit in memory, or the library refuses it."""
        try:
            return self._measured(wanted)
        finally:
            if self.device == "cuda":
                torch.cuda.empty_cache()

    def _measured(self, wanted: Wanted) -> tuple[list[float], str | None]:
        call: Callable[[], Any] | None = None
        error = None
        try:
            call = collective_call(wanted, self.group, self.device)
        except RuntimeError as problem:  # out of memory is one
            error = _reason(problem)
        if self.agree(float(call is None)) > 0 or call is None:
            return [], error or ELSEWHERE
        try:
            call()
        except RuntimeError as problem:
            error = _reason(problem)
        if self.agree(float(error is not None)) > 0:
            return [], error or ELSEWHERE
        return self.samples_s(call), None

    def samples_s(self, call: Callable[[], Any]) -> list[float]:
        """Return seconds of one, of several samples, each the slowest rank's."""
        call()
        once_s = self._valid(call, 1, 1)[0]
        return self._valid(call, in_a_row(once_s), repeats(once_s))

    def agree(self, value: float) -> float:
        """Return the largest that any rank gives."""
        return self._slowest([value])[0]

    def _valid(self, call: Callable[[], Any], count: int, wanted: int) -> list[float]:
        """Return so many samples during which no rank's host was late; if hosts always are, samples all the same."""
        found: list[float] = []
        host_s = self._host_s
        for _ in range(ATTEMPTS):
            runs = [self._run(call, count, host_s) for _ in range(wanted - len(found))]
            self._host_s = statistics.median(run.host_s for run in runs)
            seconds = self._slowest([run.time_s for run in runs])
            late = self._slowest([float(run.is_late) for run in runs])
            found += [value for value, missed in zip(seconds, late, strict=True) if not missed]
            if len(found) == wanted:
                break
            host_s = 2 * max(host_s, self._host_s)
        return found or seconds

    def _slowest(self, values_s: list[float]) -> list[float]:
        values = torch.tensor(values_s, dtype=torch.float64, device=self.device)
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group)
        return [float(value) for value in values.tolist()]

    def _run(self, call: Callable[[], Any], count: int, host_s: float) -> _Run:
        """host_s: what a launch may take the host."""
        if self._stream is None:
            dist.barrier(group=self.group)
            began_s = time.perf_counter()
            for _ in range(count):
                call()
            each_s = (time.perf_counter() - began_s) / count
            return _Run(each_s, False, each_s)
        stream = self._stream
        stream.drain()
        stream.hold(min(MARGIN * host_s * (count + 1) + SLACK_S, LONGEST_HOLD_S))
        began_s = time.perf_counter()
        dist.all_reduce(self._flag, group=self.group)
        first = stream.mark()
        for _ in range(count):
            call()
        last = stream.mark()
        is_late = stream.passed(first)
        queued_s = time.perf_counter() - began_s
        return _Run(stream.between_s(first, last) / count, is_late, queued_s / (count + 1))


def outside_bytes(device: str) -> int:
    """Return bytes of the GPU in use, but not torch's: contexts, libraries and communicators; 0 on a CPU."""
    if device != "cuda":
        return 0
    torch.cuda.synchronize()
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return int(total_bytes - free_bytes - torch.cuda.memory_reserved())


def in_a_row(once_s: float) -> int:
    """Return how many collectives one sample runs.

    >>> in_a_row(1e-5), in_a_row(0.01), in_a_row(0.5)
    (20, 6, 1)
    """
    return max(1, min(MOST_IN_A_ROW, math.ceil(TARGET_S / max(once_s, 1e-6) - 1e-9)))


def repeats(once_s: float) -> int:
    """Return how many samples are taken."""
    return REPEATS if once_s < LONG_S else REPEATS_OF_LONG


def cost_s(once_s: float) -> float:
    """Return seconds that timing a collective of so many takes: first calls, and all samples.

    >>> round(cost_s(0.01), 3), round(cost_s(2.0), 3)
    (0.33, 10.0)
    """
    return once_s * (3 + in_a_row(once_s) * repeats(once_s))


def _reason(problem: RuntimeError) -> str:
    if isinstance(problem, torch.OutOfMemoryError):
        return "out of memory"
    return f"{type(problem).__name__}: {str(problem).strip().partition(chr(10))[0]}"[:200]


def differ(passes: Sequence[Sequence[float]]) -> bool:
    """Return whether the medians of the passes are further apart than what a pass is worth.

    >>> differ([[1.0, 1.0], [1.8, 1.8]]), differ([[1.0], [1.04]]), differ([[1e-6], [2e-6]])
    (True, False, False)
    """
    medians_s = [statistics.median(samples_s) for samples_s in passes]
    apart_s = max(medians_s) - min(medians_s)
    return apart_s > max(AGREEMENT * min(medians_s), AGREEMENT_S)


def record_of(passes: Sequence[Sequence[float]], origin: Literal["grid", "scenario"] = "grid") -> CollectiveRecord:
    """Return the median of the medians of passes far apart in time; the spread is that of all samples.

    A single pass now and then is 1.8 times off; of three, the middle one is not.
    """
    values_s = [value for samples_s in passes for value in samples_s]
    return CollectiveRecord(
        time_s=statistics.median(statistics.median(samples_s) for samples_s in passes),
        spread=relative_spread(values_s),
        samples=len(values_s),
        origin=origin,
    )


def call_records(device: str, reference: HostReference) -> dict[str, CallRecord]:
    """Return host seconds of the calls of all ranks: ``all_gather``, ``reduce_scatter``, ``broadcast``, each also
    ``async``; and of those that follow each other in a row, ``broadcast async again`` and ``wait again``.

    Every rank measures at the same time. Before each call, or row, runs what a layer of a model runs, since a call
    after itself finds all it needs in the processor's caches, and in a step it does not.
    """
    shard, whole = torch.zeros(1024, device=device), torch.zeros(1024 * dist.get_world_size(), device=device)
    calls: dict[str, Callable[[bool], Any]] = {
        "all_gather": lambda later: dist.all_gather_into_tensor(whole, shard, async_op=later),
        "reduce_scatter": lambda later: dist.reduce_scatter_tensor(shard, whole, async_op=later),
        "broadcast": lambda later: dist.broadcast(shard, 0, async_op=later),
    }

    def one_round() -> Timings:
        for name, call in calls.items():
            yield name, timed_after_work(partial(call, False), reference, device)[0]
            seconds, work = timed_after_work(partial(call, True), reference, device)
            work.wait()
            yield host_calls.asynchronous(name), seconds

    samples_s = paired_samples(reference, one_round, rounds=CALL_ROUNDS, warm_up=CALL_WARM_UP)
    samples_s |= _rows(shard, reference)
    return {name: call_record(values_s) for name, values_s in samples_s.items()}


def _rows(tensor: torch.Tensor, reference: HostReference) -> dict[str, list[float]]:
    """Return samples of calls that come right after one like them, and of waiting for what they began."""

    def one_round() -> Timings:
        reference.disturb(1)
        synchronize(tensor.device.type)
        begun = [timed(lambda: dist.broadcast(tensor, 0, async_op=True)) for _ in range(ROW)]
        waited_s = [timed(work.wait)[0] for _, work in begun]
        yield (
            host_calls.repeated(host_calls.asynchronous("broadcast")),
            statistics.mean(seconds for seconds, _ in begun[1:]),
        )
        yield host_calls.repeated(host_calls.WAIT), statistics.mean(waited_s[1:])

    return paired_samples(reference, one_round, rounds=CALL_ROUNDS, warm_up=CALL_WARM_UP)
