"""Host seconds of what fully_shard and DTensors add to a step, from steps of small models with them and without.

Groups of parameters, by models of few and many groups and parameters a group:

    forward that gives parameters up - plain forward      = forward group x groups + forward parameter x parameters
    backward that need not gather    - plain backward     = reduce group x groups + reduce parameter x parameters
    backward that gathers            - one that need not  = gather group x groups + gather parameter x parameters

Loops over parameters (optimizers, clipping, zero_grad), by few and many parameters:

    over DTensors - over plain tensors of a rank's part = a + b x parameters
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from calibrate.host.optimizers import CLIP, IMPLEMENTATIONS, ZERO_GRAD, give_gradients, loop_of
from calibrate.host.reference import HostReference, synchronize
from calibrate.interconnect.collectives import Wanted, collective_call
from calibrate.interconnect.wrappers.small_models import ROUNDS, WARM_UP, WIDTH, linears, step_seconds
from calibrate.timing.host_stopwatch import timed
from calibrate.timing.samples import relative_spread
from perfmodel.hardware.interconnect import CallRecord
from perfmodel.prediction.support import NOT_OVER_DTENSORS

MODELS = ((2, 2), (8, 2), (2, 16), (8, 16))  # groups, and parameters of each
LOOPS = (CLIP, ZERO_GRAD, *(prefix for prefix in IMPLEMENTATIONS if prefix not in NOT_OVER_DTENSORS))
COUNTS = (4, 32)  # parameters that loops run over
LOOP_ROUNDS, LOOP_WARM_UP = 9, 2


class _Step(NamedTuple):
    """Median host seconds of one form of a model."""

    forward_s: float
    backward_s: float
    spread: float

    @classmethod
    def of(cls, model: nn.Module, mesh: DeviceMesh, reference: HostReference) -> _Step:
        forward_s, backward_s = step_seconds(model, mesh.device_type, reference)
        spread = max(relative_spread(forward_s), relative_spread(backward_s))
        return cls(statistics.median(forward_s), statistics.median(backward_s), spread)


def sharded_records(device: str, reference: HostReference) -> dict[str, CallRecord]:
    """Of ``fsdp ...`` and ``dtensor ...``; every rank of the world measures at the same time."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    return _groups(mesh, reference) | _loops(mesh, reference)


def _groups(mesh: DeviceMesh, reference: HostReference) -> dict[str, CallRecord]:
    plain: list[_Step] = []
    gathering: list[_Step] = []
    keeping: list[_Step] = []
    gathers_s: list[float] = []
    reductions_s: list[float] = []
    for shape in MODELS:
        for found, reshards in ((plain, None), (gathering, True), (keeping, False)):
            found.append(_Step.of(_model(*shape, mesh, reshards), mesh, reference))
        gathers_s.append(_blocked_s("all_gather", *shape, mesh, reference))
        reductions_s.append(_blocked_s("reduce_scatter", *shape, mesh, reference))
    rows = [(groups, groups * parameters) for groups, parameters in MODELS]
    parts = {
        "forward": [a.forward_s - b.forward_s - c for a, b, c in zip(gathering, plain, gathers_s, strict=True)],
        "reduce": [a.backward_s - b.backward_s - c for a, b, c in zip(keeping, plain, reductions_s, strict=True)],
        "gather": [a.backward_s - b.backward_s - c for a, b, c in zip(gathering, keeping, gathers_s, strict=True)],
    }
    spread = max(each.spread for each in (*gathering, *keeping))
    records: dict[str, CallRecord] = {}
    for name, wanted_s in parts.items():
        records |= line((f"fsdp {name} group", f"fsdp {name} parameter"), rows, wanted_s, spread, ROUNDS)
    return records


def _blocked_s(kind: str, groups: int, parameters: int, mesh: DeviceMesh, reference: HostReference) -> float:
    """Seconds for which the collectives of a model's groups hold the host up by themselves: on a CPU, where a call ends
    when its collective has. A key holds what comes on top of these.
    """
    if mesh.device_type != "cpu":
        return 0.0
    size_bytes = parameters * WIDTH * WIDTH * torch.float32.itemsize
    call = collective_call(Wanted(kind, mesh.size(), "float32", size_bytes), mesh.get_group(), mesh.device_type)
    samples_s: list[float] = []
    for index in range(WARM_UP + ROUNDS):
        reference.beat()
        seconds, _ = timed(lambda: [call() for _ in range(groups)])
        if index >= WARM_UP:
            reference.note(samples_s, seconds)
    reference.beat()
    return statistics.median(samples_s)


def _model(groups: int, parameters: int, mesh: DeviceMesh, reshards: bool | None) -> nn.Module:
    """reshards: whether groups are given up after forward; None for a model that is not sharded."""
    model = nn.Sequential(*(linears(parameters, mesh.device_type) for _ in range(groups)))
    if reshards is not None:
        for part in (*model, model):
            fully_shard(part, mesh=mesh, reshard_after_forward=reshards)
    return model


def _loops(mesh: DeviceMesh, reference: HostReference) -> dict[str, CallRecord]:
    found: dict[str, CallRecord] = {}
    rows = [(1, count) for count in COUNTS]
    for prefix in LOOPS:
        wanted_s, spreads = [], []
        for count in COUNTS:
            plain_s, sharded_s = _loop_seconds(prefix, count, mesh, reference)
            blocked_s = _blocked_s("all_reduce", 1, 1, mesh, reference) if prefix == CLIP else 0.0
            wanted_s.append(statistics.median(sharded_s) - statistics.median(plain_s) - blocked_s)
            spreads.append(relative_spread(sharded_s))
        found |= line((f"dtensor {prefix}", f"dtensor {prefix} parameter"), rows, wanted_s, max(spreads), LOOP_ROUNDS)
    return found


def _loop_seconds(prefix: str, count: int, mesh: DeviceMesh, reference: HostReference) -> list[list[float]]:
    """Samples over plain tensors, and over DTensors."""
    device = mesh.device_type
    samples_s: list[list[float]] = [[], []]
    loops = []
    for parameters in _parameters(count, mesh):
        loops.append((parameters, loop_of(prefix, parameters, device)))
    for index in range(LOOP_WARM_UP + LOOP_ROUNDS):
        reference.beat()
        for samples, (parameters, loop) in zip(samples_s, loops, strict=True):
            give_gradients(parameters)
            reference.disturb(1)
            synchronize(device)
            seconds, _ = timed(loop)
            if index >= LOOP_WARM_UP:
                reference.note(samples, seconds)
    reference.beat()
    return samples_s


def _parameters(count: int, mesh: DeviceMesh) -> Iterator[list[nn.Parameter]]:
    """Plain ones of the shape of a rank's part, and DTensors."""
    model = linears(count, mesh.device_type)
    fully_shard(model, mesh=mesh)
    sharded = list(model.parameters())
    yield [nn.Parameter(each.to_local().detach().clone()) for each in sharded]
    yield sharded


def line(
    names: tuple[str, str], rows: Sequence[tuple[int, int]], wanted_s: Sequence[float], spread: float, rounds: int
) -> dict[str, CallRecord]:
    """Seconds of each name, none negative, of which the rows have so many each."""
    from scipy.optimize import nnls

    each_s, _ = nnls(np.array(rows, dtype=float), np.array(wanted_s))
    return {
        name: CallRecord(time_s=float(seconds), spread=spread, samples=rounds * len(rows))
        for name, seconds in zip(names, each_s, strict=True)
    }
