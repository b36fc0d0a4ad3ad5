"""What the host issues in a sharded step, against steps that two H200s ran under torch 2.11 (tests/data/cuda_sharded)."""

from __future__ import annotations

from itertools import pairwise

import pytest

from perfmodel.program.program import COLLECTIVE
from tests.program.strategies.traced_steps import (
    CASES,
    HOST_WAITS,
    RANKS,
    Line,
    Traced,
    pinned_copies,
    programs,
    said,
    traced,
    waits,
)

EACH = [(case, rank) for case in CASES for rank in range(RANKS)]
RECORD, WAIT, COMPUTE = "record", "wait", "compute"
COLLECTIVES = ("all_gather ", "reduce_scatter ", "all_reduce ", "broadcast ")
LAUNCH_US = 100.0  # from the host's call, under a profiler, until a device that is free begins


def issued(case: str, rank: int) -> tuple[list[Line], list[Line]]:
    """Lines of the trace, and those among them that hold nothing up, which a program leaves out:

    - fully_shard records the end of a group's reduction twice where nothing follows it on its stream;
    - torch 2.11 awaits at the end of backward the reduction of each group, 2.13 the last one, which comes after them;
    - pinned memory that is given up is guarded by an event, which only its allocator looks at.
    """
    lines = [each.line for each in traced(case, rank)]
    extra = {at for at, line in enumerate(lines) if line == Line("zero_grad", RECORD)}
    for at in range(2, len(lines)):
        if [line.text for line in lines[at - 1 : at + 1]] == [RECORD] * 2 and is_reduction(lines[at - 2]):
            extra.add(at)
    last = max(at for at, line in enumerate(lines) if line == Line("backward", RECORD))
    ends = [at for at in range(last, len(lines)) if lines[at] == Line("backward", WAIT)]
    extra.update(ends[1:-1])
    return [line for at, line in enumerate(lines) if at not in extra], [lines[at] for at in sorted(extra)]


def is_reduction(line: Line) -> bool:
    return line.text.startswith("reduce_scatter ")


def by_stream(case: str, rank: int) -> dict[str, list[Traced]]:
    """What each stream was given, and where the host waited."""
    found: dict[str, list[Traced]] = {}
    for row in traced(case, rank):
        if row.line.stream or row.line.text == HOST_WAITS:
            found.setdefault(row.line.stream or "host", []).append(row)
    return found


def collectives(case: str, rank: int) -> list[Traced]:
    return [row for row in traced(case, rank) if row.line.text.startswith(COLLECTIVES)]


def awaited_us(case: str, rank: int) -> dict[tuple[str, int], float | None]:
    """By the stream (or ``host``) and how much that was given before: when all was done that the program says it waits
    for; None where that is of the step before.
    """
    ran = by_stream(case, rank)
    found: dict[tuple[str, int], float | None] = {}
    for each in waits(programs(case)[rank]):
        place = (each.stream, each.given)
        before = found.get(place, 0.0)
        known = each.done and before is not None
        found[place] = max(before or 0.0, ran[each.source][each.done - 1].end_us) if known else None
    return found


@pytest.mark.parametrize(("case", "rank"), EACH)
def test_the_program_is_what_the_host_issued(case: str, rank: int) -> None:
    """Operators with their tensors, collectives with dtypes and bytes, on which streams, and records and waits."""
    assert said(programs(case)[rank]) == issued(case, rank)[0]


@pytest.mark.parametrize(("case", "rank"), EACH)
def test_what_the_program_leaves_out(case: str, rank: int) -> None:
    made = programs(case)[rank]
    groups = sum(map(is_reduction, said(made)))
    copies_out = sum(way == "d2h" for way, _ in pinned_copies(made))
    assert issued(case, rank)[1] == [
        *[Line("zero_grad", RECORD)] * copies_out,
        *[Line("backward", RECORD)] * (0 if copies_out else groups),
        *[Line("backward", WAIT)] * max(groups - 1, 0),
    ]


@pytest.mark.parametrize(("case", "rank"), EACH)
def test_nothing_ran_before_what_the_program_says_it_waits_for(case: str, rank: int) -> None:
    ran, early = by_stream(case, rank), []
    for (stream, given), awaited in awaited_us(case, rank).items():
        following = ran.get(stream, [])[given : given + 1]
        early += [row for row in following if awaited is not None and row.start_us < awaited]
    assert early == []


@pytest.mark.parametrize(("case", "rank"), EACH)
def test_nothing_ran_later_than_the_program_explains(case: str, rank: int) -> None:
    """By its launch, by what its stream was given before, by waits, or by the communicator."""
    awaited, late = awaited_us(case, rank), []
    free_us = {id(after): before.end_us for before, after in pairwise(collectives(case, rank))}
    for stream, rows in by_stream(case, rank).items():
        for given, row in enumerate(rows):
            until = awaited.get((stream, given), 0.0)
            if until is None or (not given and stream == COMPUTE):
                continue  # the step before comes in
            before = rows[given - 1].end_us if given else 0.0
            ready = max(row.launched_us, before, until, free_us.get(id(row), 0.0))
            late += [(row, ready)] if row.start_us - ready > LAUNCH_US else []
    assert late == []


@pytest.mark.parametrize(("case", "rank"), EACH)
def test_a_communicator_runs_its_collectives_one_after_another_in_the_order_of_the_host(case: str, rank: int) -> None:
    """On whatever streams they are."""
    made, ran = programs(case)[rank], collectives(case, rank)
    assert len({each.members for each in made.collectives}) == 1
    assert len(ran) == (made.instructions.kind == COLLECTIVE).sum()
    assert all(before.end_us <= after.start_us for before, after in pairwise(ran))


@pytest.mark.parametrize(("case", "rank"), EACH)
def test_offloaded_parts_are_copied_by_the_copy_engines_byte_for_byte(case: str, rank: int) -> None:
    ways = {"HtoD (Pinned -> Device)": "h2d", "DtoH (Device -> Pinned)": "d2h"}
    copies = [row.launches for row in traced(case, rank) if row.line.text.startswith("_to_copy ")]
    assert [(ways[str(way)], size_bytes) for ((_, way, size_bytes),) in copies] == pinned_copies(programs(case)[rank])
    assert bool(copies) == case.endswith("-offload")
