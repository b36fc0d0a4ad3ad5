"""Tracing of one stage of a pipeline: what torch's PipelineStage computes of two micro-batches, without messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import pipelining
from torch.distributed.pipelining import _backward

from perfmodel.models.build import build_module, make_inputs, repeated_blocks, replace_tensors
from perfmodel.models.precision import AUTOCAST_DTYPES
from perfmodel.models.stages import boundary_tensors, cut, loss_of
from perfmodel.models.step import Mark, make_optimizer, update
from perfmodel.progress import doing
from perfmodel.scenario.families import FAMILIES
from perfmodel.scenario.stage_split import blocks_of_stages, micro_batch_size, pipeline_of
from perfmodel.trace.store import check_stage, stage_workload
from perfmodel.trace.trace import Boundary, BoundaryTensor, Parameter, StepEvents, StorageKind, Trace
from perfmodel.tracing.autograd import blocks_reported, gradients_reported, modules_reported, nodes_reported
from perfmodel.tracing.fake_cuda import FakeCudaMode, patched
from perfmodel.tracing.recorder import Recorder
from perfmodel.tracing.step import (
    TRACED_MICRO_BATCHES,
    assemble,
    cuda_environment,
    fake_twin,
    mark_optimizer_states,
    no_garbage_collection,
    number_module,
)

if TYPE_CHECKING:
    from perfmodel.scenario.scenario import Scenario

CPU = torch.device("cpu")  # of fake tensors


def trace_stage(scenario: Scenario, number: int, split: bool = False) -> Trace:
    """Trace what stage ``number`` of the scenario's pipeline computes in its first and in a later step.

    Phases: zero_grad (-1), then forward (i) and backward (i) of two micro-batches, scale (-1), optimizer (-1);
    ``split`` has backward_input (i) and backward_weight (i) in place of backward (i). The second micro-batch is what
    all later ones run. A pipeline of one micro-batch runs neither the second nor scale.

    Parameters
    ----------
    scenario : Scenario
        With ``parallelism.pp`` and ``mode: train``.
    number : int
        From 0: of torch's stages, in the model's order.
    split : bool
        Whether gradients of the input and of the weights are computed apart, as zero-bubble schedules do.

    Returns
    -------
    Trace
        With a boundary. Blocks are named as if the stage's first one were the model's first. Before the first step
        there are parameters, buffers, tokens or labels of two micro-batches in one storage, and the buffers that torch
        receives into: one for each micro-batch of activations, then of gradients.

    Raises
    ------
    PerfModelError
        If the model cannot be cut or built, or if there is no such stage.

    Notes
    -----
    Nothing is sent: a tensor is free where the stage itself lets it go. Schedules keep some longer: what is on its way
    until the send has been waited for, and GPipe and 1F1B the last output until the next forward has ended or the step
    has. What of a micro-batch outlives its backward even so: gradients of the parameters; the loss, until ``scale``;
    and with ``split``, but in the first stage, the gradient of the input, which torch keeps until the next step begins.
    """
    check_stage(scenario, number)
    with no_garbage_collection():
        with torch.device("meta"):
            module: Any = cut(build_module(scenario), scenario)[number]
        workload = stage_workload(scenario, blocks_of_stages(scenario), number, split)
        count_from_zero(module, scenario)
        recorder = Recorder(tuple((name, type(each).__name__) for name, each in module.named_modules()))
        fake_mode = FakeTensorMode()
        replace_tensors(module, lambda tensor: fake_twin(tensor, fake_mode))
        stage = make_stage(module, scenario, number, fake_mode)
        with cuda_environment(recorder), fake_mode, recorder, FakeCudaMode(recorder) as illusion:
            traced = _trace(stage, scenario, split, recorder, illusion)
        recorder.ledger.close()
    parameters, taken, boundary = traced
    return replace(assemble(workload, recorder, parameters, taken), boundary=boundary)


def count_from_zero(module: Any, scenario: Scenario) -> None:
    """Name the blocks by their place in the stage, so that traces of stages that run the same are the same."""
    (name,) = FAMILIES[scenario.model.family or ""].blocks
    holder = module.get_submodule(name)
    holder._modules = {str(index): block for index, block in enumerate(holder.children())}


def make_stage(module: Any, scenario: Scenario, number: int, making: AbstractContextManager[Any]) -> Any:
    """Return torch's stage as a schedule prepares it.

    ``making`` is entered where the buffers that the stage receives into are made.
    """
    boundary, count = boundary_tensors(module, scenario), pipeline_of(scenario).number_of_stages
    return prepared_stage(module, number, count, CPU, *boundary, making)


def prepared_stage(
    module: Any,
    number: int,
    count: int,
    device: torch.device,
    takes: torch.Tensor,
    gives: torch.Tensor,
    making: AbstractContextManager[Any],
) -> Any:
    """Return torch's stage ``number`` of ``count``, as a schedule prepares it for two micro-batches.

    ``takes`` and ``gives`` are tensors like what it takes and gives for one micro-batch.
    """
    distributed = torch.distributed
    with (  # a stage asks for its place among the ranks, which decides nothing that it computes
        patched(distributed, "get_rank", lambda group=None: 0),
        patched(distributed, "get_world_size", lambda group=None: 1),
    ):
        stage: Any = pipelining.PipelineStage(module, number, count, device, input_args=takes, output_args=gives)
    stage.has_backward = True
    options = {}
    if hasattr(stage, "_inference_mode"):  # since torch 2.12
        from torch.distributed.pipelining._utils import InferenceMode

        stage._inference_mode = InferenceMode.STATIC
        options["has_backward"] = True
    with making:
        stage._prepare_forward_infra(TRACED_MICRO_BATCHES, (), {}, **options)
        stage._prepare_backward_infra(TRACED_MICRO_BATCHES)
    return stage


def _trace(
    stage: Any, scenario: Scenario, split: bool, recorder: Recorder, illusion: FakeCudaMode
) -> tuple[list[Parameter], list[StepEvents], Boundary]:
    module: Any = stage.submod
    parameters = number_module(module, recorder)
    inputs = _inputs(module, scenario)
    received = [[infos[0].buffer for infos in table.values()] for table in _receiving(stage)]
    for tensor in [*inputs.values(), *received[0], *received[1]]:
        recorder.ledger.add_persistent(tensor, StorageKind.INPUT)
    step = _StageStep(stage, inputs, scenario, split, recorder)
    taken = []
    with ExitStack() as stack:
        stack.enter_context(modules_reported(module, recorder))
        stack.enter_context(nodes_reported(recorder, illusion))
        stack.enter_context(blocks_reported(module, [module, *repeated_blocks(module, scenario)], recorder))
        stack.enter_context(gradients_reported(list(module.parameters()), recorder, recorder.ledger))
        if split:
            stack.enter_context(_ordered_groups())
        recorder.learn_reference_counts()
        for number in (1, 2):
            with doing("tracing step", number, 2):
                step.run(recorder.begin_segment)
            mark_optimizer_states(step.optimizer, recorder)
            taken.append(recorder.take_step())
    return parameters, taken, step.boundary(*received)


def _inputs(module: Any, scenario: Scenario) -> dict[str, torch.Tensor]:
    """Return the inputs of two micro-batches: tokens in the first stage, labels in the last."""
    size = TRACED_MICRO_BATCHES * micro_batch_size(scenario)
    batch = scenario.batch.model_copy(update={"size": size})
    made = make_inputs(scenario.model_copy(update={"batch": batch}), "cuda")
    wanted = {"input_ids": module.is_first, "labels": module.is_last}
    return {name: made[name] for name, is_wanted in wanted.items() if is_wanted}


def _receiving(stage: Any) -> tuple[dict[int, Any], dict[int, Any]]:
    return {} if stage.is_first else stage.args_recv_info, {} if stage.is_last else stage.grad_recv_info


class _StageStep:
    """One step after another of a stage alone; see :func:`trace_stage`."""

    def __init__(
        self, stage: Any, inputs: dict[str, torch.Tensor], scenario: Scenario, split: bool, recorder: Recorder
    ) -> None:
        self._stage, self._split, self._recorder = stage, split, recorder
        self._parameters = list(stage.submod.parameters())
        self.optimizer = make_optimizer(self._parameters, scenario)
        self._tokens, self._labels = [
            inputs[name].tensor_split(TRACED_MICRO_BATCHES) if name in inputs else None
            for name in ("input_ids", "labels")
        ]
        self._criterion = loss_of(scenario)
        self._autocast = AUTOCAST_DTYPES.get(scenario.precision)
        self._losses: list[torch.Tensor] = []
        self._given: dict[str, list[tuple[Any, int]]] = {"output": [], "gradient": []}

    def run(self, mark: Mark) -> None:
        mark("zero_grad", -1)
        self.optimizer.zero_grad(set_to_none=True)
        self._stage.clear_runtime_states()
        for micro_batch in range(TRACED_MICRO_BATCHES):
            mark("forward", micro_batch)
            self._forward(micro_batch)
            self._backward(micro_batch, mark)
        mark("scale", -1)
        self._losses.clear()
        self._stage.perform_reduce_grad(TRACED_MICRO_BATCHES)
        update(self.optimizer, None, None, mark)
        mark("end", -1)

    def _forward(self, micro_batch: int) -> None:
        tokens = () if self._tokens is None else (self._tokens[micro_batch],)
        output = self._stage.forward_one_chunk(micro_batch, tokens, {}, save_forward_output=False)
        self._note("output", output)
        if self._labels is not None:
            with nullcontext() if self._autocast is None else torch.autocast("cuda", self._autocast):
                self._losses.append(self._criterion(output, self._labels[micro_batch]))

    def _backward(self, micro_batch: int, mark: Mark) -> None:
        loss = self._losses[micro_batch] if self._losses else None
        is_last = micro_batch == TRACED_MICRO_BATCHES - 1
        if not self._split:
            mark("backward", micro_batch)
            self._stage.backward_one_chunk(micro_batch, loss=loss, last_backward=is_last)
            self._send_back(micro_batch)
            return
        mark("backward_input", micro_batch)
        self._stage.backward_one_chunk(micro_batch, loss=loss, full_backward=False)
        self._send_back(micro_batch)
        mark("backward_weight", micro_batch)
        self._stage.backward_weight_one_chunk(micro_batch, last_backward=is_last)
        if not self._stage.is_first:  # whose gradients the engine accumulates
            self._report_gradients()

    def _send_back(self, micro_batch: int) -> None:
        """Take the input's gradient from the stage, as whoever sends it does."""
        if not self._stage.is_first:
            (gradient,) = self._stage.get_local_bwd_output(micro_batch)
            self._note("gradient", gradient)

    def _report_gradients(self) -> None:
        """All are ready now; in the order in which ``gradient_storages`` finds out whose storage is whose."""
        ledger = self._recorder.ledger
        ready = [
            (ledger.find(parameter.grad), index)
            for index, parameter in enumerate(self._parameters)
            if parameter.grad is not None
        ]
        for _, index in sorted(ready, reverse=True):
            gradient: Any = self._parameters[index].grad
            ledger.mark(gradient, StorageKind.GRADIENT)
            self._recorder.gradient_ready(index)

    def _note(self, name: str, tensor: torch.Tensor) -> None:
        with torch._C.DisableTorchFunction():
            spec = self._recorder.table.spec(tensor, host=False)
        storage = self._recorder.ledger.find(tensor)
        assert storage is not None
        self._given[name].append((spec, storage))

    def boundary(self, takes: list[torch.Tensor], takes_gradient: list[torch.Tensor]) -> Boundary:
        """Return the boundary; the buffers are those that torch receives activations and gradients into."""
        output = _noted_tensors(self._given["output"])
        return Boundary(
            takes=self._received(takes),
            gives=None if self._stage.is_last else output,
            takes_gradient=self._received(takes_gradient),
            gives_gradient=_noted_tensors(self._given["gradient"]) if self._given["gradient"] else None,
            output=output,
        )

    def _received(self, buffers: list[torch.Tensor]) -> BoundaryTensor | None:
        if not buffers:
            return None
        with torch._C.DisableTorchFunction():
            spec = self._recorder.table.spec(buffers[0], host=False)
        storages: Any = tuple(self._recorder.ledger.find(buffer) for buffer in buffers)
        return BoundaryTensor(spec, storages, storages)


def _noted_tensors(given: list[tuple[Any, int]]) -> BoundaryTensor:
    """Return the tensors that were noted in two steps."""
    storages = [storage for _, storage in given]
    first, steady = storages[:TRACED_MICRO_BATCHES], storages[TRACED_MICRO_BATCHES:]
    return BoundaryTensor(given[0][0], tuple(first), tuple(steady))


@contextmanager
def _ordered_groups() -> Iterator[None]:
    """Let torch go through its groups of parameters in their order, where it goes through sets, in any."""
    find: Callable[..., Any] = _backward.get_param_groups

    def get_param_groups(inputs: Any, params: Any, reverse_edges: Any) -> Any:
        groups = find(inputs, params, reverse_edges)
        for group in groups:
            group["params"] = [each for each in params if each in group["params"]]
            group["intermediates"] = [each for each in reverse_edges if each in group["intermediates"]]
        return groups

    with patched(_backward, "get_param_groups", get_param_groups):
        yield
