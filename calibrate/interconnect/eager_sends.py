"""How many messages go ahead of a receiver that has not come, by their size."""

from __future__ import annotations

import statistics
from typing import Any

import torch
import torch.distributed as dist

from calibrate.timing.cuda_stopwatch import CudaStream, Stream
from perfmodel.units import KIB

SIZES = tuple(256 * KIB << doublings for doublings in range(10))  # up to 128 MiB
ROW = 32  # of messages
LATE_S = 10e-3
ROUNDS = 3
SENDER = 0


class RowBench:
    """Of a group of two, whose first rank sends rows of messages while the second's device is held."""

    def __init__(self, group: Any, stream: Stream) -> None:
        self._group, self._stream = group, stream
        self._is_sender = dist.get_rank(group) == SENDER

    def messages_ahead(self) -> dict[int, int]:
        """By bytes of a message: how many of a row ended before the receiver came, where all of ROW is a lower bound;
        nothing above the first size of which none did.
        """
        found: dict[int, int] = {}
        for size_bytes in SIZES:
            message = torch.zeros(size_bytes // 4, device="cuda")
            rounds = [self._row(message) for _ in range(ROUNDS)]
            found[size_bytes] = self._told(statistics.median_low(rounds))
            if found[size_bytes] == 0:
                break
        return found

    def _row(self, message: torch.Tensor) -> int:
        self._told(0)  # both are here
        self._stream.drain()
        if not self._is_sender:
            self._stream.hold(LATE_S)
        began = self._stream.mark()
        ends = [self._one(message) for _ in range(ROW)]
        return sum(self._stream.between_s(began, end) < LATE_S / 2 for end in ends)

    def _one(self, message: torch.Tensor) -> Any:
        """The mark of its end."""
        if self._is_sender:
            work = dist.isend(message, group=self._group, group_dst=1 - SENDER)
        else:
            work = dist.irecv(message, group=self._group, group_src=SENDER)
        assert work is not None
        work.wait()
        return self._stream.mark()

    def _told(self, count: int) -> int:
        """What the sender says."""
        value = torch.tensor([count if self._is_sender else 0], device="cuda")
        dist.all_reduce(value, group=self._group)
        return int(value.item())


def messages_ahead(group: Any) -> dict[int, int]:
    """On the current devices of both ranks; takes a second or two, and longer where wires are slow."""
    return RowBench(group, CudaStream()).messages_ahead()
