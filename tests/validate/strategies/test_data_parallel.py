"""Every form on two gloo ranks against one process that has both ranks' samples."""

import os
import runpy
from pathlib import Path

import pytest
import torch

from calibrate.this_machine.launcher import Launch, run_ranks
from perfmodel.program.strategies.ddp import ddp_buckets
from perfmodel.trace.store import get_trace
from tests.places import ROOT

SCRIPT = Path(__file__).parent / "rank_gradients.py"
of_rank = runpy.run_path(str(SCRIPT))
REPLICATED = of_rank["REPLICATED"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of two ranks wrote."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run_ranks(Launch("gradients", [str(SCRIPT), str(folder)], 2, "cpu", folder, 120.0, environment))
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.fixture(scope="module")
def alone():
    samples = [of_rank["inputs_of"](rank) for rank in range(2)]
    both = {name: torch.cat([each[name] for each in samples]) for name in samples[0]}
    return of_rank["run"](of_rank["scenario"]("naive"), both)


@pytest.mark.parametrize("strategy", REPLICATED)
def test_gradients_are_those_of_all_samples_together(ranks, alone, strategy):
    for rank in ranks:
        for name in ("gradients", "parameters"):
            for mine, whole in zip(rank[strategy][name], alone[name], strict=True):
                torch.testing.assert_close(mine, whole, rtol=1e-4, atol=1e-6)  # sums in another order
    for mine, other in zip(ranks[0][strategy]["gradients"], ranks[1][strategy]["gradients"], strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("strategy", REPLICATED)
def test_nothing_is_reduced_before_the_last_micro_batch(ranks, strategy):
    first, second = (rank[strategy]["local"] for rank in ranks)
    assert not torch.allclose(first, second)


def test_buckets_are_those_of_the_program(ranks):
    asked = of_rank["scenario"]("ddp")
    expected = tuple(bucket.size_bytes for bucket in ddp_buckets(asked, get_trace(asked)))
    assert len(expected) > 2
    for rank in ranks:
        assert rank["buckets"]["rebuilt"]
        assert tuple(rank["buckets"]["rebuilt_bytes"]) == expected
        assert sum(rank["buckets"]["initial_bytes"]) == sum(expected)
