"""What ranks of a pipeline compute when, against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from perfmodel.prediction.pipeline_ranks import (
    ComputedStep,
    bubble_share,
    computing_s,
    largest_rank,
    measured_steps,
    of_rank,
    predicted_steps,
    rank_shares,
    with_largest_memory,
)
from perfmodel.units import US
from tests.report.pipelines import EXCHANGES, PIPELINE, TWO_STAGES, measured_pipeline, pipeline, with_larger_last
from tests.report.synthetic import MIB, prediction, scenario


def rows(step: ComputedStep) -> list[tuple[str, int, int, float, float]]:
    """In microseconds."""
    return [
        (each.kind, each.stage, each.micro_batch, round(each.start_s / US, 6), round(each.end_s / US, 6))
        for each in step.computed
    ]


def test_ranks_stand_on_one_clock_that_begins_with_the_first_mark() -> None:
    # The first rank's host begins 3 after the last's; the marks are reached at 3 + 1 and at 0 + 2.
    first, last = predicted_steps(pipeline())
    assert rows(first) == [
        ("F", 0, 0, 2, 5),
        ("F", 0, 1, 5, 7),
        ("B", 0, 0, 13, 17),
        ("B", 0, 1, 19, 23),
        ("optimizer", -1, -1, 23, 24),
        ("optimizer", -1, -1, 24, 26),
    ]
    assert rows(last)[0] == ("F", 1, 0, 6, 9)
    assert [each.start_s / US for each in (first, last)] == pytest.approx([2, 0])
    assert [each.end_s / US for each in (first, last)] == pytest.approx([27, 25])


def test_stages_are_those_of_the_runs() -> None:
    first, last = predicted_steps(pipeline(computed_stages=TWO_STAGES))
    assert [each.stage for each in first.computed] == [0, 2, 2, 0, -1, -1]
    assert [each.stage for each in last.computed] == [1, 3, 3, 1, -1]
    assert (first.stages, last.stages) == ((0, 2), (1, 3))


def test_measured_stages_are_those_of_the_actions() -> None:
    assert [step.stages for step in measured_steps(measured_pipeline())] == [(0,), (1,)]


def test_shares_of_each_rank() -> None:
    first, last = rank_shares(pipeline())
    # Busy: 1 + 1 + 2 + 4 + 4 + 1 + 2 and 3 + 3 + 4 + 4 + 2. Of the messages 4 and 4 + 1 wait with nothing beside them.
    assert (first.busy_s / US, last.busy_s / US) == pytest.approx((15, 16))
    assert (first.bubble_s / US, last.bubble_s / US) == pytest.approx((4, 5))
    assert (first.exposed_communication_s / US, last.exposed_communication_s / US) == pytest.approx((2, 2))
    assert (first.host_bound_s / US, last.host_bound_s / US) == pytest.approx((25 - 15 - 4 - 2, 25 - 16 - 5 - 2))
    assert (first.blocks, last.blocks) == ((1,), (1,))
    assert [(each.rank, each.stages, each.peak_allocated_bytes) for each in (first, last)] == [
        (0, (0,), 8 * MIB),
        (1, (1,), MIB),
    ]
    assert bubble_share(pipeline()) == pytest.approx((4 + 5) / (2 * 25))
    assert rank_shares(prediction()) == []


def test_replicas_stand_one_after_another() -> None:
    known = pipeline()
    twice = replace(
        known,
        scenario=scenario(parallelism={"dp": 2, "strategy": "ddp", "pp": PIPELINE}),
        rank_memories=known.rank_memories * 2,
        rank_timelines=known.rank_timelines * 2,
        rank_programs=known.rank_programs * 2,
        rank_kernels=known.rank_kernels * 2,
    )
    assert [(each.rank, each.stages) for each in rank_shares(twice)] == [(0, (0,)), (1, (1,)), (2, (0,)), (3, (1,))]
    assert predicted_steps(twice) == predicted_steps(known) * 2
    assert bubble_share(twice) == pytest.approx(bubble_share(known))


def test_without_memory_there_is_no_peak() -> None:
    assert [each.peak_allocated_bytes for each in rank_shares(replace(pipeline(), rank_memories=()))] == [None, None]


def test_measured_actions_have_the_optimizer_behind_them() -> None:
    first, last = measured_steps(measured_pipeline())
    assert rows(first) == [
        ("F", 0, 0, 4, 6),
        ("F", 0, 1, 6, 8),
        ("B", 0, 0, 14, 18),
        ("B", 0, 1, 20, 24),
        ("optimizer", -1, -1, 24, 26),
    ]
    assert (first.start_s / US, first.end_s / US) == pytest.approx((26 - 30, 26))
    assert (last.start_s / US, last.end_s / US) == pytest.approx((23 - 30, 23))


def test_a_step_that_took_longer_than_the_median_begins_with_its_first_action() -> None:
    first, last = measured_steps(measured_pipeline(step_s=(20 * US,) * 8))
    assert (first.start_s / US, last.start_s / US) == pytest.approx((4, 23 - 20))


def test_measured_actions_of_all_ranks_or_none() -> None:
    known = measured_pipeline()
    missing = known.model_copy(update={"ranks": (known.ranks[0], known.ranks[1].model_copy(update={"actions": ()}))})
    assert measured_steps(missing) == measured_steps(measured_pipeline(ranks=())) == []


def test_share_of_computing_is_without_the_optimizer() -> None:
    assert computing_s(measured_steps(measured_pipeline())) == pytest.approx(13 * US)


def test_each_rank_is_a_prediction_on_the_first_one_s_clock() -> None:
    first, last = pipeline().by_rank
    assert (first.timeline.start_s[0] / US, last.timeline.start_s[0] / US) == pytest.approx((1 + 3, 8))
    assert first.timeline.communications[0].start_s / US == pytest.approx(6 + 3)
    assert first.timeline.host_spans[0].start_s / US == pytest.approx(0 + 3)
    assert [each.program.exchanges for each in (first, last)] == list(EXCHANGES)
    assert last.memory is not None and last.memory.peak_allocated_bytes == MIB
    alone = prediction()
    assert alone.by_rank == (alone,)


def test_blocks_of_each_of_a_rank_s_stages() -> None:
    shares = rank_shares(pipeline(computed_stages=((0, 3, 3, 0), (1, 2, 2, 1)), stage_blocks=(1, 2, 3, 4)))
    assert [(each.stages, each.blocks) for each in shares] == [((0, 3), (1, 4)), ((1, 2), (2, 3))]


def test_one_rank_since_its_own_host_began() -> None:
    first = of_rank(pipeline(), 0)
    assert first.timeline.start_s[0] / US == pytest.approx(1)
    assert [each.program.exchanges for each in (first, of_rank(pipeline(), 1))] == list(EXCHANGES)


def test_memory_is_of_the_rank_that_takes_most() -> None:
    known = with_larger_last()
    assert largest_rank(known) == 1
    shown, rank = with_largest_memory(known)
    assert (shown.memory, shown.program, rank) == (known.largest_memory, known.rank_programs[1], 1)
    alone = prediction()
    assert (largest_rank(alone), with_largest_memory(alone)) == (None, (alone, None))
    assert alone.memory is not None
    alike = replace(alone, rank_memories=(alone.memory,) * 2)
    assert (largest_rank(alike), with_largest_memory(alike)) == (None, (alike, None))


def test_without_its_program_no_other_rank_s_memory_is_shown() -> None:
    """Of sharded strategies, whose ranks differ in memory alone."""
    memories = with_larger_last().rank_memories
    sharded = replace(prediction(), memory=memories[0], rank_memories=memories)
    assert largest_rank(sharded) == 1
    assert with_largest_memory(sharded) == (sharded, 0)
