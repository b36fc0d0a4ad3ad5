"""Measure scenarios by running them: each in processes of its own, so that one that fails or hangs loses no other."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibrate.this_machine.launcher import GROUP_TIMEOUT_S, LONGEST_CAUSE, Launch, of_rank_path, run_ranks, run_within
from perfmodel.errors import PerfModelError, naming
from perfmodel.files.kinds import ALLOCATOR_HISTORY, CHROME_TRACE, MEASUREMENT, FileKind
from perfmodel.files.writing import check_folder, check_writable, replacing, write_atomically
from perfmodel.hardware.measurement import Measurement, RankSamples, load_measurement, save_measurement
from perfmodel.scenario.rules import check_scenario
from perfmodel.terminal import visible_console
from perfmodel.units import format_bytes, format_seconds
from validate.cases import Case, Split, resolved_scenario
from validate.overlap import LEAD_IN_STEPS, TRACED_STEPS, communication_of, load_rank_trace

if TYPE_CHECKING:
    from rich.console import Console

    from perfmodel.scenario.scenario import Scenario
    from validate.worker import Effort

ROOT = Path(__file__).parent.parent
TIMEOUT_S = 300.0
NOT_RECORDED = "nothing is recorded of a kept case. Record it with `perfmodel validate --again --recordings`."


@dataclass
class Outcome:
    """What became of a list of cases; ``kept`` were measured by an earlier run and are left as they are."""

    measured: list[Measurement] = field(default_factory=list)
    kept: list[Measurement] = field(default_factory=list)
    failures: list[PerfModelError] = field(default_factory=list)


def measure(
    scenario: Scenario,
    device: str = "cuda",
    *,
    name: str | None = None,
    split: Split = "tuning",
    group: str = "own",
    allow_import: bool = False,
    timeout_s: float = TIMEOUT_S,
    group_timeout_s: float = GROUP_TIMEOUT_S,
    trace: Path | None = None,
    history: Path | None = None,
    effort: Effort | None = None,
) -> Measurement:
    """Run the scenario for real on ``device`` and time it.

    On CUDA: four first steps with the allocator's peaks of each; warm-up of at least 5 steps and 2 s; a loop of 12 to
    60 steps (about 3 s) without synchronisation, timed by events on the device at every phase, in blocks between which
    the host's speed is taken; a loop with a synchronisation after each step, timed by the host. Data is random and
    resident on the device. On CPU: the same with one thread, the host's clock in both loops, and no memory.

    A scenario of several GPUs runs on as many ranks, each a process with random data of its own, joined by its
    ``hardware.interconnect``; every rank is measured so. With ``trace``, each writes one of four steps, from which the
    overlap of communication and computation is taken. In a pipeline each rank runs its stages of one batch, the
    same for all ranks of a replica, and writes down when each computed what.

    Parameters
    ----------
    scenario : Scenario
    device : str
        ``cuda`` or ``cpu``.
    name, split, group : str
        What the measurement is filed under; the name is the scenario's unless given.
    allow_import : bool
        Whether a model target may be imported.
    timeout_s : float
        The whole process is killed after that, in seconds.
    group_timeout_s : float
        How long a rank waits for another before it gives up, in seconds.
    trace : Path, optional
        Write a Chrome trace of one steady step there (``.json`` or ``.json.gz``); rank 0's of several, the others' go
        beside it.
    history : Path, optional
        Write the allocator's history of the first two steps there (gzip JSON; CUDA only); of several ranks, rank 0's.
    effort : Effort, optional
        Other numbers of steps.

    Raises
    ------
    PerfModelError
        If the scenario asks for what cannot be run here, or the run fails, runs out of memory or time.
    """
    name = scenario.name if name is None else name
    _check(scenario, name, device, history)
    request: dict[str, Any] = {
        "name": name,
        "split": split,
        "group": group,
        "scenario": scenario.model_dump(mode="json", exclude_unset=True),
        "device": device,
        "allow_import": allow_import,
        "folder": None if scenario.folder is None else str(scenario.folder),
    }
    settings = {} if effort is None else asdict(effort)
    with tempfile.TemporaryDirectory(prefix="perfmodel-") as name_of_folder:
        folder, ranks = Path(name_of_folder), scenario.parallelism.ranks
        recorded_trace = None if trace is None else folder / "trace" / trace.name
        recorded_history = None if history is None else folder / "history" / history.name
        request["trace"] = None if recorded_trace is None else str(recorded_trace)
        request["history"] = None if recorded_history is None else str(recorded_history)
        if ranks > 1:
            request |= {"ranks": ranks, "group_timeout_s": min(group_timeout_s, timeout_s)}
            measured = _measure_ranks(request, settings, folder, timeout_s, recorded_trace)
        else:
            result = _run_worker(request, settings, folder, timeout_s)
            if "error" in result:
                raise PerfModelError(result["error"])
            measured = Measurement.model_validate(result["measurement"])
        if recorded_trace is not None and trace is not None:
            for rank in range(ranks):
                _save(of_rank_path(recorded_trace, rank), of_rank_path(trace, rank), CHROME_TRACE)
        if recorded_history is not None and history is not None:
            _save(recorded_history, history, ALLOCATOR_HISTORY)
    return measured


def _save(recorded: Path, path: Path, kind: FileKind) -> None:
    """Put a recording of a run that has succeeded in its place; those of an earlier run stay until then."""
    with replacing(path, kind) as temporary:
        shutil.copyfile(recorded, temporary)


def _check(scenario: Scenario, name: str, device: str, history: Path | None) -> None:
    """Refuse what breaks a rule of scenarios, and what this machine cannot run."""
    if device not in ("cuda", "cpu"):
        raise PerfModelError(f"--device must be cuda or cpu (got {device!r}). Choose one.")
    with naming(name):
        check_scenario(scenario, device)
        _check_runnable(scenario, device, history)


def _check_runnable(scenario: Scenario, device: str, history: Path | None) -> None:
    section = scenario.parallelism
    if section.dp == 1 and section.strategy != "none":
        raise PerfModelError(
            f"parallelism.strategy must be none to be run on one GPU (got {section.strategy}). Leave it out."
        )
    if section.ranks > 1 and scenario.mode != "train":
        raise PerfModelError(
            f"mode must be train to be run on {section.ranks} GPUs (got {scenario.mode}). Use train, or one GPU."
        )
    if section.ranks > 1 and device == "cpu" and scenario.hardware.interconnect not in (None, "gloo"):
        raise PerfModelError(
            f"hardware.interconnect must be gloo on the CPU (got {scenario.hardware.interconnect}). Leave it out."
        )
    if scenario.hardware.gpu_speeds is not None:
        raise PerfModelError(
            f"hardware.gpu_speeds must be left out to be run here (got {scenario.hardware.gpu_speeds}): GPUs are as "
            "fast as they are. Leave it out."
        )
    if history is not None and device == "cpu":
        raise PerfModelError("an allocator history must be taken with --device cuda (got cpu). Leave it out.")


def _run_worker(request: dict[str, Any], effort: dict[str, Any], folder: Path, timeout_s: float) -> dict[str, Any]:
    name, answered, log = request["name"], folder / "result.json", folder / "log"
    command = [sys.executable, *_program(request, effort, folder)]
    try:
        code = run_within(timeout_s, command, log, _environment())
    except subprocess.TimeoutExpired as error:
        raise PerfModelError(
            f"{name}: the run must end within {timeout_s:g} s (it did not). "
            "Allow more with --timeout, or make it smaller."
        ) from error
    if code != 0 or not answered.exists():
        text = log.read_text(errors="replace")
        print(text, file=sys.stderr, end="")
        raise PerfModelError(
            f"{name}: the step must run on {request['device']} (exit code {code}: {_last_line(text)}). "
            "The whole message is above."
        )
    result: dict[str, Any] = json.loads(answered.read_text())
    return result


def _program(request: dict[str, Any], effort: dict[str, Any], folder: Path) -> list[str]:
    """Return the worker as arguments of ``python``; its results go to ``folder / result.json``."""
    asked = folder / "request.json"
    write_atomically(asked, json.dumps({"request": request, "effort": effort}), None)
    return ["-m", "validate.worker", str(asked), str(folder / "result.json")]


def _environment() -> dict[str, str]:
    search_path = filter(None, [str(ROOT), os.getcwd(), os.environ.get("PYTHONPATH")])
    return os.environ | {"PYTHONPATH": os.pathsep.join(search_path)}


def _measure_ranks(
    request: dict[str, Any], effort: dict[str, Any], folder: Path, timeout_s: float, trace: Path | None
) -> Measurement:
    count, program = request["ranks"], _program(request, effort, folder)
    run_ranks(Launch(request["name"], program, count, request["device"], folder, timeout_s, _environment()))
    paths = [of_rank_path(folder / "result.json", rank) for rank in range(count)]
    merged = merge_ranks([Measurement.model_validate(json.loads(path.read_text())["measurement"]) for path in paths])
    if trace is None or merged.actions:  # messages of a pipeline are no collectives, which all ranks have in one order
        return merged
    traces = [load_rank_trace(of_rank_path(trace, rank)) for rank in range(count)]
    return merged.model_copy(update={"communication": communication_of(traces, TRACED_STEPS, LEAD_IN_STEPS)})


def merge_ranks(ranks: Sequence[Measurement]) -> Measurement:
    """Return one measurement of all ranks', given rank 0's first: its columns, each step the slowest rank's."""
    shared = RankSamples.model_fields
    return ranks[0].model_copy(
        update={
            "step_s": tuple(map(max, zip(*(each.step_s for each in ranks), strict=True))),
            "synced_step_s": tuple(map(max, zip(*(each.synced_step_s for each in ranks), strict=True))),
            "ranks": tuple(RankSamples(**{name: getattr(each, name) for name in shared}) for each in ranks),
        }
    )


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:LONGEST_CAUSE] if lines else "it said nothing"


def measure_cases(
    cases: Sequence[Case],
    device: str,
    results: Path,
    *,
    again: bool = False,
    recordings: bool = False,
    console: Console | None = None,
    **options: Any,
) -> Outcome:
    """Measure each case and save it as ``results/<name>.json`` at once; cases already there are kept, not run again.

    Progress goes to ``console``, by default standard error. Failures are collected, and the other cases still run.

    Parameters
    ----------
    again : bool
        Measure cases already there anew; what is there is replaced when the new measurement has succeeded.
    recordings : bool
        Also write ``<name>.trace.json.gz`` and, on CUDA, ``<name>.history.json.gz`` beside each measurement.
    options
        ``allow_import``, ``timeout_s`` and ``effort`` of :func:`measure`.

    Raises
    ------
    PerfModelError
        If nothing can be written to ``results``.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    check_folder(results)
    outcome = Outcome()
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console or visible_console(stderr=True)) as progress:
        task = progress.add_task("measuring", total=len(cases))
        for case in cases:
            progress.update(task, description=case.name)
            try:
                line = _measure_case(case, device, results, outcome, again=again, recordings=recordings, **options)
            except PerfModelError as error:
                outcome.failures.append(error)
                line = f"failed. {error}"
            progress.console.print(f"{case.name}: {line}", markup=False, highlight=False)
            progress.advance(task)
        progress.update(task, description="measured")
    return outcome


def _measure_case(
    case: Case, device: str, results: Path, outcome: Outcome, *, again: bool, recordings: bool, **options: Any
) -> str:
    """Measure one case into ``outcome``; returns what to show."""
    path = results / f"{case.name}.json"
    kept = _measured_before(path, case, again)
    if kept is not None and not again:
        outcome.kept.append(kept)
        not_recorded = [f"{case.name}: {NOT_RECORDED}"] if recordings else []
        return "\n".join([f"kept, {summary(kept)}", *not_recorded, *kept.warnings()])
    check_writable(path, MEASUREMENT)
    if recordings:
        options |= _recordings(case, device, results)
    measured = measure(case.scenario, device, name=case.name, split=case.split, group=case.group, **options)
    save_measurement(measured, path, replace=again)
    outcome.measured.append(measured)
    return "\n".join([summary(measured), *measured.warnings()])


def _measured_before(path: Path, case: Case, again: bool) -> Measurement | None:
    """Return what an earlier run measured of the case. With ``again``, a damaged file counts as none."""
    if not path.exists():
        return None
    try:
        kept = load_measurement(path)
    except PerfModelError:
        if again:
            return None
        raise
    if kept.scenario != resolved_scenario(case.scenario):
        raise PerfModelError(f"{path}: must be a measurement of this case (its scenario differs). Delete or rename it.")
    return kept


def _recordings(case: Case, device: str, results: Path) -> dict[str, Path | None]:
    """Return where :func:`measure` is to write recordings; refuse now what cannot be written."""
    trace = results / f"{case.name}.trace.json.gz"
    history = results / f"{case.name}.history.json.gz" if device == "cuda" else None
    for rank in range(case.scenario.parallelism.ranks):
        check_writable(of_rank_path(trace, rank), CHROME_TRACE)
    if history is not None:
        check_writable(history, ALLOCATOR_HISTORY)
    return {"trace": trace, "history": history}


def summary(measurement: Measurement) -> str:
    """Return step time with its spread, synced step time and peak memory in one line.

    >>> summary(Measurement(name="a", split="tuning", group="own", scenario={}, provenance={}, warmup_steps=5,
    ...     step_s=(0.01, 0.01), synced_step_s=(0.011,), phases_s={}))
    'step 10 ms ±0.0 %, synced 11 ms'
    """
    parts = [
        f"step {format_seconds(measurement.median_step_s)} ±{measurement.spread:.1%}".replace("%", " %"),
        f"synced {format_seconds(measurement.median_synced_step_s)}",
    ]
    if measurement.peak_allocated_bytes is not None:
        parts.append(f"peak {format_bytes(measurement.peak_allocated_bytes)}")
    return ", ".join(parts)
