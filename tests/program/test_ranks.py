"""Which ranks run alike, found without going through all of them."""

from types import SimpleNamespace

import pytest

from perfmodel.program.ranks import optimizer_shares
from perfmodel.program.sharding import shard_of
from perfmodel.scenario.scenario import Scenario
from perfmodel.trace.operation import TensorSpec, contiguous_stride
from tests.refusals import refused

SHAPES = [(64, 3), (17,), (33, 5), (40, 2, 2), (1000,), (12,)]


def scenario(dp, strategy="zero3", **fsdp):
    parallelism = {"dp": dp, "strategy": strategy, **({"fsdp": fsdp} if fsdp else {})}
    return Scenario(
        model={"family": "gpt", "size": "tiny"},
        batch={"size": 1, "sequence_length": 8},
        parallelism=parallelism,
        hardware={"profile": "none", "gpus": dp},
    )


def trace(shapes):
    """Of which only the parameters are asked for."""
    tensors = [TensorSpec(shape, contiguous_stride(shape), "float32") for shape in shapes]
    return SimpleNamespace(parameters=[SimpleNamespace(tensor=tensor, requires_grad=True) for tensor in tensors])


@pytest.mark.parametrize(("ranks", "copies"), [(2, 1), (3, 1), (7, 1), (12, 1), (16, 4), (64, 1), (250, 1), (1000, 2)])
def test_shares_are_those_of_every_rank_by_itself(ranks, copies):
    made = trace(SHAPES)
    sharing = ranks // copies
    one_by_one = {}
    for rank in range(ranks):
        shards = [shard_of(parameter.tensor, sharing, rank % sharing) for parameter in made.parameters]
        one_by_one.setdefault(tuple(shard for shard in shards if shard.numel), []).append(rank)
    found = optimizer_shares(scenario(ranks, replicate=copies), made)
    assert {share.tensors: list(share.ranks) for share in found} == one_by_one
    assert len(found) == len(one_by_one)


def test_a_million_ranks_cost_no_more_than_what_differs():
    """Copies of 500 ranks each: a handful of shares, where a list for every rank took gigabytes."""
    found = optimizer_shares(scenario(10**6, replicate=2000), trace(SHAPES * 100))
    assert len(found) <= 2 * len(SHAPES)
    assert sum(len(share.ranks) for share in found) == 10**6


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_ranks_that_would_have_nothing_are_refused_at_once(strategy):
    with refused("parallelism.dp", 10**6, strategy):
        optimizer_shares(scenario(10**6, strategy), trace(SHAPES))
