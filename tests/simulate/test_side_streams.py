"""Known answers of steps with several streams beside the compute stream: kernels on them, and one communicator's
collectives on two of them. Seconds are whole for legibility.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.hardware.profile import Launch
from perfmodel.program.program import BY_HOST, COLLECTIVE, COMPUTE, RECORD, WAIT, Insertion, Instruction, Program
from perfmodel.simulate.one_clock import simulate_one_clock
from perfmodel.simulate.timeline import SideKernel, Timeline
from perfmodel.trace.trace import EventKind
from tests.builders import ops, program_of

from .streams import FAST_HOST, INF, near, reduce_async, run, with_edits

COPY, GATHER, SCATTER = 1, 2, 3
NO_HOST = 0.0


def op(number: int, stream: int) -> Instruction:
    return Instruction(EventKind.OP, number, stream=stream)


def meet(mark: int, first: int, then: int) -> tuple[Instruction, ...]:
    """What stream ``then`` is given from now on starts after all that stream ``first`` was given."""
    return Instruction(RECORD, mark, stream=first), Instruction(WAIT, mark, stream=then)


def forward(*parts: int | tuple[Instruction, ...], groups: tuple[str, ...] = ("dp",)) -> Program:
    """A step of one phase: operators of the compute stream (by number) and what is put between them."""
    kernels = [part for part in parts if isinstance(part, int)]
    insertions, at = [], 0
    for part in parts:
        if isinstance(part, int):
            at += 1
        else:
            insertions.append(Insertion(0, at, part))
    return with_edits(program_of(("forward", 0, ops(*kernels))), *insertions, groups=groups)


def events(timeline: Timeline) -> list[tuple[int, str, float, float]]:
    """(stream, what, start, end) of all that ran, seconds from the start of the first operator, to the microsecond."""
    found = [(each.stream, f"op{each.operation}", each.start_s, each.end_s) for each in timeline.side]
    found += [(each.stream, f"c{each.collective}", each.start_s, each.end_s) for each in timeline.communications]
    columns = (timeline.stream, timeline.operation, timeline.start_s, timeline.end_s)
    found += [
        (stream, f"op{operation}", start_s, end_s)
        for stream, operation, start_s, end_s in zip(*(column.tolist() for column in columns), strict=True)
    ]
    return since(float(timeline.start_s[0]), found)


def since(origin_s: float, found: list[tuple[int, str, float, float]]) -> list[tuple[int, str, float, float]]:
    return [
        (stream, what, round(start - origin_s, 6), round(end - origin_s, 6))
        for stream, what, start, end in sorted(found)
    ]


def copied_and_gathered() -> tuple[Instruction, ...]:
    """What FSDP2 does ahead of a layer: copied in (op1), gathered (c0), awaited with mark 2."""
    return (
        *meet(0, COMPUTE, COPY),
        op(1, COPY),
        *meet(1, COPY, GATHER),
        Instruction(COLLECTIVE, 0, stream=GATHER),
        Instruction(RECORD, 2, stream=GATHER),
    )


def awaited(*marks: int) -> tuple[Instruction, ...]:
    return tuple(Instruction(WAIT, mark) for mark in marks)


@pytest.mark.parametrize(
    ("copy_s", "copied", "gathered", "last", "exposed_s"),
    [(3.0, 13.0, 18.0, (20.0, 22.0), 0.0), (7.0, 17.0, 22.0, (22.0, 24.0), 2.0)],
)
def test_a_copy_a_collective_and_the_work_that_waits_for_them(copy_s, copied, gathered, last, exposed_s) -> None:
    timeline = run(forward(0, copied_and_gathered(), 0, awaited(2), 2), [10.0, copy_s, 2.0], [5.0], host_s=NO_HOST)
    assert events(timeline) == [
        (COMPUTE, "op0", 0.0, 10.0),
        (COMPUTE, "op0", 10.0, 20.0),
        (COMPUTE, "op2", *last),
        (COPY, "op1", 10.0, copied),
        (GATHER, "c0", copied, gathered),
    ]
    assert timeline.step_time_s == near(last[1])
    assert timeline.busy_s == near(22.0)  # of the compute stream: the copy is no part of it
    assert (timeline.communication_s, timeline.exposed_communication_s) == (near(5.0), near(exposed_s))


def test_a_side_kernel_is_launched_like_any_other() -> None:
    # The host takes 3 s a launch: at 3, 6, 9; kernels arrive 2 s later. op2 does not wait for op1.
    program = forward(0, (*meet(0, COMPUTE, COPY), op(1, COPY)), 2)
    launch = Launch(latency_s=2.0, queue_depth=1000, synchronize_s=1.0)
    timeline = run(program, [1.0, 9.0, 1.0], [], host_s=np.array([3.0, 0.0, 0.0, 3.0, 3.0]), launch=launch)
    (side,) = timeline.side
    assert side == SideKernel(1, 0, COPY, near(3.0), near(6.0), near(8.0), near(17.0))
    assert timeline.issue_s.tolist() == [near(3.0), near(9.0)]
    assert timeline.start_s.tolist() == [near(5.0), near(11.0)]
    assert timeline.step_time_s == near(9.0)
    assert timeline.synced_step_time_s == near(8.0 + 9.0 + 1.0)  # the device is done when the side kernel is


def test_side_kernels_and_operators_share_the_memory() -> None:
    # The copy (4 s alone) and op0, both bound by memory, halve each other for 8 s.
    program = forward(2, (*meet(0, COMPUTE, COPY), op(1, COPY)), 0, 2, meet(1, COPY, COMPUTE), 0)
    sharing = {1: ([2.0, 1.0, 1.0], [2.0, 1.0, 1.0], [INF] * 3)}
    timeline = run(program, [6.0, 4.0, 1.0], [], host_s=NO_HOST, sharing=sharing)
    assert sorted(events(timeline), key=lambda event: event[2:]) == [
        (COMPUTE, "op2", 0.0, 1.0),
        (COPY, "op1", 1.0, 9.0),
        (COMPUTE, "op0", 1.0, 11.0),
        (COMPUTE, "op2", 11.0, 12.0),
        (COMPUTE, "op0", 12.0, 18.0),
    ]


def test_a_side_kernel_waits_for_the_tail_of_what_runs() -> None:
    # op0 runs from 1 to 7 and has handed out its blocks 2 s before its end; the copy is ready at 3.
    program = forward(2, (*meet(0, COMPUTE, COPY), op(3, COPY), op(1, COPY)), 0, meet(1, COPY, COMPUTE), 2)
    sharing = {1: ([1.0] * 4, [1.0] * 4, [2.0, INF, INF, INF])}
    timeline = run(program, [6.0, 4.0, 1.0, 2.0], [], host_s=NO_HOST, sharing=sharing)
    assert [each for each in events(timeline) if each[0] == COPY] == [(COPY, "op1", 5.0, 9.0), (COPY, "op3", 1.0, 3.0)]


def test_side_kernels_have_a_place_in_the_launch_queue() -> None:
    # Two launches fit. The second side kernel is the fourth launch of its step: the second must have started.
    program = forward(0, 1, (op(3, COPY), op(3, COPY)), 2)
    launch = Launch(latency_s=0.0, queue_depth=2)
    timeline = run(program, [100.0, 10.0, 1.0, 1.0], [], host_s=1.0, launch=launch)
    first_s = float(timeline.start_s[0])
    assert [side.issue_s - first_s for side in timeline.side] == [near(0.0), near(100.0)]
    assert (timeline.issue_s - first_s).tolist() == [near(-9.0), near(-1.0), near(101.0)]
    assert timeline.step_time_s == near(111.0)


@pytest.mark.parametrize(
    ("groups", "gathered"),
    [(("dp", "dp", "dp"), [(30.0, 35.0), (35.0, 37.0)]), (("a", "b", "a"), [(10.0, 15.0), (30.0, 32.0)])],
)
def test_a_communicator_keeps_the_order_of_issue_across_streams(groups, gathered) -> None:
    # c0 (20 s) and c2 (2 s) on one stream, c1 (5 s) between them on another, all issued when op0 is done.
    inserted = (*reduce_async(0, 0, SCATTER), *reduce_async(1, 2, GATHER), *reduce_async(2, 4, SCATTER))
    timeline = run(forward(0, inserted, 0, 0, 0, groups=groups), [10.0], [20.0, 5.0, 2.0], host_s=NO_HOST)
    assert [each for each in events(timeline) if each[0] != COMPUTE] == [
        (GATHER, "c1", *gathered[0]),
        (SCATTER, "c0", 10.0, 30.0),
        (SCATTER, "c2", *gathered[1]),
    ]
    assert timeline.step_time_s == near(40.0)


@pytest.mark.parametrize(("groups", "between", "after"), [(("dp",) * 3, 30.0, 35.0), (("dp", "tp", "dp"), 10.0, 30.0)])
def test_a_collective_on_the_compute_stream_keeps_its_communicators_order(groups, between, after) -> None:
    inserted = (*reduce_async(0, 0, SCATTER), Instruction(COLLECTIVE, 1), Instruction(COLLECTIVE, 2, stream=GATHER))
    timeline = run(forward(0, inserted, 0, groups=groups), [10.0], [20.0, 5.0, 2.0], host_s=NO_HOST)
    assert events(timeline) == [
        (COMPUTE, "c1", between, between + 5),
        (COMPUTE, "op0", 0.0, 10.0),
        (COMPUTE, "op0", between + 5, between + 15),
        (GATHER, "c2", after, after + 2),
        (SCATTER, "c0", 10.0, 30.0),
    ]


@pytest.mark.parametrize("slowed", [None, [([1.0] * 3, [1.0] * 3, [INF] * 3)] * 3])
def test_what_is_over_before_the_device_is_asked_leaves_the_compute_stream_in_order(slowed) -> None:
    # One launch fits: the second op0 is launched when the first starts, and with it the three collectives, each after
    # the one before, that end before the first op0 does.
    inserted = (
        Instruction(COLLECTIVE, 0, stream=GATHER),
        *meet(0, GATHER, SCATTER),
        Instruction(COLLECTIVE, 1, stream=SCATTER),
        *meet(1, SCATTER, GATHER),
        Instruction(COLLECTIVE, 2, stream=GATHER),
    )
    program = forward(0, 0, inserted, 2, groups=("a", "b", "c"))
    launch = Launch(latency_s=0.0, queue_depth=1)
    timeline = run(program, [100.0, 0.0, 2.0], [5.0, 3.0, 2.0], slowed, NO_HOST, launch)
    assert events(timeline) == [
        (COMPUTE, "op0", 0.0, 100.0),
        (COMPUTE, "op0", 100.0, 200.0),
        (COMPUTE, "op2", 200.0, 202.0),
        (GATHER, "c0", 0.0, 5.0),
        (GATHER, "c2", 8.0, 10.0),
        (SCATTER, "c1", 5.0, 8.0),
    ]


@pytest.mark.parametrize("gather_s", [4.0, 25.0])
def test_a_side_stream_waits_for_all_of_the_step_before(gather_s: float) -> None:
    # Gathered at the start of a step, after what the step before did last; awaited by the second operator.
    inserted = (
        *meet(0, COMPUTE, GATHER),
        Instruction(COLLECTIVE, 0, stream=GATHER),
        Instruction(RECORD, 1, stream=GATHER),
    )
    timeline = run(forward(inserted, 0, awaited(1), 2, 2), [10.0, 7.0, 7.0], [gather_s], host_s=NO_HOST)
    second_s = max(10.0, gather_s)
    assert events(timeline) == [
        (COMPUTE, "op0", 0.0, 10.0),
        (COMPUTE, "op2", second_s, second_s + 7),
        (COMPUTE, "op2", second_s + 7, second_s + 14),
        (GATHER, "c0", 0.0, gather_s),
    ]
    assert timeline.step_time_s == near(second_s + 14)


def test_a_side_stream_that_does_not_wait_runs_ahead_of_the_step_before() -> None:
    program = forward((Instruction(COLLECTIVE, 0, stream=GATHER),), 0, 1)
    timeline = run(program, [10.0, 7.0], [4.0], host_s=NO_HOST)
    (gathered,) = timeline.communications
    assert gathered.start_s < timeline.end_s[-1] - timeline.step_time_s - 1


def test_a_mark_of_a_stream_that_only_waits() -> None:
    # COPY was given nothing but to wait for op0 and for c0 (20 s); so what waits for its mark waits for both.
    inserted = (
        *reduce_async(0, 0, SCATTER),
        *meet(2, COMPUTE, COPY),
        Instruction(WAIT, 1, stream=COPY),
        *meet(3, COPY, GATHER),
        Instruction(COLLECTIVE, 1, stream=GATHER),
    )
    timeline = run(forward(0, inserted, 0, 0, 0, groups=("a", "b")), [10.0], [20.0, 5.0], host_s=NO_HOST)
    assert events(timeline)[4:] == [(GATHER, "c1", 30.0, 35.0), (SCATTER, "c0", 10.0, 30.0)]
    only_compute = (*meet(0, COMPUTE, COPY), *meet(1, COPY, GATHER), Instruction(COLLECTIVE, 0, stream=GATHER))
    timeline = run(forward(0, only_compute, 0), [10.0], [5.0], host_s=NO_HOST)
    assert events(timeline)[2:] == [(GATHER, "c0", 10.0, 15.0)]


def test_a_mark_of_the_compute_stream_carries_what_that_waits_for() -> None:
    inserted = (*reduce_async(0, 0, GATHER), *awaited(1), *meet(2, COMPUTE, COPY), op(1, COPY))
    timeline = run(forward(0, inserted, 0), [10.0, 3.0], [20.0], host_s=NO_HOST)
    assert events(timeline)[2:] == [(COPY, "op1", 30.0, 33.0), (GATHER, "c0", 10.0, 30.0)]


def test_the_host_waits_for_what_the_compute_stream_waits_for() -> None:
    inserted = (*reduce_async(0, 0, GATHER), *awaited(1), Instruction(EventKind.SYNC))
    timeline = run(forward(0, inserted, 0), [10.0], [20.0], host_s=NO_HOST)
    assert timeline.issue_s[1] - timeline.start_s[0] == near(30.0)


def test_a_collective_goes_on_while_the_compute_stream_waits_for_a_copy() -> None:
    # c0 takes 10 s alone and runs at half speed beside operators: 6 to 12 beside op0, 12 to 16 beside nothing, 16 to 18
    # beside op2 make 3 + 4 + 1.
    copy = (*meet(2, COMPUTE, COPY), op(1, COPY), Instruction(RECORD, 3, stream=COPY))
    program = forward(0, (*reduce_async(0, 0, GATHER), *copy), 0, awaited(3), 2, awaited(1), 2)
    timeline = run(program, [6.0, 10.0, 2.0], [10.0], [([1.0] * 3, [2.0] * 3, [INF] * 3)], host_s=NO_HOST)
    assert events(timeline) == [
        (COMPUTE, "op0", 0.0, 6.0),
        (COMPUTE, "op0", 6.0, 12.0),
        (COMPUTE, "op2", 16.0, 18.0),
        (COMPUTE, "op2", 20.0, 22.0),
        (COPY, "op1", 6.0, 16.0),
        (GATHER, "c0", 6.0, 20.0),
    ]


@pytest.mark.parametrize(("waits", "copied"), [(True, (15.0, 18.0)), (False, (10.0, 13.0))])
def test_one_clock_runs_side_kernels_in_the_hosts_order(waits: bool, copied: tuple[float, float]) -> None:
    inserted = (*reduce_async(0, 0, GATHER), *(Instruction(WAIT, 1, stream=COPY),) * waits, op(1, COPY))
    timeline = run(forward(0, inserted, 2), [10.0, 3.0, 2.0], [5.0], host_s=NO_HOST, simulator=simulate_one_clock)
    assert events(timeline) == [
        (COMPUTE, "op0", 0.0, 10.0),
        (COMPUTE, "op2", copied[1], copied[1] + 2),
        (COPY, "op1", *copied),
        (GATHER, "c0", 10.0, 15.0),
    ]
    assert timeline.step_time_s == near(copied[1] + 2)


@pytest.mark.parametrize(("groups", "start_s"), [(("dp", "dp"), 30.0), (("a", "b"), 10.0)])
def test_one_clock_keeps_a_communicators_order(groups: tuple[str, ...], start_s: float) -> None:
    inserted = (*reduce_async(0, 0, SCATTER), *reduce_async(1, 2, GATHER))
    program = forward(0, inserted, awaited(1, 3), groups=groups)
    timeline = run(program, [10.0], [20.0, 5.0], host_s=NO_HOST, simulator=simulate_one_clock)
    assert events(timeline)[1:] == [(GATHER, "c1", start_s, start_s + 5), (SCATTER, "c0", 10.0, 30.0)]


class OneByOne:
    """The same clocks, instruction by instruction: no contention, so a stream is known by when it is free."""

    def __init__(self, program: Program, launch: Launch) -> None:
        self.program, self.launch = program, launch
        self.host_s, self.free_s, self.group_s = 0.0, [0.0] * 4, {}
        self.started: list[tuple[int, float]] = []  # of the compute stream: launches until then, start
        self.queued = 0
        self.events: list[tuple[int, str, float, float]] = []

    def step(self, device_s: list[float], collective_s: list[float], host_s: float) -> None:
        self.events, marks = [], {}
        self._mark()
        columns = self.program.instructions
        for kind, a, stream in zip(columns.kind.tolist(), columns.a.tolist(), columns.stream.tolist(), strict=True):
            self.host_s += host_s
            if kind == EventKind.SYNC:
                self.host_s = max(self.host_s, self.free_s[COMPUTE]) + self.launch.synchronize_s
            elif kind == RECORD:
                marks[a] = self.free_s[stream]
            elif kind == WAIT:
                self.free_s[stream] = max(self.free_s[stream], marks[a])
            elif kind == COLLECTIVE:
                self._run(stream, f"c{a}", collective_s[a], self.program.collectives[a].group)
            else:
                self._run(stream, f"op{a}", device_s[a])
        self._mark()

    def _mark(self) -> None:
        self.free_s[COMPUTE] = max(self.free_s[COMPUTE], self.host_s + self.launch.latency_s)

    def _run(self, stream: int, name: str, duration_s: float, group: str = "") -> None:
        if stream == COMPUTE or not group:  # kernels, and what runs between them
            self.queued += 1
            full = [start for count, start in self.started if count <= self.queued - self.launch.queue_depth]
            self.host_s = max([self.host_s, *full])
        start_s = max(self.host_s + self.launch.latency_s, self.free_s[stream], self.group_s.get(group, 0.0))
        self.free_s[stream] = start_s + duration_s
        if group:
            self.group_s[group] = start_s + duration_s
        if stream == COMPUTE:
            self.started.append((self.queued, start_s))
        self.events.append((stream, name, start_s, start_s + duration_s))


instructions = st.one_of(
    st.tuples(st.just(EventKind.OP), st.integers(0, 3), st.integers(0, 2)),
    st.tuples(st.just(COLLECTIVE), st.integers(0, 3), st.integers(0, 2)),
    st.tuples(st.just(RECORD), st.integers(0, 3), st.just(0)),
    st.tuples(st.just(WAIT), st.integers(0, 3), st.integers(0, 20)),
    st.tuples(st.just(EventKind.SYNC), st.just(COMPUTE), st.just(0)),
)


def numbered(drawn: list[tuple[int, int, int]]) -> tuple[Instruction, ...]:
    """Records numbered in order, waits for one of those made so far."""
    rows, marks = [], 0
    for kind, stream, number in drawn:
        if kind == RECORD:
            rows.append(Instruction(RECORD, marks, stream=stream))
            marks += 1
        elif kind != WAIT:
            rows.append(Instruction(kind, number, stream=stream))
        elif marks:
            rows.append(Instruction(WAIT, number % marks, stream=stream))
    return tuple(rows)


seconds = st.floats(0.1, 10.0)
three = st.lists(seconds, min_size=3, max_size=3)


@given(
    drawn=st.lists(instructions, max_size=25),
    device_s=three,
    collective_s=three,
    host_s=st.floats(1e-3, 3.0),
    latency_s=st.floats(0.0, 2.0),
    depth=st.integers(1, 8),
    groups=st.tuples(*[st.sampled_from(["a", "b"])] * 3),
    slowed=st.sampled_from([None, [([1.0] * 3, [1.0] * 3, [INF] * 3)] * 3]),
)
def test_all_that_ran_agrees_with_a_simulation_one_by_one(
    drawn, device_s, collective_s, host_s, latency_s, depth, groups, slowed
) -> None:
    program = forward(2, numbered(drawn), 2, groups=groups)
    launch = Launch(latency_s=latency_s, queue_depth=depth, synchronize_s=0.5)
    timeline = run(program, device_s, collective_s, slowed, host_s, launch)
    expected = OneByOne(program, launch)
    expected.step(device_s, collective_s, host_s)
    launches = expected.queued
    for _ in range(math.ceil(depth / launches) + 1):
        expected.step(device_s, collective_s, host_s)
    first_s = next(start for stream, name, start, _ in expected.events if (stream, name) == (COMPUTE, "op2"))
    found, wanted = events(timeline), since(first_s, expected.events)
    assert [each[:2] for each in found] == [each[:2] for each in wanted]
    assert [each[2:] for each in found] == [pytest.approx(each[2:], abs=2e-6) for each in wanted]


@given(device_s=st.lists(seconds, min_size=3, max_size=3), longer=st.floats(1.0, 5.0), host_s=st.floats(1e-3, 3.0))
def test_a_longer_side_kernel_never_shortens_the_step(device_s, longer, host_s) -> None:
    program = forward(0, copied_and_gathered(), 0, awaited(2), 2)
    short = run(program, device_s, [5.0], host_s=host_s)
    device_s[1] *= longer
    long = run(program, device_s, [5.0], host_s=host_s)
    assert long.step_time_s >= short.step_time_s * (1 - 1e-9)
    assert long.step_time_s >= (device_s[0] + device_s[1] + 5.0 + device_s[2]) * (1 - 1e-9)


@given(device_s=st.lists(seconds, min_size=3, max_size=3), depth=st.integers(1, 8))
def test_what_nothing_waits_for_leaves_the_compute_stream_alone(device_s, depth) -> None:
    launch = Launch(latency_s=FAST_HOST.latency_s, queue_depth=depth)
    with_copy = run(forward(0, (op(1, COPY),), 2), device_s, [], host_s=NO_HOST, launch=launch)
    without = run(forward(0, 2), device_s, [], host_s=NO_HOST, launch=launch)
    assert (with_copy.step_time_s, with_copy.busy_s) == (near(without.step_time_s), near(without.busy_s))


@pytest.mark.parametrize(("copy_s", "issued_s"), [(9.0, 13.5), (3.0, 7.5), (0.5, 4.0)])
def test_the_host_waits_for_work_of_a_stream(copy_s: float, issued_s: float) -> None:
    # op0 runs from 1 to 2, and then the copy. The host gets to its wait at 3; if the copy has not ended by then, it is
    # reported of that 1.5 s later. op2 is issued 1 s after that.
    copied = (*meet(0, COMPUTE, COPY), op(1, COPY), Instruction(RECORD, 1, stream=COPY))
    program = forward(0, copied, 3, (Instruction(WAIT, 1, stream=BY_HOST),), 2)
    launch = Launch(latency_s=0.0, queue_depth=1000, synchronize_s=1.5)
    costs_s = np.array([1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0])
    timeline = run(program, [1.0, copy_s, 1.0, 1.0], [], host_s=costs_s, launch=launch)
    (side,) = timeline.side
    assert (side.start_s, side.end_s) == (near(2.0), near(2.0 + copy_s))
    assert timeline.issue_s.tolist() == [near(1.0), near(2.0), near(issued_s)]
    assert timeline.end_s.tolist() == [near(2.0), near(3.0), near(issued_s + 1.0)]
    assert timeline.host_busy_s == near(4.0)


def test_a_host_that_waits_for_what_the_compute_stream_did_goes_on_when_that_has_ended() -> None:
    # When a step begins, op1 of the one before is still to run.
    program = forward(0, (Instruction(RECORD, 0), Instruction(WAIT, 0, stream=BY_HOST)), 1)
    launch = Launch(latency_s=0.0, queue_depth=1000, synchronize_s=2.0)
    timeline = run(program, [10.0, 3.0], [], host_s=NO_HOST, launch=launch)
    assert timeline.issue_s.tolist() == [near(0.0), near(3.0 + 10.0 + 2.0)]
