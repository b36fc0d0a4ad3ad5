"""`perfmodel calibrate --interconnect`: what one wiring of the ranks adds to a profile that is there already."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from calibrate.draft import check_belongs
from calibrate.interconnect.merging import merged
from calibrate.interconnect.own_contention import OwnKernel, beside_of, own_kernels, together
from calibrate.interconnect.request import Measured, Request, asked_in, exact_collectives, measure, measured_in
from calibrate.output_lock import locked
from calibrate.stage_names import GENERAL
from calibrate.this_machine.wirings import environment, nodes_of
from perfmodel.cost.kernels.lookup import kernel_costs
from perfmodel.cost.routing import stays_in_a_node
from perfmodel.errors import PerfModelError, did_you_mean, naming
from perfmodel.files.kinds import STAGES
from perfmodel.files.writing import check_writable
from perfmodel.hardware.interconnect import MESSAGES, Interconnect
from perfmodel.hardware.profile import Profile, load_profile, save_profile
from perfmodel.program.program import Collective, Program
from perfmodel.program.ranks import rank_programs
from perfmodel.scenario.scenario import Scenario
from perfmodel.units import format_seconds

BUDGET_S = {"cuda": 150.0, "cpu": 20.0}  # after which no further size of the ladder is begun
TIMEOUT_S = 400.0  # with that budget
GROUP = "group of "  # begins the names of the stages that connect groups and time their collectives
OF_GPUS = ("contention", "transfers")


def calibrate_interconnect(
    output: Path,
    name: str,
    device: str,
    ranks: int,
    scenarios: Sequence[Scenario] = (),
    *,
    allow_import: bool = False,
    budget_s: float | None = None,
    timeout_s: float | None = None,
    only: Sequence[str] = (),
    nodes: int = 1,
    rendezvous: str | None = None,
) -> Profile | None:
    """Measure an interconnect into the profile ``output``.

    Parameters
    ----------
    output : Path
        A profile that `perfmodel calibrate` made on this machine.
    name : str
        One of :data:`~calibrate.this_machine.wirings.INTERCONNECTS`.
    device : str
        ``cuda`` (NCCL) or ``cpu`` (gloo).
    ranks : int
        Processes, each with a GPU; groups of 2 to as many are measured.
    scenarios : sequence of Scenario
        Whose exact collectives and messages over this interconnect to measure; and, on GPUs, whose largest kernels
        beside a collective, a receive that waits, or both.
    budget_s : float, optional
        Seconds for timing collectives, :data:`BUDGET_S` if left out; sizes of the ladder that do not fit in are left
        out. With 0 nothing but the scenarios' own collectives is measured, whatever they take, and their kernels
        beside one.
    timeout_s : float, optional
        Seconds after which all ranks are ended; if left out, :data:`TIMEOUT_S` and what the budget is above the usual.
    only : sequence of str, optional
        Of :data:`GENERAL`, the stages to run again; then nothing of the scenarios is measured.
    nodes, rendezvous
        See :class:`~calibrate.this_machine.launcher.Launch`.

    Returns
    -------
    Profile or None
        None on a machine that rank 0 is not on, which wrote nothing.

    Raises
    ------
    PerfModelError
        If there is no profile there, a name is unknown, nothing is to be measured, a rank fails, or time is up. The
        profile then keeps what it had, and gains what stages that ended found; after a kill it gains that at the next
        start. Also if another profile's finished stages are in the file that such stages are kept in.
    """
    environment(name, 0, ranks)
    if ranks < 2:
        raise PerfModelError(f"--ranks must be at least 2 to measure an interconnect (got {ranks}). Give more.")
    if (device == "cpu") != (name == "gloo"):
        remedy = "Give --device cpu" if name == "gloo" else "Give --interconnect gloo, or --device cuda"
        raise PerfModelError(
            f"--interconnect must be gloo on a CPU, and one of NCCL's on GPUs (got {name} on {device}). {remedy}."
        )
    load_profile(output)  # only what is a profile is locked
    with locked(output, shared=nodes > 1) as target:
        kept = target.with_suffix(f".{name}.partial.json")
        check_writable(kept, STAGES)
        _keep_finished(target, name, device, kept)
        profile = load_profile(target)
        if only:
            _check_only(only, name, device, profile.interconnects.get(name), scenarios, budget_s)
        hosts = max(nodes_of(name), nodes)
        every = [_sent_over(one, name, ranks, hosts, allow_import) for one in scenarios]
        sent = [each for each in every if each is not None]
        request = _request(profile, name, ranks, device, sent, budget_s, only, nodes, rendezvous)
        return _measured_into(target, profile, request, only, timeout_s, kept)


def _request(
    profile: Profile,
    name: str,
    ranks: int,
    device: str,
    sent: Sequence[_Sent],
    budget_s: float | None,
    only: Sequence[str],
    nodes: int,
    rendezvous: str | None,
) -> Request:
    exact = exact_collectives([each for one in sent for each in one.collectives if each.ranks <= ranks])
    if budget_s == 0 and not exact and not only:
        raise PerfModelError(
            f"--budget 0 leaves only what scenarios send over {name} among {ranks} ranks (got nothing). Give such a "
            "--scenario, or a budget."
        )
    reference = profile.host.get("reference")
    return Request(
        name,
        ranks,
        device,
        budget_s or BUDGET_S[device],
        exact,
        tuple(only) or (() if budget_s == 0 else GENERAL),
        None if reference is None else reference.time_s,
        nodes=nodes,
        rendezvous=rendezvous,
        own=together(_own_kernels(each, profile) for each in sent) if device == "cuda" else (),
        profile=_measured_at(profile),
    )


def _measured_at(profile: Profile) -> str:
    return str(profile.provenance.get("measured_at"))


def _keep_finished(output: Path, name: str, device: str, kept: Path) -> None:
    """Put the stages that a run of the profile finished before it was ended into it, if there are any."""
    if not kept.exists():
        return
    profile, asked = load_profile(output), asked_in(kept)
    with naming(kept):
        check_belongs(None if asked is None else asked.profile, _measured_at(profile))
    assert asked is not None
    found = measured_in(kept, Request(name, asked.ranks, device, 0.0, nodes=asked.nodes))
    before = profile.interconnects.get(name)
    if before is None or not _has_all(before, found.interconnect):
        only = () if asked.stages == GENERAL else asked.stages
        save_profile(merged(profile, name, _again(before, found, only), found.transfers), output)
    kept.unlink()
    print(f"{output}: {name}: has what an interrupted run measured: {', '.join(found.stages_s)}", file=sys.stderr)


def _has_all(before: Interconnect, now: Interconnect) -> bool:
    """Whether the collectives were put there before, in which case they are no second run to compare with."""
    return bool(now.collectives) and all(before.collectives.get(key) == now.collectives[key] for key in now.collectives)


def _measured_into(
    output: Path, profile: Profile, request: Request, only: Sequence[str], timeout_s: float | None, kept: Path
) -> Profile | None:
    """Run the request and write the profile; also where the run fails, with what the stages that ended found."""
    name = request.interconnect
    before = profile.interconnects.get(name)
    if timeout_s is None:
        own_s = request.own_budget_s if request.own else 0.0
        timeout_s = TIMEOUT_S + own_s + max(request.budget_s - BUDGET_S[request.device], 0.0)
    try:
        found = measure(request, timeout_s, kept)
    except BaseException:  # Ctrl-C too
        _keep_finished(output, name, request.device, kept)
        raise
    if found is None:  # rank 0, which writes the profile, is on another machine
        return None
    earlier_s = profile.provenance.get("interconnects_s", {}).get(name, {}) if only else {}
    interconnect, stages_s = _again(before, found, only), earlier_s | _asked_s(found, only)
    profile = merged(profile, name, interconnect, found.transfers)
    if found.topology is not None and not only:
        profile = profile.model_copy(update={"topology": found.topology})
    seconds = profile.provenance.get("interconnects_s", {}) | {name: stages_s}
    profile = profile.model_copy(
        update={
            "gpus": max(profile.gpus, request.ranks),
            "provenance": profile.provenance | {"interconnects_s": seconds},
        }
    )
    save_profile(profile, output)
    kept.unlink()
    total = format_seconds(sum(stages_s.values()))
    print(f"{output}: {name}: {len(interconnect.collectives)} collectives in {total}", file=sys.stderr)
    return profile


def _check_only(
    only: Sequence[str],
    name: str,
    device: str,
    before: Interconnect | None,
    scenarios: Sequence[Scenario],
    budget_s: float | None,
) -> None:
    for stage in only:
        if stage not in GENERAL:
            raise PerfModelError(
                f"--only must name a stage of an interconnect (got {stage!r}). {did_you_mean(stage, GENERAL)}"
            )
        if device == "cpu" and stage in OF_GPUS:
            raise PerfModelError(f"--only {stage} must be given with --device cuda (got cpu). Leave it out.")
    if before is None:
        raise PerfModelError(
            f"--only must be given for an interconnect that the profile has (got {name}, which it has not). Measure "
            "all of it first."
        )
    if scenarios or budget_s == 0:
        given = "--scenario" if scenarios else "--budget 0"
        raise PerfModelError(f"--only must be given without {given} (got both), which is for what it leaves out.")


def _again(before: Interconnect | None, found: Measured, only: Sequence[str]) -> Interconnect:
    """What was found. Of a stage alone what it measured, under the provenance of the rest, which says when it was."""
    now = found.interconnect
    if before is None or not only:
        return now
    again = {stage: {"again_at": now.provenance.get("measured_at")} for stage in only if _has_run(stage, found)}
    kept = ("environment", "nodes", "communicator_bytes")
    return now.model_copy(
        update={name: getattr(before, name) for name in kept} | {"provenance": before.provenance | again}
    )


def _has_run(stage: str, found: Measured) -> bool:
    """Collectives are timed group by group."""
    return any(name.startswith(GROUP) for name in found.stages_s) if stage == "collectives" else stage in found.stages_s


def _asked_s(found: Measured, only: Sequence[str]) -> dict[str, float]:
    """Seconds of the stages, without those that only connected groups for one that was asked for alone."""
    connects = bool(only) and "collectives" not in only
    return {name: each_s for name, each_s in found.stages_s.items() if not (connects and name.startswith(GROUP))}


class _Sent(NamedTuple):
    """A scenario, the programs whose kernels stand for it, and what all its ranks send over the interconnect."""

    scenario: Scenario
    programs: list[Program]
    collectives: list[Collective]


def _sent_over(scenario: Scenario, name: str, ranks: int, nodes: int, allow_import: bool) -> _Sent | None:
    """The scenario over so many nodes; of its collectives those that use the wires between these. None without any.

    Messages are asked for one way and both ways: versions of torch differ in which of them they batch.
    """
    in_all = scenario.parallelism.ranks
    if scenario.hardware.interconnect not in (name, None) or in_all == 1:
        return None
    programs = [each.program for each in rank_programs(scenario, allow_import)]
    found: list[Collective] = []
    for collective in (each for program in programs for each in program.collectives):
        kinds = MESSAGES if collective.kind in MESSAGES else (collective.kind,)
        found += [collective._replace(kind=kind) for kind in kinds]
    if nodes > 1:
        per_node = max(min(in_all, ranks) // nodes, 1)
        found = [each for each in found if not stays_in_a_node(*each.among, per_node)]
    return _Sent(scenario, programs if scenario.parallelism.pp is not None else programs[:1], found) if found else None


def _own_kernels(sent: _Sent, profile: Profile) -> tuple[OwnKernel, ...]:
    """None, and a note, if the profile does not know what the scenario's kernels take."""
    scenario, programs, collectives = sent
    beside = beside_of(scenario, {each.kind for each in collectives})
    try:
        costs = [kernel_costs(program.operations, profile, scenario.matmul_tf32) for program in programs]
    except PerfModelError as error:
        print(f"{scenario.name}: no kernels of its own are measured beside a collective: {error}", file=sys.stderr)
        return ()
    return together(
        own_kernels(program, each, scenario.matmul_tf32, collective)
        for collective in beside
        for program, each in zip(programs, costs, strict=True)
    )
