"""Messages between ranks that are simulated together, and who of them may go on.

A message moves once sender and receiver are there. Until then neither knows when it will end, and may go on only as far
as nothing that the other does can reach back: to the earliest time at which any of the others does anything more. The
one who is furthest behind is always free to go on, so all come to their ends unless they wait for each other.

Source of the rule: conservative simulation of discrete events (Chandy and Misra, 1979).
"""

from __future__ import annotations

import math
from collections.abc import Generator, Hashable, Sequence
from dataclasses import dataclass, field

from perfmodel.errors import PerfModelError

SENDER, RECEIVER = 0, 1

Clock = Generator[float, None, None]  # what a rank does; each time that it yields, it does no more before that time


@dataclass
class Meeting:
    """One message. duration_s: from when both are there. ranks, arrived_s: of sender and receiver."""

    world: World
    duration_s: float
    ranks: list[int] = field(default_factory=lambda: [-1, -1])
    arrived_s: list[float] = field(default_factory=lambda: [math.inf, math.inf])

    def arrive(self, side: int, time_s: float) -> None:
        self.arrived_s[side] = time_s
        if self.moves_s < math.inf:
            self.world.wake(self.ranks[1 - side], self.moves_s)

    @property
    def moves_s(self) -> float:
        """From when it moves; infinity while one is missing."""
        return max(self.arrived_s)

    @property
    def end_s(self) -> float:
        """Infinity while it is not known."""
        return self.moves_s + self.duration_s


def alone(clock: Clock) -> None:
    """To its end, of a rank that no message can hold up."""
    for _ in clock:
        raise RuntimeError("a rank that is simulated alone waits for a message")


class World:
    """Ranks that are simulated together."""

    def __init__(self, ranks: int) -> None:
        self._next_s = [0.0] * ranks
        self._half: dict[Hashable, Meeting] = {}  # that only one side has asked for

    def meeting(self, key: Hashable, side: int, rank: int, duration_s: float) -> Meeting:
        """The message of this name. It takes as long as the side says for which it takes longer."""
        known = self._half.pop(key, None)
        if known is None:
            known = self._half[key] = Meeting(self, duration_s)
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
