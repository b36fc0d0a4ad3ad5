"""What each rank of a pipeline computes when, predicted and measured, and what it waits for."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from perfmodel.prediction.prediction import Prediction
from perfmodel.program.pipeline.programs import PHASES

if TYPE_CHECKING:
    from perfmodel.hardware.measurement import Measurement, RankSamples
    from perfmodel.simulate.timeline import PhaseSpan, Timeline

OPTIMIZER = "optimizer"
_KIND_OF_PHASE = {phase: kind for kind, phase in PHASES.items()}


class Computed(NamedTuple):
    """One stretch of a rank's compute stream, in seconds since the first rank's device began the step.

    kind: F, B, I or W, see :class:`~perfmodel.hardware.measurement.PipelineAction`, or ``optimizer``, with the scaling
    of gradients: of no stage and no micro-batch, both -1.
    """

    kind: str
    stage: int
    micro_batch: int
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True)
class ComputedStep:
    """A rank's step: from reaching its first mark to reaching the next step's, which on another rank may be another
    time. computed: in order.
    """

    start_s: float
    end_s: float
    computed: tuple[Computed, ...]

    @property
    def stages(self) -> tuple[int, ...]:
        """Stages of the model that the rank has, ascending."""
        return _stages(each.stage for each in self.computed)


@dataclass(frozen=True)
class RankShare:
    """What a rank does in the step. stages, blocks: the parts of the model that it has, repeated blocks of each.
    busy_s: its compute stream works. bubble_s: that waits for another rank. exposed_communication_s: for what moves
    between ranks. host_bound_s: for its host, the rest of the step. peak_allocated_bytes: None where it does not fit.
    """

    rank: int
    stages: tuple[int, ...]
    blocks: tuple[int, ...]
    busy_s: float
    bubble_s: float
    exposed_communication_s: float
    host_bound_s: float
    peak_allocated_bytes: int | None


def _stages(numbers: Iterable[int]) -> tuple[int, ...]:
    """Return the distinct stages among these, ascending; -1 is none."""
    return tuple(sorted({*numbers} - {-1}))


def rank_shares(prediction: Prediction) -> list[RankShare]:
    """Of each rank of a pipeline in order; empty for any other prediction."""
    if not prediction.rank_timelines:
        return []
    blocks = prediction.program.stage_blocks
    memories = prediction.rank_memories or (None,) * len(prediction.rank_timelines)
    stages_of_ranks = [_stages(span.stage for span in each.phases) for each in prediction.rank_timelines]
    columns = zip(stages_of_ranks, prediction.rank_timelines, memories, strict=True)
    return [
        RankShare(
            rank=rank,
            stages=stages,
            blocks=tuple(blocks[stage] for stage in stages),
            busy_s=timeline.busy_s,
            bubble_s=timeline.bubble_s,
            exposed_communication_s=timeline.exposed_communication_s,
            host_bound_s=_left_s(timeline),
            peak_allocated_bytes=memory.peak_allocated_bytes if memory is not None and memory.fits else None,
        )
        for rank, (stages, timeline, memory) in enumerate(columns)
    ]


def _left_s(timeline: Timeline) -> float:
    return max(timeline.step_time_s - timeline.busy_s - timeline.bubble_s - timeline.exposed_communication_s, 0.0)


def bubble_share(prediction: Prediction) -> float:
    """Of the step, over all ranks of a pipeline: what their compute streams wait for other ranks."""
    bubbles_s = [timeline.bubble_s for timeline in prediction.rank_timelines]
    return sum(bubbles_s) / (len(bubbles_s) * prediction.step_time_s)


def largest_rank(prediction: Prediction) -> int | None:
    """The first rank that takes most memory; None where memory is not predicted, or all take the same."""
    memories, largest = prediction.rank_memories, prediction.largest_memory
    if len({id(each) for each in memories}) < 2:
        return None
    return next(rank for rank, memory in enumerate(memories) if memory is largest)


def on_rank(rank: int | None) -> str:
    """`` on rank 3``; nothing for None."""
    return "" if rank is None else f" on rank {rank}"


def titled_of_rank(prediction: Prediction, title: str) -> str:
    """Of a pipeline, the title with the rank that is shown before it."""
    return title if prediction.shown_rank is None else f"rank {prediction.shown_rank}: {title}"


def of_rank(prediction: Prediction, rank: int) -> Prediction:
    """Of a pipeline, with program, timeline, kernels and memory of one rank, since its own host began the step."""
    return replace(prediction.by_rank[rank], timeline=prediction.rank_timelines[rank])


def with_largest_memory(prediction: Prediction) -> tuple[Prediction, int | None]:
    """The prediction with program, timeline and memory of a rank whose memory can be followed from event to event, and
    that rank: of a pipeline the largest; else the one that it is of, as no other's program is kept. None where all are
    alike.
    """
    rank = largest_rank(prediction)
    if rank is None:
        return prediction, None
    if prediction.rank_timelines:
        return of_rank(prediction, rank), rank
    return prediction, next(i for i, each in enumerate(prediction.rank_memories) if each is prediction.memory)


def predicted_steps(prediction: Prediction) -> list[ComputedStep]:
    """Of each rank of a pipeline: actions from the device's start of the first operator to the end of the last."""
    timelines = [each.timeline for each in prediction.by_rank]
    zero_s = min(timeline.phases[0].start_s for timeline in timelines)
    return [_predicted_step(timeline.shifted(-zero_s)) for timeline in timelines]


def _predicted_step(timeline: Timeline) -> ComputedStep:
    computed = tuple(
        _computed(timeline.phases[run], start_s, end_s) for run, start_s, end_s in computed_stretches(timeline)
    )
    return ComputedStep(timeline.phases[0].start_s, timeline.phases[-1].end_s, computed)


def _computed(span: PhaseSpan, start_s: float, end_s: float) -> Computed:
    if span.phase not in _KIND_OF_PHASE:
        return Computed(OPTIMIZER, -1, -1, start_s, end_s)
    return Computed(_KIND_OF_PHASE[span.phase], span.stage, span.micro_batch, start_s, end_s)


def computed_stretches(timeline: Timeline) -> Iterator[tuple[int, float, float]]:
    """Of each phase that runs operators its index, the start of the first operator and the end of the last, seconds."""
    runs, firsts = np.unique(timeline.run, return_index=True)
    lasts = np.append(firsts[1:], len(timeline.run)) - 1
    return zip(runs.tolist(), timeline.start_s[firsts].tolist(), timeline.end_s[lasts].tolist(), strict=True)


def measured_steps(measurement: Measurement) -> list[ComputedStep]:
    """Of each rank; empty where any rank's actions are not known. Behind the last action stands the optimizer as it is
    in the median, since actions are written down of one step and without it; a step begins a median step before its
    end, or with its first action, where it took longer.
    """
    if not all(rank.actions for rank in measurement.ranks):
        return []
    return [_measured_step(rank, measurement.median_step_s) for rank in measurement.ranks]


def _measured_step(rank: RankSamples, step_s: float) -> ComputedStep:
    computed = [Computed(each.kind, each.stage, each.micro_batch, each.start_s, each.end_s) for each in rank.actions]
    first_s, last_s = min(each.start_s for each in computed), max(each.end_s for each in computed)
    if OPTIMIZER in rank.phases_s:
        end_s = last_s + statistics.median(rank.phases_s[OPTIMIZER])
        computed.append(Computed(OPTIMIZER, -1, -1, last_s, end_s))
        last_s = end_s
    return ComputedStep(min(last_s - step_s, first_s), last_s, tuple(computed))


def computing_s(steps: Sequence[ComputedStep]) -> float:
    """Seconds for which a rank runs forwards and backwards, the mean over all."""
    return sum(each.duration_s for step in steps for each in step.computed if each.kind != OPTIMIZER) / len(steps)
