"""What runs beside the compute stream: pieces of work in lanes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from perfmodel.simulate.rendezvous import Rendezvous


@dataclass
class StreamTask:
    """One piece of work of a lane. ready_s: when its launch has arrived. after_entry: number of the entry, counted over
    all steps, that must have ended, with all before it (-1: none). after_items: items that must have, too. kind: which
    slowdown holds while it runs, -1 for none. meetings: of messages, each with its side; they set its end.
    waiting_kind: as kind, while these wait for another rank.
    """

    lane: int
    duration_s: float
    kind: int
    ready_s: float
    after_entry: int = -1
    after_items: tuple[StreamTask, ...] = ()
    meetings: tuple[tuple[Rendezvous, int], ...] = ()
    waiting_kind: int = -1
    start_s: float = -1.0
    end_s: float = -1.0
    left_s: float = 0.0
    has_waited: bool = False

    @property
    def is_done(self) -> bool:
        return self.end_s >= 0

    @property
    def moves_s(self) -> float:
        """From when it does more than wait for another rank."""
        return max((meeting.moves_s(side) for meeting, side in self.meetings), default=self.start_s)

    @property
    def met_s(self) -> float:
        """When its messages have arrived; infinity while that is not known."""
        return max(meeting.end_s(side) for meeting, side in self.meetings)


@dataclass
class SideStream:
    """A stream beside the compute stream: what runs, what waits behind it, and since when it is free."""

    waiting: deque[StreamTask] = field(default_factory=deque)
    running: StreamTask | None = None
    free_s: float = 0.0
