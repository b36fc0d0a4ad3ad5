"""Losses of a training step: the model's own, cross entropy, or a function of the user's own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from perfmodel.errors import PerfModelError
from perfmodel.models.family import torch_family
from perfmodel.models.target import load_callable, parameter_names

if TYPE_CHECKING:
    from perfmodel.scenario.scenario import Scenario

Loss = Callable[[nn.Module, dict[str, torch.Tensor]], torch.Tensor]


def loss_of_step(scenario: Scenario, allow_import: bool) -> Loss:
    """Return the loss of the scenario's step, a function of the module and its inputs.

    Raises
    ------
    PerfModelError
        If it is the user's own and cannot be loaded or called, or if it needs labels that are no input. The function
        raises one where what it gets or gives is nothing that backward can begin with.
    """
    family = scenario.model.family
    if family is not None:
        return _loss_of_output if torch_family(family).has_loss else _cross_entropy
    if scenario.model.loss == "output.loss":
        return partial(_checked, scenario, partial(_loss_of_target, scenario))
    if scenario.model.loss == "cross_entropy":
        _check_labels(scenario)
        return partial(_checked, scenario, partial(_cross_entropy_of_target, scenario))
    return partial(_checked, scenario, _load(scenario, allow_import))


def _load(scenario: Scenario, allow_import: bool) -> Loss:
    reference = scenario.model.loss
    loss: Loss = load_callable("model.loss", reference, allow_import, scenario.folder)
    with suppress(ValueError):  # some functions written in C have no signature
        try:
            signature(loss).bind(None, {})
        except TypeError as error:
            raise PerfModelError(
                f"model.loss: {reference} must take the module and its inputs (it takes {parameter_names(loss)}). "
                "Write it as loss(module, inputs)."
            ) from error
    return loss


def _checked(scenario: Scenario, compute: Loss, module: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return a loss of the user's own, if backward can begin with it."""
    where, loss = f"model.loss: {scenario.model.loss}", compute(module, inputs)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise PerfModelError(f"{where} must give one number (got {_kind(loss)}). Reduce it, for example by mean().")
    if not loss.requires_grad:
        raise PerfModelError(
            f"{where} must depend on parameters that are trained (it does not: nothing of it requires gradients). "
            "Compute it from what forward returns, outside of torch.no_grad()."
        )
    return loss


def _kind(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return type(value).__name__


def _loss_of_output(module: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return module(**inputs).loss


def _loss_of_target(scenario: Scenario, module: nn.Module, inputs: dict[str, torch.Tensor]) -> Any:
    output = module(**inputs)
    if not hasattr(output, "loss"):
        raise PerfModelError(
            f"model.loss: output.loss must be in what {scenario.model.target} returns (got {_kind(output)}). Return an "
            "object that has it, or name another loss: cross_entropy, or package.module:function, which is called with "
            "module and inputs."
        )
    return output.loss


def _cross_entropy(module: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the mean cross entropy of the module's output (or its ``logits``) and ``labels``, tokens flattened."""
    logits = module(**{name: value for name, value in inputs.items() if name != "labels"})
    return _cross_entropy_with(getattr(logits, "logits", logits), inputs["labels"])


def _cross_entropy_of_target(scenario: Scenario, module: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    output = module(**{name: value for name, value in inputs.items() if name != "labels"})
    logits = getattr(output, "logits", output)
    if not isinstance(logits, torch.Tensor):
        raise PerfModelError(
            f"model.loss: cross_entropy must be given a tensor, or an object with logits, by {scenario.model.target} "
            f"(got {_kind(output)}). Return the tensor alone, or name a loss of your own, package.module:function, "
            "which is called with module and inputs."
        )
    return _cross_entropy_with(logits, inputs["labels"])


def _cross_entropy_with(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    if logits.dim() > 2:
        logits, labels = logits.view(-1, logits.shape[-1]), labels.view(-1)
    return nn.functional.cross_entropy(logits, labels)


def _check_labels(scenario: Scenario) -> None:
    if "labels" not in scenario.model.inputs:
        names = ", ".join(scenario.model.inputs) or "none"
        raise PerfModelError(
            f"model.inputs must have labels for model.loss cross_entropy (got {names}). Add them, or name another loss."
        )
