"""Sharded steps as two H200s ran them: the allocator fed with their requests, and what the programs predict of them."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest

from perfmodel.program.ranks import RankProgram, rank_programs
from perfmodel.scenario.scenario import Scenario
from perfmodel.simulate.memory.allocator import BLOCK_BYTES, CachingAllocator
from perfmodel.simulate.memory.columns import MemoryColumns
from perfmodel.simulate.memory.walk import MemoryTimeline, simulate_memory
from tests.places import TESTS
from tests.simulate.memory.replays import MIB, h200, recorded_places, recorded_segments, replay

RECORDINGS = TESTS / "data" / "cuda_sharded"
FULLY_SHARDED = ["tiny-zero2", "tiny-zero3", "tiny-zero3-clipped", "tiny-zero3-mixed", "tiny-zero3-offload"]
ZERO1 = "tiny-zero1"
CASES = [ZERO1, *FULLY_SHARDED]

Request = tuple[int, int]  # bytes, and its stream's number in the order of first use


@cache
def recorded(case: str) -> dict:
    return json.loads(gzip.decompress((RECORDINGS / f"{case}.json.gz").read_bytes()))


@cache
def programs(case: str) -> tuple[RankProgram, ...]:
    return rank_programs(Scenario.model_validate(recorded(case)["scenario"]))


@cache
def predicted(case: str, rank: int = 0) -> MemoryTimeline:
    (program,) = [each.program for each in programs(case) if rank in each.ranks]
    return simulate_memory(program, h200())


def numbered(requests: list[Request]) -> list[Request]:
    """With streams numbered in the order of first use."""
    numbers: dict[int, int] = {}
    return [(size, numbers.setdefault(stream, len(numbers))) for size, stream in requests]


def recorded_requests(case: str, action: str = "alloc") -> list[Request]:
    """From before the model was built to the end of the second step."""
    return numbered([(size, stream) for done, _, size, stream in recorded(case)["memory"]["events"] if done == action])


def parts_of_two_steps(case: str) -> list[MemoryColumns]:
    history = predicted(case).history
    second = next(index for index, (part, _) in enumerate(history) if part in ("steady", "rebuilding"))
    return [columns for _, columns in history[: second + 1]]


def predicted_requests(case: str) -> list[Request]:
    return numbered(
        [
            (size, stream)
            for columns in parts_of_two_steps(case)
            for size, stream in zip(columns.request_bytes.tolist(), columns.stream.tolist(), strict=True)
            if size
        ]
    )


def predicted_allocated(case: str) -> list[int]:
    """After each request, in bytes."""
    return [
        allocated
        for columns in parts_of_two_steps(case)
        for size, allocated in zip(columns.request_bytes.tolist(), columns.allocated_bytes.tolist(), strict=True)
        if size
    ]


# the allocator, asked for what was recorded


@pytest.mark.parametrize("case", CASES)
def test_recorded_process_to_the_byte(case: str) -> None:
    memory, peaks = recorded(case)["memory"], recorded(case)["peaks_of_ranks"][0]
    asked: list[int] = []
    allocator = CachingAllocator(place=recorded_places(memory, asked))
    done = replay(memory, allocator)
    assert asked == [size for action, _, size, _ in memory["events"] if action == "segment_alloc"]
    assert done.handed_out == [address for action, address, _, _ in memory["events"] if action == "alloc"]
    assert done.peaks == peaks[:2]
    assert allocator.allocated_bytes == peaks[2]["allocated_before_bytes"]
    assert [tuple(segment) for segment in done.segments[-1]] == recorded_segments(memory["segments"])
    assert allocator.reserved_bytes == sum(segment["total_size"] for segment in memory["segments"])


@pytest.mark.parametrize("case", CASES)
def test_recorded_process_with_modelled_addresses(case: str) -> None:
    done = replay(recorded(case)["memory"], CachingAllocator())
    assert done.peaks == recorded(case)["peaks_of_ranks"][0][:2]


@pytest.mark.parametrize("case", CASES)
def test_no_block_waits_for_another_stream(case: str) -> None:
    """Neither fully_shard nor DDP gives a block to ``record_stream``: what is freed is free at once."""
    events = [(action, address) for action, address, *_ in recorded(case)["memory"]["events"]]
    requested = [(address, after) for (action, address), after in pairwise(events) if action == "free_requested"]
    assert len(requested) > 400
    assert all(after == ("free_completed", address) for address, after in requested)


# what is predicted, with no measured kernel


@pytest.mark.parametrize("case", FULLY_SHARDED)
def test_every_request_and_its_stream_in_order(case: str) -> None:
    """Building, wrapping, the first step and a steady one."""
    assert {stream for _, stream in recorded_requests(case)} == {0, 1, 2}  # compute, copy-in and scatter
    assert predicted_requests(case) == recorded_requests(case)


@pytest.mark.parametrize("case", CASES)
def test_every_segment_and_its_stream_in_order(case: str) -> None:
    bought = [(event.bytes, event.stream) for event in predicted(case).allocator.segment_log]
    assert numbered(bought) == recorded_requests(case, "segment_alloc")


LOSS = 2 * BLOCK_BYTES  # and its gradient, which outlive the root's turn
ROOTS_TURN = Counter({(278784, LOSS): 2, (760, LOSS): 2, (139392, LOSS): 2})  # whole gradients, a table, the part
NORMS = 21 * BLOCK_BYTES  # of each gradient and of all, given up before the factor is made
CLIPPING = Counter({(4, BLOCK_BYTES): 40, (80, 2 * BLOCK_BYTES): 2, (4, -NORMS): 8})


@pytest.mark.parametrize("case", FULLY_SHARDED)
def test_what_is_held_at_every_request(case: str) -> None:
    """To the byte but for numbers of four bytes each (and in clipping a list of them), freed earlier or later."""
    held = replay(recorded(case)["memory"], CachingAllocator()).allocated_bytes
    rows = zip(predicted_requests(case), held, predicted_allocated(case), strict=True)
    more = Counter((size, theirs - ours) for (size, _), theirs, ours in rows if theirs != ours)
    assert more == (ROOTS_TURN + CLIPPING if case == "tiny-zero3-clipped" else ROOTS_TURN)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("case", FULLY_SHARDED)
def test_peaks_of_both_ranks_to_the_byte(case: str, rank: int) -> None:
    timeline = predicted(case, rank)
    first, steady = timeline.first.model_dump(), timeline.steady.model_dump()
    assert [first, steady, steady, steady] == recorded(case)["peaks_of_ranks"][rank]


# zero1 is DDP's: its buckets are rebuilt in the second step

OLD_BUCKET = 673280  # 673024 bytes


def test_requests_of_zero1_but_for_what_its_ranks_tell_each_other() -> None:
    """Wrapping sends the number of parameters and their shapes and strides; rebuilding their order (int32, and how many)
    and the buckets' sizes. All of it is given back before anything else is asked for.
    """
    requests = [size for size, _ in recorded_requests(ZERO1)]
    held = replay(recorded(ZERO1)["memory"], CachingAllocator()).allocated_bytes
    rows = list(zip(requests, held, strict=True))
    parameters = 20
    rebuilt = requests.index(4 * (parameters + 1), parameters + 5)
    assert requests[parameters : parameters + 5] == [8, 8, 8, 2 * 8, 2 * 8 * (15 * 2 + 5)]
    assert requests[rebuilt : rebuilt + 2] == [4 * (parameters + 1), 4]
    kept = rows[:parameters] + rows[parameters + 5 : rebuilt] + rows[rebuilt + 2 :]
    ours = [size for size, _ in predicted_requests(ZERO1)]
    assert list(zip(ours, predicted_allocated(ZERO1), strict=True)) == kept


def test_peaks_of_zero1_where_the_old_bucket_outlives_the_step() -> None:
    timeline, peaks = predicted(ZERO1), recorded(ZERO1)["peaks_of_ranks"][0]
    steady, rebuilding = timeline.steady.model_dump(), timeline.rebuilding.model_dump()
    assert [timeline.first.model_dump(), rebuilding, steady] == [peaks[0], peaks[1], peaks[3]]
    assert peaks[2] == {  # it was still there all through the third step
        "allocated_before_bytes": steady["allocated_before_bytes"] + OLD_BUCKET,
        "peak_allocated_bytes": steady["peak_allocated_bytes"] + OLD_BUCKET,
        "peak_reserved_bytes": steady["peak_reserved_bytes"],
    }


def test_peaks_of_zero1_where_the_old_bucket_was_gone_before_the_peak() -> None:
    """NCCL's watchdog lets go of it: on this rank soon, and a segment of 2 MiB less was bought."""
    timeline, peaks = predicted(ZERO1, 1), recorded(ZERO1)["peaks_of_ranks"][1]
    assert timeline.first.model_dump() == peaks[0]
    assert timeline.rebuilding.peak_allocated_bytes == peaks[1]["peak_allocated_bytes"] + OLD_BUCKET
    assert timeline.steady.peak_allocated_bytes == peaks[3]["peak_allocated_bytes"]
    assert timeline.steady.peak_reserved_bytes == peaks[3]["peak_reserved_bytes"] + 2 * MIB
    (program,) = [each.program for each in programs(ZERO1) if 1 in each.ranks]
    rebuild = program.rebuild
    (made,) = rebuild.made
    soon = (made._replace(instructions=made.instructions + rebuild.replaced),)
    timeline = simulate_memory(replace(program, rebuild=rebuild._replace(made=soon, replaced=())), h200())
    steady, rebuilding = timeline.steady.model_dump(), timeline.rebuilding.model_dump()
    assert [timeline.first.model_dump(), rebuilding, steady, steady] == peaks
