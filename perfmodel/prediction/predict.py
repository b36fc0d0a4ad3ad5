"""The verbs of the command line, for notebooks and programs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from statistics import fmean

from perfmodel.cost.host import host_slowness, host_spread
from perfmodel.cost.routing import route_of
from perfmodel.hardware.interconnect import communicators_bytes
from perfmodel.hardware.profile import Profile
from perfmodel.prediction.bottleneck import bottleneck
from perfmodel.prediction.breakdown import bubble_of_busy, busiest, communication_bytes, rank_figures, step_flops
from perfmodel.prediction.costed_rank import CostedRank, costed_ranks, timelines_of
from perfmodel.prediction.prediction import KernelUse, Prediction
from perfmodel.prediction.provenance import (
    Talk,
    assumptions,
    batches_messages,
    collective_shares,
    communication_warnings,
    host_warnings,
    kernel_shares,
    kernel_warnings,
    message_assumptions,
    retry_warnings,
    scaled_share,
    scaling_assumptions,
    sharding_warnings,
    unsteady_warnings,
)
from perfmodel.prediction.support import check_supported, interconnect_of
from perfmodel.prediction.uncertainty import step_interval_s
from perfmodel.prediction.what_if import idle_settings, idle_warnings
from perfmodel.program.ranks import RankProgram, rank_programs
from perfmodel.progress import doing
from perfmodel.scenario.scenario import Scenario
from perfmodel.scenario.yaml_file import interconnect_in_use
from perfmodel.simulate.memory.walk import MemoryTimeline, simulate_memory
from perfmodel.simulate.timeline import Timeline

__all__ = ["predict", "predict_memories"]


def predict(
    scenario: Scenario,
    profile: Profile,
    *,
    exact: bool = True,
    allow_import: bool = False,
    host_reference_s: float | None = None,
    doubted: Collection[str] | None = None,
) -> Prediction:
    """How ``scenario`` behaves on the machine of ``profile``.

    exact: use kernel times measured for scenarios; without, only what the general grid tells.
    allow_import: the scenario's own model may be imported (which executes it) if its trace is not at hand.
    host_reference_s: the host's speed, as what one run of the profile's host reference takes; by default, the speed at
    which the profile, or its interconnect, was measured.
    doubted: keys of ``--set`` that the answer says of whether they changed anything, for which it is worked out once
    more without each; all that changed the profile, if left out.

    Raises
    ------
    PerfModelError
        If the scenario asks for what the profile or perfmodel does not have.
    """

    def predict_on(profile: Profile) -> Prediction:
        return _predict(scenario, profile, exact, allow_import, host_reference_s)

    found = predict_on(profile)
    idle = idle_settings(found, predict_on, doubted)
    warnings = (*found.warnings, *idle_warnings(scenario, profile, idle))
    return replace(found, idle_settings=idle.ignored, own_settings=idle.own, warnings=warnings)


def _predict(
    scenario: Scenario, profile: Profile, exact: bool, allow_import: bool, host_reference_s: float | None
) -> Prediction:
    check_supported(scenario, profile)
    interconnect = interconnect_of(scenario, profile)
    slowness = host_slowness(profile, host_reference_s, talks=interconnect is not None)
    spread = host_spread(profile)
    with doing("writing each rank's program"):
        ranks = rank_programs(scenario, allow_import, batches_all=batches_messages(profile))
    with doing("working out times of kernels"):
        steps = costed_ranks(ranks, profile, scenario, interconnect, exact=exact, slowness=slowness)
    with doing("simulating the step"):
        timelines = timelines_of(steps, slowness)
    with doing("simulating memory"):
        memories = _memories(ranks, profile, scenario)
    is_pipeline = any(step.program.exchanges for step in steps)
    shown = busiest(timelines) if is_pipeline else _longest(timelines)
    along = list(range(len(steps))) if is_pipeline else [shown]  # whose timelines depend on each other
    step, timeline, step_time_s = steps[shown], timelines[shown], max(each.step_time_s for each in timelines)
    together = [steps[at] for at in along]
    with doing("simulating the step on a slower host and wire"):
        host_term_s = max(_step_time_s(together, slowness * (1 + spread)) - step_time_s, 0.0)
        wire_term_s = max(_step_time_s(together, slowness, 1 + step.wire_spread) - step_time_s, 0.0)
    wire_limited_s = wire_term_s / step.wire_spread if step.wire_spread else 0.0
    figures = {
        at: rank_figures(timelines[at], steps[at].program, steps[at].costs, scenario.matmul_tf32) for at in along
    }
    kernels = figures[shown].kernels
    place_of = {rank: at for at, each in enumerate(ranks) for rank in each.ranks}
    by_rank = [place_of[rank] for rank in sorted(place_of)] if is_pipeline else []
    return Prediction(
        scenario=scenario,
        profile=profile,
        program=step.program,
        timeline=timeline,
        shown_rank=ranks[shown].ranks[0] if is_pipeline else None,
        memory=memories[ranks[shown].ranks[0]] if memories else None,
        rank_memories=memories,
        rank_timelines=tuple(timelines[at] for at in by_rank),
        rank_programs=tuple(steps[at].program for at in by_rank),
        rank_kernels=tuple(figures[at].kernels for at in by_rank),
        interval_s=step_interval_s(
            step_time_s,
            kernels,
            host_term_s,
            wire_term_s,
            0.0 if step.clock is None else step.clock.term_s,
            bubble_of_busy(timeline),
        ),
        kernels=kernels,
        breakdown=figures[shown].breakdown,
        clock=step.clock,
        bottleneck=bottleneck(step_time_s, list(figures.values()), host_term_s / spread, wire_limited_s),
        provenance=kernel_shares(kernels),
        model_flops=fmean(step_flops(timelines[at], steps[at].program) for at in along),
        communication_bytes=communication_bytes(timeline, step.program),
        collective_provenance=collective_shares(timeline, step.collectives),
        scaled_share=scaled_share(kernels),
        assumptions=(
            *scaling_assumptions(kernels, profile),
            *assumptions(scenario, interconnect, [route for each in together for route in each.routes]),
            *message_assumptions([each.program for each in together], profile),
        ),
        warnings=(
            *_warnings([each.kernels for each in figures.values()], together, profile, scenario),
            *unsteady_warnings([timelines[at].step_time_s for at in along]),
            *sharding_warnings(scenario, step.program),
            *retry_warnings(memories),
        ),
    )


def predict_memories(scenario: Scenario, profile: Profile) -> tuple[MemoryTimeline, ...]:
    """The memory of every rank in order, without times; none on a CPU.

    Raises
    ------
    PerfModelError
        As :func:`predict`.
    """
    check_supported(scenario, profile)
    return _memories(rank_programs(scenario, batches_all=batches_messages(profile)), profile, scenario)


def _longest(timelines: Sequence[Timeline]) -> int:
    """The first rank whose step is longest."""
    return max(range(len(timelines)), key=lambda at: timelines[at].step_time_s)


def _step_time_s(steps: Sequence[CostedRank], slowness: float, wire: float = 1.0) -> float:
    return max(timeline.step_time_s for timeline in timelines_of(steps, slowness, wire))


def _memories(ranks: Sequence[RankProgram], profile: Profile, scenario: Scenario) -> tuple[MemoryTimeline, ...]:
    """Of every rank in order, the same one for those that are alike; none on a CPU. Each group of ranks that
    collectives run in has a communicator.
    """
    if profile.device.kind != "cuda":
        return ()
    found: dict[int, MemoryTimeline] = {}
    for each in ranks:
        groups = dict.fromkeys(collective.among for collective in each.program.collectives)
        communicators = [(among.ranks, route_of(among, scenario, profile).interconnect) for among in groups]
        outside_bytes = communicators_bytes(communicators)
        memory = simulate_memory(each.program, profile, scenario.matmul_tf32, outside_bytes)
        found |= dict.fromkeys(each.ranks, memory)
    return tuple(found[rank] for rank in sorted(found))


def _warnings(
    kernels: Sequence[Sequence[KernelUse]], steps: Sequence[CostedRank], profile: Profile, scenario: Scenario
) -> tuple[str, ...]:
    name, of_wires = interconnect_in_use(scenario, profile), tuple[str, ...]()
    if name is not None:
        talks = [Talk(step.program, step.collectives, step.routes) for step in steps]
        of_wires = tuple(communication_warnings(talks, profile, name))
    return (
        *kernel_warnings(kernels, profile, scenario.hardware.profile),
        *host_warnings(profile, scenario),
        *of_wires,
    )
