"""Tracing of a whole training step: from a scenario to a :class:`Trace`, on any machine with torch, without a GPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from perfmodel.errors import PerfModelError
from perfmodel.models.build import build_module, make_inputs, repeated_blocks, replace_tensors
from perfmodel.models.step import TrainingStep, make_optimizer
from perfmodel.models.target import target_at_work
from perfmodel.progress import doing
from perfmodel.scenario.scenario import workload_of
from perfmodel.trace.trace import Parameter, StepEvents, StorageKind, Trace
from perfmodel.tracing.autograd import blocks_reported, gradients_reported, modules_reported, nodes_reported
from perfmodel.tracing.cuda_autocast import CudaAutocastPolicy
from perfmodel.tracing.cuda_composites import cuda_composites
from perfmodel.tracing.cuda_environment import cuda_autocast, cuda_defaults
from perfmodel.tracing.fake_cuda import FakeCudaMode, devices_answered
from perfmodel.tracing.recorder import Recorder

if TYPE_CHECKING:
    from perfmodel.scenario.scenario import Scenario

TRACED_MICRO_BATCHES = 2  # the third and later ones run what the second runs


def trace_step(scenario: Scenario, allow_import: bool = False, steps: int = 2) -> Trace:
    """Trace ``steps`` training steps of ``scenario`` as CUDA runs them; the first and the last are kept.

    Parameters
    ----------
    scenario : Scenario
    allow_import : whether the scenario's target may be imported (it runs code)
    steps : at least 2; every step from the second on runs the same operators

    Returns
    -------
    Trace

    Raises
    ------
    PerfModelError
        If the model cannot be built, or does what cannot be traced without data.

    Notes
    -----
    Assumes attention as torch chooses it on compute capability 9.0. Tensors are fake: no memory is used and
    nothing is computed. Dispatcher overrides are in place while it runs, so no other thread may use torch.
    """
    workload = workload_of(scenario)
    scenario = _with_few_micro_batches(scenario)
    with no_garbage_collection():
        with torch.device("meta"):
            module = build_module(scenario, allow_import)
        recorder = Recorder(tuple((name, type(submodule).__name__) for name, submodule in module.named_modules()))
        fake_mode = FakeTensorMode()
        replace_tensors(module, lambda tensor: fake_twin(tensor, fake_mode))
        with cuda_environment(recorder), fake_mode, recorder, FakeCudaMode(recorder) as illusion:
            traced = _trace(scenario, module, recorder, illusion, allow_import, steps)
        recorder.ledger.close()
    return assemble(workload, recorder, *traced)


def _trace(
    scenario: Scenario, module: nn.Module, recorder: Recorder, illusion: FakeCudaMode, allow_import: bool, steps: int
) -> tuple[list[Parameter], list[StepEvents]]:
    ledger = recorder.ledger
    parameters = number_module(module, recorder)
    inputs = make_inputs(scenario, "cuda")
    for tensor in inputs.values():
        ledger.add_persistent(tensor, StorageKind.INPUT)
    optimizer = make_optimizer(module.parameters(), scenario) if scenario.mode == "train" else None
    step = TrainingStep(module, inputs, optimizer, scenario, allow_import)
    taken = []
    with ExitStack() as stack:
        stack.enter_context(modules_reported(module, recorder))
        stack.enter_context(nodes_reported(recorder, illusion))
        stack.enter_context(blocks_reported(module, [module, *repeated_blocks(module, scenario)], recorder))
        stack.enter_context(gradients_reported(list(module.parameters()), recorder, ledger))
        recorder.learn_reference_counts()
        stack.enter_context(target_at_work(scenario, module, lambda: recorder.phase))
        for number in range(1, steps + 1):
            with doing("tracing step", number, steps):
                step.run(recorder.begin_segment)
            mark_optimizer_states(optimizer, recorder)
            taken.append(recorder.take_step())
    return parameters, taken


def fake_twin(tensor: torch.Tensor, fake_mode: FakeTensorMode) -> torch.Tensor:
    with fake_mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")


def number_module(module: nn.Module, recorder: Recorder) -> list[Parameter]:
    """Number parameters, then buffers, then other tensors of the module: the order in which they are placed."""
    ledger, parameters = recorder.ledger, []
    for name, parameter in module.named_parameters():
        with torch._C.DisableTorchFunction():
            spec = recorder.table.spec(parameter, host=False)
        storage = ledger.add_persistent(parameter, StorageKind.PARAMETER)
        parameters.append(Parameter(name, spec, storage, parameter.requires_grad))
    for buffer in module.buffers():
        ledger.add_persistent(buffer, StorageKind.BUFFER)
    for submodule in module.modules():
        for value in submodule.__dict__.values():
            if isinstance(value, torch.Tensor):
                ledger.add_persistent(value, StorageKind.BUFFER)
    return parameters


def mark_optimizer_states(optimizer: torch.optim.Optimizer | None, recorder: Recorder) -> None:
    if optimizer is None:
        return
    for states in optimizer.state.values():
        for value in states.values():
            if isinstance(value, torch.Tensor):
                recorder.ledger.mark(value, StorageKind.OPTIMIZER_STATE)


def _with_few_micro_batches(scenario: Scenario) -> Scenario:
    count = min(scenario.training.gradient_accumulation, TRACED_MICRO_BATCHES)
    training = scenario.training.model_copy(update={"gradient_accumulation": count})
    return scenario.model_copy(update={"training": training})


def assemble(
    workload: dict[str, Any], recorder: Recorder, parameters: list[Parameter], taken: list[StepEvents]
) -> Trace:
    return Trace(
        workload=workload,
        provenance=_versions(),
        operations=tuple(recorder.table.operations),
        modules=recorder.modules,
        calls=recorder.calls.values(),
        nodes=recorder.nodes.values(),
        parameters=tuple(parameters),
        persistent=tuple(recorder.ledger.persistent),
        first=taken[0],
        steady=taken[-1],
        storage_kinds=dict(sorted(recorder.ledger.kinds.items())),
    )


def _versions() -> dict[str, str]:
    import sys

    found = {"torch": torch.__version__}
    if "transformers" in sys.modules:
        found["transformers"] = sys.modules["transformers"].__version__
    return found


@contextmanager
def cuda_environment(recorder: Recorder) -> Iterator[None]:
    policy = CudaAutocastPolicy()
    with ExitStack() as stack:
        stack.enter_context(policy.installed())
        stack.enter_context(cuda_composites())
        stack.enter_context(cuda_autocast(policy.clear_cache))
        stack.enter_context(cuda_defaults())
        stack.enter_context(devices_answered(recorder))
        stack.enter_context(sizes_in_range())
        yield


@contextmanager
def sizes_in_range() -> Iterator[None]:
    """Refuse tensors whose bytes are beyond torch's integers.

    Raises
    ------
    PerfModelError
        If there is one.
    """
    try:
        yield
    except RuntimeError as error:
        said = " ".join(str(error).split())
        if "overflow" not in said:
            raise
        raise PerfModelError(
            f"model: tensors must be smaller than 2^63 bytes (got {said}). Make batch.size, batch.sequence_length or "
            "the model smaller."
        ) from error


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Let storages die when their last user does: no cycle keeps them until a collection."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
