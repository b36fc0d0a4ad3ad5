"""What ranks keep of sharded tensors, counted by hand."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.program.program import Members
from perfmodel.program.sharding import (
    Dtypes,
    flat_shard_of,
    padded_shard_of,
    replicas_of,
    resharing_of,
    shard_of,
    sharing_of,
)
from perfmodel.scenario.scenario import ParallelismSection
from perfmodel.trace.operation import TensorSpec, contiguous_stride
from tests.builders import tiny_scenario


def tensor(*shape: int) -> TensorSpec:
    return TensorSpec(shape, contiguous_stride(shape), "float32")


@given(shape=st.lists(st.integers(1, 40), min_size=1, max_size=3), ranks=st.integers(1, 12))
def test_shards_are_rows_that_together_are_the_tensor(shape: list[int], ranks: int) -> None:
    shards = [shard_of(tensor(*shape), ranks, rank) for rank in range(ranks)]
    rows = [shard.shape[0] for shard in shards]
    assert sum(rows) == shape[0]
    assert rows == sorted(rows, reverse=True)
    assert {shard.shape[1:] for shard in shards} == {tuple(shape[1:])}
    padded = padded_shard_of(tensor(*shape), ranks)
    assert padded.shape == (rows[0] * prod(shape[1:]),)
    assert ranks * padded.numel >= prod(shape)


def test_a_number_is_one_row() -> None:
    assert [shard_of(tensor(), 2, rank).shape for rank in (0, 1)] == [(1,), (0,)]


def test_flat_shards_are_padded_once_for_all_tensors() -> None:
    assert flat_shard_of([tensor(3, 3), tensor(2)], 4).shape == (3,)  # 11 elements
    assert flat_shard_of([tensor(3, 3), tensor(3)], 4).shape == (3,)  # 12
    assert flat_shard_of([tensor(3, 3), tensor(4)], 4).shape == (4,)  # 13


@pytest.mark.parametrize(
    ("fsdp", "sharing", "replicas", "resharing"),
    [
        (None, Members("dp", 8), None, None),
        ({"replicate": 2}, Members("shard", 4), Members("replicate", 2), None),
        ({"reshard_after_forward": 2}, Members("dp", 8), None, Members("reshard", 2)),
        ({"reshard_after_forward": 8}, Members("dp", 8), None, None),  # as those that share it anyway
        ({"reshard_after_forward": 1}, Members("dp", 8), None, None),  # each keeps all
        ({"reshard_after_forward": True}, Members("dp", 8), None, None),
        ({"replicate": 2, "reshard_after_forward": 4}, Members("shard", 4), Members("replicate", 2), None),
    ],
    ids=str,
)
def test_ranks_that_share(
    fsdp: dict[str, Any] | None, sharing: Members, replicas: Members | None, resharing: Members | None
) -> None:
    section = ParallelismSection.model_validate({"dp": 8, "strategy": "zero3", "fsdp": fsdp})
    assert (sharing_of(section), replicas_of(section), resharing_of(section)) == (sharing, replicas, resharing)


@pytest.mark.parametrize(
    ("policy", "kept", "reduced"),
    [
        (None, None, None),
        ({"param": "bf16"}, "float32", None),
        ({"param": "bf16", "reduce": "fp32"}, "float32", "float32"),
        ({"reduce": "bf16"}, None, "bfloat16"),
    ],
    ids=str,
)
def test_dtypes_of_a_policy(policy: dict[str, str] | None, kept: str | None, reduced: str | None) -> None:
    fsdp = {} if policy is None else {"fsdp": {"mixed_precision": policy}}
    asked = tiny_scenario(parallelism={"dp": 2, "strategy": "zero3", **fsdp}, hardware={"profile": "any", "gpus": 2})
    assert Dtypes.of(asked) == Dtypes(kept, reduced)
