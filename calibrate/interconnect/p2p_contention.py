"""Kernels at the same time as a message between two ranks: on the rank that sends, on the rank that receives, and on
one whose receive waits for a sender that has not come.

The kernels run on one of the two ranks alone, so that what they do to the message is known of each; the other only
sends or receives.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from calibrate.fit.couplings import MOVING
from calibrate.interconnect.collectives import Wanted
from calibrate.interconnect.concurrent_loops import (
    LONGER,
    LOOP_S,
    CudaGroup,
    CudaStreams,
    LoopTimer,
    Run,
    half_range,
    loops,
)
from calibrate.interconnect.contention import SLOW_S, ContentionBench, TimedCollective, kernels
from calibrate.interconnect.own_contention import WAIT, OwnKernel
from calibrate.kernels.arguments import Call
from perfmodel.hardware.interconnect import ContentionRecord, Role
from perfmodel.units import MIB

FAST_MESSAGE_BYTES = (64 * MIB, 4 * MIB)  # a long and a short one
SLOW_MESSAGE_BYTES = (8 * MIB, MIB)
REPEATS = 2
RECEIVER = 1


def messages(short_s: float) -> tuple[Wanted, Wanted]:
    """Return a long and a short message that kernels are measured with: smaller ones where the interconnect is slow.

    Parameters
    ----------
    short_s : float
        Seconds of an all-reduce of 25 MiB.
    """
    long, short = FAST_MESSAGE_BYTES if short_s < SLOW_S else SLOW_MESSAGE_BYTES
    return Wanted("send_recv", 2, "float32", long), Wanted("send_recv", 2, "float32", short)


class MessagePair(NamedTuple):
    """A kernel by name, the role of its rank, and the message."""

    kernel: str
    role: Role
    message: TimedCollective

    @property
    def key(self) -> str:
        return f"{self.kernel} {self.role} {self.message.key.partition(' ')[2]}"


class MessageContention(ContentionBench):
    """A bench for a group of two, whose first rank sends and whose second receives."""

    @classmethod
    def on_gpus(cls, group: Any) -> MessageContention:
        """Return a bench for a process group of two ranks that have a GPU each."""
        return cls(LoopTimer(CudaStreams(), CudaGroup(group), REPEATS))

    def message_records(self, budget_s: float, calls: Mapping[str, Run] | None = None) -> dict[str, ContentionRecord]:
        """Return pairs that could be made to overlap, as ``gemm_fp32_4096 receive 2 float32 67108864``.

        Parameters
        ----------
        budget_s : float
            Seconds after which none is begun; pairs with the short message come last.
        calls : mapping of str to callable, optional
            Kernels by name; by default :func:`~calibrate.interconnect.contention.kernels`.
        """
        began_s = self._clock()
        found: dict[str, ContentionRecord] = {}
        with torch.no_grad():
            calls = kernels(self.device) if calls is None else calls
            timed = [self.timed(wanted) for wanted in messages(self.short_s())]
            alone_s = {name: self._each_alone_s(call) for name, call in calls.items()}
            pairs = list(_pairs(list(calls), *timed))
            for pair in pairs:
                if self.timer.largest(self._clock() - began_s) > budget_s:
                    break
                rank = int(pair.role != "send")
                record = self.measured_on(rank, pair, calls[pair.kernel], alone_s[pair.kernel][rank])
                if record is not None:
                    found[pair.key] = record
            if len(found) < len(pairs) and self.group.rank == 0:
                missing = ", ".join(pair.key for pair in pairs if pair.key not in found)
                print(f"not measured beside messages, for time or since the host was late: {missing}", flush=True)
        return found

    def measured_on(self, rank: int, pair: MessagePair, kernel: Run, compute_s: float) -> ContentionRecord | None:
        """Return the record of a pair whose kernel runs on that rank, where it takes ``compute_s`` alone."""
        with self._computing_on(rank) as is_here:
            own = kernel if is_here else _nothing
            if pair.role == WAIT:
                return self._waiting(own, pair.message, compute_s)
            return self.pair(own, pair.message.call, compute_s, pair.message.alone_s)

    def own_waiting(
        self, wanted: Sequence[OwnKernel], budget_s: float, report: Callable[[str], None]
    ) -> dict[str, dict[str, ContentionRecord]]:
        """Return what :meth:`own_records` does, for the rank that receives while its receive waits."""
        with self._computing_on(RECEIVER):
            return self.own_records(wanted, budget_s, report)

    def collectives(self, kind: str) -> list[TimedCollective]:
        """Return a long message, which holds as much of the device as any, under the key of that kind."""
        message = self.timed(messages(self.short_s())[0])
        return [message._replace(key=message.key.replace("send_recv", kind))]

    def own_pair(
        self, run: Call, collective: TimedCollective, compute_s: float, launches: int
    ) -> ContentionRecord | None:
        """Return the record of a scenario's own kernel while a receive waits."""
        return self._waiting(run if self.timer.is_computing else _nothing, collective, compute_s, launches)

    @contextmanager
    def _computing_on(self, rank: int) -> Iterator[bool]:
        """Let the times of that rank alone count; yield whether it is this one."""
        self.timer.is_computing = self.group.rank == rank
        try:
            yield self.timer.is_computing
        finally:
            self.timer.is_computing = True

    def _each_alone_s(self, run: Run) -> tuple[float, float]:
        """Return the seconds of a kernel alone on each of the two."""
        own_s = statistics.median(self.timer.loops_alone_s(run))
        first_s, second_s = (self._reported_by(rank, own_s) for rank in (0, 1))
        return first_s, second_s

    def _reported_by(self, rank: int, value_s: float) -> float:
        return self.group.reduced([value_s if self.group.rank == rank else 0.0])[0]

    def _waiting(
        self, kernel: Run, message: TimedCollective, compute_s: float, launches: int = 1
    ) -> ContentionRecord | None:
        """Return the record of a kernel during one receive, whose sender is held until the loop must be over."""
        counts = loops(compute_s, LOOP_S, launches)._replace(other=1, held=1)
        late_s = LONGER * counts.own * compute_s

        def send() -> None:
            self.streams.hold(late_s)
            message.call()

        other = message.call if self.timer.is_computing else send
        slowed_s = self.timer.concurrent_s(kernel, other, counts, False)
        if not slowed_s:
            return None
        return ContentionRecord(
            compute_factor=statistics.median(slowed_s) / compute_s,
            communication_factor=1.0,
            compute_s=compute_s,
            communication_s=message.alone_s,
            spread=half_range(slowed_s),
            samples=len(slowed_s),
        )


def _pairs(names: list[str], long: TimedCollective, short: TimedCollective) -> Iterator[MessagePair]:
    for role in (*MOVING, WAIT):
        yield from (MessagePair(name, role, long) for name in names)
    for role in MOVING:
        yield from (MessagePair(name, role, short) for name in names)


def _nothing() -> None:
    """Do nothing, on a rank without kernels."""
