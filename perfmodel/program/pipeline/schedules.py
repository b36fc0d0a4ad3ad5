"""The actions of each rank's host in one step of a pipeline, in order, as torch.distributed.pipelining runs them.

torch writes GPipe and 1F1B out, and so does this module: a receive is posted and waited for right before what needs it;
1F1B posts what goes to a neighbour together with what comes from it. The other five run a list, in which a receive is
posted where its sender sends, were all ranks to take turns, and waited for before what needs it; sends are waited for
at the end of the step, the last one first. Stages that follow each other on one rank hand over without a message.

torch 2.12 and later post a message that goes alone by itself (isend, irecv), which NCCL runs on a communicator of the
two ranks; earlier ones hand it to batch_isend_irecv as well, which NCCL runs on the one of the whole pipeline.

Source: torch/distributed/pipelining/schedules.py (``_step_microbatches`` of each class, ``_add_send_recv``,
``_add_reduce_grad``, ``_add_unshard_reshard``, ``_batch_p2p``), equal in 2.11 and 2.13 but for what is said above.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from perfmodel.program.pipeline.orders import Compute, Turn, stages_of, turns_of
from perfmodel.scenario.rules import check_schedule
from perfmodel.scenario.scenario import Schedule

__all__ = [
    "Action",
    "Await",
    "Compute",
    "Message",
    "Post",
    "Reduce",
    "rank_actions",
    "stages_of",
]

HELD_STAGES = 3  # whose parameters torch would prefetch were they sharded: max_active_stages


class Message(NamedTuple):
    """One micro-batch between two stages.

    Attributes
    ----------
    is_send : bool
    kind : str
        F for activations, B for their gradients.
    stage : int
        This rank's own, which made what is sent, or needs what is received.
    micro_batch : int
    peer : int
        The other rank.
    """

    is_send: bool
    kind: str
    stage: int
    micro_batch: int
    peer: int


class Post(NamedTuple):
    """Messages that the host posts at once.

    Attributes
    ----------
    number : int
        Counts the posts of the rank.
    messages : tuple of Message
    is_batched : bool
        Whether they are one batch_isend_irecv; else each is posted alone.
    """

    number: int
    messages: tuple[Message, ...]
    is_batched: bool


class Await(NamedTuple):
    """A wait for the messages of the post of that number: with NCCL the compute stream waits."""

    number: int


class Reduce(NamedTuple):
    """The end of a stage's gradients: they are complete, and are scaled and, under data parallelism, reduced."""

    stage: int


Action = Compute | Post | Await | Reduce
_Turn = tuple[Compute | Reduce, ...]  # may be empty


def rank_actions(
    schedule: Schedule,
    ranks: int,
    micro_batches: int,
    virtual_stages: int = 1,
    *,
    batches_all: bool = False,
) -> tuple[tuple[Action, ...], ...]:
    """Return what each rank's host does in a step (the first, which also learns shapes, excepted).

    Parameters
    ----------
    schedule : str
    ranks, micro_batches, virtual_stages : int
    batches_all : bool
        Whether every message is posted in a batch, as torch before 2.12 does.

    Raises
    ------
    PerfModelError
        If torch refuses the numbers; see :func:`~perfmodel.scenario.rules.check_schedule`.

    Examples
    --------
    >>> first, last = rank_actions("gpipe", ranks=2, micro_batches=1)
    >>> for action in last:
    ...     print(action)
    Post(number=0, messages=(Message(is_send=False, kind='F', stage=1, micro_batch=0, peer=0),), is_batched=False)
    Await(number=0)
    Compute(kind='F', stage=1, micro_batch=0)
    Compute(kind='B', stage=1, micro_batch=0)
    Post(number=1, messages=(Message(is_send=True, kind='B', stage=1, micro_batch=0, peer=0),), is_batched=False)
    Await(number=1)
    Reduce(stage=1)
    """
    check_schedule(schedule, ranks, micro_batches, virtual_stages)
    stages = stages_of(schedule, ranks, virtual_stages)
    hosts = [_Host(rank, stages, batches_all) for rank in range(ranks)]
    if schedule == "gpipe":
        for host in hosts:
            _gpipe(host, micro_batches)
    elif schedule == "1f1b":
        for host in hosts:
            _one_forward_one_backward(host, micro_batches, ranks)
    else:
        turns = [tuple(turns_of(schedule, rank, ranks, micro_batches, virtual_stages)) for rank in range(ranks)]
        _run_lists(hosts, [_all_turns(of_rank, micro_batches) for of_rank in turns])
    return tuple(tuple(host.actions) for host in hosts)


class _Host:
    """The host of one rank, which notes its actions one by one."""

    def __init__(self, rank: int, stages: Sequence[Sequence[int]], batches_all: bool) -> None:
        self.rank, self.stages = rank, stages[rank]
        self.actions: list[Action] = []
        self._batches_all = batches_all
        self._rank_of = {stage: rank for rank, own in enumerate(stages) for stage in own}
        self._posts = 0

    def compute(self, kind: str, stage: int, micro_batch: int) -> None:
        self.actions.append(Compute(kind, stage, micro_batch))

    def sends(self, kind: str, stage: int, micro_batch: int) -> tuple[Message, ...]:
        """Return the message that takes the stage's result on; none behind the last stage, or to one of this rank."""
        return self._message(True, kind, stage, micro_batch, stage + (1 if kind == "F" else -1))

    def receives(self, kind: str, stage: int, micro_batch: int) -> tuple[Message, ...]:
        """Return the message that brings what the stage needs; none where no other rank has it."""
        return self._message(False, kind, stage, micro_batch, stage - (1 if kind == "F" else -1))

    def post(self, messages: tuple[Message, ...]) -> tuple[int, ...]:
        """Post messages and return the number of the post; none where there is nothing to post."""
        if not messages:
            return ()
        is_batched = self._batches_all or len({message.is_send for message in messages}) > 1
        self.actions.append(Post(self._posts, messages, is_batched))
        self._posts += 1
        return (self._posts - 1,)

    def wait(self, posts: Iterable[int]) -> None:
        self.actions += [Await(number) for number in posts]

    def _message(self, is_send: bool, kind: str, stage: int, micro_batch: int, other: int) -> tuple[Message, ...]:
        peer = self._rank_of.get(other, self.rank)
        return () if peer == self.rank else (Message(is_send, kind, stage, micro_batch, peer),)


def _gpipe(host: _Host, micro_batches: int) -> None:
    (stage,) = host.stages
    for kind in ("F", "B"):
        sent: list[int] = []
        for micro_batch in range(micro_batches):
            host.wait(host.post(host.receives(kind, stage, micro_batch)))
            host.compute(kind, stage, micro_batch)
            sent += host.post(host.sends(kind, stage, micro_batch))
        host.wait(sent)
    host.actions.append(Reduce(stage))


def _one_forward_one_backward(host: _Host, micro_batches: int, ranks: int) -> None:
    """Note the actions of 1F1B, which has at least as many micro-batches as ranks."""
    (stage,) = host.stages
    warm_up = ranks - stage  # forwards before the first backward
    sent: tuple[int, ...] = ()
    for micro_batch in range(warm_up):
        host.wait(host.post(host.receives("F", stage, micro_batch)))
        host.compute("F", stage, micro_batch)
        host.wait(sent)
        if micro_batch < warm_up - 1:
            sent = host.post(host.sends("F", stage, micro_batch))
    sends = host.sends("F", stage, warm_up - 1)
    steady = micro_batches - warm_up + 1
    for micro_batch in range(steady):
        host.wait(host.post(sends + host.receives("B", stage, micro_batch)))
        host.compute("B", stage, micro_batch)
        sends = host.sends("B", stage, micro_batch)
        if micro_batch < steady - 1:
            host.wait(host.post(sends + host.receives("F", stage, micro_batch + warm_up)))
            host.compute("F", stage, micro_batch + warm_up)
            sends = host.sends("F", stage, micro_batch + warm_up)
    sent = host.post(sends)
    for micro_batch in range(steady, micro_batches):
        host.wait(host.post(host.receives("B", stage, micro_batch)))
        host.compute("B", stage, micro_batch)
        host.wait(sent)
        sent = host.post(host.sends("B", stage, micro_batch))
    host.wait(sent)
    host.actions.append(Reduce(stage))


def _all_turns(turns: Sequence[Turn], micro_batches: int) -> Iterator[_Turn]:
    """Add reductions to a rank's turns, and the turns that torch takes to unshard and reshard parameters.

    It takes those whether or not parameters are sharded: they are empty, but while a rank takes one the others go on.
    """
    held: frozenset[int] = frozenset()
    backwards: Counter[int] = Counter()
    for turn, soon in zip(turns, _soon(turns), strict=True):
        yield from [()] * len(held ^ soon)
        held = soon
        yield turn
        for compute in turn:
            backwards[compute.stage] += compute.kind in ("B", "W")
            if compute.kind in ("B", "W") and backwards[compute.stage] == micro_batches:
                yield (Reduce(compute.stage),)
    yield from [()] * len(held)


def _soon(turns: Sequence[Turn]) -> list[frozenset[int]]:
    """Return for each turn the distinct stages that compute next, at most ``HELD_STAGES``."""
    held: list[frozenset[int]] = []
    upcoming: list[int] = []
    for turn in reversed(turns):
        now = [compute.stage for compute in turn]
        upcoming = now + [stage for stage in upcoming if stage not in now]
        held.append(frozenset(upcoming[:HELD_STAGES]))
    return held[::-1]


def _run_lists(hosts: Sequence[_Host], turns: Iterable[Iterator[_Turn]]) -> None:
    """Let every rank take one turn after the other; it passes while something that it needs is not posted yet."""
    lists = [_List(host, deque(own)) for host, own in zip(hosts, turns, strict=True)]
    while any(rank.turns for rank in lists):
        if not sum(rank.take(lists) for rank in lists):
            raise AssertionError("each rank's next turn needs what no rank has sent")
    for rank in lists:
        rank.host.wait(reversed(rank.sent))


class _List:
    """The list that a rank runs.

    Attributes
    ----------
    turns : deque
        What is left to run.
    sent : list of int
        The rank's posts that send.
    _made, _posted
        Activations (F) and gradients (B), by stage and micro-batch, that the rank computed; and those that it receives,
        with the number of the post.
    """

    def __init__(self, host: _Host, turns: deque[_Turn]) -> None:
        self.host, self.turns = host, turns
        self.sent: list[int] = []
        self._made: set[tuple[str, int, int]] = set()
        self._posted: dict[tuple[str, int, int], int] = {}

    def take(self, lists: Sequence[_List]) -> bool:
        """Take the next turn, if its inputs are posted, and return whether it was; ``lists`` has those of all ranks."""
        if not self.turns or not all(isinstance(action, Reduce) or self._has_input(action) for action in self.turns[0]):
            return False
        turn = self.turns.popleft()
        for action in turn:
            self._run(action)
        for action in turn:
            if isinstance(action, Compute) and action.kind != "W":
                self._send(_made_by(action), lists)
        return True

    def _has_input(self, compute: Compute) -> bool:
        kind, stage, micro_batch = _made_by(compute)
        if compute.kind == "W":
            return True
        if self.host.receives(kind, stage, micro_batch):
            return (kind, stage, micro_batch) in self._posted
        before = stage + (-1 if kind == "F" else 1)
        return before not in self.host.stages or (kind, before, micro_batch) in self._made

    def _run(self, action: Compute | Reduce) -> None:
        if isinstance(action, Compute) and action.kind != "W":
            made = _made_by(action)
            if made in self._posted:
                self.host.wait([self._posted[made]])
            self._made.add(made)
        self.host.actions.append(action)

    def _send(self, made: tuple[str, int, int], lists: Sequence[_List]) -> None:
        kind, stage, micro_batch = made
        messages = self.host.sends(kind, stage, micro_batch)
        self.sent += self.host.post(messages)
        for message in messages:
            peer = lists[message.peer]
            needs = (kind, stage + (1 if kind == "F" else -1), micro_batch)
            (peer._posted[needs],) = peer.host.post(peer.host.receives(*needs))


def _made_by(compute: Compute) -> tuple[str, int, int]:
    return "F" if compute.kind == "F" else "B", compute.stage, compute.micro_batch
