"""Tracing of an optimizer alone, over tensors that need belong to no module: a rank's share of the parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from perfmodel.models.step import clip_shards, make_optimizer, update
from perfmodel.scenario.scenario import workload_of
from perfmodel.trace.operation import TensorSpec
from perfmodel.trace.optimizer_share import OptimizerShare
from perfmodel.trace.trace import Parameter, StorageKind, Trace
from perfmodel.tracing.fake_cuda import FakeCudaMode
from perfmodel.tracing.recorder import Recorder
from perfmodel.tracing.step import assemble, cuda_environment, mark_optimizer_states, no_garbage_collection

if TYPE_CHECKING:
    from perfmodel.scenario.scenario import Scenario


def trace_optimizer(scenario: Scenario, tensors: Sequence[TensorSpec], share: OptimizerShare | None = None) -> Trace:
    """Trace the first and the second step of the scenario's optimizer over parameters like ``tensors``.

    Parameters
    ----------
    scenario : Scenario
        Whose optimizer section counts.
    tensors : sequence of TensorSpec
        At least one; their gradients have the same shapes and dtypes.
    share : OptimizerShare, optional
        What goes before, if ``tensors`` are shards of parameters.

    Returns
    -------
    Trace
        One phase, ``optimizer``, after ``clip`` where shards are clipped, less the communication in them. The
        persistent storages are the parameters in order, then their gradients in order.
    """
    with no_garbage_collection():
        recorder = Recorder(())
        fake_mode = FakeTensorMode()
        with cuda_environment(recorder), fake_mode, recorder, FakeCudaMode(recorder):
            leaves = [nn.Parameter(_like(tensor)) for tensor in tensors]
            parameters = [
                Parameter(str(index), tensor, recorder.ledger.add_persistent(leaf, StorageKind.PARAMETER))
                for index, (tensor, leaf) in enumerate(zip(tensors, leaves, strict=True))
            ]
            for tensor, leaf in zip(tensors, leaves, strict=True):
                leaf.grad = _like(tensor)
                recorder.ledger.add_persistent(leaf.grad, StorageKind.GRADIENT)
            optimizer = make_optimizer(leaves, scenario)
            scaler, clip = _scaler(share), _clipping(scenario, leaves, share)
            taken = []
            for _ in range(2):
                update(optimizer, scaler, clip, recorder.begin_segment)
                recorder.begin_segment("end", -1)
                mark_optimizer_states(optimizer, recorder)
                taken.append(recorder.take_step())
        recorder.ledger.close()
    return assemble(workload_of(scenario), recorder, parameters, taken)


def _scaler(share: OptimizerShare | None) -> Any:
    """Return the gradient scaler as it is after it has scaled the loss."""
    if share is None or not share.are_scaled:
        return None
    scaler = torch.amp.GradScaler("cuda")
    scaler.scale(torch.empty((), device="cuda"))
    return scaler


def _clipping(
    scenario: Scenario, leaves: Sequence[nn.Parameter], share: OptimizerShare | None
) -> Callable[[], object] | None:
    norm = scenario.optimizer.max_grad_norm
    if share is None or norm is None:
        return None
    if not share.are_dtensors:
        return partial(clip_shards, leaves, norm, lambda squared: None)
    return partial(_clip_dtensors, leaves, norm, [torch.empty((), device="cuda") for _ in range(share.absent)])


def _clip_dtensors(shards: Sequence[nn.Parameter], max_norm: float, absent: Sequence[torch.Tensor]) -> None:
    """Clip as clip_grad_norm_ does with the local shards of DTensors.

    Squares of norms are summed over the ranks before the norm of all is taken.
    """
    norms = torch._foreach_norm([shard.grad for shard in shards if shard.grad is not None], 2.0)
    squares = torch.stack([*norms, *absent]).pow(2.0)
    total = torch.linalg.vector_norm(squares.pow(0.5), 2.0)
    nn.utils.clip_grads_with_norm_(shards, max_norm, total, foreach=True)


def _like(tensor: TensorSpec) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride, dtype=getattr(torch, tensor.dtype), device="cuda")
