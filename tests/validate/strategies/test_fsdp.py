"""Every sharded form on four gloo ranks against one process that has all ranks' samples: results, shares, collectives."""

import os
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore

from calibrate.this_machine.launcher import Launch, run_ranks
from perfmodel.errors import PerfModelError
from perfmodel.models.build import build_module
from perfmodel.program.builder import ProgramBuilder
from perfmodel.program.program import Members
from perfmodel.program.ranks import rank_programs
from perfmodel.program.strategies.fsdp.groups import plan_of
from perfmodel.scenario.scenario import Scenario
from tests.places import ROOT
from tests.refusals import refused
from validate.run import measure
from validate.strategies import fsdp
from validate.worker import Effort

SCRIPT = Path(__file__).parent / "rank_sharded.py"
of_rank = runpy.run_path(str(SCRIPT))
RANKS, LAYERS, TRIED = of_rank["RANKS"], of_rank["LAYERS"], of_rank["TRIED"]
GROUPS = LAYERS + 1
FSDP = [name for name in TRIED["accumulated"] if name.startswith(("zero", "hsdp", "bf16"))]
QUICK = Effort(
    warmup_steps=3, warmup_s=0.0, steady_s=0.0, least_steps=4, most_steps=4, synced_s=0.0, least_synced_steps=1
)

# Rows of each parameter, and elements a row: embeddings, two blocks, final norm, head.
BLOCK = [(6, 1), (6, 6), (6, 6), (6, 6), (6, 6), (6, 1), (10, 6), (6, 10)]
SHAPES = [(33, 6), (8, 6), *BLOCK * LAYERS, (6, 1), (33, 6)]
NUMEL = sum(rows * width for rows, width in SHAPES)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each rank wrote."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run_ranks(Launch("sharded", [str(SCRIPT), str(folder)], RANKS, "cpu", folder, 240.0, environment))
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


@pytest.fixture(scope="module")
def alone():
    samples = [of_rank["inputs_of"](rank) for rank in range(RANKS)]
    together = {name: torch.cat([each[name] for each in samples]) for name in samples[0]}
    return {training: of_rank["run"](of_rank["scenario"]("zero3", training), together) for training in TRIED}


def distance(mine, expected):
    """Of what training changed, relative to the size of the change."""
    error = torch.cat([(a - b).flatten() for a, b in zip(mine, expected, strict=True)])
    return (error.norm() / torch.cat([each.flatten() for each in expected]).norm()).item()


@pytest.mark.parametrize(("training", "variant"), [(name, each) for name, tried in TRIED.items() for each in tried])
def test_training_is_that_of_all_samples_together(ranks, alone, training, variant):
    low_precision = training == "scaled" or variant == "bf16-reduce"
    for rank in ranks:
        moved = rank[training, variant]["moved"]
        assert distance(moved, alone[training]["moved"]) < (0.02 if low_precision else 2e-3)


def test_the_reduced_type_is_used(ranks):
    exact, rounded = (ranks[0]["accumulated", variant]["moved"] for variant in ("zero3", "bf16-reduce"))
    assert distance(rounded, exact) > 1e-4


@pytest.mark.parametrize("variant", FSDP)
def test_fully_shard_keeps_a_share_of_rows(ranks, variant):
    """Ranks take ceil(rows / shards) each until none are left."""
    shards = 2 if variant.startswith("hsdp") else RANKS
    for number, rank in enumerate(ranks):
        found = rank["accumulated", variant]
        each = [-(-rows // shards) for rows, _ in SHAPES]
        first = [min(number % shards * share, rows) for share, (rows, _) in zip(each, SHAPES, strict=True)]
        held = [
            min(share, rows - start) * width for share, start, (rows, width) in zip(each, first, SHAPES, strict=True)
        ]
        assert found["held"] == held
        assert found["states"] == found["gradients"] == sum(held)


def test_the_papers_zero1_keeps_whole_parameters_and_an_equal_share_of_states(ranks):
    for rank in ranks:
        found = rank["accumulated", "reduce-scatter"]
        assert (sum(found["held"]), found["states"], found["gradients"]) == (NUMEL, -(-NUMEL // RANKS), 0)
    assert NUMEL % RANKS  # so that it is padded


@pytest.mark.parametrize("variant", ["broadcast", "broadcast-view"])
def test_torchs_zero1_gives_whole_parameters_to_the_least_loaded(ranks, variant):
    loads = [0] * RANKS
    for numel in sorted((rows * width for rows, width in SHAPES), reverse=True):
        loads[loads.index(min(loads))] += numel
    assert [rank["accumulated", variant]["states"] for rank in ranks] == loads
    assert all(rank["accumulated", variant]["gradients"] == NUMEL for rank in ranks)


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        ("broadcast", {"all_reduce": 1, "broadcast": len(SHAPES)}),
        ("broadcast-view", {"all_reduce": 1, "broadcast": RANKS}),
        ("reduce-scatter", {"reduce_scatter": 1, "all_gather": 1, "all_reduce": 1}),
        ("zero2", {"all_gather": 2 * GROUPS, "reduce_scatter": GROUPS, "all_reduce": 1}),
        ("zero3", {"all_gather": 2 * (GROUPS + LAYERS), "reduce_scatter": GROUPS, "all_reduce": 1}),
        ("zero3-all", {"all_gather": 4 * GROUPS, "reduce_scatter": GROUPS, "all_reduce": 1}),
        ("zero3-pairs", {"all_gather": 4 * GROUPS, "reduce_scatter": GROUPS, "all_reduce": 1}),
        ("zero3-offload", {"all_gather": 2 * (GROUPS + LAYERS), "reduce_scatter": GROUPS, "all_reduce": 1}),
        ("zero3-root", {"all_gather": 2, "reduce_scatter": 1, "all_reduce": 1}),
        ("zero3-prefetch", {"all_gather": 2 * (GROUPS + LAYERS), "reduce_scatter": GROUPS, "all_reduce": 1}),
        ("zero3-prefetch-far", {"all_gather": 2 * (GROUPS + LAYERS), "reduce_scatter": GROUPS, "all_reduce": 1}),
        ("hsdp", {"all_gather": 2 * (GROUPS + LAYERS), "reduce_scatter": GROUPS, "all_reduce": GROUPS + 1}),
        ("hsdp-prefetch", {"all_gather": 2 * (GROUPS + LAYERS), "reduce_scatter": GROUPS, "all_reduce": GROUPS + 1}),
    ],
)
def test_collectives_of_a_step(ranks, variant, expected):
    """Both micro-batches gather and only the last reduces. Clipping sums the ranks' norms, but where all have all."""
    assert ranks[0]["accumulated", variant]["collectives"] == expected


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        ("broadcast", {"all_reduce": 1, "broadcast": len(SHAPES)}),
        ("reduce-scatter", {"reduce_scatter": 1, "all_gather": 1}),
        ("zero2", {"all_gather": GROUPS, "reduce_scatter": GROUPS}),
        ("zero3", {"all_gather": GROUPS + LAYERS, "reduce_scatter": GROUPS}),
    ],
)
def test_collectives_without_accumulation_and_clipping(ranks, variant, expected):
    assert ranks[0]["plain", variant]["collectives"] == expected


def test_zero1_rebuilds_the_buckets_of_ddp(ranks):
    assert ranks[0]["plain", "broadcast"]["buckets_rebuilt"]


def two(**section):
    return Scenario.model_validate(
        {
            "name": "tiny",
            "model": {"family": "gpt", "size": "tiny"},
            "batch": {"size": 1, "sequence_length": 8},
            "parallelism": {"dp": 2, **section},
            "hardware": {"profile": "cpu.json", "gpus": 2},
        }
    )


def test_a_sharded_step_is_measured():
    measured = measure(two(strategy="zero3"), "cpu", effort=QUICK)
    assert list(measured.phases_s) == ["zero_grad", "forward", "backward", "optimizer"]
    assert (len(measured.ranks), measured.ddp_buckets) == (2, None)


@pytest.mark.parametrize("ahead", [1, 2, 4])
def test_what_is_gathered_ahead_is_what_the_program_gathers(ahead):
    """By name; of four blocks, in forward the next ones and in backward those before."""
    asked = two(strategy="zero3", fsdp={"forward_prefetch": ahead, "backward_prefetch": ahead})
    asked = asked.model_copy(update={"model": asked.model.model_copy(update={"layers": 4})})
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        module = fsdp.FullyShard(asked).wrap(build_module(asked))
        states = {name: part._get_fsdp_state() for name, part in module.named_modules() if isinstance(part, FSDPModule)}
    finally:
        dist.destroy_process_group()
    (each,) = rank_programs(asked)
    names = [name for name, _ in each.program.trace.modules]
    groups = plan_of(ProgramBuilder(each.program, Members("dp", 2)), asked).groups
    assert len(states) == len(groups) == 5
    for group in groups:
        state = states[names[group.module]]
        for modules, found in [
            (group.prefetched_in_forward, state._states_to_forward_prefetch),
            (group.prefetched_in_backward, state._states_to_backward_prefetch),
        ]:
            assert [states[names[module]] for module in modules] == found
    assert [len(group.prefetched_in_forward) for group in groups] == [min(ahead, 3 - index) for index in range(4)] + [0]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(2, 2, bias=False) for _ in range(2)])
        self.head = nn.Linear(2, 2, bias=False)


def wrap(module, blocks="blocks"):
    asked = SimpleNamespace(
        model=SimpleNamespace(family=None, blocks=blocks),
        parallelism=two(strategy="zero3").parallelism,
        training=two(strategy="zero3").training,
    )
    fsdp.FullyShard(asked).wrap(module)


def test_parameters_of_two_types_are_refused():
    module = Model()
    module.head.to(torch.bfloat16)
    module.register_parameter("scale", nn.Parameter(torch.ones(2)))
    with refused("parameters", "bfloat16", "float32"):
        wrap(module)


def test_frozen_parameters_may_be_of_another_type():
    module = Model()
    module.head.to(torch.bfloat16).requires_grad_(False)
    module.register_parameter("scale", nn.Parameter(torch.ones(2)))
    fsdp._check_groups(module, list(module.blocks))


def test_parameters_shared_between_groups_are_refused():
    module = Model()
    module.head.weight = module.blocks[0].weight
    with pytest.raises(PerfModelError, match="blocks must not share parameters"):
        wrap(module)
    fsdp._check_groups(module, [])


def test_parameters_in_another_memory_format_are_refused():
    module = nn.Sequential(nn.Conv2d(2, 2, 3)).to(memory_format=torch.channels_last)
    with pytest.raises(PerfModelError, match="fully_shard: parameters must be contiguous to be sharded"):
        wrap(module, blocks=None)
