"""What a rank keeps of tensors that are sharded, and in which dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from perfmodel.program.editor import vector
from perfmodel.workload.ops import TensorSpec, contiguous_stride
from perfmodel.workload.scenario import Scenario

DTYPE_OF_POLICY = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class Dtypes:
    """kept: what parameters and their gradients are kept in; reduced: what gradients are reduced in. None: as they are
    computed in.
    """

    kept: str | None = None
    reduced: str | None = None

    @classmethod
    def of(cls, scenario: Scenario) -> Dtypes:
        """By the policy. Where it has computation in another dtype, that is the trace's, and parameters are float32."""
        section = scenario.parallelism.fsdp
        policy = None if section is None else section.mixed_precision
        if policy is None:
            return cls()
        reduced = None if policy.reduce is None else DTYPE_OF_POLICY[policy.reduce]
        return cls(None if policy.param in (None, "fp32") else "float32", reduced)


def in_dtype(tensor: TensorSpec, dtype: str | None) -> TensorSpec:
    """The same in another dtype, if one is given."""
    return tensor if dtype is None else tensor._replace(dtype=dtype)


def shard_of(tensor: TensorSpec, ranks: int, rank: int) -> TensorSpec:
    """What one rank keeps of a parameter: its rows, of which the last ranks may have fewer or none.

    >>> [shard_of(TensorSpec((10, 3), (3, 1), "float32"), 4, rank).shape for rank in range(4)]
    [(3, 3), (3, 3), (3, 3), (1, 3)]
    """
    rows, *rest = tensor.shape or (1,)
    chunk = -(-rows // ranks)
    own = min(chunk, max(0, rows - rank * chunk))
    shape = (own, *rest)
    return TensorSpec(shape, contiguous_stride(shape), tensor.dtype)


def padded_shard_of(tensor: TensorSpec, ranks: int) -> TensorSpec:
    """The first rank's part, as flat as it is sent: all others' are padded to it.

    >>> padded_shard_of(TensorSpec((10, 3), (3, 1), "float32"), 4).numel
    9
    """
    return vector(prod(shard_of(tensor, ranks, 0).shape), tensor.dtype)


def flat_shard_of(tensors: Sequence[TensorSpec], ranks: int) -> TensorSpec:
    """A rank's part of all these in one flat buffer, which is padded so that the parts are alike.

    >>> flat_shard_of([TensorSpec((3, 2), (2, 1), "float32"), TensorSpec((5,), (1,), "float32")], 4).shape
    (3,)
    """
    return vector(-(-sum(tensor.numel for tensor in tensors) // ranks), tensors[0].dtype)
