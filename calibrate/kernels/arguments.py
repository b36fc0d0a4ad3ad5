"""An operator call with real arguments: exact layouts, random data, saved tensors that belong together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from calibrate.kernels.argument_data import Fill, fill_for, scalar_for
from calibrate.kernels.saved_tensors import CPU_TWINS, SAVED, Saved
from perfmodel.cost.kernels.work import is_list
from perfmodel.errors import PerfModelError
from perfmodel.trace.operation import Argument, Operation, TensorSpec

Bound = dict[str, Argument]


@dataclass(frozen=True)
class Call:
    """A torch operator and its arguments; calling it runs it once."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]

    def __call__(self) -> Any:
        return self.function(*self.arguments, **self.keywords)


def resolve(name: str) -> Any:
    """torch's operator of that full name.

    Raises
    ------
    PerfModelError
        If this torch has no such operator.
    """
    found: Any = torch.ops
    for attribute in name.split("."):
        found = getattr(found, attribute, None)
    if not isinstance(found, torch._ops.OpOverload):
        raise PerfModelError(
            f"operator {name!r} must exist in torch {torch.__version__}. Trace with the torch you calibrate with."
        )
    return found


def materialise(operation: Operation, device: str) -> Call:
    """Make the arguments of ``operation`` on ``device`` (``cuda`` or ``cpu``; on ``cpu`` everything lies there).

    Tensors have the recorded shapes and strides (expanded ones too). Tensors that a forward operator saves for its
    backward are made by running that forward operator first.

    Raises
    ------
    PerfModelError
        If this torch has no such operator.
    """
    name, bound = operation.name, _bind(resolve(operation.name), operation)
    if device == "cpu" and operation.base_name in CPU_TWINS:
        twin = CPU_TWINS[operation.base_name]
        name, bound = twin.name, twin.arguments(bound)
    function = resolve(name)
    saved = SAVED.get(name.split(".")[1])
    same = operation.same if name == operation.name else ()  # a twin takes other arguments
    if saved is None:
        return _as_call(function, _shared(bound, _values(function, bound, device), same))
    values = _values(function, {key: bound[key] for key in bound if key not in saved.outputs}, device)
    return _as_call(function, _shared(bound, values | _saved_values(saved, function, bound, values), same))


def _bind(function: Any, operation: Operation) -> Bound:
    names = [argument.name for argument in function._schema.arguments]
    return dict(zip(names, operation.inputs, strict=False)) | dict(operation.keywords)


def _as_call(function: Any, values: dict[str, Any]) -> Call:
    positional: dict[str, Any] = {}
    for argument in function._schema.arguments:
        if argument.kwarg_only or argument.name not in values:
            break
        positional[argument.name] = values[argument.name]
    keywords = {name: value for name, value in values.items() if name not in positional}
    return Call(function, tuple(positional.values()), keywords)


def _values(function: Any, bound: Bound, device: str) -> dict[str, Any]:
    base_name = function._schema.name.split("::")[1]
    return {name: _value(base_name, name, value, bound, device) for name, value in bound.items()}


def _value(base_name: str, name: str, value: Argument, bound: Bound, device: str) -> Any:
    if isinstance(value, TensorSpec):
        return make_tensor(value, fill_for(base_name, name, 0, bound), device)
    if isinstance(value, tuple):
        items = [
            make_tensor(item, fill_for(base_name, name, i, bound), device)
            if isinstance(item, TensorSpec)
            else _plain(item, name, device)
            for i, item in enumerate(value)
        ]
        return scalar_for(base_name, name, items, bound) if items and isinstance(items[0], float) else items
    return scalar_for(base_name, name, _plain(value, name, device), bound)


def _shared(bound: Bound, values: dict[str, Any], same: tuple[int, ...]) -> dict[str, Any]:
    """Return the values, a tensor that is passed again in place of its repetitions.

    same: as :class:`Operation` has it.
    """
    if not same:
        return values
    made: list[Any] = []

    def first_of(spec: Argument, value: Any) -> Any:
        if not isinstance(spec, TensorSpec):
            return value
        made.append(value)
        first = made[same[len(made) - 1]]
        return value if first is None else first

    shared = dict(values)
    for name, spec in bound.items():
        if not is_list(spec):
            chosen = first_of(spec, values.get(name))
        else:
            given = values.get(name, [None] * len(spec))  # type: ignore[arg-type]
            chosen = [first_of(item, value) for item, value in zip(spec, given, strict=True)]  # type: ignore[arg-type]
        if name in values:
            shared[name] = chosen
    return shared


def _plain(value: Argument, name: str, device: str) -> Any:
    if not isinstance(value, str):
        return value
    if value.startswith("torch."):
        return getattr(torch, value.removeprefix("torch."))
    if name == "device":
        return torch.device(_place(value.split(":")[0], device))
    return value


def _place(recorded: str, device: str) -> str:
    return "cpu" if "cpu" in (recorded, device) else device


def make_tensor(spec: TensorSpec, fill: Fill, device: str) -> torch.Tensor:
    """Return a tensor of that layout on its own storage, which is filled whole, gaps between rows included."""
    extent = 1 + sum((n - 1) * s for n, s in zip(spec.shape, spec.stride, strict=True)) if spec.numel else 0
    flat = torch.empty(extent, dtype=getattr(torch, spec.dtype), device=_place(spec.device, device))
    if extent:
        fill(flat)
    return flat.as_strided(spec.shape, spec.stride)


def _saved_values(saved: Saved, backward: Any, bound: Bound, values: dict[str, Any]) -> dict[str, Any]:
    """Run the forward operator on the backward's own inputs and take what it saves."""
    forward = resolve(saved.forward)
    given = saved.constants | {
        argument.name: values[saved.renamed.get(argument.name, argument.name)]
        for argument in forward._schema.arguments
        if saved.renamed.get(argument.name, argument.name) in values
    }
    outputs = _as_call(forward, given)()
    wanted = {argument.name for argument in backward._schema.arguments}
    return {name: _laid_out(outputs[i], bound.get(name)) for name, i in saved.outputs.items() if name in wanted}


def _laid_out(value: Any, spec: Argument) -> Any:
    if not (isinstance(value, torch.Tensor) and isinstance(spec, TensorSpec)):
        return value
    if value.shape != spec.shape or value.stride() == spec.stride:
        return value
    return torch.empty_strided(spec.shape, spec.stride, dtype=value.dtype, device=value.device).copy_(value)
