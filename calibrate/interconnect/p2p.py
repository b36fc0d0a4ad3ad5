"""Messages between two ranks, as pipelines send them: what they take, what their calls cost the host, how many are
sent eagerly, and how they and kernels slow each other.

One way is isend and irecv, each on the stream of a communicator that the library makes for the two ranks; both ways is
one batch of them (``exchange``), on the stream of the group's own. All of it takes about 20 s.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from calibrate.host.reference import HostReference, synchronize
from calibrate.interconnect.collectives import (
    CALL_ROUNDS,
    CALL_WARM_UP,
    CONNECTING_BYTES,
    ROW,
    CollectiveBench,
    Wanted,
    collective_call,
)
from calibrate.interconnect.sizes import message_grid
from calibrate.interconnect.sweeps import Sweeps
from calibrate.this_machine.launcher import Ranks
from calibrate.timing.host_stopwatch import no_collection, timed
from calibrate.timing.paired import Timings, paired_samples
from calibrate.timing.samples import call_record
from perfmodel.hardware import host_calls
from perfmodel.hardware.interconnect import MESSAGES, CallRecord, CollectiveRecord, ContentionRecord

LADDER_S = 5.0  # for all passes over the sizes
PAIRS_S = 12.0  # for kernels beside messages
NUMEL = 1024  # of a message whose call is timed


class FoundMessages(NamedTuple):
    """The measurements, as an :class:`~perfmodel.hardware.interconnect.Interconnect` keeps it."""

    collectives: dict[str, CollectiveRecord]
    host: dict[str, CallRecord]
    contention: dict[str, ContentionRecord]
    messages_ahead: dict[int, int]


class MessageStage:
    """All ranks run it together; only those of ``bench``, which is of a group of two, time messages.

    Parameters
    ----------
    ranks
        The ranks wait for each other through these.
    bench
        None on a rank that is not of the two.
    reference_s
        Seconds of a reference run on the profile's host.
    most_bytes
        Size of the largest message.
    budget_s
        Seconds for timing messages, if less than :data:`LADDER_S`; sizes that do not fit in are left out.
    passes
        How often the sizes are timed; of several passes, one more is for sizes of which they differ.
    """

    def __init__(
        self,
        ranks: Ranks,
        bench: CollectiveBench | None,
        device: str,
        reference_s: float | None,
        most_bytes: int,
        budget_s: float,
        passes: int,
    ) -> None:
        self._ranks, self._bench, self._device, self._reference_s = ranks, bench, device, reference_s
        self._left_s, self._passes = min(LADDER_S, budget_s), passes
        self._turns_left = passes + 1 if passes > 1 else 1
        wanted = {Wanted(kind, 2, "float32", size_bytes): "grid" for kind, size_bytes in message_grid(most_bytes)}
        self._sweeps = None if bench is None else Sweeps(bench, wanted)
        self._found = FoundMessages({}, {}, {}, {})

    def run(self) -> FoundMessages:
        """Measure all; the passes over the sizes lie apart in time."""
        if self._bench is not None:
            connect(self._bench)
        self._sweep()
        self._ranks.together()
        with no_collection():
            reference = HostReference(self._device, self._reference_s)
            self._found.host.update(call_records(self._device, reference, self._ranks.rank, self._ranks.size))
        for _ in range(self._passes - 1):
            self._sweep()
        if self._bench is not None and self._device == "cuda":
            from calibrate.interconnect.eager_sends import EagerSends
            from calibrate.interconnect.p2p_contention import MessageContention

            self._found.messages_ahead.update(EagerSends.on_gpus(self._bench.group).by_size())
            self._found.contention.update(MessageContention.on_gpus(self._bench.group).message_records(PAIRS_S))
        if self._passes > 1:
            self._sweep(only_disputed=True)
        self._ranks.together()
        return self._found

    def _sweep(self, only_disputed: bool = False) -> None:
        """Each pass gets its share of what time is left."""
        if self._sweeps is None:
            return
        began_s = time.perf_counter()
        self._found.collectives.update(self._sweeps.run(self._left_s / self._turns_left, only_disputed))
        self._left_s = max(self._left_s - (time.perf_counter() - began_s), 0.0)
        self._turns_left -= 1


def connect(bench: CollectiveBench) -> None:
    """Send small and large messages once: the library makes what they need when it is first needed."""
    for size_bytes in CONNECTING_BYTES if bench.device == "cuda" else CONNECTING_BYTES[:1]:
        for kind in MESSAGES:
            collective_call(Wanted(kind, 2, "float32", size_bytes), bench.group, bench.device)()
    bench.agree(0.0)


def call_records(device: str, reference: HostReference, rank: int, ranks: int) -> dict[str, CallRecord]:
    """Return host seconds of ``isend``, ``irecv`` and ``batch_isend_irecv`` (of one each) as torch's pipelines call
    them, the making of their ``P2POp`` included, and of ``... wait`` for what they began; of ``... again`` and ``...
    wait again`` right after one like it.

    Ranks go in pairs, of which one sends while the other receives; all pairs measure at the same time. Before each call
    that is not in a row, and each row, runs what a layer of a model runs, as in
    :func:`calibrate.interconnect.collectives.call_records`.
    """
    starts = _starts(device, rank, ranks)

    def one_round() -> Timings:
        for name, start in starts.items():
            for count, called in ((1, str), (ROW, host_calls.repeated)):
                reference.disturb(1)
                synchronize(device)
                started_s, waited_s = _row(start, count)
                yield called(name), started_s
                yield called(host_calls.wait_for(name)), waited_s

    samples_s = paired_samples(reference, one_round, rounds=CALL_ROUNDS, warm_up=CALL_WARM_UP)
    return {name: call_record(values_s) for name, values_s in samples_s.items()}


def _starts(device: str, rank: int, ranks: int) -> dict[str, Callable[[], Sequence[Any]]]:
    """Return calls by name in the order of this rank: one of a pair sends first, the other receives.

    The last of an odd number does nothing.
    """
    peer, tensors = rank ^ 1, [torch.zeros(NUMEL, device=device) for _ in range(2)]
    if peer >= ranks:
        return {name: lambda: () for name in host_calls.MESSAGES}

    def single(operation: Callable[..., Any], tensor: torch.Tensor) -> Callable[[], Sequence[Any]]:
        key = "group_dst" if operation is dist.isend else "group_src"

        def start() -> Sequence[Any]:
            made = dist.P2POp(operation, tensor, peer)
            return (made.op(made.tensor, group=made.group, tag=made.tag, **{key: made.group_peer}),)

        return start

    def batch() -> Sequence[Any]:
        made = [dist.P2POp(*each, peer) for each in zip((dist.isend, dist.irecv), tensors, strict=True)]
        works: list[Any] = dist.batch_isend_irecv(made)
        return works

    send, receive = single(dist.isend, tensors[0]), single(dist.irecv, tensors[1])
    pair = {host_calls.ISEND: send, host_calls.IRECV: receive}
    first = pair if rank < peer else dict(reversed(pair.items()))
    return first | {host_calls.BATCH: batch}


def _row(start: Callable[[], Sequence[Any]], count: int) -> tuple[float, float]:
    """Return the mean seconds of starting one and of waiting for it; of several in a row without the first."""
    begun = [timed(start) for _ in range(count)]
    waited_s = [timed(lambda: [work.wait() for work in works])[0] for _, works in begun]  # noqa: B023
    skipped = int(count > 1)
    return statistics.mean(seconds for seconds, _ in begun[skipped:]), statistics.mean(waited_s[skipped:])
