"""The question of this project, answered: how a scenario behaves on a machine."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import replace
from os import PathLike
from statistics import fmean

from perfmodel.cost.host import host_spread
from perfmodel.errors import naming
from perfmodel.hardware.profile import Profile
from perfmodel.prediction.bottleneck import bottleneck
from perfmodel.prediction.breakdown import bubble_of_busy, communication_bytes, step_flops
from perfmodel.prediction.prediction import Prediction
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
from perfmodel.prediction.simulated_step import SimulatedStep, memory_of_ranks, simulated_step
from perfmodel.prediction.support import check_supported
from perfmodel.prediction.uncertainty import step_interval_s
from perfmodel.prediction.what_if import idle_settings, idle_warnings
from perfmodel.program.ranks import rank_programs
from perfmodel.scenario.scenario import Scenario
from perfmodel.scenario.yaml_file import Assignments, interconnect_in_use, load_question
from perfmodel.simulate.memory.walk import MemoryTimeline

__all__ = ["predict", "predict_memories"]


def predict(
    scenario: Scenario | str | PathLike[str],
    profile: Profile | str | PathLike[str] | None = None,
    *,
    set: Assignments = (),
    device: str | None = None,
    exact: bool = True,
    allow_import: bool = False,
    host_reference_s: float | None = None,
    doubted: Collection[str] | None = None,
) -> Prediction:
    """Predict how a training step behaves on a machine.

    Parameters
    ----------
    scenario : Scenario, str or path
        The question: a scenario, or the YAML file of one.
    profile : Profile, str or path, optional
        The machine: a profile, its name in the catalog, or its file. By default the one that the scenario names.
    set : iterable of str or mapping, optional
        Values to change, as ``--set`` takes them: ``"key=value"`` with dotted keys, or a mapping from keys to values.
        Keys such as ``hardware.device.memory_bytes`` change the profile.
    device : {"cpu", "cuda"}, optional
        ``"cpu"`` asks the same question of this machine's CPU, whose profile is ``cpu.json``.
    exact : bool
        Use kernel times that were measured for scenarios. If False, use only those of the general grid.
    allow_import : bool
        Import (and so execute) the scenario's own ``model.target`` if its trace is not stored yet.
    host_reference_s : float, optional
        Seconds that one run of the profile's host reference takes, which says how fast the host is. By default the host
        is as fast as when the profile, or its interconnect, was measured.
    doubted : collection of str, optional
        Keys of ``set`` for which to find out whether they change the answer; each needs one more prediction. By default
        all keys that change the profile.

    Returns
    -------
    Prediction
        Step time with its interval, memory, timeline, bottleneck, and what the answer rests on.

    Raises
    ------
    PerfModelError
        If the scenario or profile breaks a rule, or the scenario asks for what the profile or perfmodel does not have.

    Examples
    --------
    >>> import perfmodel
    >>> prediction = perfmodel.predict("scenarios/gpt2.7b.yaml", set={"precision": "amp-bf16"})
    >>> prediction.fits, prediction.bottleneck.partition(":")[0]
    (True, 'the device')
    """
    question, machine = load_question(scenario, set, device, profile=profile)

    def predict_on(profile: Profile) -> Prediction:
        return _predict(question, profile, exact, allow_import, host_reference_s)

    with nullcontext() if isinstance(scenario, Scenario) else naming(scenario):
        prediction = predict_on(machine)
        idle = idle_settings(prediction, predict_on, doubted)
    warnings = (*prediction.warnings, *idle_warnings(question, machine, idle))
    return replace(prediction, idle_settings=idle.ignored, own_settings=idle.own, warnings=warnings)


def predict_memories(scenario: Scenario, profile: Profile) -> tuple[MemoryTimeline, ...]:
    """Predict the memory of every rank, in order of ranks, without times; empty on a CPU.

    Raises
    ------
    PerfModelError
        As :func:`predict` does.
    """
    check_supported(scenario, profile)
    return memory_of_ranks(rank_programs(scenario, batches_all=batches_messages(profile)), profile, scenario)


def _predict(
    scenario: Scenario, profile: Profile, exact: bool, allow_import: bool, host_reference_s: float | None
) -> Prediction:
    check_supported(scenario, profile)
    step = simulated_step(scenario, profile, exact=exact, allow_import=allow_import, host_reference_s=host_reference_s)
    shown, by_rank, memories = step.shown, step.index_of_rank, step.memories
    costed, timeline, figures = step.costed[shown], step.timelines[shown], step.figures
    first_rank, kernels = step.ranks[shown].ranks[0], figures[shown].kernels
    return Prediction(
        scenario=scenario,
        profile=profile,
        program=costed.program,
        timeline=timeline,
        shown_rank=first_rank if step.is_pipeline else None,
        memory=memories[first_rank] if memories else None,
        rank_memories=memories,
        rank_timelines=tuple(step.timelines[index] for index in by_rank),
        rank_programs=tuple(step.costed[index].program for index in by_rank),
        rank_kernels=tuple(figures[index].kernels for index in by_rank),
        interval_s=_interval_s(step),
        kernels=kernels,
        breakdown=figures[shown].breakdown,
        clock=costed.clock,
        bottleneck=_bottleneck(step),
        provenance=kernel_shares(kernels),
        model_flops=fmean(step_flops(step.timelines[at], step.costed[at].program) for at in step.interacting),
        communication_bytes=communication_bytes(timeline, costed.program),
        collective_provenance=collective_shares(timeline, costed.collectives),
        scaled_share=scaled_share(kernels),
        assumptions=_assumptions(step),
        warnings=_warnings(step),
    )


def _interval_s(step: SimulatedStep) -> tuple[float, float]:
    clock, timeline = step.costed[step.shown].clock, step.timelines[step.shown]
    return step_interval_s(
        step.step_time_s,
        step.figures[step.shown].kernels,
        step.host_term_s,
        step.interconnect_term_s,
        0.0 if clock is None else clock.term_s,
        bubble_of_busy(timeline),
    )


def _bottleneck(step: SimulatedStep) -> str:
    """Name what limits the step. A term over its relative spread is d step / d log(slowness): what it limits."""
    spread = step.costed[step.shown].interconnect_spread
    host_limited_s = step.host_term_s / host_spread(step.profile)
    interconnect_limited_s = step.interconnect_term_s / spread if spread else 0.0
    return bottleneck(step.step_time_s, list(step.figures.values()), host_limited_s, interconnect_limited_s)


def _assumptions(step: SimulatedStep) -> tuple[str, ...]:
    ranks = step.interacting_ranks
    routes = [route for each in ranks for route in each.routes]
    return (
        *scaling_assumptions(step.figures[step.shown].kernels, step.profile),
        *assumptions(step.scenario, step.interconnect, routes),
        *message_assumptions([each.program for each in ranks], step.profile),
    )


def _warnings(step: SimulatedStep) -> tuple[str, ...]:
    scenario, profile = step.scenario, step.profile
    return (
        *kernel_warnings([each.kernels for each in step.figures.values()], profile, scenario.hardware.profile),
        *host_warnings(profile, scenario),
        *_communication_warnings(step),
        *unsteady_warnings([step.timelines[index].step_time_s for index in step.interacting]),
        *sharding_warnings(scenario, step.costed[step.shown].program),
        *retry_warnings(step.memories),
    )


def _communication_warnings(step: SimulatedStep) -> tuple[str, ...]:
    name = interconnect_in_use(step.scenario, step.profile)
    if name is None:
        return ()
    talks = [Talk(each.program, each.collectives, each.routes) for each in step.interacting_ranks]
    return tuple(communication_warnings(talks, step.profile, name))
