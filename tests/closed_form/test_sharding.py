"""What sharding sends and keeps: rings walked chunk by chunk, the paper's relations, torch, and the simulator."""

from __future__ import annotations

import re
from collections import Counter
from fractions import Fraction

import pytest
import sympy
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from perfmodel.closed_form.formulas import lambdified
from perfmodel.closed_form.sharding import StepCollectives, expressions, sent_bytes, symbols
from perfmodel.hardware.profile import find_profile, load_profile
from perfmodel.program.program import COLLECTIVE, Program
from perfmodel.program.ranks import RankProgram, rank_programs
from perfmodel.scenario.scenario import Scenario
from perfmodel.simulate.memory.walk import simulate_memory
from perfmodel.trace.trace import StorageKind
from tests.program.strategies.fsdp.recorded_fsdp import Model, Variant, record_steps

S = symbols()
FORMS = ("ddp", "zero1_broadcast", "zero1_reduce_scatter", "zero2", "zero3", "hsdp")
RING_OF = {"broadcast": "broadcasts"}  # many of one rank's each, as one of everybody's
KINDS = (StorageKind.PARAMETER, StorageKind.GRADIENT, StorageKind.OPTIMIZER_STATE)
FULLY_SHARD = ("zero2", "zero3", "hsdp")
BUCKET_VIEW = {"gradient_as_bucket_view": True}
SECTIONS = {
    "ddp": {"strategy": "ddp", **BUCKET_VIEW},
    "zero1_broadcast": {"strategy": "zero1", **BUCKET_VIEW},
    "zero1_reduce_scatter": {"strategy": "zero1", "zero1_form": "reduce-scatter"},
    "zero2": {"strategy": "zero2"},
    "zero3": {"strategy": "zero3"},
}
REPLICATED = [(4, 2), (6, 3), (8, 2), (8, 4)]  # ranks and replicas


def expression(name: str, **values: object) -> sympy.Expr:
    """The formula with values for some of its symbols."""
    return expressions()[name].subs({getattr(S, symbol): value for symbol, value in values.items()})


def same(first: sympy.Expr, second: sympy.Expr) -> bool:
    return sympy.simplify(first - second) == 0


# Rings


def walked_gather(ranks: int) -> Counter[int]:
    """Chunks that each rank passes on until all have all: its own, then each as it comes."""
    held = [{rank} for rank in range(ranks)]
    passing, sent = list(range(ranks)), Counter()
    while any(len(chunks) < ranks for chunks in held):
        passing = [passing[rank - 1] for rank in range(ranks)]
        sent.update(range(ranks))
        for rank, chunk in enumerate(passing):
            held[rank].add(chunk)
    return sent


def walked_broadcasts(ranks: int) -> Counter[int]:
    """Chunks that each rank passes on while every rank broadcasts its own."""
    sent: Counter[int] = Counter()
    for owner in range(ranks):
        sent.update((owner + step) % ranks for step in range(ranks - 1))
    return sent


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_ring_passes_on_all_but_a_chunk(ranks: int) -> None:
    chunk_bytes = Fraction(1000, ranks)
    for kind, walked, times in [
        ("all_gather", walked_gather, 1),
        ("reduce_scatter", walked_gather, 1),  # the same, backwards
        ("all_reduce", walked_gather, 2),
        ("broadcasts", walked_broadcasts, 1),
    ]:
        expected = times * walked(ranks)[0] * chunk_bytes
        assert {*walked(ranks).values()} == {walked(ranks)[0]}
        assert Fraction(str(sent_bytes(StepCollectives(kind, sympy.Integer(1000), sympy.Integer(ranks))))) == expected


# Relations


def test_volumes_are_the_papers() -> None:
    """Stages 1 and 2 send what data parallelism sends, 2 S in the limit of many ranks, and stage 3 half as much again."""
    ddp = expression("ddp_sent_bytes")
    assert sympy.limit(ddp, S.N, sympy.oo) == 2 * S.G
    assert same(expression("zero1_reduce_scatter_sent_bytes", W=S.G), ddp)
    assert same(expression("zero2_sent_bytes", W=S.G, A=1), ddp)
    assert same(expression("zero3_sent_bytes", W=S.G, A=1, W_r=0), ddp * sympy.Rational(3, 2))


def test_torchs_zero1_sends_as_much_as_stage_3() -> None:
    """Gradients are reduced whole on every rank before parameters are sent."""
    broadcast = expression("zero1_broadcast_sent_bytes", W=S.G)
    assert same(broadcast, expression("zero3_sent_bytes", W=S.G, A=1, W_r=0))


@pytest.mark.parametrize("kind", ["sent", "communication", "state"])
def test_the_forms_of_fully_shard_are_each_others_limits(kind: str) -> None:
    if kind != "state":
        assert same(expression(f"zero3_{kind}_bytes", W_r=S.W), expression(f"zero2_{kind}_bytes"))
    one_replica = expression(f"hsdp_{kind}_bytes", R=1)
    expected = expression(f"zero3_{kind}_bytes") + (S.G / S.N if kind == "communication" else 0)
    assert same(one_replica, expected)  # an all-reduce of one rank has a size, and sends nothing
    if kind != "communication":
        assert same(expression(f"hsdp_{kind}_bytes", R=S.N), expression(f"ddp_{kind}_bytes"))


@pytest.mark.parametrize("form", FORMS)
def test_a_rank_alone_sends_nothing_and_keeps_everything(form: str) -> None:
    assert expression(f"{form}_sent_bytes", N=1).subs(S.R, 1) == 0
    assert same(expression(f"{form}_state_bytes", N=1).subs(S.R, 1), S.W + S.G + S.K)


def test_memory_of_the_papers_example() -> None:
    """7.5 billion parameters on 64 GPUs, 2 + 2 + 12 bytes each (its figure 1)."""
    given = {"parameter_bytes": 15e9, "gradient_bytes": 15e9, "optimizer_state_bytes": 90e9}
    forms = {"zero1_broadcast": 31.4, "zero1_reduce_scatter": 16.6, "zero3": 1.9}
    assert lambdified("ddp_state_bytes")(**given) == 120e9
    for form, expected_gb in forms.items():
        assert lambdified(f"{form}_state_bytes")(**given, ranks=64) / 1e9 == pytest.approx(expected_gb, abs=0.05)


# Torch's fully_shard

BLOCK = ((10, 6), (10,), (6, 10), (6,))
ROOT = ((11, 6), (11, 6), (11,))


def padded_elements(shapes: tuple[tuple[int, ...], ...], ranks: int) -> int:
    """Rows of every parameter are padded to equal parts."""
    return sum(-(-rows // ranks) * ranks * (columns[0] if columns else 1) for rows, *columns in shapes)


@pytest.mark.parametrize(
    ("form", "fields"),
    [
        ("zero2", {"reshard_after_forward": False}),
        ("zero2", {"reshard_after_forward": False, "micro_batches": 3}),
        ("zero3", {}),
        ("zero3", {"micro_batches": 2, "ranks": 2}),
        ("zero3", {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}),
        ("hsdp", {"replicas": 2, "ranks": 8}),
        ("hsdp", {"replicas": 4, "ranks": 8, "micro_batches": 2}),
    ],
)
def test_sizes_are_those_of_what_torch_issues(form: str, fields: dict[str, object]) -> None:
    variant = Variant(**fields)  # type: ignore[arg-type]
    shards = variant.ranks // variant.replicas
    root, block = padded_elements(ROOT, shards), padded_elements(BLOCK, shards)
    elements = root + variant.blocks * block
    width = 4 if variant.param_dtype is None else 2
    given = {
        "G": 4 * elements,
        "W": width * elements,
        "W_r": width * root,
        "N": variant.ranks,
        "R": variant.replicas,
        "A": variant.micro_batches,
    }
    issued = [row for row in record_steps(variant, 2)[1] if row.kind == "collective"]
    assert sum(row.size_bytes for row in issued) == expression(f"{form}_communication_bytes", **given)
    sent = sum(sent_bytes(StepCollectives(row.name, sympy.Integer(row.size_bytes), row.ranks)) for row in issued)
    assert sent == expression(f"{form}_sent_bytes", **given)


def kept_by_rank(rank: int, ranks: int, reshard: bool | None) -> dict[str, int]:
    """Bytes after a step of AdamW under fully_shard, and the whole model's."""
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        model = Model(2, checkpoint_blocks=False)
        whole = sum(parameter.nbytes for parameter in model.parameters())
        for module in (*model.blocks, model):
            fully_shard(module, reshard_after_forward=reshard)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.arange(4)).sum().backward()
        optimizer.step()
        held = [*model.parameters(), *(parameter.grad for parameter in model.parameters())]
        held += [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        local = [each.to_local() if hasattr(each, "to_local") else each for each in held]
        return {"kept": sum(each.nbytes for each in local), "whole": whole}
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("form", "reshard"), [("zero2", False), ("zero3", None)])
def test_ranks_of_fully_shard_keep_a_share_each_of_everything(form: str, reshard: bool | None) -> None:
    ranks = [kept_by_rank(rank, 4, reshard) for rank in range(4)]
    whole = ranks[0]["whole"]
    mean = lambdified(f"{form}_state_bytes")(
        parameter_bytes=whole, gradient_bytes=whole, optimizer_state_bytes=2 * whole, ranks=4
    )
    assert sum(each["kept"] for each in ranks) == 4 * mean


# The simulator


def programs(form: str, ranks: int, replicas: int = 1) -> tuple[RankProgram, ...]:
    replicated = {"strategy": "zero3", "fsdp": {"replicate": replicas}}
    return rank_programs(
        Scenario.model_validate(
            {
                "name": "tiny",
                "model": {"family": "gpt", "size": "tiny"},
                "batch": {"size": 2, "sequence_length": 8},
                "parallelism": {"dp": ranks, **SECTIONS.get(form, replicated)},
                "hardware": {"profile": "x", "gpus": ranks},
            }
        )
    )


def issued(program: Program) -> list[StepCollectives]:
    columns = program.instructions
    called = [program.collectives[a] for a in columns.a[columns.kind == COLLECTIVE].tolist()]
    return [
        StepCollectives(RING_OF.get(each.kind, each.kind), sympy.Integer(each.size_bytes), each.ranks)
        for each in called
    ]


def tensor_bytes(program: Program) -> list[int]:
    return [parameter.tensor.bytes for parameter in program.trace.parameters]


def padded_bytes(form: str, program: Program, ranks: int, names: str = "") -> int:
    """float32 parameters, or those with names like that. The reduce-scatter pads one flat buffer, fully_shard rows."""
    shapes = tuple(each.tensor.shape for each in program.trace.parameters if re.match(names, each.name))
    if form in FULLY_SHARD:
        return 4 * padded_elements(shapes, ranks)
    whole = sum(tensor_bytes(program))
    return -(-whole // (4 * ranks)) * 4 * ranks if form == "zero1_reduce_scatter" else whole


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
@pytest.mark.parametrize("form", SECTIONS)
def test_sizes_are_those_of_the_program(form: str, ranks: int) -> None:
    for each in programs(form, ranks):
        padded = padded_bytes(form, each.program, ranks)
        padding = padded - sum(tensor_bytes(each.program))
        assert padding >= 0
        assert padding < 4 * ranks or form in FULLY_SHARD
        given = {"G": padded, "W": padded, "N": ranks, "A": 1}
        given["W_r"] = padded_bytes(form, each.program, ranks, r"(?!layers\.)")
        moved = issued(each.program)
        assert sum(one.size_bytes for one in moved) == expression(f"{form}_communication_bytes", **given)
        assert sum(map(sent_bytes, moved)) == expression(f"{form}_sent_bytes", **given)


@pytest.mark.parametrize(("ranks", "replicas"), REPLICATED)
def test_sizes_are_those_of_the_program_with_replicas(ranks: int, replicas: int) -> None:
    """Rows are padded for the ranks that share a copy."""
    shards = ranks // replicas
    found = programs("hsdp", ranks, replicas)
    assert sorted(rank for each in found for rank in each.ranks) == list(range(ranks))
    for each in found:
        padded, root = (padded_bytes("hsdp", each.program, shards, names) for names in ("", r"(?!layers\.)"))
        given = {"G": padded, "W": padded, "W_r": root, "N": ranks, "R": replicas, "A": 1}
        moved = issued(each.program)
        assert sum(one.size_bytes for one in moved) == expression("hsdp_communication_bytes", **given)
        assert sum(map(sent_bytes, moved)) == expression("hsdp_sent_bytes", **given)
        groups = {(one.group, one.ranks) for one in each.program.collectives}
        assert groups == {("shard", shards), ("replicate", replicas)}


def rounded(sizes: list[int]) -> int:
    """As the allocator rounds each."""
    return sum(-(-size // 512) * 512 for size in sizes)


def kept_bytes(each: RankProgram) -> list[int]:
    """Before a step, of each of KINDS."""
    memory = simulate_memory(each.program, load_profile(find_profile("h200-sxm-x4")))
    return [int(memory.kind_bytes[kind][0]) for kind in KINDS]


def expected_state_bytes(form: str, whole_bytes: float, ranks: int, replicas: int = 1) -> float:
    values = {"W": whole_bytes, "G": whole_bytes, "K": 2 * whole_bytes, "N": ranks, "R": replicas}
    return float(expression(f"{form}_state_bytes", **values))


def test_ddp_keeps_everything() -> None:
    (each,) = programs("ddp", 2)
    sizes = tensor_bytes(each.program)
    parameters, gradients, states = kept_bytes(each)
    assert (parameters, states) == (rounded(sizes), 2 * rounded(sizes))
    buckets = [one.size_bytes for one in issued(each.program)]
    assert gradients == rounded([int(size) for size in buckets])
    assert parameters + gradients + states == pytest.approx(
        expected_state_bytes("ddp", sum(sizes), 2), abs=512 * (3 * len(sizes) + len(buckets))
    )


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_shares_of_the_broadcast_form_add_up(ranks: int) -> None:
    """Parameters are dealt out whole, so each is rounded once; the mean of the ranks is the formula's."""
    found = programs("zero1_broadcast", ranks)
    sizes = tensor_bytes(found[0].program)
    of_ranks = [kept for each in found for kept in [kept_bytes(each)] * len(each.ranks)]
    assert len(of_ranks) == ranks
    ((parameters, gradients),) = {(kept[0], kept[1]) for kept in of_ranks}
    assert parameters == rounded(sizes)
    states = [kept[2] for kept in of_ranks]
    assert sum(states) == 2 * rounded(sizes)
    assert max(states) >= 2 * sum(sizes) / ranks
    mean = parameters + gradients + sum(states) / ranks
    assert mean == pytest.approx(expected_state_bytes("zero1_broadcast", sum(sizes), ranks), abs=512 * 4 * len(sizes))


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_shares_of_the_reduce_scatter_form_are_equal(ranks: int) -> None:
    (each,) = programs("zero1_reduce_scatter", ranks)
    padded = padded_bytes("zero1_reduce_scatter", each.program, ranks)
    padding = padded - sum(tensor_bytes(each.program))
    parameters, gradients, states = kept_bytes(each)
    assert parameters == rounded([padded, padding])
    assert (gradients, states) == (rounded([padded // ranks]), 2 * rounded([padded // ranks]))
    assert parameters + gradients + states == pytest.approx(
        expected_state_bytes("zero1_reduce_scatter", padded, ranks), abs=5 * 512
    )


@pytest.mark.parametrize(
    ("form", "ranks", "replicas"),
    [
        *((form, ranks, 1) for form in ("zero2", "zero3") for ranks in (2, 4)),
        ("hsdp", 4, 2),
        ("hsdp", 8, 2),
        ("hsdp", 8, 4),
    ],
)
def test_shares_of_fully_shard_are_equal(form: str, ranks: int, replicas: int) -> None:
    """Where every parameter's rows divide; each rank's part of each is rounded."""
    (each,) = programs(form, ranks, replicas)
    sizes = tensor_bytes(each.program)
    assert padded_bytes(form, each.program, ranks // replicas) == sum(sizes)
    assert sum(kept_bytes(each)) == pytest.approx(
        expected_state_bytes(form, sum(sizes), ranks, replicas), abs=4 * 512 * len(sizes)
    )
