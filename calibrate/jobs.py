"""What is to be measured: operator calls under their kernel keys, from the general grid, a scenario, or once more."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from perfmodel.cost.transfers import pinned_copy
from perfmodel.errors import PerfModelError, did_you_mean
from perfmodel.program.program import Program
from perfmodel.trace.kernel_key import kernel_key, uses_tf32
from perfmodel.trace.operation import Operation
from perfmodel.trace.trace import EventKind, StepEvents


class Job(NamedTuple):
    """key: kernel key. tf32: whether TF32 may be used. origin: ``grid`` or ``scenario``."""

    key: str
    operation: Operation
    tf32: bool
    origin: str


def job(operation: Operation, origin: str, matmul_tf32: bool = False) -> Job:
    """Return the job of ``operation``; convolutions may use TF32, as torch's defaults have it."""
    tf32 = uses_tf32(operation, matmul_tf32, convolution_tf32=True)
    return Job(kernel_key(operation, matmul_tf32), operation, tf32, origin)


def program_jobs(program: Program, matmul_tf32: bool) -> list[Job]:
    """Return one job for every distinct operator that the steps of ``program`` run on the device, in order of first
    use, those that its strategy inserts last, less copies between host and device, which ``transfers`` are.
    """
    trace = program.trace
    indices = [index for events in (trace.steady, trace.first) for index in _operations_of(events)]
    found: dict[str, Job] = {}
    inserted = (operation for operation in program.extra_operations if pinned_copy(operation) is None)
    for operation in (*(trace.operations[index] for index in indices), *inserted):
        if operation.runs_on_device:
            wanted = job(operation, "scenario", matmul_tf32)
            found.setdefault(wanted.key, wanted)
    return list(found.values())


def _operations_of(events: StepEvents) -> list[int]:
    used = events.a[np.isin(events.kind, (EventKind.OP, EventKind.SYNC))]
    return list(dict.fromkeys(used.tolist()))


def missing(jobs: Iterable[Job], measured: Iterable[str]) -> list[Job]:
    """Return the jobs whose key is not measured yet, each key once."""
    seen = set(measured)
    wanted: list[Job] = []
    for item in jobs:
        if item.key not in seen:
            seen.add(item.key)
            wanted.append(item)
    return wanted


def chosen(jobs: Iterable[Job], keys: Iterable[str]) -> list[Job]:
    """Return the jobs of exactly these keys.

    Raises
    ------
    PerfModelError
        If a key is none of theirs.
    """
    by_key = {item.key: item for item in jobs}
    for key in keys:
        if key not in by_key:
            raise PerfModelError(f"--only must name keys known here (got {key!r}). {did_you_mean(key, by_key)}")
    return [by_key[key] for key in keys]
