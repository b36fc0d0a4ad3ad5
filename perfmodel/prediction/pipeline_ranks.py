"""The steps of a pipeline's ranks, predicted and measured: when each computes, and what it waits for."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from perfmodel.prediction.prediction import Prediction
from perfmodel.program.pipeline.programs import PHASES
from perfmodel.trace.phases import OPTIMIZER

if TYPE_CHECKING:
    from perfmodel.hardware.measurement import Measurement, RankSamples
    from perfmodel.simulate.timeline import PhaseSpan, Timeline

_KIND_OF_PHASE = {phase: kind for kind, phase in PHASES.items()}


class Computed(NamedTuple):
    """One stretch of a rank's compute stream, in seconds since the first rank's device began the step.

    Attributes
    ----------
    kind : str
        F, B, I or W, see :class:`~perfmodel.hardware.measurement.PipelineAction`; or ``optimizer``, which includes the
        scaling of gradients.
    stage, micro_batch : int
        Both are -1 for ``optimizer``.
    start_s, end_s : float
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
    """A rank's step, from reaching its first mark to reaching the next step's; other ranks may reach theirs later.

    Attributes
    ----------
    start_s, end_s : float
    computed : tuple of Computed
        In order.
    """

    start_s: float
    end_s: float
    computed: tuple[Computed, ...]

    @property
    def stages(self) -> tuple[int, ...]:
        """Return the stages of the model that the rank has, ascending."""
        return _stages(each.stage for each in self.computed)


@dataclass(frozen=True)
class RankShare:
    """A rank's stages, and how it spends the step.

    Attributes
    ----------
    rank : int
    stages, blocks : tuple of int
        The stages of the model that it has, and the repeated blocks of each.
    busy_s : float
        Its compute stream works.
    bubble_s : float
        Its compute stream waits for another rank.
    exposed_communication_s : float
        Its compute stream waits for what moves between ranks.
    host_bound_s : float
        Its compute stream waits for the host: the rest of the step.
    peak_allocated_bytes : int or None
        None where the step does not fit.
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
    """Return the share of each rank of a pipeline in order; none for any other prediction."""
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
            host_bound_s=_host_bound_s(timeline),
            peak_allocated_bytes=memory.peak_allocated_bytes if memory is not None and memory.fits else None,
        )
        for rank, (stages, timeline, memory) in enumerate(columns)
    ]


def _host_bound_s(timeline: Timeline) -> float:
    return max(timeline.step_time_s - timeline.busy_s - timeline.bubble_s - timeline.exposed_communication_s, 0.0)


def bubble_share(prediction: Prediction) -> float:
    """Return the share of the step, over all ranks of a pipeline, in which compute streams wait for other ranks."""
    bubbles_s = [timeline.bubble_s for timeline in prediction.rank_timelines]
    return sum(bubbles_s) / (len(bubbles_s) * prediction.step_time_s)


def largest_rank(prediction: Prediction) -> int | None:
    """Return the first rank that takes most memory; None where memory is not predicted, or all take the same."""
    memories, largest = prediction.rank_memories, prediction.largest_memory
    if len({id(each) for each in memories}) < 2:
        return None
    return next(rank for rank, memory in enumerate(memories) if memory is largest)


def on_rank(rank: int | None) -> str:
    """Return words such as `` on rank 3``; nothing for None."""
    return "" if rank is None else f" on rank {rank}"


def titled_of_rank(prediction: Prediction, title: str) -> str:
    """Return the title, of a pipeline's prediction with the shown rank before it."""
    return title if prediction.shown_rank is None else f"rank {prediction.shown_rank}: {title}"


def of_rank(prediction: Prediction, rank: int) -> Prediction:
    """Return a pipeline's prediction with program, timeline, kernels and memory of one rank.

    Its timeline counts from when its own host began the step.
    """
    return replace(prediction.by_rank[rank], timeline=prediction.rank_timelines[rank])


def with_largest_memory(prediction: Prediction) -> tuple[Prediction, int | None]:
    """Return a prediction whose memory can be followed from event to event, and the rank that it shows.

    In a pipeline that is the rank that takes most memory; else the rank that the prediction shows already, as no
    other's program is kept. The rank is None where all take the same.
    """
    rank = largest_rank(prediction)
    if rank is None:
        return prediction, None
    if prediction.rank_timelines:
        return of_rank(prediction, rank), rank
    return prediction, next(i for i, each in enumerate(prediction.rank_memories) if each is prediction.memory)


def predicted_steps(prediction: Prediction) -> list[ComputedStep]:
    """Return each rank's step of a pipeline.

    An action lasts from the start of its first operator on the device to the end of its last.
    """
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
    """Yield, for each phase that runs operators, its index, the start of the first and the end of the last, seconds."""
    runs, firsts = np.unique(timeline.run, return_index=True)
    lasts = np.append(firsts[1:], len(timeline.run)) - 1
    return zip(runs.tolist(), timeline.start_s[firsts].tolist(), timeline.end_s[lasts].tolist(), strict=True)


def measured_steps(measurement: Measurement) -> list[ComputedStep]:
    """Return each rank's measured step; none where any rank's actions are not known.

    Actions are recorded for one step and exclude the optimizer, so its median duration is appended. A step begins a
    median step before its end, or with its first action, where it took longer.
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
    """Return the seconds for which a rank runs forwards and backwards, the mean over all ranks."""
    return sum(each.duration_s for step in steps for each in step.computed if each.kind != OPTIMIZER) / len(steps)
