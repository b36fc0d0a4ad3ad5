"""Measuring jobs one by one into a draft; whatever fails is recorded with its reason and the rest goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from calibrate.draft import Draft
from calibrate.jobs import Job
from calibrate.kernels.arguments import Call, materialise
from calibrate.kernels.cold_calls import ColdCall, rounds_needed
from calibrate.kernels.profiled import Activity, Maker, observe
from calibrate.progress import Progress
from calibrate.timing.cuda_stopwatch import CudaStopwatch, SynchronizesError
from calibrate.timing.samples import COLD_LIMITS, Samples, Stopwatch
from perfmodel.errors import PerfModelError
from perfmodel.hardware.profile import KernelRecord

OUT_OF_MEMORY = "out-of-memory"
SHORTEST_S = 1e-9  # an operator that launches nothing
LONGEST_REASON = 200
PROFILED_TOGETHER = 200
FAILURES = (RuntimeError, TypeError, ValueError, IndexError, MemoryError, PerfModelError)


class Bench:
    """One device with its stopwatch. cache_bytes: size of its last-level cache; 0 where calls are not timed cold."""

    def __init__(self, device: str, stopwatch: Stopwatch, cache_bytes: int = 0) -> None:
        self.device = device
        self._stopwatch = stopwatch
        self._cache_bytes = cache_bytes
        self._cold_stopwatch = stopwatch.limited(COLD_LIMITS) if isinstance(stopwatch, CudaStopwatch) else stopwatch

    def make(self, job: Job) -> Call:
        """Return the job's call, with real arguments."""
        return materialise(job.operation, self.device)

    def time(self, job: Job) -> tuple[KernelRecord, Samples | None]:
        """Time one job; a failure becomes a record with an error.

        Raises
        ------
        PerfModelError
            If the failure left the device unusable.
        """
        try:
            with tf32(self.device, job.tf32), torch.no_grad():
                call = self.make(job)
                samples = self._stopwatch.measure(call)
                cold_time_s = self._cold_time_s(job, call, samples)
        except SynchronizesError:
            return KernelRecord(origin=job.origin), None
        except FAILURES as error:
            reason = failure(error)
        else:
            return self._record(job, samples, cold_time_s), samples
        self._recover(job)
        return KernelRecord(origin=job.origin, error=reason), None

    def _cold_time_s(self, job: Job, call: Call, samples: Samples) -> float | None:
        """Return seconds of a scenario's call with nothing in the cache; None where that fails or is not asked for."""
        if job.origin != "scenario" or self._cache_bytes <= 0:
            return None
        rounds = rounds_needed(job.operation, self._cache_bytes)
        if rounds == 1:
            return max(samples.median_s, SHORTEST_S)
        try:
            return max(self._cold_stopwatch.measure(ColdCall(call, rounds, self.device)).median_s, SHORTEST_S)
        except (SynchronizesError, *FAILURES):
            self._recover(job)
            return None

    def _record(self, job: Job, samples: Samples, cold_time_s: float | None) -> KernelRecord:
        return KernelRecord(
            time_s=max(samples.median_s, SHORTEST_S),
            cold_time_s=cold_time_s,
            spread=samples.spread,
            samples=len(samples.values_s),
            kernels=None if self.device == "cuda" else 1,
            origin=job.origin,
        )

    def _recover(self, job: Job) -> None:
        """Free what the failed call holds, and make sure that the device still answers."""
        if self.device != "cuda":
            return
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError as error:
            raise PerfModelError(
                f"{job.key}: broke the device ({failure(error)})."
                " Start the same calibration again with --resume: it is left out then."
            ) from error


def failure(error: BaseException) -> str:
    """Why a call could not be measured, in a line.

    >>> failure(RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"))
    'out-of-memory'
    """
    lines = str(error).splitlines() or [type(error).__name__]
    known = ("out of memory", "not enough memory", "can't allocate memory")
    if isinstance(error, MemoryError) or any(text in lines[0].lower() for text in known):
        return OUT_OF_MEMORY
    return lines[0][:LONGEST_REASON]


@contextmanager
def tf32(device: str, allowed: bool) -> Iterator[None]:
    """Run GEMMs with TF32 or without (and without afterwards); convolutions with, as torch has it by default."""
    if device != "cuda":
        yield
        return
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = allowed, True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


def time_jobs(
    bench: Bench,
    jobs: Sequence[Job],
    draft: Draft,
    progress: Progress,
    title: str,
    stop_s: float = float("inf"),
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Time the jobs into the draft until the clock says ``stop_s``, and return how many were left out for time."""
    progress.stage(title, len(jobs))
    for done, job in enumerate(jobs):
        if clock() > stop_s:
            return len(jobs) - done
        progress.now(job.key)
        try:
            record, samples = bench.time(job)
        except PerfModelError as error:
            draft.record(job, KernelRecord(origin=job.origin, error=failure(error)), None)
            draft.write()
            raise
        draft.record(job, record, samples)
        progress.advance()
    return 0


def unobserved(draft: Draft) -> list[Job]:
    """Jobs whose launches and memory script are not known yet."""
    return [
        draft.jobs[key]
        for key, record in draft.kernels.items()
        if record.kernels is None and record.error is None and key in draft.jobs
    ]


def observe_jobs(bench: Bench, jobs: Sequence[Job], draft: Draft, progress: Progress) -> None:
    """Add launches and memory scripts to the draft's records, and device times of calls that synchronise. CUDA only."""
    progress.stage("launches and memory", len(jobs))
    for start in range(0, len(jobs), PROFILED_TOGETHER):
        batch = jobs[start : start + PROFILED_TOGETHER]
        with torch.no_grad():
            seen = observe(_makers(bench, batch, progress), lambda _: progress.advance())
        for job, activity in zip(batch, seen, strict=True):
            draft.record(job, _observed(draft.kernels[job.key], activity), None)


def _makers(bench: Bench, jobs: Iterable[Job], progress: Progress) -> Iterator[Maker]:
    for job in jobs:
        progress.now(job.key)
        with tf32(bench.device, job.tf32):
            yield partial(bench.make, job)


def _observed(record: KernelRecord, activity: Activity | None) -> KernelRecord:
    if activity is None:
        unknown = {"error": "it synchronises, and failed under the profiler"}
        return record if record.time_s else record.model_copy(update=unknown)
    changes: dict[str, Any] = {"kernels": activity.launches, "memory_script": activity.memory_script}
    if record.time_s is None:
        changes |= {"time_s": max(activity.busy_s, SHORTEST_S), "samples": 1}
    return record.model_copy(update=changes)
