"""Orders of computing that can be written down by hand; test_schedules.py holds all of them against torch."""

from __future__ import annotations

import pytest

from perfmodel.program.pipeline.orders import stages_of, turns_of
from perfmodel.scenario.scenario import Schedule


def spelt(schedule: Schedule, rank: int, ranks: int, micro_batches: int, virtual_stages: int) -> list[str]:
    turns = turns_of(schedule, rank, ranks, micro_batches, virtual_stages)
    return ["+".join(f"{each.kind}{each.stage}.{each.micro_batch}" for each in turn) for turn in turns]


@pytest.mark.parametrize(
    ("schedule", "virtual_stages", "expected"),
    [
        ("1f1b", 1, ((0,), (1,), (2,))),
        ("interleaved-1f1b", 2, ((0, 3), (1, 4), (2, 5))),
        ("zbv-zero-bubble", 2, ((0, 5), (1, 4), (2, 3))),
        ("dualpipev", 2, ((0, 5), (1, 4), (2, 3))),
    ],
)
def test_stages_are_dealt_out_in_turns_or_there_and_back(
    schedule: Schedule, virtual_stages: int, expected: tuple[tuple[int, ...], ...]
) -> None:
    assert stages_of(schedule, 3, virtual_stages) == expected


def test_looped_breadth_first_runs_every_micro_batch_through_a_stage_before_the_next() -> None:
    assert spelt("looped-bfs", 1, 2, 2, 2) == ["F1.0", "F1.1", "F3.0", "F3.1", "B3.1", "B3.0", "B1.1", "B1.0"]


@pytest.mark.parametrize(("rank", "warm_up"), [(0, 4), (1, 2)])
def test_interleaved_1f1b_begins_with_a_round_less_and_two_forwards_a_rank_behind(rank: int, warm_up: int) -> None:
    """(virtual - 1) x ranks + 2 (ranks - 1 - rank) forwards, then one of each in turns."""
    kinds = [each[0] for each in spelt("interleaved-1f1b", rank, 2, 2, 2)]
    assert kinds == ["F"] * warm_up + ["F", "B"] * (4 - warm_up) + ["B"] * warm_up


def test_interleaved_zero_bubble_computes_weights_gradients_as_many_turns_later_as_the_rank_says() -> None:
    for rank in (0, 1):
        turns = spelt("interleaved-zero-bubble", rank, 2, 4, 1)
        inputs = [each[1:] for each in turns if each[0] == "I"]
        weights = [each[1:] for each in turns if each[0] == "W"]
        assert inputs == weights == [f"{rank}.{number}" for number in range(4)]
        lag = [sum(each[0] == "I" for each in turns[: turns.index(f"W{rank}.{number}")]) for number in range(4)]
        assert lag == [min(number + 1 + rank, 4) for number in range(4)]


@pytest.mark.parametrize(
    "schedule", ["looped-bfs", "interleaved-1f1b", "interleaved-zero-bubble", "zbv-zero-bubble", "dualpipev"]
)
def test_each_stage_computes_each_micro_batch_once(schedule: Schedule) -> None:
    ranks, micro_batches = 2, 4
    for rank in range(ranks):
        done = [each for turn in turns_of(schedule, rank, ranks, micro_batches, 2) for each in turn]
        for stage in stages_of(schedule, ranks, 2)[rank]:
            of_stage = [each for each in done if each.stage == stage]
            for kinds in ("F", "BI", "BW"):
                assert sorted(each.micro_batch for each in of_stage if each.kind in kinds) == [0, 1, 2, 3]
