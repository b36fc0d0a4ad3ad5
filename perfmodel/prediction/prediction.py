"""The answer to a scenario: what the reports print and draw."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from perfmodel.cost.kernels.kernel_cost import KernelCost
from perfmodel.simulate.timeline import Timeline

if TYPE_CHECKING:
    from perfmodel.cost.power import Clock
    from perfmodel.hardware.profile import Profile
    from perfmodel.program.program import Program
    from perfmodel.scenario.scenario import Scenario
    from perfmodel.simulate.memory.walk import MemoryTimeline


@dataclass(frozen=True)
class KernelUse:
    """One distinct operator of the step.

    key: its kernel key. cost: what one call costs alone. count: how often the step runs it. total_s: device seconds of
    these runs in the step, each as warm as it finds the cache.
    """

    key: str
    cost: KernelCost
    count: int
    total_s: float

    @property
    def mean_s(self) -> float:
        return self.total_s / self.count


@dataclass(frozen=True)
class Prediction:
    """See ``perfmodel predict --json`` for the meaning of each field; times in seconds, sizes in bytes.

    interval_s: 5th and 95th percentile of the steady step. breakdown: seconds by forward_s, backward_s, optimizer_s,
    exposed_communication_s, bubble_s, host_bound_s, which add up to the step, and communication_s beside them.
    provenance: share of the device's busy time by source (exact, curve, extrapolated, estimated, roofline).
    collective_provenance: share of the collectives' time alone by source (exact, curve, extrapolated), empty where
    there are none. communication_bytes: by
    group; of collectives, the sizes that nccl-tests counts, of messages (group ``pp``, or one for each two ranks) all
    that the rank sends and receives. scaled_share: of the device's busy time before it was scaled to another datasheet,
    what follows the values that were changed. idle_settings: keys of ``--set`` that change the profile but nothing in
    the answer. own_settings: those that set a value which the profile has anyway. assumptions: what was not measured
    but supposed, such as faster links. clock: to which the power limit lowers it, which kernels
    and their times contain; None at the full one. kernels: largest total first. model_flops: of the whole step over all
    ranks, per rank.

    Of one rank are program, timeline, memory, clock, kernels, breakdown, communication_bytes and provenance: of a
    pipeline, of shown_rank, the first of those whose compute streams work longest; else, where shown_rank is None, of
    one whose step is longest, which all others wait for. bottleneck and warnings are of all ranks of a pipeline.
    rank_memories: of each rank in order. rank_timelines, rank_programs, rank_kernels: the same of a pipeline, empty
    where ranks do not differ in time.
    """

    scenario: Scenario
    profile: Profile
    program: Program
    timeline: Timeline
    memory: MemoryTimeline | None
    interval_s: tuple[float, float]
    kernels: tuple[KernelUse, ...]
    breakdown: dict[str, float]
    bottleneck: str
    provenance: dict[str, float]
    model_flops: float
    shown_rank: int | None = None
    rank_memories: tuple[MemoryTimeline, ...] = ()
    rank_timelines: tuple[Timeline, ...] = ()
    rank_programs: tuple[Program, ...] = ()
    rank_kernels: tuple[tuple[KernelUse, ...], ...] = ()
    communication_bytes: dict[str, int] = field(default_factory=dict)
    collective_provenance: dict[str, float] = field(default_factory=dict)
    scaled_share: float = 0.0
    idle_settings: tuple[str, ...] = ()
    own_settings: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    clock: Clock | None = None
    warnings: tuple[str, ...] = ()

    @property
    def largest_memory(self) -> MemoryTimeline | None:
        """Of the rank that takes most; None on a CPU."""
        known = self.rank_memories or (() if self.memory is None else (self.memory,))
        return max(known, key=lambda each: (not each.fits, each.needed_bytes), default=None)

    @property
    def fits(self) -> bool | None:
        """Whether every rank's memory does; None on a CPU."""
        memory = self.largest_memory
        return None if memory is None else memory.fits

    @property
    def step_retries(self) -> int:
        """Most of any rank, see :class:`~perfmodel.simulate.memory.walk.MemoryTimeline`."""
        known = self.rank_memories or (() if self.memory is None else (self.memory,))
        return max((each.step_retries for each in known if each.fits), default=0)

    @property
    def step_time_s(self) -> float:
        """Of the rank whose step is longest; those of a pipeline differ by rounding alone."""
        return max((each.step_time_s for each in self.rank_timelines), default=self.timeline.step_time_s)

    @property
    def by_rank(self) -> tuple[Prediction, ...]:
        """Of a pipeline, with program, timeline, kernels and memory of each rank in order, timelines since the first
        host began the step; else this one alone.
        """
        if not self.rank_timelines:
            return (self,)
        memories = self.rank_memories or (None,) * len(self.rank_timelines)
        columns = zip(self.rank_programs, self.rank_timelines, self.rank_kernels, memories, strict=True)
        return tuple(
            replace(self, program=program, timeline=timeline.shifted(timeline.began_s), kernels=kernels, memory=memory)
            for program, timeline, kernels, memory in columns
        )
