"""Messages between ranks that are simulated together, and which rank may advance.

A message moves once sender and receiver are there, or, on the sender's side, once the eager buffer has room to keep it
until the receiver comes. Until then neither side knows when its own part ends. A rank may advance only to its lookahead
horizon: the earliest time at which another rank can still affect it. The rank that is furthest behind can always
advance, so all reach their ends unless they wait for each other.

Assumes: the receiver of a message that was sent eagerly takes the whole time of the interconnect from when it comes, as
if the message still had to be sent, though the sender has taken that time too (measured over NVLink: 0.7 of it); and
kernels that run during a message do not slow it.

Source of the rule: conservative simulation of discrete events (Chandy and Misra, 1979).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Hashable, Sequence
from dataclasses import dataclass, field

from perfmodel.errors import PerfModelError

SENDER, RECEIVER = 0, 1
ROUNDING = 1e-9  # of shares of the eager buffer

Clock = Generator[float, None, None]  # what a rank does; having yielded a time, it does no more before that time


@dataclass
class Rendezvous:
    """One message between two ranks.

    Parameters
    ----------
    scheduler : RankScheduler
        Learns from when what a rank does may change.
    duration_s : float
        Seconds from when it moves to its end.
    blocked_by : Rendezvous, optional
        The message whose receive must be posted before this eager send can move; itself for a send that waits for its
        own receiver; None where the eager buffer has room.
    unblocks : list of Rendezvous
        The messages that are blocked by this one.
    ranks, arrived_s : list
        Of sender and receiver: who they are, and when each came to the message.
    """

    scheduler: RankScheduler
    duration_s: float
    blocked_by: Rendezvous | None = None
    unblocks: list[Rendezvous] = field(default_factory=list)
    ranks: list[int] = field(default_factory=lambda: [-1, -1])
    arrived_s: list[float] = field(default_factory=lambda: [math.inf, math.inf])

    def arrive(self, side: int, time_s: float) -> None:
        """Note that this side has come, and wake the ranks whose messages can move now."""
        self.arrived_s[side] = time_s
        if side == SENDER:
            self._wake(RECEIVER)
        else:
            for message in self.unblocks:
                message._wake(SENDER)

    def _wake(self, side: int) -> None:
        if (moves_s := self.moves_s(side)) < math.inf:
            self.scheduler.wake(self.ranks[side], moves_s)

    def moves_s(self, side: int) -> float:
        """Return when the message begins to move for this side; infinity while that is not known."""
        if side == RECEIVER:
            return max(self.arrived_s)
        return max(self.arrived_s[SENDER], self.blocked_by.arrived_s[RECEIVER] if self.blocked_by is not None else 0.0)

    def end_s(self, side: int) -> float:
        """Return when the message has ended for this side; infinity while that is not known."""
        return self.moves_s(side) + self.duration_s


def run_alone(clock: Clock) -> None:
    """Run a rank to its end that no message can hold up."""
    for _ in clock:
        raise RuntimeError("a rank that is simulated alone waits for a message")


class RankScheduler:
    """Ranks that are simulated together, and the messages between them."""

    def __init__(self, ranks: int) -> None:
        self._next_s = [0.0] * ranks
        self._one_sided: dict[Hashable, Rendezvous] = {}  # messages that only one side has asked for, by name
        # By pair of ranks: messages sent, each with the sum of the shares of the eager buffer until it.
        self._sent: dict[Hashable, deque[tuple[float, Rendezvous]]] = {}

    def send(self, key: Hashable, rank: int, duration_s: float, pair: Hashable, share: float = math.inf) -> Rendezvous:
        """Return the sender's side of a message, which follows the others of its pair.

        Parameters
        ----------
        key : hashable
            Name of the message, the same on both sides.
        rank : int
            The sender.
        duration_s : float
            Seconds from when it moves; where the sides differ, the longer holds.
        pair : hashable
            Sender, receiver and communicator, which have an eager buffer of their own.
        share : float
            Fraction of that buffer which the message occupies. One that does not fit at all waits for its receiver.
        """
        message = self._joined(key, SENDER, rank, duration_s)
        sent = self._sent.setdefault(pair, deque())
        so_far = (sent[-1][0] if sent else 0.0) + min(share, 1.0)
        sent.append((so_far, message))
        while sent[0][0] < so_far - 1 - ROUNDING:
            sent.popleft()
        if share > 1 or so_far > 1 + ROUNDING:
            message.blocked_by = message if share > 1 else sent[0][1]
            message.blocked_by.unblocks.append(message)
        return message

    def receive(self, key: Hashable, rank: int, duration_s: float) -> Rendezvous:
        """Return the receiver's side of the message of this name."""
        return self._joined(key, RECEIVER, rank, duration_s)

    def _joined(self, key: Hashable, side: int, rank: int, duration_s: float) -> Rendezvous:
        message = self._one_sided.pop(key, None)
        if message is None:
            message = self._one_sided[key] = Rendezvous(self, duration_s)
        message.duration_s = max(message.duration_s, duration_s)
        message.ranks[side] = rank
        return message

    def horizon_s(self, rank: int) -> float:
        """Return the rank's lookahead horizon: until then nothing that the others do can change what it does."""
        return min((time_s for other, time_s in enumerate(self._next_s) if other != rank), default=math.inf)

    def wake(self, rank: int, time_s: float) -> None:
        """Note that what the rank does may change from then on."""
        self._next_s[rank] = min(self._next_s[rank], time_s)

    def run(self, clocks: Sequence[Clock]) -> None:
        """Run all clocks to their ends, the one that is furthest behind first.

        Raises
        ------
        PerfModelError
            If ranks wait for each other for ever.
        """
        running = dict(enumerate(clocks))
        while running:
            rank = min(running, key=lambda each: self._next_s[each])
            if self._next_s[rank] == math.inf:
                stuck = ", ".join(map(str, running))
                raise PerfModelError(
                    f"a schedule must let all ranks come to their ends (ranks {stuck} wait for each other). Post sends "
                    "and receives in the same order on both sides."
                )
            try:
                self._next_s[rank] = next(running[rank])
            except StopIteration:
                self._next_s[rank] = math.inf
                del running[rank]
