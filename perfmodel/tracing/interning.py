"""Distinct things numbered as they appear: tensors, operators, names."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any, Generic, TypeVar

import torch

from perfmodel.trace.operation import Argument, Operation, TensorSpec
from perfmodel.tracing.fake_cuda import is_on_host

T = TypeVar("T", bound=Hashable)


class Table(Generic[T]):
    """Values in order of first appearance."""

    def __init__(self) -> None:
        self._index: dict[T, int] = {}

    def add(self, value: T) -> int:
        return self._index.setdefault(value, len(self._index))

    def values(self) -> tuple[T, ...]:
        return tuple(self._index)


class OperationTable:
    """Numbers operator calls and turns live tensors and arguments into their descriptions."""

    def __init__(self) -> None:
        self._specs: dict[Any, TensorSpec] = {}
        self._index: dict[Any, int] = {}
        self._dtypes: dict[torch.dtype, str] = {}
        self.operations: list[Operation] = []

    def spec(self, tensor: torch.Tensor, host: bool) -> TensorSpec:
        key = (tensor.dtype, tensor.shape, tensor.stride(), host)
        spec = self._specs.get(key)
        if spec is None:
            dtype = str(tensor.dtype).removeprefix("torch.")
            spec = TensorSpec(tuple(tensor.shape), tuple(tensor.stride()), dtype, "cpu" if host else "cuda")
            self._specs[key] = spec
        return spec

    def argument(self, value: Any, host: bool) -> Argument:
        if isinstance(value, torch.Tensor):
            return self.spec(value, is_on_host(value))
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, (list, tuple)):
            return tuple([self.argument(item, host) for item in value])
        if isinstance(value, torch.device):
            return "cpu" if host and value.type == "cpu" else "cuda"
        return str(value)

    def add(self, name: str, inputs: Any, keywords: Any, outputs: Any, host: bool, runs_on_device: bool) -> int:
        """Number the call. Scalars of equal value and different type (1, 1.0, True) stay different calls."""
        same = repeated_tensors(inputs, keywords) if runs_on_device else ()
        arguments = tuple([self.argument(value, host) for value in inputs])
        named = tuple([(key, self.argument(keywords[key], host)) for key in sorted(keywords)]) if keywords else ()
        made = tuple([self.spec(tensor, is_on_host(tensor)) for tensor in outputs])
        types = tuple([type(value) for value in arguments]) + tuple([type(value) for _, value in named])
        key = (name, arguments, named, made, runs_on_device, types, same)
        number = self._index.get(key)
        if number is None:
            number = self._index[key] = len(self.operations)
            self.operations.append(Operation(name, arguments, named, made, runs_on_device, same))
        return number


def repeated_tensors(inputs: Any, keywords: Any) -> tuple[int, ...]:
    """Return for each tensor of a call the first that is the same view of the same storage; () if all differ."""
    first: dict[Any, int] = {}
    named = tuple([keywords[key] for key in sorted(keywords)]) if keywords else ()
    tensors = [item for item in flat((inputs, named)) if isinstance(item, torch.Tensor)]
    same = tuple([first.setdefault(_identity(tensor), i) for i, tensor in enumerate(tensors)])
    return same if len(first) < len(same) else ()


def _identity(tensor: torch.Tensor) -> Any:
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def flat(value: Any) -> Iterator[Any]:
    """Yield the items of nested lists and tuples."""
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from flat(item)
    else:
        yield value
