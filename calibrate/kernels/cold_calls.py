"""A call that finds nothing in the cache: its inputs rotate through copies and its outputs through fresh blocks.

In a step, most tensors of some megabytes have left the cache before they are used again; a call that is repeated alone
finds all of them. Copies hold the same data at other addresses.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from calibrate.kernels.arguments import Call
from perfmodel.trace.operation import Operation

TIMES_CACHE = 3.0  # the footprint of one round, in caches
LEAST_BYTES = 100_000  # what moves less spends its time otherwise
MOST_BYTES = 2_000_000_000
MOST_TENSORS = 20_000  # of all copies together: each takes the host a few microseconds
ALIGNMENT = 512  # of tensors as the caching allocator places them


def addressed_bytes(operation: Operation) -> int:
    """Return bytes that a call's tensors on the device address; what is overwritten in place counts once."""
    written = () if operation.base_name.endswith("_") else operation.outputs
    tensors = [*operation.distinct_inputs(), *written]
    return sum(spec.touched_bytes for spec in tensors if spec.device != "cpu")


def rounds_needed(operation: Operation, cache_bytes: int) -> int:
    """Copies after which a round of calls has passed ``TIMES_CACHE`` caches; 1 where cold and warm are one.

    They are where a single call passes as much, where it moves next to nothing, and where copies would be too many.
    """
    size = addressed_bytes(operation)
    if size < LEAST_BYTES or size > TIMES_CACHE * cache_bytes:
        return 1
    rounds = math.ceil(TIMES_CACHE * cache_bytes / size) + 1
    tensors = len(operation.input_tensors()) + len(operation.outputs)
    too_many = rounds * size > MOST_BYTES or rounds * tensors > MOST_TENSORS
    return 1 if too_many else rounds


class ColdCall:
    """``call`` with the next of ``rounds`` sets of arguments each time, holding the results of the last round."""

    def __init__(self, call: Call, rounds: int, device: str = "cuda") -> None:
        copies = _copies(call, rounds, device)
        self._calls = [
            Call(call.function, _replaced(call.arguments, chosen), _replaced(call.keywords, chosen))
            for chosen in _sets(copies, rounds)
        ]
        self._results: deque[Any] = deque(maxlen=rounds)
        self._next = 0
        for _ in range(rounds):
            self()

    def __call__(self) -> None:
        if len(self._results) == self._results.maxlen:
            self._results.popleft()
        self._results.append(self._calls[self._next]())
        self._next = (self._next + 1) % len(self._calls)


Copies = dict[int, list[torch.Tensor]]


def _copies(call: Call, rounds: int, device: str) -> Copies:
    """Copies of every tensor that lies on the device, by its identity."""
    found: Copies = {}
    for tensor in _tensors((call.arguments, call.keywords)):
        if tensor.device.type == device and id(tensor) not in found:
            found[id(tensor)] = _copies_of(tensor, rounds)
    return found


def _copies_of(tensor: torch.Tensor, rounds: int) -> list[torch.Tensor]:
    """Return copies of a tensor: itself first, then views of one buffer that are laid out as it is."""
    if not tensor.numel():
        return [tensor] * rounds
    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    flat = tensor.as_strided((extent,), (1,))
    granule = ALIGNMENT // math.gcd(ALIGNMENT, tensor.element_size())
    row = math.ceil(extent / granule) * granule
    buffer = torch.empty((rounds - 1, row), dtype=tensor.dtype, device=tensor.device)
    buffer[:, :extent] = flat
    return [tensor, *(buffer.as_strided(tensor.shape, tensor.stride(), i * row) for i in range(rounds - 1))]


def _sets(copies: Copies, rounds: int) -> Iterator[dict[int, torch.Tensor]]:
    for i in range(rounds):
        yield {identity: tensors[i] for identity, tensors in copies.items()}


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _replaced(value: Any, chosen: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return chosen.get(id(value), value)
    if isinstance(value, dict):
        return {name: _replaced(item, chosen) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_replaced(item, chosen) for item in value)
    return value
