"""Kernels beside a message between two ranks: on the one that sends, on the one that receives, and on one whose receive
waits for a sender that has not come.

The kernels run on one of the two ranks alone, so that what they do to the message is known of each; the other only
sends or receives.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from calibrate.fit.couplings import MOVING
from calibrate.interconnect.collectives import Wanted
from calibrate.interconnect.contention import BESIDE, LOOP_S, SLOW_S, ContentionBench, Wire, half_range, kernels, loops
from calibrate.interconnect.own_contention import WAIT, OwnKernel
from calibrate.kernels.arguments import Call
from perfmodel.hardware.interconnect import ContentionRecord, Role
from perfmodel.units import MIB

FAST_MESSAGE_BYTES = (64 * MIB, 4 * MIB)  # a long and a short one
SLOW_MESSAGE_BYTES = (8 * MIB, MIB)
REPEATS = 2
RECEIVER = 1


def messages(short_s: float) -> tuple[Wanted, Wanted]:
    """A long and a short message that kernels are measured beside: smaller ones where the wire is slow.

    short_s: what an all-reduce of 25 MiB takes.
    """
    long, short = FAST_MESSAGE_BYTES if short_s < SLOW_S else SLOW_MESSAGE_BYTES
    return Wanted("send_recv", 2, "float32", long), Wanted("send_recv", 2, "float32", short)


class _Turn(NamedTuple):
    """A kernel by name, the role of its rank, and the message."""

    kernel: str
    role: Role
    wire: Wire

    @property
    def key(self) -> str:
        return f"{self.kernel} {self.role} {self.wire.key.partition(' ')[2]}"


class MessageContention(ContentionBench):
    """Of a group of two, whose first rank sends and whose second receives."""

    repeats = REPEATS

    def message_records(self, budget_s: float) -> dict[str, ContentionRecord]:
        """Pairs that could be made to overlap (``gemm_fp32_4096 receive 2 float32 67108864``).

        budget_s: seconds after which none is begun; pairs with the short message come last.
        """
        began_s = time.perf_counter()
        found: dict[str, ContentionRecord] = {}
        with torch.no_grad():
            calls = kernels(self.device)
            wires = [self._wire(wanted) for wanted in messages(self._short_s())]
            alone_s = {name: self._each_alone_s(call) for name, call in calls.items()}
            turns = list(_turns(list(calls), *wires))
            for turn in turns:
                if self._largest(time.perf_counter() - began_s) > budget_s:
                    break
                rank = int(turn.role != "send")
                pair = self._of_one(rank, turn, calls[turn.kernel], alone_s[turn.kernel][rank])
                if pair is not None:
                    found[turn.key] = pair
            if len(found) < len(turns) and dist.get_rank(self.group) == 0:
                missing = ", ".join(turn.key for turn in turns if turn.key not in found)
                print(f"not measured beside messages, for time or since the host was late: {missing}", flush=True)
        return found

    def _each_alone_s(self, run: Callable[[], Any]) -> tuple[float, float]:
        """Seconds of a kernel alone on each of the two."""
        own_s = statistics.median(self._loops_alone_s(run))
        first_s, second_s = (self._told_by(rank, own_s) for rank in (0, 1))
        return first_s, second_s

    def _told_by(self, rank: int, value_s: float) -> float:
        return self._agreed([value_s if dist.get_rank(self.group) == rank else 0.0])[0]

    def _of_one(self, rank: int, turn: _Turn, kernel: Callable[[], Any], compute_s: float) -> ContentionRecord | None:
        """The kernel on that rank."""
        self.is_computing = dist.get_rank(self.group) == rank
        try:
            own = kernel if self.is_computing else _nothing
            if turn.role == WAIT:
                return self._waiting(own, turn.wire, compute_s)
            return self._pair(own, turn.wire.call, compute_s, turn.wire.alone_s)
        finally:
            self.is_computing = True

    def own_waiting(
        self, wanted: Sequence[OwnKernel], budget_s: float, report: Callable[[str], None]
    ) -> dict[str, dict[str, ContentionRecord]]:
        """As :meth:`own_records`, on the rank that receives, beside a receive that waits."""
        self.is_computing = dist.get_rank(self.group) == RECEIVER
        try:
            return self.own_records(wanted, budget_s, report)
        finally:
            self.is_computing = True

    def _wires(self, kind: str) -> list[Wire]:
        """A long one, which holds as much of the device as any."""
        wire = self._wire(messages(self._short_s())[0])
        return [wire._replace(key=wire.key.replace("send_recv", kind))]

    def _own_pair(self, run: Call, wire: Wire, compute_s: float, launches: int) -> ContentionRecord | None:
        return self._waiting(run if self.is_computing else _nothing, wire, compute_s, launches)

    def _waiting(
        self, kernel: Callable[[], Any], wire: Wire, compute_s: float, launches: int = 1
    ) -> ContentionRecord | None:
        """Beside one receive, whose sender's device is held until the loop must be over."""
        counts = loops(compute_s, LOOP_S, launches)._replace(other=1, held=1)
        late_s = BESIDE * counts.own * compute_s

        def send() -> None:
            self._stream.hold(late_s)
            wire.call()

        slowed_s = self._several_s(kernel, wire.call if self.is_computing else send, counts, False)
        if not slowed_s:
            return None
        return ContentionRecord(
            compute_factor=statistics.median(slowed_s) / compute_s,
            communication_factor=1.0,
            compute_s=compute_s,
            communication_s=wire.alone_s,
            spread=half_range(slowed_s),
            samples=len(slowed_s),
        )


def _turns(names: list[str], long: Wire, short: Wire) -> Iterator[_Turn]:
    for role in (*MOVING, WAIT):
        yield from (_Turn(name, role, long) for name in names)
    for role in MOVING:
        yield from (_Turn(name, role, short) for name in names)


def _nothing() -> None:
    """What runs on a rank without kernels."""
