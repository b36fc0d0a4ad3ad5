"""Work of the streams beside the compute stream."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from perfmodel.simulate.rendezvous import Rendezvous


@dataclass
class StreamTask:
    """One collective, message batch or kernel of a side stream.

    Parameters
    ----------
    stream : int
        Runs its tasks one after another, in the order in which they were issued.
    duration_s : float
        Alone.
    slowdown : int
        Index of the slowdown that holds between the compute stream and the task while it runs; -1 for none.
    ready_s : float
        When its launch has arrived on the device.
    after_entry : int
        Entry of the compute stream, counted over all steps, that must have ended before it starts; -1 for none.
    after_tasks : tuple of StreamTask
        Tasks that must have ended, too.
    messages : tuple of (Rendezvous, int)
        Messages that it consists of, each with this rank's side; they set its end. Empty for other work.
    waiting_slowdown : int
        As ``slowdown``, while a message waits for the other rank.
    start_s, end_s : float
        When it started and ended; negative while that is not known.
    left_s : float
        Seconds alone of it that are left, once it runs.
    has_waited : bool
        Whether it has waited for the tail of the kernel that ran when it could start.
    """

    stream: int
    duration_s: float
    slowdown: int
    ready_s: float
    after_entry: int = -1
    after_tasks: tuple[StreamTask, ...] = ()
    messages: tuple[tuple[Rendezvous, int], ...] = ()
    waiting_slowdown: int = -1
    start_s: float = -1.0
    end_s: float = -1.0
    left_s: float = 0.0
    has_waited: bool = False

    @property
    def is_done(self) -> bool:
        """Whether its end is known."""
        return self.end_s >= 0

    @property
    def moves_s(self) -> float:
        """Time at which it begins to do more than wait for another rank."""
        return max((message.moves_s(side) for message, side in self.messages), default=self.start_s)

    @property
    def messages_end_s(self) -> float:
        """Time at which the last of its messages has arrived; infinity while that is not known."""
        return max(message.end_s(side) for message, side in self.messages)


@dataclass
class SideStream:
    """A stream beside the compute stream: its running task, those waiting behind it, and since when it is free."""

    waiting: deque[StreamTask] = field(default_factory=deque)
    running: StreamTask | None = None
    free_s: float = 0.0
