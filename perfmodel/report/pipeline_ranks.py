"""What each rank of a pipeline computes when, predicted and measured, and what it waits for."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from perfmodel.program.pipeline.orders import stages_of
from perfmodel.program.pipeline.programs import PHASES
from perfmodel.program.pipeline.schedules import Compute, rank_actions
from perfmodel.simulate.prediction import Prediction
from perfmodel.workload.pipeline_parts import pipeline_of
from perfmodel.workload.scenario import Scenario

if TYPE_CHECKING:
    from perfmodel.hardware.measurement import Measurement, RankSamples
    from perfmodel.simulate.timeline import Timeline

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
class RankStep:
    """A rank's step: from reaching its first mark to reaching the next step's, which on another rank may be another
    time. computed: in order.
    """

    start_s: float
    end_s: float
    computed: tuple[Computed, ...]


@dataclass(frozen=True)
class RankShare:
    """What a rank does in the step. busy_s: its compute stream works. bubble_s: that waits for another rank.
    exposed_communication_s: for messages that move. peak_allocated_bytes: None where it is not predicted.
    """

    rank: int
    stages: tuple[int, ...]
    busy_s: float
    bubble_s: float
    exposed_communication_s: float
    peak_allocated_bytes: int | None


def rank_stages(scenario: Scenario) -> tuple[tuple[int, ...], ...]:
    """Of each rank of a pipeline, or of several."""
    section = pipeline_of(scenario)
    return stages_of(section.schedule, section.stages, section.virtual_stages) * scenario.parallelism.dp


def rank_shares(prediction: Prediction) -> list[RankShare]:
    """Of each rank of a pipeline in order; empty for any other prediction."""
    if not prediction.rank_timelines:
        return []
    memories = prediction.rank_memories or (None,) * len(prediction.rank_timelines)
    columns = zip(rank_stages(prediction.scenario), prediction.rank_timelines, memories, strict=True)
    return [
        RankShare(
            rank=rank,
            stages=stages,
            busy_s=timeline.busy_s,
            bubble_s=timeline.bubble_s,
            exposed_communication_s=timeline.exposed_communication_s,
            peak_allocated_bytes=memory.peak_allocated_bytes if memory is not None and memory.fits else None,
        )
        for rank, (stages, timeline, memory) in enumerate(columns)
    ]


def bubble_share(prediction: Prediction) -> float:
    """Of the step, over all ranks of a pipeline: what their compute streams wait for other ranks."""
    shares = rank_shares(prediction)
    return sum(each.bubble_s for each in shares) / (len(shares) * prediction.step_time_s)


def predicted_steps(prediction: Prediction) -> list[RankStep]:
    """Of each rank of a pipeline: actions from the device's start of the first operator to the end of the last."""
    section = pipeline_of(prediction.scenario)
    of_pipeline = rank_actions(section.schedule, section.stages, section.micro_batches, section.virtual_stages)
    of_ranks = of_pipeline * prediction.scenario.parallelism.dp
    timelines = [each.timeline for each in prediction.by_rank]
    zero_s = min(timeline.phases[0].start_s for timeline in timelines)
    return [
        _predicted_step(timeline.shifted(-zero_s), [each.stage for each in actions if isinstance(each, Compute)])
        for timeline, actions in zip(timelines, of_ranks, strict=True)
    ]


def _predicted_step(timeline: Timeline, stages: Iterable[int]) -> RankStep:
    """stages: of the actions, in order."""
    left = iter(stages)
    stage_of_run = [next(left) if span.phase in _KIND_OF_PHASE else -1 for span in timeline.phases]
    runs, firsts = np.unique(timeline.run, return_index=True)
    lasts = np.append(firsts[1:], len(timeline.run)) - 1
    computed = (
        Computed(
            _KIND_OF_PHASE.get(timeline.phases[run].phase, OPTIMIZER),
            stage_of_run[run],
            timeline.phases[run].micro_batch,
            float(timeline.start_s[first]),
            float(timeline.end_s[last]),
        )
        for run, first, last in zip(runs.tolist(), firsts.tolist(), lasts.tolist(), strict=True)
    )
    return RankStep(timeline.phases[0].start_s, timeline.phases[-1].end_s, tuple(computed))


def measured_steps(measurement: Measurement) -> list[RankStep]:
    """Of each rank; empty where any rank's actions are not known. Behind the last action stands the optimizer as it is
    in the median, since actions are written down of one step and without it; a step begins a median step before its
    end.
    """
    if not all(rank.actions for rank in measurement.ranks):
        return []
    return [_measured_step(rank, measurement.median_step_s) for rank in measurement.ranks]


def _measured_step(rank: RankSamples, step_s: float) -> RankStep:
    computed = [Computed(each.kind, each.stage, each.micro_batch, each.start_s, each.end_s) for each in rank.actions]
    last_s = max(each.end_s for each in computed)
    if OPTIMIZER in rank.phases_s:
        end_s = last_s + statistics.median(rank.phases_s[OPTIMIZER])
        computed.append(Computed(OPTIMIZER, -1, -1, last_s, end_s))
        last_s = end_s
    return RankStep(last_s - step_s, last_s, tuple(computed))


def computing_share(steps: Sequence[RankStep], step_time_s: float) -> float:
    """Of the step, over all ranks, the share in which they run forwards and backwards."""
    seconds = sum(each.duration_s for step in steps for each in step.computed if each.kind != OPTIMIZER)
    return seconds / (len(steps) * step_time_s)
