"""How many eager sends NCCL completes before the receiver has come, by the size of the message."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist

from calibrate.timing.cuda_stopwatch import CudaStream, Stream
from perfmodel.units import KIB

SIZES = tuple(256 * KIB << doublings for doublings in range(10))  # up to 128 MiB
ROW = 32  # of messages
LATE_S = 10e-3
ROUNDS = 3
SENDER = 0


class Pair(Protocol):
    """Two ranks, of which the first sends."""

    is_sender: bool

    def message(self, size_bytes: int) -> Callable[[], None]:
        """Return a call that queues one message, or its receive."""

    def reported(self, count: int) -> int:
        """Return what the sender gives; both ranks call it together."""


class CudaPair:
    """A process group of two ranks with a GPU each."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.is_sender = dist.get_rank(group) == SENDER

    def message(self, size_bytes: int) -> Callable[[], None]:
        tensor = torch.zeros(size_bytes // 4, device="cuda")

        def queue() -> None:
            if self.is_sender:
                work = dist.isend(tensor, group=self._group, group_dst=1 - SENDER)
            else:
                work = dist.irecv(tensor, group=self._group, group_src=SENDER)
            assert work is not None
            work.wait()

        return queue

    def reported(self, count: int) -> int:
        value = torch.tensor([count if self.is_sender else 0], device="cuda")
        dist.all_reduce(value, group=self._group)
        return int(value.item())


class EagerSends:
    """Rows of messages that the first of two ranks sends while the second's device is held."""

    def __init__(self, pair: Pair, stream: Stream) -> None:
        self._pair, self._stream = pair, stream

    @classmethod
    def on_gpus(cls, group: Any) -> EagerSends:
        """Return rows on the current devices of a process group of two."""
        return cls(CudaPair(group), CudaStream())

    def by_size(self) -> dict[int, int]:
        """Return how many of a row ended before the receiver came, by bytes of a message.

        All of ROW is a lower bound. Sizes above the first of which none ended early are left out. It takes a second
        or two, and longer over a slow interconnect.
        """
        found: dict[int, int] = {}
        for size_bytes in SIZES:
            message = self._pair.message(size_bytes)
            rounds = [self._row(message) for _ in range(ROUNDS)]
            found[size_bytes] = self._pair.reported(statistics.median_low(rounds))
            if found[size_bytes] == 0:
                break
        return found

    def _row(self, message: Callable[[], None]) -> int:
        self._pair.reported(0)  # both are here
        self._stream.drain()
        if not self._pair.is_sender:
            self._stream.hold(LATE_S)
        began = self._stream.mark()
        ends = []
        for _ in range(ROW):
            message()
            ends.append(self._stream.mark())
        return sum(self._stream.between_s(began, end) < LATE_S / 2 for end in ends)
