"""`perfmodel calibrate`: the stages of measuring a machine, in an order that keeps them from disturbing each other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from calibrate.closing import closing_report, closing_warnings
from calibrate.draft import Draft
from calibrate.host.pieces import HostPieces
from calibrate.host.reference import with_general
from calibrate.host.scenarios import scenario_host_records
from calibrate.jobs import Job, chosen, job, missing
from calibrate.kernels import drift
from calibrate.kernels.bench import Bench, failure, observe_jobs, time_jobs, unobserved
from calibrate.kernels.grid import grid_classes
from calibrate.opening import Wanted, check_output_name, opened, wanted_of
from calibrate.output_lock import locked
from calibrate.progress import Progress
from calibrate.stage_names import CACHE, OTHER_STAGES, POWER, WAITING
from calibrate.stages import Stages, now
from calibrate.this_machine import facts as machine
from calibrate.timing.cuda_stopwatch import CudaSeparator, CudaStopwatch, CudaStream
from calibrate.timing.samples import CpuStopwatch, Stopwatch
from perfmodel.errors import PerfModelError
from perfmodel.files.kinds import HOST_PIECES, SAMPLES
from perfmodel.files.writing import check_writable
from perfmodel.hardware.profile import Profile
from perfmodel.scenario.rules import check_scenario
from perfmodel.scenario.scenario import Scenario
from perfmodel.trace.trace import Trace
from perfmodel.units import format_seconds

BUDGET_S = {"cuda": 185.0, "cpu": 110.0}  # of the general calibration where none is given
TOLERANCE_S = 10.0  # by which measuring may overrun a budget on an idle machine
KEPT_S = {"cuda": 50.0, "cpu": 25.0}  # of that, for all but the grid
SOAK_S = 6.0
SHORT_SOAK_S = 1.0
SOAK_SHARE = 0.1  # of the budget that a soak may take


def calibrate(
    output: Path,
    device: str,
    scenarios: Sequence[Scenario] = (),
    resume: bool = False,
    name: str | None = None,
    only: Sequence[str] | None = None,
    progress: bool = True,
    budget_s: float | None = None,
    allow_import: bool = False,
    base: str | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Profile:
    """Measure this machine into a profile file.

    A new file gets the general calibration (constants, grid, host costs, power) and the exact keys of the scenarios. An
    existing one gets the scenarios' missing keys added, or, with ``resume``, everything it lacks. A new one with a
    ``base`` takes all that belongs to the device from that profile, and only the host is measured. The file is valid
    at every moment; killing this loses a few seconds of work. Warnings (what could not be measured or was left out,
    drift, unstable keys) go to standard error in any case.

    Parameters
    ----------
    output : Path
        The profile, ``.json``. Raw samples go beside it.
    device : str
        ``cuda`` (the current GPU) or ``cpu`` (one thread).
    scenarios : sequence of Scenario
        The exact kernel keys of these are measured.
    resume : bool
        Go on with an unfinished file.
    name : str, optional
        The profile's name; by default the file's.
    only : sequence of str, optional
        Measure just these kernel keys again, which the file (or a scenario, or the grid) knows, or a class of the grid
        (``full-reductions``), whether or not the file has it; ``power`` names what work draws and how a lowered clock
        slows it, ``waiting`` what kernels take more while other streams wait, ``cache`` what stays in the device's
        cache and what misses cost.
    progress : bool
        Show a bar and the closing report on standard error.
    budget_s : float, optional
        Seconds for the general calibration (grid, host costs, power): after them nothing more is begun, neither a
        kernel nor a piece of the host's costs, nor a stage that would not fit into half of what is left. What is left
        out is measured with ``resume``. What runs then and the drift check take up to :data:`TOLERANCE_S` more on an
        idle machine; the fit of the curves, which measures nothing, follows. 0 leaves grid and power out, and measures
        all of the host's costs. Without, the grid fits into :data:`BUDGET_S` and nothing else is left out. Exact keys
        of scenarios are not counted.
    allow_import : bool
        Whether a scenario's own model may be imported.
    base : str, optional
        A profile of the catalog, measured on another machine with the same device and libraries.
    clock : callable
        Returns the time in seconds, for budgets.

    Returns
    -------
    Profile
        What now is in ``output``.

    Raises
    ------
    PerfModelError
        If the device is not here, another calibration is writing ``output``, it exists and nothing was asked of it, it
        or the base was measured on another machine or with other libraries, or a key in ``only`` is unknown.
    """
    machine.check_device(device)
    for scenario in scenarios:
        check_scenario(scenario, device)
    check_output_name(output)
    with locked(output) as target, _threads_of(device):
        is_new = not target.exists()
        draft = opened(target, device, name, resume or bool(scenarios) or bool(only), only, base)
        check_writable(draft.samples_path, SAMPLES)
        check_writable(draft.host_pieces_path, HOST_PIECES)
        HostPieces.kept_in(draft.host_pieces_path, draft.measured_at)  # is refused now, not after the grid
        wanted = [wanted_of(scenario, allow_import) for scenario in scenarios]
        session = _Session(draft, device, Progress(progress), budget_s, allow_import, clock)
        with session.progress():
            return session.run(wanted, only, general=resume or is_new or not draft.stages_s)


@contextmanager
def _threads_of(device: str) -> Iterator[None]:
    """Let a CPU be measured with one thread."""
    threads = torch.get_num_threads()
    try:
        if device == "cpu":
            torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(threads)


class _Session:
    """One run over one draft: what is measured, and in which order."""

    def __init__(
        self,
        draft: Draft,
        device: str,
        progress: Progress,
        budget_s: float | None,
        allow_import: bool,
        clock: Callable[[], float],
    ) -> None:
        self.draft = draft
        self.device = device
        self.progress = progress
        self.stages = Stages(draft, device, budget_s, clock)
        self._clock = clock
        self._budget_s = BUDGET_S[device] if budget_s is None else budget_s
        self._allow_import = allow_import
        self._is_warm = False
        self._lines: list[str] = []
        self._before = dict(draft.kernels)

    def run(self, wanted: Wanted, only: Sequence[str] | None, general: bool) -> Profile:
        general = general and not only
        if general:
            self._memory_constants()
        stopwatch = self._stopwatch()
        bench = Bench(self.device, stopwatch, self.draft.profile.device.l2_bytes)
        if general:
            self._general_before(bench, stopwatch)
        if only:
            self._repeat(bench, stopwatch, only, wanted)
        else:
            self._scenarios(bench, wanted)
        if general:
            self._general_after(bench)
        if self.device == "cuda":
            self._observe(bench)
        self._fit()
        profile = self.draft.write()
        self._report()
        return profile

    # general calibration

    def _general_before(self, bench: Bench, stopwatch: Stopwatch) -> None:
        self.stages.once("launch", lambda: self._launch(stopwatch))
        if self.device == "cuda" and self._budget_s > 0 and self.stages.has_time_for(WAITING):
            self.stages.once(WAITING, self._waiting)
        if not self.stages.is_done("grid") and self._budget_s > 0:
            self._soak(bench, min(SOAK_S, SOAK_SHARE * self._budget_s))
            self._sentinels(bench, "start")
            self._grid(bench)
            self._sentinels(bench, "middle")
        if isinstance(stopwatch, CudaStopwatch) and self._budget_s > 0 and self.stages.has_time_for(CACHE):
            self._cache(bench, stopwatch)
        if not self.stages.is_done("host"):
            self._host()

    def _general_after(self, bench: Bench) -> None:
        if self._budget_s > 0 and self.stages.has_time_for(POWER):
            self.stages.once(POWER, lambda: self._power(bench))
            self._sentinels(bench, "end")

    def _memory_constants(self) -> None:
        if self.device == "cuda":
            from calibrate.device.launch_constants import memory_constants

            self.stages.once("memory", lambda: self.draft.update(memory=memory_constants()))

    def _launch(self, stopwatch: Stopwatch) -> None:
        if isinstance(stopwatch, CudaStopwatch):
            from calibrate.device.launch_constants import empty_kernel_s, launch_constants

            spacing_s = empty_kernel_s(stopwatch)
            self.stages.note("launch", {"empty_kernel_s": spacing_s})
            self.draft.update(launch=launch_constants(stopwatch, spacing_s))

    def _waiting(self) -> None:
        """Measure what kernels take more while other streams wait; it adds to the section of the stage ``launch``."""
        from calibrate.device.waiting_streams import PROCESSES, waiting_gaps_s, waiting_spacings_s

        self.progress.stage(WAITING, PROCESSES)
        spacings_s = waiting_spacings_s(self.progress.advance)
        self.stages.note(WAITING, {"spacings_s": spacings_s, "measured_at": now()})
        gaps_s = waiting_gaps_s(spacings_s)
        self.draft.update(launch=self.draft.profile.launch.model_copy(update={"waiting_gap_s": gaps_s}))

    def _cache(self, bench: Bench, stopwatch: CudaStopwatch) -> None:
        from calibrate.device.cache import measure_cache

        if not self._is_warm:
            self._soak(bench, SHORT_SOAK_S)
        self.progress.stage(CACHE, None)
        self.stages.run(CACHE, lambda: self.draft.update(cache=measure_cache(stopwatch)))
        measured_at = now()
        self.draft.update(provenance=self.draft.profile.provenance | {CACHE: {"measured_at": measured_at}})

    def _grid(self, bench: Bench) -> None:
        from calibrate.kernels.grid import grid_operations

        jobs = [job(operation, "grid", allowed) for operation, allowed in grid_operations(self.draft.profile.device)]
        jobs = missing(jobs, self.draft.kernels)
        began_s = self._clock()
        stop_s = self.stages.began_s + max(self._budget_s - KEPT_S[self.device], self._budget_s / 2)
        left_out = time_jobs(bench, jobs, self.draft, self.progress, "general grid", stop_s, self._clock)
        if left_out:
            self.stages.left_out.append(f"{left_out} grid keys were")
        else:
            self.draft.complete("grid", self._clock() - began_s)

    def _host(self) -> None:
        """Measure host costs piece by piece; those that a stopped run measured are kept beside the profile."""
        from calibrate.host.costs import measure_host

        if not self.draft.path.exists():
            self.draft.write()  # so that a stopped run finds the profile that its pieces belong to
        began_s = self._clock()
        self.progress.stage("host costs", None)
        pieces = HostPieces.kept_in(self.draft.host_pieces_path, self.draft.measured_at)
        found = measure_host(self.device, self.progress.at, pieces, lambda: self.stages.is_late)
        self.draft.update(host=dict(sorted(with_general(self.draft.profile.host, found).items())))
        if pieces.left_out:
            self.stages.left_out.append(f"{pieces.left_out} pieces of the host's costs were")
            return
        self.draft.complete("host", self._clock() - began_s)
        pieces.remove()

    def _power(self, bench: Bench) -> None:
        if self.device == "cuda":
            from calibrate.device.power import measure_power

            if not self._is_warm:
                self._soak(bench, SHORT_SOAK_S)
            self.progress.stage("power and clock", None)
            self.draft.update(power=measure_power(bench, self.progress.now))

    def _sentinels(self, bench: Bench, when: str) -> None:
        self.progress.stage(f"drift check, {when}", None)
        self.draft.update(provenance=drift.noted(self.draft.profile.provenance, drift.measure(bench), when))

    # exact keys

    def _scenarios(self, bench: Bench, wanted: Wanted) -> None:
        for scenario, jobs, traces, ranks in wanted:
            began_s = self._clock()
            new = missing(jobs, self.draft.kernels)
            if new and not self._is_warm:
                self._soak(bench, SHORT_SOAK_S)
            time_jobs(bench, new, self.draft, self.progress, f"scenario {scenario.name}")
            kernels_s = self._clock() - began_s
            found = sum(self._host_of(scenario, trace) for trace in traces)
            found += sum(self._host_of(scenario, trace, has_modules=False) for trace in ranks)
            host_s = self._clock() - began_s - kernels_s
            self._lines.append(
                f"scenario {scenario.name}: {len(new)} of {len(jobs)} kernel keys were new,"
                f" {format_seconds(kernels_s)} added; {found} host costs, {format_seconds(host_s)} added"
            )
            self.stages.note("scenarios_s", {scenario.name: round(kernels_s + host_s, 3)})

    def _host_of(self, scenario: Scenario, trace: Trace, has_modules: bool = True) -> int:
        """Measure host costs that are the scenario's own, and return how many were new."""
        self.progress.stage(f"scenario {scenario.name}, host", None)
        profile = self.draft.profile
        try:
            found = scenario_host_records(scenario, trace, profile, self.device, self._allow_import, has_modules)
        except RuntimeError as error:
            self._lines.append(f"scenario {scenario.name}: its own host costs were not measured: {failure(error)}")
            return 0
        self.draft.update(host=dict(sorted((profile.host | found).items())))
        return len(found)

    def _repeat(self, bench: Bench, stopwatch: Stopwatch, only: Sequence[str], wanted: Wanted) -> None:
        for stage in (WAITING, CACHE):
            if stage in only and self.device != "cuda":
                raise PerfModelError(
                    f"--only {stage} must be given with --device cuda (got {self.device}). Leave it out."
                )
        known = [*self.draft.jobs.values(), *(item for each in wanted for item in each.jobs)]
        groups = {name: points for name, points in grid_classes(self.draft.profile.device).items() if name in only}
        jobs = chosen(known, [key for key in only if key not in (*OTHER_STAGES, *groups)])
        self._soak(bench, SHORT_SOAK_S)
        time_jobs(bench, jobs, self.draft, self.progress, "again")
        for name, points in groups.items():
            self._grid_class(bench, name, [job(operation, "grid", allowed) for operation, allowed in points])
        if POWER in only:
            self.stages.run(POWER, lambda: self._power(bench))
        if WAITING in only:
            self.stages.run(WAITING, self._waiting)
        if CACHE in only and isinstance(stopwatch, CudaStopwatch):
            self._cache(bench, stopwatch)

    def _grid_class(self, bench: Bench, name: str, jobs: Sequence[Job]) -> None:
        """Measure one class of the grid, with the sentinels, which say whether the machine is as fast as before."""
        began_s = self._clock()
        times_s = drift.measure(bench)
        time_jobs(bench, jobs, self.draft, self.progress, name)
        facts = {"measured_at": now(), "sentinels_s": times_s}
        self.stages.note("grid_classes", {name: facts})
        change = drift.change(self.draft.profile, times_s)
        spent = format_seconds(self._clock() - began_s)
        self._lines.append(
            f"{name}: {len(jobs)} kernel keys, {spent}; the machine's sentinels changed by {change:+.1%}"
        )

    # after all timing

    def _observe(self, bench: Bench) -> None:
        observe_jobs(bench, unobserved(self.draft), self.draft, self.progress)
        if self.stages.is_done("launch"):
            self.stages.once("gap", self._gap)

    def _gap(self) -> None:
        from calibrate.device.launch_constants import gap_s

        spacing_s = self.draft.profile.provenance["launch"]["empty_kernel_s"]
        self.draft.update(launch=self.draft.profile.launch.model_copy(update={"gap_s": gap_s(spacing_s)}))

    def _fit(self) -> None:
        if self.draft.profile.base is not None:  # whose curves they are
            return
        from calibrate.fit.kernels import fit_curves

        self.progress.stage("fit", None)
        operations = {key: item.operation for key, item in sorted(self.draft.jobs.items())}
        kernels, profile = self.draft.kernels, self.draft.profile
        changed = [key for key, record in kernels.items() if self._time_s(key) != record.time_s]
        self.draft.update(curves=fit_curves(kernels, operations, profile.device, profile.curves, changed))

    def _time_s(self, key: str) -> float | None:
        """Return the seconds of a kernel when this run began."""
        return self._before[key].time_s if key in self._before else None

    # helpers

    def _stopwatch(self) -> Stopwatch:
        if self.device == "cpu":
            return CpuStopwatch()
        stream = CudaStream()
        return CudaStopwatch(stream, separator=CudaSeparator(stream))

    def _soak(self, bench: Bench, seconds: float) -> None:
        """Bring the device into its working state; on a CPU, load and allocate what first calls do."""
        self._is_warm = True
        if self.device == "cpu":
            drift.measure(bench)
            return
        from calibrate.device.power import soak

        self.progress.stage(f"heat soak, {seconds:g} s", None)
        soak(seconds)

    def _report(self) -> None:
        for line in closing_report(self.draft, self._lines, self._clock() - self.stages.began_s):
            self.progress.say(line)
        for line in closing_warnings(self.draft, self.stages.left_out):
            self.progress.warn(line)
