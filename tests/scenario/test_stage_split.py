"""Blocks of each stage against all ways to cut."""

import itertools

import pytest

from perfmodel.scenario.parameter_counts import ParameterCounts
from perfmodel.scenario.scenario import Scenario
from perfmodel.scenario.stage_split import (
    balanced,
    blocks_of_stages,
    micro_batch_size,
    pipeline_of,
)
from tests.refusals import refused

EVEN = ParameterCounts(embeddings=0, block=1, head=0)


def asked(model=None, batch=8, **pipeline):
    return Scenario.model_validate(
        {
            "model": model or {"family": "gpt", "size": "tiny", "layers": 6},
            "batch": {"size": batch, "sequence_length": 8},
            "parallelism": {"pp": {"stages": 2, "micro_batches": 4, **pipeline}},
            "hardware": {"profile": "none"},
        }
    )


def largest(found, counts):
    sizes = [counts.block * each for each in found]
    sizes[0] += counts.embeddings
    sizes[-1] += counts.head
    return max(sizes)


@pytest.mark.parametrize("counts", [(0, 1, 0), (7, 2, 3), (0, 5, 12), (100, 1, 0), (4, 3, 4), (1, 10, 25)])
@pytest.mark.parametrize("stages", [2, 3, 4, 5])
def test_no_other_cut_has_a_smaller_largest_stage(counts, stages):
    counts = ParameterCounts(*counts)
    for blocks in range(stages, 11):
        found = balanced(blocks, stages, counts)
        cuts = itertools.combinations(range(1, blocks), stages - 1)
        others = [[b - a for a, b in itertools.pairwise((0, *cut, blocks))] for cut in cuts]
        assert (sum(found), len(found), min(found) >= 1) == (blocks, stages, True)
        assert largest(found, counts) == min(largest(other, counts) for other in others)


def test_equal_blocks_are_dealt_out_evenly_and_what_is_over_goes_to_the_end():
    assert balanced(36, 4, EVEN) == (9, 9, 9, 9)
    assert balanced(7, 4, EVEN) == (1, 2, 2, 2)


def test_virtual_stages_are_stages_of_the_model_too():
    scenario = asked(virtual_stages=3, schedule="looped-bfs")
    assert pipeline_of(scenario).number_of_stages == 6
    assert blocks_of_stages(scenario) == (1,) * 6


def test_layers_are_taken_as_given():
    assert blocks_of_stages(asked(layers=[4, 2])) == (4, 2)


def test_embeddings_and_head_weigh_as_much_as_blocks_of_that_many_parameters():
    # gpt tiny: a block has 4 x 64 x 64 + 2 x 64 x 256 + 2 x 64 = 49,280 parameters, a token 64 in the embeddings and 64 in the head.
    assert blocks_of_stages(asked()) == (3, 3)
    many = {"family": "gpt", "size": "tiny", "layers": 6, "vocabulary": 5 * 49_280 // 64}
    assert blocks_of_stages(asked(model=many, stages=3)) == (1, 4, 1)


def test_a_micro_batch_has_its_share_of_the_batch():
    assert micro_batch_size(asked(batch=12)) == 3


def test_a_scenario_without_a_pipeline_is_refused():
    with refused("parallelism.pp", "given"):
        pipeline_of(asked().model_copy(update={"parallelism": type(asked().parallelism)()}))
