"""What a calibration begins with: a profile that is new, or goes on, and what scenarios want of it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from calibrate.draft import Draft
from calibrate.jobs import Job, missing, program_jobs
from calibrate.this_machine import facts as machine
from perfmodel.errors import PerfModelError
from perfmodel.hardware.profile import Profile, find_base
from perfmodel.program.pipeline.programs import stages_of_ranks
from perfmodel.program.ranks import rank_programs
from perfmodel.scenario.scenario import Scenario
from perfmodel.trace.store import get_stage_trace
from perfmodel.trace.trace import Trace

SAME_DEVICE = ("device", "gpu", "torch", "driver", "cuda", "cudnn")
SAME_MACHINE = (*SAME_DEVICE, "cpu")


class WantedScenario(NamedTuple):
    """What of a scenario is to be measured.

    Parameters
    ----------
    jobs : list of Job
        Kernels of all ranks.
    traces : list of Trace
        The step, or the stages of a pipeline, whose modules and loops over parameters are measured on the host.
    ranks : list of Trace
        Ranks that have several stages, of which only the loops are measured.
    """

    scenario: Scenario
    jobs: list[Job]
    traces: list[Trace]
    ranks: list[Trace]


Wanted = list[WantedScenario]


def check_output_name(output: Path) -> None:
    """Refuse a name that no profile has."""
    if output.suffix != ".json":
        raise PerfModelError(f"--output must end in .json (got {str(output)!r}). Add it.")


def opened(
    output: Path, device: str, name: str | None, existing: bool, only: Sequence[str] | None, base: str | None
) -> Draft:
    """Return the draft of the file that is to be written: what is in it, or a new one.

    Parameters
    ----------
    existing : bool
        Whether the file may be there.
    only : sequence of str, optional
        As :func:`calibrate.session.calibrate` takes it; then it must be there.

    Raises
    ------
    PerfModelError
        If it must not be there and is, or the reverse, or it or the base was measured on another machine.
    """
    facts = machine.machine_facts(device)
    if output.exists():
        if not existing:
            raise PerfModelError(
                f"{output}: exists already. Go on with --resume, add keys with --scenario, or choose another --output."
            )
        if base is not None:
            raise PerfModelError(f"{output}: must be new for --base (it exists). Choose another --output.")
        draft = Draft.load(output)
        _check_same_machine(output, draft.profile, facts)
        return draft
    if only:
        raise PerfModelError(f"{output}: must exist for --only (no such file). Calibrate without --only first.")
    own: dict[str, Any] = {
        "name": name or output.stem,
        "provenance": facts | {"measured_at": datetime.now(UTC).isoformat(timespec="seconds")},
        "gpus": facts.get("gpus", 1),
    }
    if base is not None:
        return _on_base(output, base, own)
    return Draft.new(output, Profile(device=machine.device_section(device), **own))


def _on_base(output: Path, base: str, own: dict[str, Any]) -> Draft:
    """Return a draft in which only the stages of the host are left to do."""
    known = find_base(base, output)
    for fact in SAME_DEVICE:
        before, now = known.provenance.get(fact), own["provenance"].get(fact)
        if before != now:
            raise PerfModelError(
                f"--base must be a profile of this {fact} (got {base}, which says {before!r}; here is {now!r}). Leave "
                "it out to measure everything."
            )
    no_interconnects: dict[str, Any] = {"interconnects": {}, "interconnect": None, "transfers": {}, "topology": None}
    profile = known.model_copy(update=own | no_interconnects | {"base": base, "host": {}})
    return Draft.new(output, profile, known.kernels)


def wanted_of(scenario: Scenario, allow_import: bool) -> WantedScenario:
    """Return what of the scenario is to be measured."""
    programs = [each.program for each in rank_programs(scenario, allow_import)]
    jobs = (each for program in programs for each in program_jobs(program, scenario.matmul_tf32))
    distinct = missing(jobs, ())
    if scenario.parallelism.pp is None:
        return WantedScenario(scenario, distinct, [programs[0].trace], [])
    of_ranks = stages_of_ranks(scenario)
    stages = dict.fromkeys(stage for of_rank in of_ranks for stage in of_rank)
    traces = {id(trace): trace for trace in (get_stage_trace(scenario, *stage) for stage in stages)}
    several = [program.trace for program, own in zip(programs, of_ranks, strict=True) if len(set(own)) > 1]
    return WantedScenario(scenario, distinct, list(traces.values()), several)


def _check_same_machine(output: Path, profile: Profile, facts: dict[str, Any]) -> None:
    for fact in SAME_MACHINE:
        before, now = profile.provenance.get(fact), facts.get(fact)
        if before != now:
            raise PerfModelError(
                f"{output}: must have been measured with this {fact} (it says {before!r}, here is {now!r})."
                " Choose another --output."
            )
