"""The operators that fully_shard copies with, in the form in which torch calls them.

Source: torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from perfmodel.trace.operation import Operation, TensorSpec, contiguous_stride


def split_copy(whole: TensorSpec, parameters: Sequence[TensorSpec], ranks: int) -> Operation:
    """Return the copy of the gathered buffer, one row a rank, into each unsharded parameter."""
    out = tuple(_by_rank(parameter, ranks) for parameter in parameters)
    inputs = (_by_rank(whole, ranks), tuple(each.shape[1] for each in out), 1)
    return Operation("aten.split_with_sizes_copy.out", inputs, (("out", out),), out)


def chunk_cat(gradients: tuple[TensorSpec, ...], whole: TensorSpec, ranks: int) -> Operation:
    """Return the copy of gradients into the buffer that is reduced, one row a rank."""
    out = _by_rank(whole, ranks)
    return Operation("aten._chunk_cat.out", (gradients, 0, ranks), (("out", out),), (out,))


def _by_rank(tensor: TensorSpec, ranks: int) -> TensorSpec:
    shape = (ranks, tensor.numel // ranks)
    return TensorSpec(shape, contiguous_stride(shape), tensor.dtype)


def foreach_copy(into: tuple[TensorSpec, ...], tensors: tuple[TensorSpec, ...]) -> Operation:
    return Operation("aten._foreach_copy_.default", (into, tensors), outputs=())
