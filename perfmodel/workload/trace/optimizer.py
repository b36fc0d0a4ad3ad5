"""Tracing of an optimizer alone, over tensors that need belong to no module: a rank's share of the parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from perfmodel.workload.models.step import make_optimizer
from perfmodel.workload.ops import TensorSpec
from perfmodel.workload.scenario import workload_of
from perfmodel.workload.trace.illusion import CudaIllusion
from perfmodel.workload.trace.recorder import Recorder
from perfmodel.workload.trace.session import assemble, cuda_environment, mark_optimizer_states, no_garbage_collection
from perfmodel.workload.trace_file import Parameter, StorageKind, Trace

if TYPE_CHECKING:
    from perfmodel.workload.scenario import Scenario


def trace_optimizer(scenario: Scenario, tensors: Sequence[TensorSpec]) -> Trace:
    """The first and the second step of the scenario's optimizer over parameters like ``tensors``.

    Parameters
    ----------
    scenario : Scenario
        Whose optimizer section counts.
    tensors : sequence of TensorSpec
        At least one; their gradients are alike.

    Returns
    -------
    Trace
        Of one phase, ``optimizer``. persistent: the parameters in order, then their gradients in order.
    """
    with no_garbage_collection():
        recorder = Recorder(())
        fake_mode = FakeTensorMode()
        with cuda_environment(recorder), fake_mode, recorder, CudaIllusion(recorder):
            leaves = [nn.Parameter(_like(tensor)) for tensor in tensors]
            parameters = [
                Parameter(str(index), tensor, recorder.ledger.add_persistent(leaf, StorageKind.PARAMETER))
                for index, (tensor, leaf) in enumerate(zip(tensors, leaves, strict=True))
            ]
            for tensor, leaf in zip(tensors, leaves, strict=True):
                leaf.grad = _like(tensor)
                recorder.ledger.add_persistent(leaf.grad, StorageKind.GRADIENT)
            optimizer = make_optimizer(leaves, scenario)
            taken = []
            for _ in range(2):
                recorder.begin_segment("optimizer", -1)
                optimizer.step()
                recorder.begin_segment("end", -1)
                mark_optimizer_states(optimizer, recorder)
                taken.append(recorder.take_step())
        recorder.ledger.close()
    return assemble(workload_of(scenario), recorder, parameters, taken)


def _like(tensor: TensorSpec) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride, dtype=getattr(torch, tensor.dtype), device="cuda")
