"""The plan of an interconnect's calibration: it turns what the command line asks into the request that ranks get."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from calibrate.interconnect.own_contention import OwnKernel, measured_with, own_kernels, together
from calibrate.interconnect.request import Request, exact_collectives
from calibrate.stage_names import GENERAL
from calibrate.this_machine.wirings import environment, nodes_of
from perfmodel.cost.kernels.lookup import kernel_costs
from perfmodel.cost.routing import stays_in_a_node
from perfmodel.errors import PerfModelError, did_you_mean
from perfmodel.hardware.interconnect import MESSAGES, Interconnect
from perfmodel.hardware.profile import Profile
from perfmodel.program.program import Collective, Program
from perfmodel.program.ranks import rank_programs
from perfmodel.scenario.rules import check_scenario
from perfmodel.scenario.scenario import Scenario

BUDGET_S = {"cuda": 150.0, "cpu": 20.0}  # after which no further size of the ladder is begun
TIMEOUT_S = 400.0  # with that budget
OF_GPUS = ("contention", "transfers")


@dataclass(frozen=True)
class InterconnectOptions:
    """The options of `perfmodel calibrate --interconnect`.

    Parameters
    ----------
    name : str
        One of :data:`~calibrate.this_machine.wirings.INTERCONNECTS`.
    device : str
        ``cuda`` (NCCL) or ``cpu`` (gloo).
    ranks : int
        Processes, each with a GPU; groups of 2 to as many are measured.
    scenarios : sequence of Scenario
        The exact collectives and messages that these send over the interconnect are measured; on GPUs, also their
        largest kernels while a collective, a receive that waits, or both are under way.
    allow_import : bool
        Whether a scenario's own model may be imported.
    budget_s : float, optional
        Seconds for timing collectives, :data:`BUDGET_S` if left out; sizes of the ladder that do not fit in are left
        out. With 0 only the scenarios' own collectives are measured, whatever they take, and their kernels while one
        is under way.
    only : sequence of str
        Stages of :data:`~calibrate.stage_names.GENERAL` to repeat; then nothing of the scenarios is measured.
    nodes, rendezvous
        See :class:`~calibrate.this_machine.launcher.Launch`.
    """

    name: str
    device: str
    ranks: int
    scenarios: Sequence[Scenario] = ()
    allow_import: bool = False
    budget_s: float | None = None
    only: Sequence[str] = ()
    nodes: int = 1
    rendezvous: str | None = None


def check_options(options: InterconnectOptions) -> None:
    """Refuse options that cannot be had on any machine.

    Raises
    ------
    PerfModelError
        If the interconnect is unknown or of another device, the ranks are too few for it, or a scenario breaks a rule.
    """
    name, device = options.name, options.device
    for scenario in options.scenarios:
        check_scenario(scenario, device)
    environment(name, 0, options.ranks)
    if options.ranks < 2:
        raise PerfModelError(f"--ranks must be at least 2 to measure an interconnect (got {options.ranks}). Give more.")
    if (device == "cpu") != (name == "gloo"):
        remedy = "Give --device cpu" if name == "gloo" else "Give --interconnect gloo, or --device cuda"
        raise PerfModelError(
            f"--interconnect must be gloo on a CPU, and one of NCCL's on GPUs (got {name} on {device}). {remedy}."
        )


def request_of(options: InterconnectOptions, profile: Profile) -> Request:
    """Return what the ranks are to measure for this profile.

    Raises
    ------
    PerfModelError
        If ``only`` names what cannot be repeated, or a budget of 0 leaves nothing to measure.
    """
    if options.only:
        _check_only(options, profile.interconnects.get(options.name))
    traffic = [each for each in (_traffic_of(scenario, options) for scenario in options.scenarios) if each is not None]
    sent = (collective for each in traffic for collective in each.collectives)
    exact = exact_collectives([collective for collective in sent if collective.ranks <= options.ranks])
    if options.budget_s == 0 and not exact and not options.only:
        raise PerfModelError(
            f"--budget 0 must come with a --scenario that sends something over {options.name} among {options.ranks} "
            "ranks (got nothing). Give one, or a budget."
        )
    reference = profile.host.get("reference")
    return Request(
        options.name,
        options.ranks,
        options.device,
        options.budget_s or BUDGET_S[options.device],
        exact,
        tuple(options.only) or (() if options.budget_s == 0 else GENERAL),
        None if reference is None else reference.time_s,
        nodes=options.nodes,
        rendezvous=options.rendezvous,
        own=together(_own_kernels(each, profile) for each in traffic) if options.device == "cuda" else (),
        profile=str(profile.provenance.get("measured_at")),
    )


def usual_timeout_s(request: Request) -> float:
    """Return the seconds after which all ranks of a request are ended, if nothing else is asked for."""
    own_s = request.own_budget_s if request.own else 0.0
    return TIMEOUT_S + own_s + max(request.budget_s - BUDGET_S[request.device], 0.0)


def _check_only(options: InterconnectOptions, before: Interconnect | None) -> None:
    for stage in options.only:
        if stage not in GENERAL:
            raise PerfModelError(
                f"--only must name a stage of an interconnect (got {stage!r}). {did_you_mean(stage, GENERAL)}"
            )
        if options.device == "cpu" and stage in OF_GPUS:
            raise PerfModelError(f"--only {stage} must be given with --device cuda (got cpu). Leave it out.")
    if before is None:
        raise PerfModelError(
            f"--only must be given for an interconnect that the profile has (got {options.name}, which it has not). "
            "Measure all of it first."
        )
    if options.scenarios or options.budget_s == 0:
        given = "--scenario" if options.scenarios else "--budget 0"
        raise PerfModelError(f"--only must be given without {given} (got both), which is for what it leaves out.")


class ScenarioTraffic(NamedTuple):
    """A scenario, the programs whose kernels stand for it, and what all its ranks send over the interconnect."""

    scenario: Scenario
    programs: list[Program]
    collectives: list[Collective]


def _traffic_of(scenario: Scenario, options: InterconnectOptions) -> ScenarioTraffic | None:
    """Return what a scenario sends over the interconnect, between nodes if there are several; None without any.

    Messages are asked for one way and both ways: versions of torch differ in which of them they batch.
    """
    in_all = scenario.parallelism.ranks
    if scenario.hardware.interconnect not in (options.name, None) or in_all == 1:
        return None
    programs = [each.program for each in rank_programs(scenario, options.allow_import)]
    sent: list[Collective] = []
    for collective in (each for program in programs for each in program.collectives):
        kinds = MESSAGES if collective.kind in MESSAGES else (collective.kind,)
        sent += [collective._replace(kind=kind) for kind in kinds]
    nodes = max(nodes_of(options.name), options.nodes)
    if nodes > 1:
        per_node = max(min(in_all, options.ranks) // nodes, 1)
        sent = [each for each in sent if not stays_in_a_node(*each.members, per_node)]
    if not sent:
        return None
    return ScenarioTraffic(scenario, programs if scenario.parallelism.pp is not None else programs[:1], sent)


def _own_kernels(traffic: ScenarioTraffic, profile: Profile) -> tuple[OwnKernel, ...]:
    """Return the scenario's kernels to be measured; none, and a note, if the profile lacks what they take alone."""
    scenario, programs, collectives = traffic
    try:
        costs = [kernel_costs(program.operations, profile, scenario.matmul_tf32) for program in programs]
    except PerfModelError as error:
        print(f"{scenario.name}: no kernels of its own are measured beside a collective: {error}", file=sys.stderr)
        return ()
    return together(
        own_kernels(program, each, scenario.matmul_tf32, collective)
        for collective in measured_with(scenario, {each.kind for each in collectives})
        for program, each in zip(programs, costs, strict=True)
    )
