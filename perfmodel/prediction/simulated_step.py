"""The simulated step of a scenario: what each rank runs, what that costs, when it runs and what memory it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from perfmodel.cost.host import host_slowness, host_spread
from perfmodel.cost.routing import route_of
from perfmodel.hardware.interconnect import Interconnect, communicators_bytes
from perfmodel.hardware.profile import Profile
from perfmodel.prediction.breakdown import RankFigures, busiest, rank_figures
from perfmodel.prediction.costed_rank import CostedRank, costed_ranks, timelines_of
from perfmodel.prediction.provenance import batches_messages
from perfmodel.prediction.support import interconnect_of
from perfmodel.program.ranks import RankProgram, rank_programs
from perfmodel.progress import doing
from perfmodel.scenario.scenario import Scenario
from perfmodel.simulate.memory.walk import MemoryTimeline, simulate_memory
from perfmodel.simulate.timeline import Timeline


@dataclass(frozen=True)
class SimulatedStep:
    """A step's distinct programs, each simulated once for all ranks that run it.

    Attributes
    ----------
    ranks : sequence of RankProgram
        Each program with the ranks that run it.
    costed : sequence of CostedRank
        Costs of each program, in the order of ``ranks``.
    timelines : sequence of Timeline
        Timeline of each program, in the same order.
    memories : tuple of MemoryTimeline
        Memory of every rank, in the order of ranks; empty on a CPU.
    interconnect : Interconnect or None
        The scenario's; None if one rank runs alone.
    slowness : float
        Factor on the host times of the profile.
    """

    scenario: Scenario
    profile: Profile
    ranks: Sequence[RankProgram]
    costed: Sequence[CostedRank]
    timelines: Sequence[Timeline]
    memories: tuple[MemoryTimeline, ...]
    interconnect: Interconnect | None
    slowness: float

    @property
    def is_pipeline(self) -> bool:
        """Whether ranks send each other messages."""
        return any(each.program.exchanges for each in self.costed)

    @cached_property
    def shown(self) -> int:
        """Index of the program that the answer describes.

        In a pipeline it is the first of those whose compute streams are busiest; otherwise the first with the longest
        step, for which all other ranks wait.
        """
        if self.is_pipeline:
            return busiest(self.timelines)
        return max(range(len(self.timelines)), key=lambda index: self.timelines[index].step_time_s)

    @cached_property
    def interacting(self) -> list[int]:
        """Indices of the programs whose timelines depend on each other: all of a pipeline, otherwise the shown one."""
        return list(range(len(self.costed))) if self.is_pipeline else [self.shown]

    @property
    def interacting_ranks(self) -> list[CostedRank]:
        """Costs of the programs in :attr:`interacting`."""
        return [self.costed[index] for index in self.interacting]

    @cached_property
    def index_of_rank(self) -> list[int]:
        """Index of the program that each rank of a pipeline runs; empty if ranks do not differ in time."""
        if not self.is_pipeline:
            return []
        index_of = {rank: index for index, each in enumerate(self.ranks) for rank in each.ranks}
        return [index_of[rank] for rank in sorted(index_of)]

    @cached_property
    def figures(self) -> dict[int, RankFigures]:
        """Kernels and breakdown of the programs in :attr:`interacting`, by their index."""
        tf32 = self.scenario.matmul_tf32
        return {
            index: rank_figures(self.timelines[index], self.costed[index].program, self.costed[index].costs, tf32)
            for index in self.interacting
        }

    @property
    def step_time_s(self) -> float:
        """Seconds of the longest step of any rank."""
        return max(each.step_time_s for each in self.timelines)

    @cached_property
    def host_term_s(self) -> float:
        """Seconds by which the step grows if the host is slower by one standard deviation of its speed."""
        slower = self.slowness * (1 + host_spread(self.profile))
        return max(_longest_step_s(self.interacting_ranks, slower) - self.step_time_s, 0.0)

    @cached_property
    def interconnect_term_s(self) -> float:
        """Seconds by which the step grows if collectives are slower by one standard deviation of their times."""
        slower = 1 + self.costed[self.shown].interconnect_spread
        return max(_longest_step_s(self.interacting_ranks, self.slowness, slower) - self.step_time_s, 0.0)


def simulated_step(
    scenario: Scenario, profile: Profile, *, exact: bool, allow_import: bool, host_reference_s: float | None
) -> SimulatedStep:
    """Write every rank's program, cost it, and simulate its time and its memory.

    The parameters are those of :func:`perfmodel.prediction.predict.predict`.
    """
    interconnect = interconnect_of(scenario, profile)
    slowness = host_slowness(profile, host_reference_s, talks=interconnect is not None)
    with doing("writing each rank's program"):
        ranks = rank_programs(scenario, allow_import, batches_all=batches_messages(profile))
    with doing("working out times of kernels"):
        costed = costed_ranks(ranks, profile, scenario, interconnect, exact=exact, slowness=slowness)
    with doing("simulating the step"):
        timelines = timelines_of(costed, slowness)
    with doing("simulating memory"):
        memories = memory_of_ranks(ranks, profile, scenario)
    step = SimulatedStep(scenario, profile, ranks, costed, timelines, memories, interconnect, slowness)
    with doing("simulating the step on a slower host and interconnect"):
        _ = step.host_term_s, step.interconnect_term_s
    return step


def memory_of_ranks(ranks: Sequence[RankProgram], profile: Profile, scenario: Scenario) -> tuple[MemoryTimeline, ...]:
    """Simulate the memory of every rank, in order of ranks; empty on a CPU.

    Ranks with equal programs share one timeline. Each group of ranks that collectives run in has a communicator, whose
    buffers count as memory outside the allocator.
    """
    if profile.device.kind != "cuda":
        return ()
    of_rank: dict[int, MemoryTimeline] = {}
    for each in ranks:
        groups = dict.fromkeys(collective.members for collective in each.program.collectives)
        communicators = [(members.ranks, route_of(members, scenario, profile).interconnect) for members in groups]
        outside_bytes = communicators_bytes(communicators)
        memory = simulate_memory(each.program, profile, scenario.matmul_tf32, outside_bytes)
        of_rank |= dict.fromkeys(each.ranks, memory)
    return tuple(of_rank[rank] for rank in sorted(of_rank))


def _longest_step_s(ranks: Sequence[CostedRank], slowness: float, interconnect_slowness: float = 1.0) -> float:
    return max(timeline.step_time_s for timeline in timelines_of(ranks, slowness, interconnect_slowness))
