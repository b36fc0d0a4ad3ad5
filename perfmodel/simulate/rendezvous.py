"""Messages between ranks that are simulated together, and who of them may go on.

A message moves once sender and receiver are there, or, on the sender's side, once there is room to keep it until the
receiver comes. Until then neither knows when it will end, and may go on only as far as nothing that the other does can
reach back: to the earliest time at which any of the others does anything more. The one who is furthest behind is always
free to go on, so all come to their ends unless they wait for each other.

Assumes: the receiver of a message that was kept for it takes the whole time of the wire from when it comes, as if it
still had to be sent, though the sender has taken that time too (measured over NVLink: 0.7 of it); and kernels that run
beside a message do not slow it.

Source of the rule: conservative simulation of discrete events (Chandy and Misra, 1979).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Hashable, Sequence
from dataclasses import dataclass, field

from perfmodel.errors import PerfModelError

SENDER, RECEIVER = 0, 1
ROUNDING = 1e-9  # of shares of the room for messages

Clock = Generator[float, None, None]  # what a rank does; each time that it yields, it does no more before that time


@dataclass
class Rendezvous:
    """One message. duration_s: from when it moves. room: the message whose receiver makes room for it by coming, be it
    its own; None if there is room anyway. frees: those for which this one's does. ranks, arrived_s: of sender and
    receiver.
    """

    world: RankScheduler
    duration_s: float
    room: Rendezvous | None = None
    frees: list[Rendezvous] = field(default_factory=list)
    ranks: list[int] = field(default_factory=lambda: [-1, -1])
    arrived_s: list[float] = field(default_factory=lambda: [math.inf, math.inf])

    def arrive(self, side: int, time_s: float) -> None:
        self.arrived_s[side] = time_s
        if side == SENDER:
            self._wake(RECEIVER)
        else:
            for message in self.frees:
                message._wake(SENDER)

    def _wake(self, side: int) -> None:
        if (moves_s := self.moves_s(side)) < math.inf:
            self.world.wake(self.ranks[side], moves_s)

    def moves_s(self, side: int) -> float:
        """From when this side does more than wait; infinity while that is not known."""
        if side == RECEIVER:
            return max(self.arrived_s)
        return max(self.arrived_s[SENDER], self.room.arrived_s[RECEIVER] if self.room is not None else 0.0)

    def end_s(self, side: int) -> float:
        """Infinity while it is not known."""
        return self.moves_s(side) + self.duration_s


def alone(clock: Clock) -> None:
    """To its end, of a rank that no message can hold up."""
    for _ in clock:
        raise RuntimeError("a rank that is simulated alone waits for a message")


class RankScheduler:
    """Ranks that are simulated together."""

    def __init__(self, ranks: int) -> None:
        self._next_s = [0.0] * ranks
        self._half: dict[Hashable, Rendezvous] = {}  # that only one side has asked for
        self._sent: dict[
            Hashable, deque[tuple[float, Rendezvous]]
        ] = {}  # by pair, with what all so far took of the room

    def send(self, key: Hashable, rank: int, duration_s: float, pair: Hashable, share: float = math.inf) -> Rendezvous:
        """The message of this name, sent after others of the pair. share: what it takes of the room that the pair has
        for messages whose receiver has not come; of more than all of it, a part is kept.
        """
        message = self._meeting(key, SENDER, rank, duration_s)
        sent = self._sent.setdefault(pair, deque())
        so_far = (sent[-1][0] if sent else 0.0) + min(share, 1.0)
        sent.append((so_far, message))
        while sent[0][0] < so_far - 1 - ROUNDING:
            sent.popleft()
        if share > 1 or so_far > 1 + ROUNDING:
            message.room = message if share > 1 else sent[0][1]
            message.room.frees.append(message)
        return message

    def receive(self, key: Hashable, rank: int, duration_s: float) -> Rendezvous:
        """The message of this name."""
        return self._meeting(key, RECEIVER, rank, duration_s)

    def _meeting(self, key: Hashable, side: int, rank: int, duration_s: float) -> Rendezvous:
        """It takes as long as the side says for which it takes longer."""
        known = self._half.pop(key, None)
        if known is None:
            known = self._half[key] = Rendezvous(self, duration_s)
        known.duration_s = max(known.duration_s, duration_s)
        known.ranks[side] = rank
        return known

    def horizon_s(self, rank: int) -> float:
        """Until when nothing that the others do can change what this rank does."""
        return min((time_s for other, time_s in enumerate(self._next_s) if other != rank), default=math.inf)

    def wake(self, rank: int, time_s: float) -> None:
        """What the rank does may change from then on."""
        self._next_s[rank] = min(self._next_s[rank], time_s)

    def run(self, clocks: Sequence[Clock]) -> None:
        """All clocks to their ends, the one that is furthest behind first.

        Raises
        ------
        PerfModelError
            If ranks wait for each other for ever.
        """
        going = dict(enumerate(clocks))
        while going:
            rank = min(going, key=lambda each: self._next_s[each])
            if self._next_s[rank] == math.inf:
                stuck = ", ".join(map(str, going))
                raise PerfModelError(
                    f"a schedule must let all ranks come to their ends (ranks {stuck} wait for each other). Post sends "
                    "and receives in the same order on both sides."
                )
            try:
                self._next_s[rank] = next(going[rank])
            except StopIteration:
                self._next_s[rank] = math.inf
                del going[rank]
