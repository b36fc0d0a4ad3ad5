"""The step of one stage of a pipeline, alone and for real, and the two halves into which its backward may be split."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from calibrate.host.reference import synchronize
from calibrate.host.stubs import borrowed_leaves
from calibrate.timing.host_stopwatch import Seen, Work, observe, timed
from perfmodel.models.build import build_module, make_inputs
from perfmodel.models.stages import boundary_tensors, cut, loss_of
from perfmodel.models.step import Mark, TrainingStep
from perfmodel.scenario.scenario import Scenario
from perfmodel.trace.phases import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT
from perfmodel.tracing.stage import count_from_zero

HALVES = (BACKWARD_INPUT, BACKWARD_WEIGHT)
GIVEN, LABELS = "x", "labels"


def layers_around(stage: dict[str, Any], checkpointing: Any, most_blocks: int | None = None) -> tuple[int, ...]:
    """Return the repeated blocks of a stage, between those that must be before and behind it for it to be that stage.

    Parameters
    ----------
    stage : dict
        The section ``part`` of a workload, see :func:`~perfmodel.trace.store.stage_workload`.
    checkpointing
        Activation checkpointing of its training.
    most_blocks : int, optional
        Blocks of the stage to keep; by default, all.

    >>> layers_around({"blocks": [1, 9], "is_first": False, "is_last": True}, {"every": 2}, most_blocks=2)
    (1, 2)
    """
    first, blocks = stage["blocks"]
    every = checkpointing["every"] if isinstance(checkpointing, dict) else 1
    before = () if stage["is_first"] else (first or every,)
    behind = () if stage["is_last"] else (1,)
    return (*before, min(blocks, most_blocks or blocks), *behind)


def build_stage(scenario: Scenario, is_first: bool) -> Any:
    """Return the stage on the default device, its blocks named as its trace has them.

    scenario: with a pipeline of :func:`layers_around` it.
    """
    stage = cut(build_module(scenario), scenario)[0 if is_first else 1]
    count_from_zero(stage, scenario)
    return stage


def stage_inputs(stage: Any, scenario: Scenario, device: str) -> dict[str, torch.Tensor]:
    """Return ``x``, which the stage takes of a micro-batch, and the labels if it is the last."""
    made = make_inputs(scenario, device)
    found = {LABELS: made["labels"]} if stage.is_last else {}
    if stage.is_first:
        return found | {GIVEN: made["input_ids"]}
    takes, _ = boundary_tensors(stage, scenario)
    return found | {GIVEN: torch.randn(takes.shape, dtype=takes.dtype, device=device).requires_grad_()}


class StageStep(TrainingStep):
    """Forward, and the loss if there are labels, and backward of one micro-batch, as a stage runs them, without the
    stage. halves: backward is that of the inputs, then that of the weights.
    """

    def __init__(
        self,
        module: nn.Module,
        inputs: dict[str, torch.Tensor],
        optimizer: torch.optim.Optimizer | None,
        scenario: Scenario,
        halves: bool,
    ) -> None:
        super().__init__(module, inputs, optimizer, scenario)
        self._criterion, self._halves = loss_of(scenario), halves
        self._gradient: torch.Tensor | None = None
        self._output: torch.Tensor | None = None
        self.loss = self._result

    def _result(self, module: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        output: torch.Tensor = module(x=inputs[GIVEN])
        self._output = output
        return self._criterion(output, inputs[LABELS]) if LABELS in inputs else output

    def _run_micro_batch(self, micro_batch: int, mark: Mark) -> None:
        assert self.loss is not None
        mark("forward", micro_batch)
        with self._autocast():
            result = self.loss(self.module, self.inputs)
        if result.dim() and self._gradient is None:
            self._gradient = torch.ones_like(result)
        if not self._halves:
            mark(BACKWARD, micro_batch)
            torch.autograd.backward(result, self._gradient)
            return
        inputs, parameters = borrowed_leaves([result]), list(self.module.parameters())
        if not inputs:  # a module that only hands out its output, which leads no further
            inputs, parameters = [self._output], []
        mark(BACKWARD_INPUT, micro_batch)
        groups = backward_input([result], [self._gradient], inputs, parameters)
        mark(BACKWARD_WEIGHT, micro_batch)
        stage_backward_weight(iter(parameters), groups)


def backward_input(
    roots: list[torch.Tensor], gradients: list[Any], inputs: list[torch.Tensor], parameters: Iterable[nn.Parameter]
) -> list[dict[str, Any]]:
    """torch's first half. Returns what the second one needs; the roots lose their history.

    Nothing is to be done without inputs, which torch 2.11 refuses.
    """
    if not inputs:
        return []
    roots = [root.clone() if root.is_leaf or root._is_view() else root for root in roots]  # others lose it in place
    groups: list[dict[str, Any]]
    _, groups = stage_backward_input(roots, gradients, inputs, iter(parameters))
    return groups


def time_halves(roots: list[torch.Tensor], parameters: list[nn.Parameter], device: str) -> dict[str, float]:
    """Return seconds of the halves of one backward over these (``roots`` is emptied)."""
    gradients, inputs = [torch.ones_like(root) for root in roots], borrowed_leaves(roots)
    synchronize(device)

    def first() -> list[dict[str, Any]]:
        groups = backward_input(roots, gradients, inputs, parameters)
        roots.clear()
        return groups

    input_s, groups = timed(first)
    synchronize(device)
    weight_s, _ = timed(lambda: stage_backward_weight(iter(parameters), groups))
    return {BACKWARD_INPUT: input_s, BACKWARD_WEIGHT: weight_s}


def observe_halves(
    function: Callable[[], Any], parameters: list[nn.Parameter], keeps_calls: bool
) -> tuple[Seen, dict[str, list[Work]]]:
    """Run it once, and the halves of its backward, under observation. Returns also what the nodes of each did."""
    works: dict[str, list[Work]] = {half: [] for half in HALVES}

    def run(roots: list[torch.Tensor], seen: Seen) -> None:
        gradients, inputs = [torch.ones_like(root) for root in roots], borrowed_leaves(roots)
        groups = backward_input(roots, gradients, inputs, parameters)
        works[BACKWARD_INPUT] = [work for _, work in seen.nodes]
        stage_backward_weight(iter(parameters), groups)
        works[BACKWARD_WEIGHT] = [work for _, work in seen.nodes[len(works[BACKWARD_INPUT]) :]]

    return observe(function, True, keeps_calls, one_root=False, run_backward=run), works
