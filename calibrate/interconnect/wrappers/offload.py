"""Host seconds of what a rank does itself where fully_shard keeps its shard in host memory.

An optimizer's step over DTensors there, of which each rank runs its own at the same time, with as many threads as
torch's launcher leaves it (one, unless OMP_NUM_THREADS is set):

    seconds = a + b x parameters + c x MiB of these in float32

a and b by few and many small parameters. c by large ones, not scaled to the reference: memory paces them, which is no
slower where the reference is. And a copy of a small shard to the device, and to the host.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from calibrate.host.optimizers import give_gradients, loop_of
from calibrate.host.reference import HostReference, synchronize
from calibrate.interconnect.wrappers.fsdp import COUNTS, LOOP_ROUNDS, LOOP_WARM_UP, line
from calibrate.interconnect.wrappers.small_models import ROUNDS, WARM_UP, WIDTH, linears
from calibrate.timing.host_stopwatch import timed
from calibrate.timing.paired import Timings, paired_samples, timed_after_work
from calibrate.timing.samples import call_record, relative_spread
from perfmodel.hardware import host_calls
from perfmodel.hardware.interconnect import CallRecord
from perfmodel.units import MIB

LARGE, LARGE_MIB = 24, 8  # many times what fits into a cache, and each as large as those of models
LARGE_ROUNDS = 5


def offload_records(device: str, reference: HostReference) -> dict[str, CallRecord]:
    """Return records of ``cpu optimizer ...`` and copies; none on a CPU, which has nothing to offload."""
    if device == "cpu":
        return {}
    return optimizer_records(init_device_mesh(device, (dist.get_world_size(),)), reference) | _copies(device, reference)


def optimizer_records(mesh: DeviceMesh, reference: HostReference, large: int = LARGE) -> dict[str, CallRecord]:
    """Return records of ``cpu optimizer ...``; every rank of the mesh measures at the same time.

    Parameters
    ----------
    large : int
        How many large shards there are.
    """
    small = [_offloaded(linears(count, mesh.device_type), mesh) for count in COUNTS]
    shards = _offloaded(_large(large, mesh), mesh)
    found: dict[str, CallRecord] = {}
    for prefix in host_calls.OPTIMIZERS_OVER_DTENSORS:
        small_s = [_samples_s(prefix, each, mesh, reference, LOOP_ROUNDS) for each in small]
        large_s = _samples_s(prefix, shards, mesh, reference, LARGE_ROUNDS, as_timed=True)
        found |= _records(host_calls.on_host(prefix), small_s, large_s, large)
    return found


def _large(count: int, mesh: DeviceMesh) -> nn.Sequential:
    columns = LARGE_MIB * MIB // torch.float32.itemsize // WIDTH
    layers = (nn.Linear(columns, WIDTH * mesh.size(), bias=False, device=mesh.device_type) for _ in range(count))
    return nn.Sequential(*layers)


def _records(call: str, small_s: list[list[float]], large_s: list[float], large: int) -> dict[str, CallRecord]:
    """Return records from samples over few and many small parameters, and over so many large ones."""
    rows, medians_s = [(1, count) for count in COUNTS], [statistics.median(each) for each in small_s]
    names, spread = (call, host_calls.per_parameter(call)), max(map(relative_spread, small_s))
    found = line(names, rows, medians_s, spread, LOOP_ROUNDS)
    more_s = statistics.median(large_s) - found[names[0]].time_s - large * found[names[1]].time_s
    spread = relative_spread(large_s)
    each = CallRecord(time_s=max(more_s, 0.0) / (large * LARGE_MIB), spread=spread, samples=len(large_s))
    return found | {host_calls.per_mib(call): each}


def _offloaded(model: nn.Module, mesh: DeviceMesh) -> list[nn.Parameter]:
    """Return the rank's shards of its parameters, pinned if there is a device to pin them for."""
    fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu"))
    return list(model.parameters())


def _samples_s(
    prefix: str,
    parameters: list[nn.Parameter],
    mesh: DeviceMesh,
    reference: HostReference,
    rounds: int,
    as_timed: bool = False,
) -> list[float]:
    """Time a loop whose gradients stay where they are, as does the pinned memory that a step copies them to.

    Were they allocated anew, so would be the pages of the optimizer's temporaries.
    """
    loop, flag = loop_of(prefix, parameters, mesh.device_type), torch.zeros(1, device=mesh.device_type)
    give_gradients(parameters)

    def one_round() -> Timings:
        reference.disturb(1)
        synchronize(mesh.device_type)
        dist.all_reduce(flag)  # all ranks use the host's memory at once, as they do in a step
        synchronize(mesh.device_type)
        yield prefix, timed(loop)[0]

    return paired_samples(reference, one_round, rounds=rounds, warm_up=LOOP_WARM_UP, as_timed=as_timed)[prefix]


def _copies(device: str, reference: HostReference) -> dict[str, CallRecord]:
    on_host = torch.zeros(WIDTH * WIDTH, pin_memory=True)
    on_device = torch.zeros(WIDTH * WIDTH, device=device)

    def to_host() -> Any:
        copied = on_device.to("cpu", non_blocking=True)
        return copied, torch.cuda.current_stream().record_event()

    calls: dict[str, Callable[[], Any]] = {
        host_calls.COPY_TO_DEVICE: lambda: on_host.to(device, non_blocking=True),
        host_calls.COPY_TO_HOST: to_host,
    }

    def one_round() -> Timings:
        for name, call in calls.items():
            seconds, result = timed_after_work(call, reference, device)
            synchronize(device)
            awaited_s = timed(result[1].synchronize)[0] if name == host_calls.COPY_TO_HOST else 0.0
            yield name, seconds + awaited_s

    samples_s = paired_samples(reference, one_round, rounds=ROUNDS, warm_up=WARM_UP)
    return {name: call_record(values_s) for name, values_s in samples_s.items()}
