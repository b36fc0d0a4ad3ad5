"""Shards: what a rank keeps of a tensor, in which dtype, and which ranks share or replicate it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from perfmodel.program.builder import vector
from perfmodel.program.program import REPLICATE, Members
from perfmodel.scenario.scenario import ParallelismSection, Scenario
from perfmodel.trace.operation import TensorSpec, contiguous_stride

DTYPE_OF_POLICY = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class Dtypes:
    """The dtypes of a mixed-precision policy; None is the one in which the model computes.

    Attributes
    ----------
    kept : str or None
        In which parameters and their gradients are kept.
    reduced : str or None
        In which gradients are reduced.
    """

    kept: str | None = None
    reduced: str | None = None

    @classmethod
    def of(cls, scenario: Scenario) -> Dtypes:
        """Return the dtypes of the scenario's policy.

        Where it computes in another dtype, that one is the trace's, and parameters are kept in float32.
        """
        section = scenario.parallelism.fsdp
        policy = None if section is None else section.mixed_precision
        if policy is None:
            return cls()
        reduced = None if policy.reduce is None else DTYPE_OF_POLICY[policy.reduce]
        return cls(None if policy.param in (None, "fp32") else "float32", reduced)


def sharing_of(section: ParallelismSection) -> Members:
    """Return the ranks that share one copy of what is sharded: consecutive ones where there are several copies.

    >>> sharing_of(ParallelismSection.model_validate({"dp": 8, "strategy": "zero3", "fsdp": {"replicate": 2}}))
    Members(group='shard', ranks=4)
    """
    replicas = replicas_of(section)
    return Members("dp", section.dp) if replicas is None else Members("shard", section.dp // replicas.ranks)


def replicas_of(section: ParallelismSection) -> Members | None:
    """Return the ranks that hold the same shard, one of each copy; None for one copy."""
    copies = 1 if section.fsdp is None else section.fsdp.replicate
    return None if copies == 1 else Members(REPLICATE, copies)


def resharing_of(section: ParallelismSection) -> Members | None:
    """Return the consecutive ranks that share parameters between forward and backward.

    None where these are the ranks that share them anyway, or where each rank keeps all parameters.
    """
    asked = None if section.fsdp is None else section.fsdp.reshard_after_forward
    if type(asked) is not int or asked in (1, sharing_of(section).ranks):
        return None
    return Members("reshard", asked)


def offloads(section: ParallelismSection) -> bool:
    """Return whether the host's memory holds shards, their gradients and optimizer states."""
    return section.fsdp is not None and section.fsdp.offload


def in_dtype(tensor: TensorSpec, dtype: str | None) -> TensorSpec:
    """Return the tensor in another dtype, if one is given."""
    return tensor if dtype is None else tensor._replace(dtype=dtype)


def shard_of(tensor: TensorSpec, ranks: int, rank: int) -> TensorSpec:
    """Return what one rank keeps of a parameter: its rows, of which the last ranks may have fewer or none.

    >>> [shard_of(TensorSpec((10, 3), (3, 1), "float32"), 4, rank).shape for rank in range(4)]
    [(3, 3), (3, 3), (3, 3), (1, 3)]
    """
    rows, *rest = tensor.shape or (1,)
    chunk = -(-rows // ranks)
    own = min(chunk, max(0, rows - rank * chunk))
    shape = (own, *rest)
    return TensorSpec(shape, contiguous_stride(shape), tensor.dtype)


def padded_shard_of(tensor: TensorSpec, ranks: int) -> TensorSpec:
    """Return the first rank's shard, as flat as it is sent: those of all others are padded to its size.

    >>> padded_shard_of(TensorSpec((10, 3), (3, 1), "float32"), 4).numel
    9
    """
    return vector(prod(shard_of(tensor, ranks, 0).shape), tensor.dtype)


def flat_shard_of(tensors: Sequence[TensorSpec], ranks: int) -> TensorSpec:
    """Return a rank's shard of all these tensors in one flat buffer, padded so that all shards are equal.

    >>> flat_shard_of([TensorSpec((3, 2), (2, 1), "float32"), TensorSpec((5,), (1,), "float32")], 4).shape
    (3,)
    """
    return vector(-(-sum(tensor.numel for tensor in tensors) // ranks), tensors[0].dtype)
