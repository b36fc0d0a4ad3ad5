"""Models of the user's own: ``package.module:callable``, imported only where the user has allowed it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from perfmodel.errors import PerfModelError, did_you_mean
from perfmodel.files.validation import shortened
from perfmodel.models.own_code import (
    compiled_code_refused,
    importing_from,
    lacks_fake_implementation,
    own_code,
    own_frames,
    text_of,
)

if TYPE_CHECKING:
    from perfmodel.scenario.scenario import ModelInput, Scenario

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in ("float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
}
MOST_NAMES = 8  # of a function's parameters in a sentence


def load_callable(where: str, reference: str, allow_import: bool, folder: Path | None = None) -> Callable[..., Any]:
    """Return what ``package.module:callable`` names.

    Parameters
    ----------
    where : str
        The key of the scenario that holds the reference.
    reference : str
    allow_import : bool
    folder : Path, optional
        Where the module is looked for first, but for modules that this process has imported already.

    Raises
    ------
    PerfModelError
        If importing was not allowed, the module does not import or is another than the one in ``folder``, or the
        reference does not name something callable.
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
    found = _imported(where, module_name, folder)
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


def _imported(where: str, module_name: str, folder: Path | None) -> Any:
    def remedy(error: BaseException) -> str:
        if not isinstance(error, ModuleNotFoundError):
            return "Mend the module."
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            return f"Install {error.name}, or put it on PYTHONPATH."
        return f"It was looked for in {_searched(folder)}: put it there, or its folder on PYTHONPATH."

    with own_code(lambda: f"{where}: {module_name} must import", remedy), importing_from(folder):
        found = importlib.import_module(module_name)
    if folder is not None:
        _refuse_namesake(where, module_name.partition(".")[0], folder)
    return found


def _searched(folder: Path | None) -> str:
    """Return where modules are looked for, without Python's own library."""
    own = Path(sys.base_prefix).resolve()
    others = [path for path in map(Path, filter(None, sys.path)) if path.is_dir() and own not in path.resolve().parents]
    return ", ".join(map(str, dict.fromkeys([*([folder] if folder else []), *others]))) or "no folder"


def _refuse_namesake(where: str, name: str, folder: Path) -> None:
    """Refuse a module of another folder that was imported before under the name of the one in ``folder``."""
    there = PathFinder.find_spec(name, [str(folder)])
    imported = getattr(sys.modules.get(name), "__spec__", None)
    if there is None or imported is None or there.origin is None or imported.origin is None:
        return
    if Path(there.origin).resolve() != Path(imported.origin).resolve():
        raise PerfModelError(
            f"{where}: {name} must be the one in {folder} (this process has imported {imported.origin} under that "
            "name). Rename one, or predict them in processes of their own."
        )


def build_target(scenario: Scenario, allow_import: bool) -> nn.Module:
    """Call the target with ``model.arguments``.

    Raises
    ------
    PerfModelError
        If it cannot be loaded, fails, or returns something other than a module.
    """
    model = scenario.model
    assert model.target is not None
    make = load_callable("model.target", model.target, allow_import, scenario.folder)
    given = ", ".join(f"{name}={shortened(value)}" for name, value in model.arguments.items())
    rule = f"model.target: {model.target} must build with model.arguments {given}".removesuffix(
        " with model.arguments "
    )
    with own_code(lambda: rule, lambda error: _remedy_of_building(error, make)), importing_from(scenario.folder):
        module = make(**model.arguments)
    if not isinstance(module, nn.Module):
        raise PerfModelError(
            f"model.target: {model.target} must return an nn.Module (got {type(module).__name__}). Return the model."
        )
    if scenario.mode == "train" and not any(parameter.requires_grad for parameter in module.parameters()):
        raise PerfModelError(
            f"model.target: {model.target} must have parameters to train (got none). Add some, or use mode forward."
        )
    if not model.inputs and next(module.parameters(), None) is None:
        raise PerfModelError(
            f"model.inputs must name what forward of {model.target}, which has no parameters, takes (got none). Add it."
        )
    return module


def _remedy_of_building(error: BaseException, make: Callable[..., Any]) -> str:
    if isinstance(error, TypeError) and not own_frames(error):
        return f"It takes {parameter_names(make)}."
    if "CUDA" in text_of(error) or "meta tensor" in text_of(error):
        return "Build the model where torch builds tensors by itself, without .cuda() or .to(): it is moved later."
    return "Mend the model, or model.arguments."


def parameter_names(function: Callable[..., Any]) -> str:
    """Return the names of a function's parameters."""
    try:
        names = [str(each).partition(":")[0].strip() for each in signature(function).parameters.values()]
    except (TypeError, ValueError):  # of some written in C
        return "what its documentation says"
    return ", ".join([*names[:MOST_NAMES], "..."] if len(names) > MOST_NAMES else names) or "no arguments"


@contextmanager
def target_at_work(scenario: Scenario, module: nn.Module, phase: Callable[[], str]) -> Iterator[None]:
    """Report failures of a model of the user's own in one sentence, around its steps; see :func:`own_code`.

    Parameters
    ----------
    scenario : Scenario
    module : nn.Module
    phase : callable
        Names the phase of the step that is running.

    Raises
    ------
    PerfModelError
        If the model or its loss fails, or runs compiled code.
    """
    target = scenario.model.target
    if target is None:
        yield
        return
    sizes = _sizes(scenario)
    given = ", ".join(
        f"{name} {each.dtype}{[sizes.get(size, size) for size in each.shape]}"
        for name, each in scenario.model.inputs.items()
    )

    def rule() -> str:
        return f"model.target: {target} must run {phase()} on model.inputs {given or 'of no name'}"

    def remedy(error: BaseException) -> str:
        if isinstance(error, TypeError) and f"{type(module).__name__}.forward()" in text_of(error):
            return f"Name model.inputs as its forward does: {parameter_names(module.forward)}."
        if lacks_fake_implementation(error):
            return (
                "Steps are traced without data, which this operator cannot be: use another, or give one of your own an "
                "implementation by torch.library.register_fake."
            )
        return "Mend the model, or model.inputs."

    with own_code(rule, remedy), compiled_code_refused(target):
        yield


def make_target_inputs(
    scenario: Scenario, device: torch.device, generator: torch.Generator | None
) -> dict[str, torch.Tensor]:
    """Return the keyword arguments of forward that ``model.inputs`` describes: uniform random numbers below ``high``.

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
    sizes = _sizes(scenario)
    shape: Any = [sizes.get(size, size) for size in given.shape]
    try:
        return _filled(name, shape, dtype, given, device, generator)
    except (RuntimeError, OverflowError, TypeError) as error:
        said = " ".join(str(error).split())
        raise PerfModelError(
            f"model.inputs.{name}.shape must be of a tensor that torch can make (got {shape}: {said}). Write smaller "
            "sizes."
        ) from error


def _filled(
    name: str,
    shape: list[int],
    dtype: torch.dtype,
    given: ModelInput,
    device: torch.device,
    generator: torch.Generator | None,
) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.empty(shape, dtype=dtype, device=device).uniform_(generator=generator)
    high = 2 if dtype is torch.bool else given.high
    if high is None:
        raise PerfModelError(
            f"model.inputs.{name}.high must be given for dtype {given.dtype}. Add the exclusive upper bound."
        )
    return torch.randint(high, shape, dtype=dtype, device=device, generator=generator)


def _sizes(scenario: Scenario) -> dict[int | str, int | None]:
    """Return the values of the symbols that shapes of inputs may hold."""
    return {"batch": scenario.batch.size, "sequence": scenario.batch.sequence_length}
