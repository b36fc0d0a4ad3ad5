"""Held against torch: the list that each of its schedules makes, and what ranks of gloo do in a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import get_args

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from perfmodel.errors import PerfModelError
from perfmodel.program.pipeline.schedules import (
    Action,
    Await,
    Compute,
    Message,
    Post,
    Reduce,
    rank_actions,
    stages_of,
)
from perfmodel.scenario.rules import check_schedule
from perfmodel.scenario.scenario import Schedule
from tests.program.pipeline.executor import SPLIT, run
from tests.program.pipeline.issued import CASES, IN_TURNS, issued
from tests.program.pipeline.recorded_steps import Case, record, torch_schedule
from tests.refusals import refused

SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
LISTS = SCHEDULES[2:]
TWO_RANKS = [case for case in CASES if case.ranks == 2]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_steps_are_what_ranks_of_gloo_did(case: Case) -> None:
    for rank, expected in enumerate(issued(case)):
        assert rank_actions(*case)[rank] == expected


def test_ranks_of_gloo_do_what_was_recorded(tmp_path: Path) -> None:
    """Of a case of every schedule; else record them again: ``python -m tests.program.pipeline.issued``."""
    draw = Random(18)
    few = [draw.choice([case for case in TWO_RANKS if case.schedule == schedule]) for schedule in SCHEDULES]
    for case, expected in record(few, tmp_path, timeout_s=240).items():
        assert issued(case) == list(expected), case


def torch_list(case: Case) -> list[list[str]]:
    """Of each rank, pairs taken apart, without what shards parameters."""
    lists = torch_schedule(case).pipeline_order_with_comms
    actions = [
        [part for action in lists[rank] for part in action.sub_actions or [action]] for rank in range(case.ranks)
    ]
    return [[str(action) for action in each if "SHARD" not in str(action)] for each in actions]


def as_torch_writes(actions: Sequence[Action]) -> list[str]:
    return [_as_torch_writes(action) for action in actions if not isinstance(action, Await)]


def _as_torch_writes(action: Action) -> str:
    if isinstance(action, Compute):
        return f"{action.stage}{action.kind}{action.micro_batch}"
    if isinstance(action, Reduce):
        return f"{action.stage}REDUCE_GRAD"
    assert isinstance(action, Post)
    (message,) = action.messages
    return f"{message.stage}{'SEND' if message.is_send else 'RECV'}_{message.kind}{message.micro_batch}"


@pytest.mark.parametrize("ranks", range(2, 7))
@pytest.mark.parametrize("schedule", LISTS)
def test_the_lists_are_torchs(schedule: Schedule, ranks: int) -> None:
    compared = 0
    for virtual_stages in (1, 2, 3, 5) if schedule in IN_TURNS else (2,):
        for micro_batches in (*range(1, 2 * ranks + 3), 3 * ranks, 4 * ranks + 1, 5 * ranks + 5):
            case = Case(schedule, ranks, micro_batches, virtual_stages)
            try:
                expected = torch_list(case)
            except ValueError:
                continue  # see test_what_torch_refuses_is_refused
            assert [as_torch_writes(each) for each in rank_actions(*case)] == expected, case
            compared += 1
    assert compared >= 4


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_torch_refuses_is_refused(schedule: Schedule) -> None:
    """torch refuses no virtual stages of GPipe and 1F1B: they take a single one."""
    outcomes = set()
    for ranks in range(1, 6):
        for micro_batches in range(1, 24):
            for virtual_stages in (1,) if schedule in ("gpipe", "1f1b") else (1, 2, 3):
                case = Case(schedule, ranks, micro_batches, virtual_stages)
                outcomes.add(is_taken_by_torch(case))
                assert is_taken(case) == is_taken_by_torch(case), case
    assert outcomes == ({True} if schedule in ("gpipe", "looped-bfs") else {True, False})


def is_taken_by_torch(case: Case) -> bool:
    try:
        torch_schedule(case)
    except ValueError:
        return False
    return True


def is_taken(case: Case) -> bool:
    try:
        check_schedule(*case)
    except PerfModelError:
        return False
    return True


@pytest.mark.parametrize(
    ("case", "key", "named"),
    [
        (Case("gpipe", 4, 8, 2), "virtual_stages", (1, "gpipe", 2, "interleaved-1f1b")),
        (Case("zbv-zero-bubble", 4, 8), "virtual_stages", (2, "zbv-zero-bubble", 1)),
        (Case("1f1b", 4, 3), "micro_batches", (4, "1f1b", 3)),
        (Case("dualpipev", 4, 7, 2), "micro_batches", (8, "dualpipev", 4, 7)),
        (Case("interleaved-1f1b", 4, 13, 2), "micro_batches", (3, "interleaved-1f1b", 4, 13, 12, 15)),
        (Case("interleaved-zero-bubble", 2, 5, 2), "micro_batches", ("interleaved-zero-bubble", 2, 5, 4, 6)),
    ],
)
def test_a_refusal_names_the_key_the_schedule_and_what_to_set(case: Case, key: str, named: tuple[object, ...]) -> None:
    with refused(f"parallelism.pp.{key}", *named):
        rank_actions(*case)


def test_where_stages_are() -> None:
    assert stages_of("1f1b", 3) == ((0,), (1,), (2,))
    assert stages_of("looped-bfs", 2, 3) == ((0, 2, 4), (1, 3, 5))
    assert stages_of("dualpipev", 3, 2) == ((0, 5), (1, 4), (2, 3))


def test_1f1b_of_the_first_of_two_ranks() -> None:
    """Two forwards, the second sent together with the receive of the first gradient; then one by one, and the rest."""

    def sent(micro_batch: int) -> Message:
        return Message(True, "F", 0, micro_batch, 1)

    def gradient(micro_batch: int) -> Message:
        return Message(False, "B", 0, micro_batch, 1)

    assert rank_actions("1f1b", 2, 3)[0] == (
        Compute("F", 0, 0),
        Post(0, (sent(0),), False),
        Compute("F", 0, 1),
        Await(0),
        Post(1, (sent(1), gradient(0)), True),
        Await(1),
        Compute("B", 0, 0),
        Compute("F", 0, 2),
        Post(2, (sent(2), gradient(1)), True),
        Await(2),
        Compute("B", 0, 1),
        Post(3, (gradient(2),), False),
        Await(3),
        Compute("B", 0, 2),
        Reduce(0),
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    schedule = draw(st.sampled_from(SCHEDULES))
    virtual_stages = st.integers(1, 4) if schedule in IN_TURNS else st.just(2 if schedule in LISTS else 1)
    case = Case(schedule, draw(st.integers(1, 8)), draw(st.integers(1, 40)), draw(virtual_stages))
    assume(is_taken(case))
    return case


@settings(max_examples=60)
@given(case=cases())
def test_everything_is_computed_once_where_its_stage_is(case: Case) -> None:
    micro_batches = range(case.micro_batches)
    for stages, actions in zip(
        stages_of(case.schedule, case.ranks, case.virtual_stages), rank_actions(*case), strict=True
    ):
        found = Counter(action for action in actions if isinstance(action, Compute))
        assert set(found.values()) == {1}
        for stage in stages:
            of = {kind: {each.micro_batch for each in found if each[:2] == (kind, stage)} for kind in "FBIW"}
            assert of["F"] == of["B"] | of["I"] == set(micro_batches)
            assert of["I"] == of["W"]
            assert not of["B"] & of["I"]
        assert {each.stage for each in found} == set(stages)
        check_reductions(actions, stages)


def check_reductions(actions: Sequence[Action], stages: Sequence[int]) -> None:
    """One of each stage, after its last backward."""
    where = {action.stage: index for index, action in enumerate(actions) if isinstance(action, Reduce)}
    assert sorted(where) == sorted(stages)
    assert len(where) == sum(isinstance(action, Reduce) for action in actions)
    for index, action in enumerate(actions):
        assert not isinstance(action, Compute) or index < where[action.stage]


@settings(max_examples=60)
@given(case=cases(), batches_all=st.booleans())
def test_every_send_has_its_receive_and_is_awaited_once(case: Case, batches_all: bool) -> None:
    found = rank_actions(*case, batches_all=batches_all)
    between: dict[tuple[int, int, bool], list[tuple[str, int, int, bool]]] = {}
    for rank, actions in enumerate(found):
        posts = [action for action in actions if isinstance(action, Post)]
        assert [post.number for post in posts] == list(range(len(posts)))
        awaited = [action.number for action in actions if isinstance(action, Await)]
        assert sorted(awaited) == list(range(len(posts)))
        for post in posts:
            is_mixed = len({message.is_send for message in post.messages}) == 2
            assert post.is_batched == (batches_all or is_mixed)
            for is_send, kind, stage, micro_batch, peer in post.messages:
                sender = stage if is_send else stage + (-1 if kind == "F" else 1)
                pair = (rank, peer, True) if is_send else (peer, rank, False)
                between.setdefault(pair, []).append((kind, sender, micro_batch, post.is_batched))
    for sender, receiver, _ in list(between):
        assert between[sender, receiver, True] == between[sender, receiver, False]


@settings(max_examples=60)
@given(case=cases(), batches_all=st.booleans())
def test_no_rank_waits_for_ever(case: Case, batches_all: bool) -> None:
    """On communicators that carry one message after the other, each once both ranks have come to it; and what is needed
    is there: see the executor.
    """
    spans = run(rank_actions(*case, batches_all=batches_all), SPLIT)
    work = 3 * case.micro_batches * case.virtual_stages
    for rank in range(case.ranks):
        assert sum(span.end - span.start for span in spans if span.rank == rank) == work


def test_the_executor_sees_who_waits_and_what_is_missing() -> None:
    first, last = rank_actions("1f1b", 2, 4)
    swapped = (Compute("F", 1, 0), *last[:2], *last[3:])
    with pytest.raises(AssertionError, match="lacks F of stage 0"):
        run((first, swapped), SPLIT)
    without_receive = tuple(action for action in last if action not in last[:2])
    with pytest.raises(AssertionError, match=r"lacks F|all wait"):
        run((first, without_receive), SPLIT)
    late = tuple(action for action in first if not (isinstance(action, Post) and action.number == 0))
    late = tuple(action for action in late if action != Await(0))
    with pytest.raises(AssertionError, match="all wait"):
        run((late, last), SPLIT)
