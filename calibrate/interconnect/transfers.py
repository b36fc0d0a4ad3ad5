"""Timing of copies between host and device, pinned and pageable, each direction and both at once, and between devices.

Pinned copies and those between devices are queued while the device is held, so that the host does not count; pageable
ones keep the host busy themselves and are timed by its clock. One rank measures, the others are idle.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from calibrate.kernels.bench import failure
from calibrate.timing.cuda_stopwatch import LONGEST_HOLD_S, SLACK_S, CudaStream, Stream
from calibrate.timing.samples import Limits, calls_per_sample, is_enough, relative_spread
from perfmodel.hardware.interconnect import TransferRecord, transfer_key
from perfmodel.units import GIB, KIB

LIMITS = Limits(fewest=3, most=7, fewest_long=2, most_long=3, enough_spread=0.01, enough_s=0.05, most_calls=50)
HOST_S = 20e-6  # a copy takes the host at most about so long
ATTEMPTS = 5  # at a sample whose host was in time

Run = Callable[[int], float]  # seconds of one copy, of so many in a row
Prepare = Callable[[int], Run]  # for copies of so many bytes


def transfer_sizes(most_bytes: int = GIB) -> list[int]:
    """Return sizes from 1 KiB up by factors of two.

    >>> transfer_sizes(4096)
    [1024, 2048, 4096]
    """
    return [KIB << power for power in range(most_bytes.bit_length() - KIB.bit_length() + 1)]


def transfer_records(
    kinds: Mapping[str, Prepare],
    sizes: Sequence[int],
    budget_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, TransferRecord]:
    """Time copies of every kind and size, the small ones first; none is begun when ``budget_s`` has passed.

    A copy that cannot be prepared or run (no memory for it) is recorded with what the library said.
    """
    found: dict[str, TransferRecord] = {}
    stop_s = clock() + budget_s
    for size_bytes in sizes:
        for kind, prepare in kinds.items():
            if clock() >= stop_s:
                return found
            try:
                found[transfer_key(kind, size_bytes)] = _record(prepare(size_bytes), clock)
            except RuntimeError as problem:  # out of memory is one
                found[transfer_key(kind, size_bytes)] = TransferRecord(error=failure(problem))
    return found


def _record(run: Run, clock: Callable[[], float]) -> TransferRecord:
    run(1)
    calls = calls_per_sample(run(1), LIMITS)
    began_s = clock()
    values_s: list[float] = []
    while not is_enough(values_s, clock() - began_s, LIMITS):
        values_s.append(run(calls))
    middle_s = sorted(values_s)[len(values_s) // 2]
    return TransferRecord(time_s=middle_s, spread=relative_spread(values_s), samples=len(values_s))


class Buffers(NamedTuple):
    """Memory that is copied: two buffers of the device, two pinned and a pageable one of the host, and a peer's."""

    device: torch.Tensor
    device_other: torch.Tensor
    pinned: torch.Tensor
    pinned_back: torch.Tensor
    pageable: torch.Tensor
    peer: torch.Tensor | None

    @classmethod
    def on_gpu(cls, most_bytes: int, peer: int | None) -> Buffers:
        """Take so many bytes of each; of the peer of that number, if there is one."""

        def zeros(**where: Any) -> torch.Tensor:
            return torch.zeros(most_bytes, dtype=torch.uint8, **where)

        device = torch.device("cuda", torch.cuda.current_device())
        return cls(
            zeros(device=device),
            zeros(device=device),
            zeros(pin_memory=True),
            zeros(pin_memory=True),
            zeros(),
            None if peer is None else zeros(device=f"cuda:{peer}"),
        )


class TransferBench:
    """The copies of one GPU, on a stream that can be held."""

    def __init__(self, buffers: Buffers, stream: Stream, side: Any = None) -> None:
        self._buffers, self._stream, self._side = buffers, stream, side

    @classmethod
    def on_gpu(cls, most_bytes: int = GIB, peer: int | None = None) -> TransferBench:
        """Return the bench of the current GPU.

        Parameters
        ----------
        most_bytes : int
            Size of the largest copy; so much memory of every kind is taken once for all.
        peer : int, optional
            Number of the GPU that copies between devices go to; None leaves them out.
        """
        return cls(Buffers.on_gpu(most_bytes, peer), CudaStream(), torch.cuda.Stream())

    def kinds(self) -> dict[str, Prepare]:
        """Return what :func:`transfer_records` measures."""
        device, _, pinned, _, pageable, peer = self._buffers
        found: dict[str, Prepare] = {
            "h2d pinned": lambda size: self._queued(device[:size], pinned[:size]),
            "d2h pinned": lambda size: self._queued(pinned[:size], device[:size]),
            "both pinned": self._both,
            "h2d pageable": lambda size: _by_host(device[:size], pageable[:size]),
            "d2h pageable": lambda size: _by_host(pageable[:size], device[:size]),
        }
        if peer is not None:
            found["p2p"] = lambda size: self._queued(peer[:size], device[:size])
        return found

    def _queued(self, into: torch.Tensor, source: torch.Tensor) -> Run:
        def copies(calls: int) -> None:
            for _ in range(calls):
                into.copy_(source, non_blocking=True)

        return lambda calls: self._held(copies, calls)

    def _both(self, size: int) -> Run:
        """Prepare copies in from one buffer and out to another, on two streams that begin together."""
        main = torch.cuda.current_stream()

        def copies(calls: int) -> None:
            self._side.wait_stream(main)
            for _ in range(calls):
                self._buffers.device[:size].copy_(self._buffers.pinned[:size], non_blocking=True)
                with torch.cuda.stream(self._side):
                    self._buffers.pinned_back[:size].copy_(self._buffers.device_other[:size], non_blocking=True)
            main.wait_stream(self._side)

        return lambda calls: self._held(copies, calls)

    def _held(self, copies: Callable[[int], None], calls: int) -> float:
        hold_s = HOST_S * (2 * calls + 2) + SLACK_S
        for _ in range(ATTEMPTS):
            self._stream.drain()
            self._stream.hold(min(hold_s, LONGEST_HOLD_S))
            first = self._stream.mark()
            copies(calls)
            last = self._stream.mark()
            late = self._stream.passed(first)
            seconds = self._stream.between_s(first, last) / calls
            if not late:
                break
            hold_s *= 2
        return seconds


def _by_host(into: torch.Tensor, source: torch.Tensor) -> Run:
    def run(calls: int) -> float:
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        for _ in range(calls):
            into.copy_(source)
        torch.cuda.synchronize()
        return (time.perf_counter() - began_s) / calls

    return run
