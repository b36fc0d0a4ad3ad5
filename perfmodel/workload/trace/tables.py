"""Distinct things numbered as they appear: tensors, operators, names."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Generic, TypeVar

import torch

from perfmodel.workload.ops import Argument, Operation, TensorSpec
from perfmodel.workload.trace.illusion import is_on_host

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
        arguments = tuple([self.argument(value, host) for value in inputs])
        named = tuple([(key, self.argument(keywords[key], host)) for key in sorted(keywords)]) if keywords else ()
        made = tuple([self.spec(tensor, is_on_host(tensor)) for tensor in outputs])
        types = tuple([type(value) for value in arguments]) + tuple([type(value) for _, value in named])
        key = (name, arguments, named, made, runs_on_device, types)
        number = self._index.get(key)
        if number is None:
            number = self._index[key] = len(self.operations)
            self.operations.append(Operation(name, arguments, named, made, runs_on_device))
        return number
