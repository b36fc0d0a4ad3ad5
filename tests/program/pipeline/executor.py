"""Runs what :func:`rank_actions` gives, on a clock: computing takes what it is told to, messages nothing.

A message is over when both ranks have come to it. Each communicator is one queue on a rank, as NCCL's streams are: one of
each pair of ranks for messages that are posted alone, one of all ranks for those posted as a batch.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from perfmodel.program.pipeline.schedules import Action, Await, Compute, Message, Post

FULL = {"F": 1.0, "B": 2.0}
SPLIT = {"F": 1.0, "I": 1.0, "W": 1.0, "B": 2.0}


class Span(NamedTuple):
    """What a rank computed, and when."""

    rank: int
    compute: Compute
    start: float
    end: float


class _Block(NamedTuple):
    number: int
    messages: frozenset[Message]
    posted: float

    def seen_from(self, rank: int) -> frozenset[Message]:
        """The messages as the peer has to post them."""
        return frozenset(
            Message(not each.is_send, each.kind, _other_stage(each), each.micro_batch, rank) for each in self.messages
        )

    @property
    def peer(self) -> int:
        (peer,) = {message.peer for message in self.messages}
        return peer


def _other_stage(message: Message) -> int:
    return message.stage + (1 if message.is_send == (message.kind == "F") else -1)


def makespan(spans: Sequence[Span]) -> float:
    return max(span.end for span in spans)


def run(actions: Sequence[Sequence[Action]], durations: Mapping[str, float]) -> list[Span]:
    """Every span, by rank. An AssertionError says who waits for what if it can go no further, if anything is computed
    before what it needs is there, or if a post is not waited for once.
    """
    return _Execution(actions, durations).spans()


class _Execution:
    def __init__(self, actions: Sequence[Sequence[Action]], durations: Mapping[str, float]) -> None:
        self.left = [deque(each) for each in actions]
        self.durations = durations
        self.last_stage = max(each.stage for rank in actions for each in rank if isinstance(each, Compute))
        self.clocks = [0.0] * len(actions)
        self.queues: dict[tuple[int, frozenset[int]], deque[_Block]] = defaultdict(deque)
        self.free_at: dict[tuple[int, frozenset[int]], float] = defaultdict(float)
        self.posts: list[dict[int, Post]] = [{} for _ in actions]  # that were not waited for
        self.over: list[dict[int, list[float]]] = [defaultdict(list) for _ in actions]  # ends of blocks, by post
        self.has: list[set[tuple[str, int, int]]] = [set() for _ in actions]
        self.found: list[Span] = []

    def spans(self) -> list[Span]:
        while any(self.left):
            moved = [self._advance(rank) for rank in range(len(self.left))]
            if not (self._deliver() or any(moved)):
                raise AssertionError(f"all wait: {[each[0] if each else None for each in self.left]}")
        assert not any(self.queues.values())
        assert not any(self.posts)
        return sorted(self.found, key=lambda span: (span.rank, span.start))

    def _advance(self, rank: int) -> bool:
        before = len(self.left[rank])
        while self.left[rank] and self._take(rank, self.left[rank][0]):
            self.left[rank].popleft()
        return len(self.left[rank]) < before

    def _take(self, rank: int, action: Action) -> bool:
        if isinstance(action, Await):
            return self._wait(rank, action.number)
        if isinstance(action, Compute):
            self._compute(rank, action)
        elif isinstance(action, Post):
            self._post(rank, action)
        return True

    def _post(self, rank: int, post: Post) -> None:
        assert post.number not in self.posts[rank]
        self.posts[rank][post.number] = post
        for message in post.messages:
            if message.is_send:
                assert (message.kind, message.stage, message.micro_batch) in self.has[rank], f"{message} has no content"
        together = [post.messages] if post.is_batched else [(message,) for message in post.messages]
        for messages in together:
            block = _Block(post.number, frozenset(messages), self.clocks[rank])
            self.queues[rank, self._communicator(rank, block, post.is_batched)].append(block)

    def _communicator(self, rank: int, block: _Block, is_batched: bool) -> frozenset[int]:
        """The pair of ranks, or none for that of all ranks."""
        return frozenset() if is_batched else frozenset({rank, block.peer})

    def _deliver(self) -> bool:
        """What is at the head of the queues of both ranks."""
        found = False
        for (rank, communicator), queue in list(self.queues.items()):
            while queue:
                block = queue[0]
                other = self.queues[block.peer, communicator]
                if not other or other[0].messages != block.seen_from(rank):
                    break
                ends = [(rank, communicator), (block.peer, communicator)]
                over = max(max(self.free_at[end], self.queues[end][0].posted) for end in ends)
                for end in ends:
                    self.over[end[0]][self.queues[end].popleft().number].append(over)
                    self.free_at[end] = over
                found = True
        return found

    def _wait(self, rank: int, number: int) -> bool:
        post = self.posts[rank][number]
        over = self.over[rank][number]
        if len(over) < (1 if post.is_batched else len(post.messages)):
            return False
        self.clocks[rank] = max(self.clocks[rank], *over)
        for message in self.posts[rank].pop(number).messages:
            if not message.is_send:
                self.has[rank].add((message.kind, _other_stage(message), message.micro_batch))
        return True

    def _compute(self, rank: int, compute: Compute) -> None:
        kind, stage, micro_batch = compute
        if kind == "F":
            needs = [("F", stage - 1)] if stage > 0 else []
        elif kind == "W":
            needs = [("I", stage)]
        else:
            needs = [("F", stage), *([("B", stage + 1)] if stage < self.last_stage else [])]
        for what, of in needs:
            assert (what, of, micro_batch) in self.has[rank], f"{compute} lacks {what} of stage {of}"
        start = self.clocks[rank]
        self.clocks[rank] += self.durations[kind]
        self.has[rank] |= {(made, stage, micro_batch) for made in ("IB" if kind == "I" else kind)}
        self.found.append(Span(rank, compute, start, self.clocks[rank]))
