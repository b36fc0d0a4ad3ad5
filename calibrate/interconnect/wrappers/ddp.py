"""Host seconds of communication calls and of what torch's wrappers add to a step, at the reference's speed."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from calibrate.host.reference import HostReference
from calibrate.interconnect.wrappers.fsdp import sharded_records
from calibrate.interconnect.wrappers.offload import offload_records
from calibrate.interconnect.wrappers.pipeline import pipeline_records
from calibrate.interconnect.wrappers.small_models import ROUNDS, WARM_UP, linears, step_seconds
from calibrate.timing.host_stopwatch import no_collection, timed
from calibrate.timing.paired import Timings, paired_samples, timed_after_work
from calibrate.timing.samples import call_record, relative_spread
from perfmodel.hardware import host_calls
from perfmodel.hardware.interconnect import REFERENCE, CallRecord

COUNTS = (8, 64)  # parameters of the models that DDP is measured on
LARGE_CAP_MB, SMALL_CAP_MB = 25.0, 1e-6  # one bucket, and one a parameter


def call_records(device: str, reference_s: float | None) -> dict[str, CallRecord]:
    """Return records by call; every rank measures at the same time."""
    with no_collection():
        reference = HostReference(device, reference_s)
        found = _calls(device, reference) | _ddp(device, reference)
        found |= sharded_records(device, reference) | offload_records(device, reference)
        found |= pipeline_records(device, reference)
        return found | {REFERENCE: CallRecord(**reference.record().model_dump(exclude={"cold_s"}))}


def _calls(device: str, reference: HostReference) -> dict[str, CallRecord]:
    tensor = torch.zeros(1024, device=device)
    works: list[Any] = []

    def start() -> None:
        works.append(dist.all_reduce(tensor, async_op=True))

    def wait() -> None:
        works.pop().wait()

    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(tensor),
        host_calls.asynchronous("all_reduce"): start,
        host_calls.WAIT: wait,
    }

    def one_round() -> Timings:
        for name, call in calls.items():
            # the wait comes right after what it waits for
            seconds, _ = timed(call) if name == host_calls.WAIT else timed_after_work(call, reference, device)
            yield name, seconds

    samples_s = paired_samples(reference, one_round, rounds=ROUNDS, warm_up=WARM_UP)
    return {name: call_record(values_s) for name, values_s in samples_s.items()}


def _ddp(device: str, reference: HostReference) -> dict[str, CallRecord]:
    """Fit forward = a, and backward = b x parameters + c x buckets, on models with few and many of each."""
    rows, forward_s, backward_s, spreads = [], [], [], []
    for count in COUNTS:
        plain = step_seconds(linears(count, device), device, reference)
        for cap_mb in (LARGE_CAP_MB, SMALL_CAP_MB):
            wrapped = DistributedDataParallel(linears(count, device), bucket_cap_mb=cap_mb)
            found = step_seconds(wrapped, device, reference)
            rows.append((count, 1 if cap_mb == LARGE_CAP_MB else count))
            forward_s.append(statistics.median(found[0]) - statistics.median(plain[0]))
            backward_s.append(statistics.median(found[1]) - statistics.median(plain[1]))
            spreads.append(relative_spread(found[1]))
    each, *_ = np.linalg.lstsq(np.array(rows, dtype=float), np.array(backward_s), rcond=None)
    spread = max(spreads)
    return {
        host_calls.DDP_FORWARD: CallRecord(
            time_s=max(statistics.median(forward_s), 0.0), spread=spread, samples=ROUNDS
        ),
        host_calls.DDP_PARAMETER: CallRecord(time_s=max(float(each[0]), 0.0), spread=spread, samples=ROUNDS),
        host_calls.DDP_BUCKET: CallRecord(time_s=max(float(each[1]), 0.0), spread=spread, samples=ROUNDS),
    }
