"""Host seconds of what fully_shard and DTensors add to a step, from steps of small models with them and without.

Groups of parameters, by models of few and many groups and parameters a group:

    forward that frees parameters - plain forward         = forward group x groups + forward parameter x parameters
    backward that need not gather - plain backward        = reduce group x groups + reduce parameter x parameters
    backward that gathers         - one that need not     = gather group x groups + gather parameter x parameters

Loops over parameters (optimizers, clipping, zero_grad), by few and many parameters:

    over DTensors - over plain tensors of a rank's shards = a + b x parameters
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from calibrate.host.optimizers import CLIP, ZERO_GRAD, give_gradients, loop_of
from calibrate.host.reference import HostReference
from calibrate.interconnect.collectives import Wanted, collective_call
from calibrate.interconnect.wrappers.small_models import ROUNDS, WARM_UP, WIDTH, linears, step_seconds
from calibrate.timing.host_stopwatch import timed
from calibrate.timing.paired import Timings, paired_samples, timed_after_work
from calibrate.timing.samples import relative_spread
from perfmodel.hardware import host_calls
from perfmodel.hardware.host_calls import FsdpHook
from perfmodel.hardware.interconnect import CallRecord

MODELS = ((2, 2), (8, 2), (2, 16), (8, 16))  # groups, and parameters of each
LOOPS = (CLIP, ZERO_GRAD, *host_calls.OPTIMIZERS_OVER_DTENSORS)
COUNTS = (4, 32)  # parameters that loops run over
LOOP_ROUNDS, LOOP_WARM_UP = 9, 2


class StepTimes(NamedTuple):
    """Median host seconds of forward and backward of one model, and their spread."""

    forward_s: float
    backward_s: float
    spread: float

    @classmethod
    def of(cls, model: nn.Module, mesh: DeviceMesh, reference: HostReference) -> StepTimes:
        forward_s, backward_s = step_seconds(model, mesh.device_type, reference)
        spread = max(relative_spread(forward_s), relative_spread(backward_s))
        return cls(statistics.median(forward_s), statistics.median(backward_s), spread)


class ShapeTimes(NamedTuple):
    """Times of the models of one shape.

    Parameters
    ----------
    plain : StepTimes
        Not sharded.
    freeing : StepTimes
        Sharded; groups are freed after forward, so that backward gathers them again.
    keeping : StepTimes
        Sharded; groups stay gathered until backward.
    gathers_s, reductions_s : float
        Seconds for which the collectives of all groups hold the host up by themselves, see :func:`blocked_s`.
    """

    plain: StepTimes
    freeing: StepTimes
    keeping: StepTimes
    gathers_s: float
    reductions_s: float


def sharded_records(device: str, reference: HostReference) -> dict[str, CallRecord]:
    """Return records of ``fsdp ...`` and ``dtensor ...``; every rank of the world measures at the same time."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    return group_records([_shape_times(*shape, mesh, reference) for shape in MODELS]) | _loops(mesh, reference)


def _shape_times(groups: int, parameters: int, mesh: DeviceMesh, reference: HostReference) -> ShapeTimes:
    plain, freeing, keeping = (
        StepTimes.of(_model(groups, parameters, mesh, reshards), mesh, reference) for reshards in (None, True, False)
    )
    gathers_s, reductions_s = (
        blocked_s(kind, groups, parameters, mesh, reference) for kind in ("all_gather", "reduce_scatter")
    )
    return ShapeTimes(plain, freeing, keeping, gathers_s, reductions_s)


def group_records(shapes: Sequence[ShapeTimes]) -> dict[str, CallRecord]:
    """Return what groups of parameters add to forward and backward, from times of the shapes of :data:`MODELS`."""
    rows = [(groups, groups * parameters) for groups, parameters in MODELS]
    added_s: dict[FsdpHook, list[float]] = {
        "forward": [each.freeing.forward_s - each.plain.forward_s - each.gathers_s for each in shapes],
        "reduce": [each.keeping.backward_s - each.plain.backward_s - each.reductions_s for each in shapes],
        "gather": [each.freeing.backward_s - each.keeping.backward_s - each.gathers_s for each in shapes],
    }
    spread = max(step.spread for each in shapes for step in (each.freeing, each.keeping))
    records: dict[str, CallRecord] = {}
    for hook, values_s in added_s.items():
        names = host_calls.fsdp_group(hook), host_calls.fsdp_parameter(hook)
        records |= line(names, rows, values_s, spread, ROUNDS)
    return records


def blocked_s(kind: str, groups: int, parameters: int, mesh: DeviceMesh, reference: HostReference) -> float:
    """Return the seconds for which the collectives of a model's groups hold the host up by themselves.

    They do on a CPU, where a call ends when its collective has ended. Keys hold what comes on top of these.
    """
    if mesh.device_type != "cpu":
        return 0.0
    size_bytes = parameters * WIDTH * WIDTH * torch.float32.itemsize
    call = collective_call(Wanted(kind, mesh.size(), "float32", size_bytes), mesh.get_group(), mesh.device_type)

    def one_round() -> Timings:
        seconds, _ = timed(lambda: [call() for _ in range(groups)])
        yield kind, seconds

    return statistics.median(paired_samples(reference, one_round, rounds=ROUNDS, warm_up=WARM_UP)[kind])


def _model(groups: int, parameters: int, mesh: DeviceMesh, reshards: bool | None) -> nn.Module:
    """Build a model whose groups are freed after forward if it ``reshards``, or one that is not sharded for None."""
    model = nn.Sequential(*(linears(parameters, mesh.device_type) for _ in range(groups)))
    if reshards is not None:
        for module in (*model, model):
            fully_shard(module, mesh=mesh, reshard_after_forward=reshards)
    return model


def _loops(mesh: DeviceMesh, reference: HostReference) -> dict[str, CallRecord]:
    found: dict[str, CallRecord] = {}
    rows = [(1, count) for count in COUNTS]
    for prefix in LOOPS:
        wanted_s, spreads = [], []
        for count in COUNTS:
            plain_s, sharded_s = _loop_seconds(prefix, count, mesh, reference).values()
            held_up_s = blocked_s("all_reduce", 1, 1, mesh, reference) if prefix == CLIP else 0.0
            wanted_s.append(statistics.median(sharded_s) - statistics.median(plain_s) - held_up_s)
            spreads.append(relative_spread(sharded_s))
        call = host_calls.over_dtensors(prefix)
        found |= line((call, host_calls.per_parameter(call)), rows, wanted_s, max(spreads), LOOP_ROUNDS)
    return found


def _loop_seconds(prefix: str, count: int, mesh: DeviceMesh, reference: HostReference) -> dict[str, list[float]]:
    """Return samples of a loop over ``plain`` tensors and over ``sharded`` ones, in this order."""
    device = mesh.device_type
    parameters = _parameters(count, mesh)
    loops = {name: loop_of(prefix, each, device) for name, each in parameters.items()}

    def one_round() -> Timings:
        for name, loop in loops.items():
            give_gradients(parameters[name])
            yield name, timed_after_work(loop, reference, device)[0]

    return paired_samples(reference, one_round, rounds=LOOP_ROUNDS, warm_up=LOOP_WARM_UP)


def _parameters(count: int, mesh: DeviceMesh) -> dict[str, list[nn.Parameter]]:
    """Return ``plain`` parameters of the shapes of a rank's shards, and the same as DTensors, ``sharded``."""
    model = linears(count, mesh.device_type)
    fully_shard(model, mesh=mesh)
    sharded = list(model.parameters())
    return {"plain": [nn.Parameter(each.to_local().detach().clone()) for each in sharded], "sharded": sharded}


def line(
    names: tuple[str, str], rows: Sequence[tuple[int, int]], wanted_s: Sequence[float], spread: float, rounds: int
) -> dict[str, CallRecord]:
    """Fit seconds of two names, neither negative, to wanted_s = rows @ (first, second).

    Parameters
    ----------
    names : tuple of str
        What the two columns of ``rows`` count.
    rows : sequence of tuple of int
        How often each occurs in each of ``wanted_s``.
    wanted_s : sequence of float
        Seconds that the two take together.
    spread : float
        Relative spread of the samples that ``wanted_s`` come from.
    rounds : int
        Samples of each of ``wanted_s``.
    """
    from scipy.optimize import nnls

    each_s, _ = nnls(np.array(rows, dtype=float), np.array(wanted_s))
    return {
        name: CallRecord(time_s=float(seconds), spread=spread, samples=rounds * len(rows))
        for name, seconds in zip(names, each_s, strict=True)
    }
