"""Models of the user's own: ``package.module:callable``, imported only where the user has allowed it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from perfmodel.errors import PerfModelError, did_you_mean

if TYPE_CHECKING:
    from perfmodel.workload.scenario import ModelInput, Scenario

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in ("float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
}


def load_callable(where: str, reference: str, allow_import: bool) -> Callable[..., Any]:
    """What ``package.module:callable`` names.

    Raises
    ------
    PerfModelError
        If importing was not allowed, or the reference does not name something callable.
    """
    if not allow_import:
        raise PerfModelError(
            f"{where}: {reference} runs code of your own, which must be allowed (it was not). Add --allow-import."
        )
    module_name, separator, attribute = reference.partition(":")
    if not (module_name and separator and attribute):
        raise PerfModelError(
            f"{where} must read package.module:callable (got {reference!r}). Separate module and name by a colon."
        )
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        raise PerfModelError(
            f"{where}: {module_name} must import ({type(error).__name__}: {error}). Check PYTHONPATH and the module."
        ) from error
    for name in attribute.split("."):
        if not hasattr(found, name):
            inside = getattr(found, "__dict__", {})
            known = [known for known, value in inside.items() if callable(value) and known[0] != "_"]
            raise PerfModelError(
                f"{where}: {module_name} must define {attribute} (it does not). {did_you_mean(name, known)}"
            )
        found = getattr(found, name)
    if not callable(found):
        raise PerfModelError(
            f"{where}: {reference} must be callable (got {type(found).__name__}). Name a function or class."
        )
    loaded: Callable[..., Any] = found
    return loaded


def build_target(scenario: Scenario, allow_import: bool) -> nn.Module:
    """Call the target with ``model.arguments``.

    Raises
    ------
    PerfModelError
        If it cannot be loaded, fails, or returns something other than a module.
    """
    model = scenario.model
    assert model.target is not None
    make = load_callable("model.target", model.target, allow_import)
    try:
        module = make(**model.arguments)
    except Exception as error:
        raise PerfModelError(
            f"model.target: {model.target} must accept model.arguments ({type(error).__name__}: {error}). Check them."
        ) from error
    if not isinstance(module, nn.Module):
        raise PerfModelError(
            f"model.target: {model.target} must return an nn.Module (got {type(module).__name__}). Return the model."
        )
    return module


def make_target_inputs(
    scenario: Scenario, device: torch.device, generator: torch.Generator | None
) -> dict[str, torch.Tensor]:
    """The keyword arguments of forward as ``model.inputs`` describes them: uniform random numbers below ``high``.

    Raises
    ------
    PerfModelError
        If a dtype is unknown or an integer input names no ``high``.
    """
    return {name: _make(name, given, scenario, device, generator) for name, given in scenario.model.inputs.items()}


def _make(
    name: str, given: ModelInput, scenario: Scenario, device: torch.device, generator: torch.Generator | None
) -> torch.Tensor:
    dtype = DTYPES.get(given.dtype)
    if dtype is None:
        raise PerfModelError(
            f"model.inputs.{name}.dtype must be a torch dtype (got {given.dtype!r}). "
            f"{did_you_mean(given.dtype, DTYPES)}"
        )
    sizes = {"batch": scenario.batch.size, "sequence": scenario.batch.sequence_length}
    shape: Any = [sizes[part] if isinstance(part, str) else part for part in given.shape]
    if dtype.is_floating_point:
        return torch.empty(shape, dtype=dtype, device=device).uniform_(generator=generator)
    high = 2 if dtype is torch.bool else given.high
    if high is None:
        raise PerfModelError(
            f"model.inputs.{name}.high must be given for dtype {given.dtype}. Add the exclusive upper bound."
        )
    return torch.randint(high, shape, dtype=dtype, device=device, generator=generator)
