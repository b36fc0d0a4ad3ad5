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

    Attributes
    ----------
    key : str
        Its kernel key.
    cost : KernelCost
        What one call costs alone.
    count : int
        How often the step runs it.
    total_s : float
        Device seconds of these runs in the step, each with what it finds in the cache.
    """

    key: str
    cost: KernelCost
    count: int
    total_s: float

    @property
    def mean_s(self) -> float:
        """Device seconds of one run, in the mean."""
        return self.total_s / self.count


@dataclass(frozen=True)
class Prediction:
    """The answer to a scenario; times in seconds, sizes in bytes.

    ``program``, ``timeline``, ``memory``, ``clock``, ``kernels``, ``breakdown``, ``communication_bytes`` and
    ``provenance`` describe one rank. In a pipeline that is ``shown_rank``, the first of those whose compute streams are
    busiest; otherwise it is a rank with the longest step, for which all others wait. ``bottleneck`` and ``warnings``
    are about all ranks of a pipeline.

    Attributes
    ----------
    scenario : Scenario
        The question.
    profile : Profile
        The machine, with the values that ``--set`` changed.
    program : Program
        What the rank's host issues in a step.
    timeline : Timeline
        When everything happens, on host and device.
    memory : MemoryTimeline or None
        What the caching allocator holds; None on a CPU.
    interval_s : tuple of float
        5th and 95th percentile of the steady step.
    kernels : tuple of KernelUse
        Distinct operators, the largest total first.
    breakdown : dict of str to float
        Seconds by ``forward_s``, ``backward_s``, ``optimizer_s``, ``exposed_communication_s``, ``bubble_s`` and
        ``host_bound_s``, which add up to the step, and ``communication_s``, which is not part of that sum.
    bottleneck : str
        One sentence: what to change first.
    provenance : dict of str to float
        Share of the device's busy time by source: exact, curve, extrapolated, estimated, roofline.
    model_flops : float
        FLOPs of the whole step over all ranks, per rank.
    shown_rank : int or None
        See above; None without a pipeline.
    rank_memories : tuple of MemoryTimeline
        Memory of every rank, in order of ranks; empty on a CPU.
    rank_timelines, rank_programs, rank_kernels : tuple
        The same of every rank of a pipeline; empty if ranks do not differ in time.
    communication_bytes : dict of str to int
        Bytes by group. Collectives count the sizes that nccl-tests counts; messages (group ``pp``, or one group for
        each two ranks) count all that the rank sends and receives.
    collective_provenance : dict of str to float
        Share of the collectives' time alone by source: exact, curve, extrapolated; empty without collectives.
    scaled_share : float
        Share of the device's busy time, before scaling to another datasheet, that follows the changed values.
    idle_settings : tuple of str
        Keys of ``--set`` that change the profile but nothing in the answer.
    own_settings : tuple of str
        Keys of ``--set`` whose values the profile has anyway.
    assumptions : tuple of str
        What was not measured but assumed, such as faster links.
    clock : Clock or None
        The clock to which the power limit lowers the device, which ``kernels`` and all times contain; None at full
        clock.
    warnings : tuple of str
        What makes the answer less certain, in sentences.
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
        """Memory of the rank that needs most; None on a CPU."""
        known = self.rank_memories or (() if self.memory is None else (self.memory,))
        return max(known, key=lambda each: (not each.fits, each.needed_bytes), default=None)

    @property
    def fits(self) -> bool | None:
        """Whether the memory of every rank fits into its device; None on a CPU."""
        memory = self.largest_memory
        return None if memory is None else memory.fits

    @property
    def step_retries(self) -> int:
        """Allocator retries in a steady step of the rank with most, see
        :class:`~perfmodel.simulate.memory.walk.MemoryTimeline`.
        """
        known = self.rank_memories or (() if self.memory is None else (self.memory,))
        return max((each.step_retries for each in known if each.fits), default=0)

    @property
    def step_time_s(self) -> float:
        """Seconds of the longest step of any rank; steps of a pipeline's ranks differ by rounding alone."""
        return max((each.step_time_s for each in self.rank_timelines), default=self.timeline.step_time_s)

    @property
    def by_rank(self) -> tuple[Prediction, ...]:
        """One Prediction per rank of a pipeline, on a common clock that starts when the first host begins the step.

        Without a pipeline it holds this prediction alone.
        """
        if not self.rank_timelines:
            return (self,)
        memories = self.rank_memories or (None,) * len(self.rank_timelines)
        columns = zip(self.rank_programs, self.rank_timelines, self.rank_kernels, memories, strict=True)
        return tuple(
            replace(self, program=program, timeline=timeline.shifted(timeline.began_s), kernels=kernels, memory=memory)
            for program, timeline, kernels, memory in columns
        )
