"""What torch's fully_shard issues, against answers worked out by hand."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch

from tests.program.strategies.fsdp.fsdp_recorder import COMPUTE, Record
from tests.program.strategies.fsdp.recorded_fsdp import ROOT, Variant, record_steps

BLOCK_BYTES = 688  # 4 ranks x 4 bytes x (3 x 6 + 3 + 2 x 10 + 2) elements: 10 and 6 rows in shards of 3 and 2
ROOT_BYTES = 624  # 4 ranks x 4 bytes x (3 x 6 + 3 x 6 + 3) elements: 11 rows in shards of 3
PARAMETERS = 15  # three blocks of four, and the root's three
FORWARD = ["gather root", "gather blocks.0", "gather blocks.1", "gather blocks.2"]
BACKWARD = [
    *("gather blocks.2", "gather blocks.1", "scatter blocks.2", "gather blocks.0", "scatter blocks.1"),
    *("scatter blocks.0", "scatter root"),
]
BFLOAT16 = {"param_dtype": torch.bfloat16}


@cache
def steps(variant: Variant) -> list[list[Record]]:
    return record_steps(variant, 3 if variant == Variant() else 2)


def steady(**fields: object) -> list[Record]:
    """The second step."""
    return steps(Variant(**fields))[1]  # type: ignore[arg-type]


def collectives(records: list[Record]) -> list[str]:
    short = {"all_gather": "gather", "reduce_scatter": "scatter", "all_reduce": "reduce"}
    return [f"{short[row.name]} {row.group}" for row in records if row.kind == "collective"]


def spelt(records: list[Record]) -> list[str]:
    """Less labels, switches of streams, memory of operators, and the numbers of events."""
    forms = {"record": "record @{0.stream}", "wait": "{0.stream} waits {0.source}"}
    shown = [row for row in records if row.kind not in ("begin", "end", "switch", "alloc", "free") or row.name]
    return [forms.get(row.kind, "{0}").format(row) for row in shown if row.kind not in ("begin", "end", "switch")]


def between(records: list[Record], begin: str, end: str) -> list[Record]:
    """From the beginning of one label to the end of another."""
    start = place(records, kind="begin", name=begin)
    return records[start + 1 : place(records, kind="end", name=end)]


def place(records: list[Record], **fields: object) -> int:
    """Where the only record with these fields is."""
    (found,) = places(records, **fields)
    return found


def places(records: list[Record], **fields: object) -> list[int]:
    return list(_places(records, fields))


def _places(records: list[Record], fields: dict[str, object]) -> Iterator[int]:
    for index, row in enumerate(records):
        if all(getattr(row, name) == value for name, value in fields.items()):
            yield index


def compute_of(records: list[Record], module: str, phase: str) -> list[int]:
    """Where the operators of a module and its children are."""
    return [i for i in places(records, kind="op", phase=phase) if (records[i].module or "").startswith(module)]


def most_held(records: list[Record], role: str) -> int:
    """Bytes, at most at once, of storages of a role that these records allocate."""
    held = most = 0
    for row in records:
        if row.name == role and row.kind in ("alloc", "free"):
            held += row.size_bytes if row.kind == "alloc" else -row.size_bytes
            most = max(most, held)
    return most


# The usual step


@pytest.mark.parametrize(("ranks", "block", "root"), [(2, 544, 624), (4, BLOCK_BYTES, ROOT_BYTES), (8, 800, 832)])
def test_every_parameter_is_padded_to_equal_parts(ranks, block, root):
    sizes = {(row.name, row.group, row.size_bytes) for row in steady(ranks=ranks) if row.kind == "collective"}
    groups = {f"blocks.{index}": block for index in range(3)} | {ROOT: root}
    assert sizes == {(kind, group, size) for group, size in groups.items() for kind in ("all_gather", "reduce_scatter")}


def test_a_step_of_blocks_and_root():
    assert collectives(steady()) == FORWARD + BACKWARD
    assert {(row.is_async, row.op) for row in steady() if row.name == "reduce_scatter"} == {(False, "avg")}


def test_later_steps_differ_from_the_first_in_optimizer_states_alone():
    first, second, third = steps(Variant())
    assert spelt(second) == spelt(third)
    assert len(places(first, name="zeros_like")) == 2 * PARAMETERS
    assert [row for row in spelt(first) if row != "zeros_like"] == spelt(second)


@pytest.mark.parametrize(
    ("name", "stream"),
    [
        ("fsdp.all_gather_copy_in", "all_gather_copy_in"),
        ("all_gather", "all_gather"),
        ("fsdp.split_with_sizes_copy", COMPUTE),
        ("fsdp.chunk_cat", COMPUTE),
        ("reduce_scatter", "reduce_scatter"),
    ],
)
def test_streams(name, stream):
    assert {row.stream for row in steady() if row.name == name and row.kind in ("op", "collective")} == {stream}


def test_before_a_block_in_forward():
    assert spelt(between(steady(), "FSDP::pre_forward (blocks.1)", "FSDP::pre_forward (blocks.1)")) == [
        "alloc all-gather output 688 [blocks.1] @all_gather_copy_in",
        "fsdp.all_gather_copy_in [blocks.1] @all_gather_copy_in",
        "record @all_gather_copy_in",
        "all_gather waits all_gather_copy_in",
        "all_gather float32 688 [blocks.1] @all_gather",
        "record @all_gather",
        "all_gather_copy_in waits compute",
        "all_gather waits compute",
        "compute waits all_gather",
        "alloc unsharded 288 [blocks.1]",
        "alloc unsharded 48 [blocks.1]",
        "alloc unsharded 320 [blocks.1]",
        "alloc unsharded 32 [blocks.1]",
        "fsdp.split_with_sizes_copy [blocks.1]",
        "record @compute",
        "free all-gather output 688 [blocks.0]",
    ]


def test_a_gathers_streams_wait_for_the_copy_out_before_the_one_it_is_for():
    """What they wait for is the event recorded last on the compute stream, right after the copy-out of block 0."""
    records = steady()
    waits = places(records, kind="wait", stream="all_gather", source=COMPUTE)
    in_block_1 = place(records, kind="begin", name="FSDP::all_gather_copy_out (blocks.1)", phase="forward")
    event = records[max(i for i in waits if i < in_block_1)].event
    copied = place(records, name="fsdp.split_with_sizes_copy", group="blocks.0", phase="forward")
    assert [row.kind for row in records[copied + 1 : place(records, kind="record", event=event)]] == ["end"]


def test_after_a_block_in_backward():
    hooks = between(steady(), "FSDP::post_backward_accumulate (blocks.1)", "FSDP::post_backward_reduce (blocks.1)")
    assert spelt(hooks) == [
        *(f"free unsharded {size} [blocks.1]" for size in (288, 48, 320, 32)),
        "compute waits reduce_scatter",
        "free reduce-scatter input 688 [blocks.2]",
        "alloc reduce-scatter input 688 [blocks.1]",
        "fsdp.chunk_cat [blocks.1]",
        *(f"free gradient {size} [blocks.1]" for size in (240, 40, 240)),
        "record @compute",
        "reduce_scatter waits compute",
        "alloc reduce-scatter output 172 [blocks.1] @reduce_scatter",
        "reduce_scatter float32 688 [blocks.1] @reduce_scatter",
        "record @reduce_scatter",
        "record @reduce_scatter",
        "free gradient 24 [blocks.1]",  # the last one is a local variable's until the hook returns
    ]


@pytest.mark.parametrize("index", [0, 1, 2])
def test_forward_gathers_between_blocks_and_backward_one_block_ahead(index):
    records, group = steady(), f"blocks.{index}"
    before, following = ("embedding", "blocks.0", "blocks.1", "blocks.2", "head")[index::2][:2]
    forward, backward = places(records, kind="collective", name="all_gather", group=group)
    assert max(compute_of(records, before, "forward")) < forward < min(compute_of(records, group, "forward"))
    assert backward < min(compute_of(records, following, "backward"))
    scatter = place(records, kind="collective", name="reduce_scatter", group=group)
    assert max(compute_of(records, group, "backward")) < scatter < min(compute_of(records, before, "backward"))


def test_memory_of_gathers():
    """Two outputs at once in forward, where freeing one is put off until the next is copied out; one in backward."""
    records = steady()
    backward = [row for row in records if row.phase == "backward"]
    assert most_held(records, "all-gather output") == 2 * BLOCK_BYTES
    assert most_held(backward, "all-gather output") == BLOCK_BYTES
    assert most_held(records, "unsharded") == ROOT_BYTES + BLOCK_BYTES
    assert most_held(records, "reduce-scatter input") == BLOCK_BYTES


def test_gradients_live_where_they_were_reduced_until_they_are_zeroed():
    freed = [row for row in steady() if row.kind == "free" and row.name == "reduce-scatter output"]
    assert [row.phase for row in freed] == ["zero_grad"] * 4
    assert sum(row.size_bytes for row in freed) == (3 * BLOCK_BYTES + ROOT_BYTES) // 4


def test_the_last_rank_steps_what_is_left_of_the_rows():
    (first_moments,) = (row for row in steady(rank=3) if row.name == "_foreach_lerp_.Scalar")
    assert first_moments.inputs[:3] == ("float32[2, 6]", "float32[1, 6]", "float32[1]")  # 11 - 9, 10 - 9 rows
    assert first_moments.inputs[3:5] == ("float32[0, 10]", "float32[0]")  # of 6 rows the third rank has the last


# Variants


def test_a_root_alone_gathers_and_scatters_once():
    size = 3 * BLOCK_BYTES + ROOT_BYTES
    found = [(row.name, row.size_bytes) for row in steady(wrap_blocks=False) if row.kind == "collective"]
    assert found == [("all_gather", size), ("reduce_scatter", size)]


@pytest.mark.parametrize(
    ("reshard", "gathers"),
    [(True, ["gather root", *(f"gather blocks.{i}" for i in (2, 1, 0))]), (False, [])],
)
def test_gathers_of_backward_when_resharding_is_asked_for(reshard, gathers):
    records = [row for row in steady(reshard_after_forward=reshard) if row.phase == "backward"]
    assert [found for found in collectives(records) if "gather" in found] == gathers


def test_resharding_to_fewer_ranks_copies_parts_and_gathers_among_them():
    records = steady(reshard_after_forward=2)
    gathers = [(row.phase, row.ranks, row.size_bytes) for row in records if row.name == "all_gather"]
    sizes = [ROOT_BYTES, BLOCK_BYTES, BLOCK_BYTES, BLOCK_BYTES]
    assert gathers == [("forward", 4, size) for size in sizes] + [("backward", 2, size) for size in sizes]
    assert most_held(records, "sharded post forward") == (ROOT_BYTES + 3 * BLOCK_BYTES) // 2


@pytest.mark.parametrize(("reduce", "dtype", "factor"), [(torch.float32, "float32", 1), (None, "bfloat16", 2)])
def test_mixed_precision(reduce, dtype, factor):
    records = steady(**BFLOAT16, reduce_dtype=reduce)
    found = {(row.name, row.group, row.dtype, row.size_bytes) for row in records if row.kind == "collective"}
    assert ("all_gather", "blocks.0", "bfloat16", BLOCK_BYTES // 2) in found
    assert ("reduce_scatter", "blocks.0", dtype, BLOCK_BYTES // factor) in found
    casts = [row for row in records if row.name == "_foreach_copy_"]
    assert {row.stream for row in casts} == {"all_gather_copy_in"}
    assert len(casts) == len(places(records, name="all_gather"))
    back = [(row.stream, row.group) for row in records if row.name == "_to_copy" and row.group]
    groups = ["blocks.2", "blocks.1", "blocks.0", ROOT] if reduce is None else []
    assert back == [("reduce_scatter", group) for group in groups]


def test_accumulation_scatters_in_the_last_micro_batch():
    found = collectives(steady(micro_batches=2))
    assert found == FORWARD + [word for word in BACKWARD if "gather" in word] + FORWARD + BACKWARD


def test_accumulation_in_the_dtype_of_the_reduction():
    records = steady(micro_batches=2, **BFLOAT16, reduce_dtype=torch.float32)
    kept = [row for row in records if row.name == "_to_copy" and row.group]
    added = [row for row in records if row.name == "add_.Tensor" and row.group]
    assert [row.inputs[0] for row in kept[:4]] == [f"bfloat16{shape}" for shape in ([10, 6], [10], [6, 10], [6])]
    assert [row.inputs for row in added[:2]] == [(f"float32{s}", f"bfloat16{s}") for s in ([10, 6], [10])]
    assert len(kept) == len(added) == PARAMETERS
    assert {row.stream for row in kept + added} == {COMPUTE}


def test_gradients_reduced_in_every_micro_batch_are_added_where_they_are_reduced():
    records = steady(micro_batches=2, sync_every=True)
    assert collectives(records) == 2 * (FORWARD + BACKWARD)
    added = [row for row in records if row.name == "add_.Tensor" and row.group]
    assert len(added) == PARAMETERS
    assert {row.stream for row in added} == {"reduce_scatter"}


def test_parameters_kept_after_a_backward_are_not_gathered_for_the_next_forward():
    found = collectives(steady(micro_batches=2, reshard_after_backward=False))
    assert found == FORWARD + [word for word in BACKWARD if "gather" in word] + BACKWARD


def test_replicas_reduce_what_was_scattered():
    records = steady(replicas=2)
    reduces = [row for row in records if row.name == "all_reduce" and row.kind == "collective"]
    assert [(row.group, row.size_bytes, row.ranks) for row in reduces] == [
        *((f"blocks.{index}", 544 // 2, 2) for index in (2, 1, 0)),
        (ROOT, 624 // 2, 2),
    ]
    assert {(row.stream, row.op) for row in reduces} == {("all_reduce", "avg")}
    last = [row for row in records if row.kind == "wait" and row.phase == "backward"][-2:]
    assert [(row.stream, row.source) for row in last] == [(COMPUTE, "all_reduce"), (COMPUTE, "reduce_scatter")]


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_recomputation_runs_between_copy_out_and_backward_and_gathers_nothing(where):
    records = steady(checkpoint=where)
    assert collectives(records) == collectives(steady())
    copied = places(records, name="fsdp.split_with_sizes_copy", group="blocks.1", phase="backward")[0]
    again = place(records, kind="begin", name="forward blocks.1.up", phase="backward")
    assert copied < again < places(records, name="mm", module="blocks.1.down", phase="backward")[0]


def test_explicit_prefetch():
    found = collectives(steady(blocks=4, forward_prefetch=2, backward_prefetch=2))
    assert found == [
        *("gather root", *(f"gather blocks.{i}" for i in range(4))),
        *("gather blocks.3", "gather blocks.2", "gather blocks.1", "scatter blocks.3"),
        *("gather blocks.0", "scatter blocks.2", "scatter blocks.1", "scatter blocks.0", "scatter root"),
    ]
    records = steady(blocks=4, forward_prefetch=2)
    gathers = [places(records, kind="collective", name="all_gather", group=f"blocks.{i}")[0] for i in range(4)]
    computes = [min(compute_of(records, f"blocks.{i}", "forward")) for i in range(4)]
    assert max(gathers[:3]) < computes[0] < gathers[3] < computes[1]


def test_offloaded_gradients_are_awaited_by_the_host():
    records = steady(offload=True)
    to_device = [row for row in records if row.name == "copy to device"]
    assert {row.stream for row in to_device} == {"all_gather_copy_in"}
    assert len(to_device) == PARAMETERS + 12  # the blocks' once more in backward
    assert [row.stream for row in records if row.name == "copy to host"] == ["reduce_scatter"] * PARAMETERS
    assert [row.source for row in records if row.stream == "host"] == ["reduce_scatter"] * PARAMETERS


def test_clipping_reduces_one_norm_a_parameter():
    records = [row for row in steady(clip=True) if row.phase == "clip"]
    (reduced,) = (row for row in records if row.kind == "collective")
    assert (reduced.name, reduced.size_bytes, reduced.op, reduced.is_async) == (
        "all_reduce",
        4 * PARAMETERS,
        "sum",
        True,
    )
    names = [row.name for row in records if row.kind in ("op", "collective", "wait")]
    assert names[:6] == [
        "_foreach_norm.Scalar",
        "stack",
        "pow.Tensor_Scalar",
        "all_reduce",
        "wait_tensor",
        "pow.Tensor_Scalar",
    ]
    assert names[6:12] == [
        "linalg_vector_norm",
        "add.Tensor",
        "reciprocal",
        "mul.Tensor",
        "clamp",
        "_foreach_mul_.Tensor",
    ]
