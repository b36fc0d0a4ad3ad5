"""Kernels of the compute stream while other streams wait for an event. Seconds are whole for legibility."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.cost.contention import Slowdown
from perfmodel.hardware.profile import Launch
from perfmodel.simulate.device_clock import DeviceClock
from perfmodel.simulate.rendezvous import run_alone
from perfmodel.simulate.tasks import StreamTask
from perfmodel.simulate.timed_step import timed_step
from tests.builders import ops, program_of

from .streams import INF, near


def item(lane: int, after_entry: int = -1, ready_s: float = 0.0, duration_s: float = 1.0) -> StreamTask:
    return StreamTask(lane, duration_s, 0, ready_s, after_entry)


def ends(
    gaps_s: tuple[float, ...], items: list[StreamTask], duration_s: tuple[float, ...] = (10.0,) * 3, kernels: int = 1
) -> list[float]:
    """Of the entries, all of which were issued at once."""
    count = len(duration_s)
    free = Slowdown(np.ones(count), np.ones(count), np.full(count, INF))
    device = DeviceClock(Launch(waiting_gap_s=gaps_s), [free], count, np.full(count, kernels))
    device.reserve(count)
    device.issue(np.zeros(count), np.array(duration_s))
    for each in items:
        device.add(each)
    run_alone(device.run_all())
    return device.end_s.tolist()


@pytest.mark.parametrize(
    ("gaps_s", "waiting", "expected"),
    [
        ((), 2, [10.0, 20.0, 30.0]),
        ((0.0, 1.0), 1, [10.0, 20.0, 30.0]),
        ((0.0, 1.0), 2, [11.0, 22.0, 32.0]),  # until what both wait for, the second entry, has ended
        ((0.0, 1.0), 3, [11.0, 22.0, 32.0]),  # no more was measured: the last holds
        ((0.5, 1.0, 2.0), 3, [12.0, 24.0, 34.0]),
        ((0.5, 1.0, 2.0), 1, [10.5, 21.0, 31.0]),
    ],
)
def test_streams_that_wait_lengthen_the_gaps(gaps_s: tuple[float, ...], waiting: int, expected: list[float]) -> None:
    assert ends(gaps_s, [item(lane, after_entry=1) for lane in range(1, waiting + 1)]) == expected


def test_every_kernel_of_an_operator_pays() -> None:
    assert ends((1.0,), [item(1, after_entry=0)], kernels=3) == [13.0, 23.0, 33.0]


def test_a_stream_waits_from_when_its_work_has_arrived() -> None:
    # Half of the first kernel is done by then; the other half pays half of the gap.
    assert ends((1.0,), [item(1, after_entry=0, ready_s=5.0)]) == [10.5, 20.5, 30.5]


def test_work_behind_other_work_of_its_stream_does_not_wait_for_another() -> None:
    assert ends((1.0,), [item(1, duration_s=15.0), item(1)]) == [10.0, 20.0, 30.0]


def test_work_that_waits_for_another_stream_waits() -> None:
    first = item(1, duration_s=15.0)
    second = StreamTask(2, 1.0, 0, 0.0, -1, (first,))
    beside_s, alone_s = 11.0, 10.0  # at 15, 4 of the second kernel's 11 are over
    ended_s = 15.0 + alone_s * (1 - 4.0 / beside_s)
    assert ends((1.0,), [first, second]) == [near(beside_s), near(ended_s), near(ended_s + alone_s)]


def test_a_gap_comes_on_top_of_a_pace_that_is_kept() -> None:
    # The first lane's item, 3 s, makes the kernel take 1.5 times as long, and so do its blocks to their end; the second
    # lane waits all the while: 2 + 8 of 10 s alone, at 1.5 and a tenth for the gap.
    slowed = Slowdown(np.array([1.5, 1.0]), np.ones(2), np.full(2, INF), np.array([10.0, 0.0]))
    device = DeviceClock(Launch(waiting_gap_s=(1.0,)), [slowed], 2, np.ones(2))
    device.reserve(2)
    device.issue(np.zeros(2), np.array([10.0, 10.0]))
    for each in (item(1, duration_s=3.2), item(2, after_entry=0)):
        device.add(each)
    run_alone(device.run_all())
    assert device.end_s.tolist() == [near(10.0 * (1.5 + 0.1)), near(26.0)]


@given(
    duration_s=st.lists(st.floats(0.1, 10.0), min_size=1, max_size=8),
    after=st.lists(st.integers(-1, 7), max_size=4),
    gaps_s=st.lists(st.floats(0.0, 3.0), max_size=3).map(sorted),
)
def test_streams_that_wait_never_make_the_step_shorter(
    duration_s: list[float], after: list[int], gaps_s: list[float]
) -> None:
    def items() -> list[StreamTask]:
        return [item(lane, min(entry, len(duration_s) - 1)) for lane, entry in enumerate(after, 1)]

    slower = ends(tuple(gaps_s), items(), tuple(duration_s))
    assert np.all(np.array(slower) >= np.array(ends((), items(), tuple(duration_s))) - 1e-9)
    assert slower[-1] <= sum(duration_s) + len(duration_s) * max(gaps_s, default=0.0) + 1e-9


@pytest.mark.parametrize(("pause_s", "ended_s"), [(0.0, 25.0), (2.0, 23.0), (5.0, 20.0), (7.0, 20.0)])
def test_a_gap_and_the_pauses_beside_a_collective_do_not_add_up(pause_s: float, ended_s: float) -> None:
    # A kernel of 10 s takes twice as long beside an item, pause_s of it by a longer gap, while a stream waits for both.
    slowed = Slowdown(np.array([2.0]), np.ones(1), np.full(1, INF), None, pause_s)
    device = DeviceClock(Launch(waiting_gap_s=(5.0,)), [slowed], 1, np.ones(1))
    device.reserve(1)
    device.issue(np.zeros(1), np.array([10.0]))
    device.add(StreamTask(1, 100.0, 0, 0.0))
    device.add(item(2, after_entry=0))
    run_alone(device.run_all())
    assert device.end_s.tolist() == [near(ended_s)]


def test_the_engine_keeps_what_a_collective_adds_to_gaps() -> None:
    program = program_of(("backward", 0, ops(0, 0)))
    slowed = Slowdown(np.full(2, 2.0), np.ones(2), np.full(2, INF), None, 3.0)
    work = timed_step(
        program, np.ones(2), np.ones(1, dtype=int), np.zeros(len(program.instructions.kind)), None, (slowed,)
    )
    assert [each.pause_s for each in work.slowdowns] == [3.0]
