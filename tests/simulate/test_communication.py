"""Known answers of streams that meet: collectives beside and on the compute stream. Seconds are whole for legibility."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.cost.contention import Slowdown
from perfmodel.hardware.profile import Launch
from perfmodel.program.program import COLLECTIVE, COMPUTE, WAIT, Insertion, Instruction, Program
from perfmodel.simulate.device_clock import DeviceClock
from perfmodel.simulate.one_clock import simulate_one_clock
from perfmodel.simulate.rendezvous import run_alone
from perfmodel.simulate.tasks import StreamTask
from tests.builders import ops, program_of

from .streams import INF, near, reduce_async, run, with_edits


def overlapped(*kernels: int, at: int, wait_at: int | None = None) -> Program:
    """The kernels in order, a collective after the first ``at`` of them, awaited before kernel ``wait_at`` or at the end."""
    program = program_of(("backward", 0, ops(*kernels)))
    wait = len(kernels) if wait_at is None else wait_at
    return with_edits(program, Insertion(0, at, reduce_async(0, 0)), Insertion(0, wait, (Instruction(WAIT, 1),)))


def test_a_collective_beside_long_work_is_hidden() -> None:
    timeline = run(overlapped(0, 0, 0, at=1), [10.0], [5.0])
    assert timeline.step_time_s == near(30.0)
    (each,) = timeline.communications
    assert (each.end_s - each.start_s, each.start_s - timeline.end_s[0]) == (near(5.0), near(0.0))
    assert (timeline.communication_s, timeline.exposed_communication_s) == (near(5.0), near(0.0))


def test_what_work_does_not_hide_is_exposed() -> None:
    timeline = run(overlapped(0, 1, 1, at=1), [10.0, 2.0], [25.0])
    assert timeline.step_time_s == near(35.0)
    assert timeline.exposed_communication_s == near(25.0 - 4.0)


def test_later_work_waits_where_the_stream_waits() -> None:
    timeline = run(overlapped(0, 1, 1, at=1, wait_at=2), [10.0, 2.0], [25.0])
    assert timeline.step_time_s == near(37.0)
    assert timeline.start_s[2] - timeline.end_s[0] == near(25.0)


def test_a_collective_on_the_compute_stream_is_exposed_whole() -> None:
    program = with_edits(program_of(("backward", 0, ops(0, 0))), Insertion(0, 1, (Instruction(COLLECTIVE, 0),)))
    timeline = run(program, [10.0], [7.0])
    assert timeline.step_time_s == near(27.0)
    assert timeline.start_s[1] - timeline.end_s[0] == near(7.0)
    assert timeline.exposed_communication_s == near(7.0)
    assert [each.stream for each in timeline.communications] == [COMPUTE]


def test_collectives_of_one_stream_follow_each_other() -> None:
    program = program_of(("backward", 0, ops(0, 0, 0)))
    insertions = (
        Insertion(0, 1, reduce_async(0, 0)),
        Insertion(0, 2, reduce_async(1, 2)),
        Insertion(0, 3, (Instruction(WAIT, 1), Instruction(WAIT, 3))),
    )
    timeline = run(with_edits(program, *insertions, groups=("dp", "dp")), [10.0], [15.0, 4.0])
    assert [each.start_s - timeline.end_s[0] for each in timeline.communications] == [near(0.0), near(15.0)]
    assert timeline.step_time_s == near(30.0)  # 10 + 15 + 4 ends before the third kernel does


def test_both_slow_each_other_while_they_run_together() -> None:
    # The collective (alone 6) takes 12 beside kernels that take 20 instead of 10: it ends when 6 of the second are done.
    timeline = run(overlapped(0, 0, 0, at=1), [10.0], [6.0], [([2.0], [2.0], [INF])])
    (each,) = timeline.communications
    assert each.end_s - each.start_s == near(12.0)
    assert timeline.end_s - timeline.start_s == pytest.approx([10.0, 16.0, 10.0], abs=1e-3)
    assert timeline.step_time_s == near(36.0)


def test_a_collective_goes_on_at_full_speed_where_nothing_computes() -> None:
    # Beside 10 s of work at half speed it gets 5 of its 8 done; the other 3 are exposed.
    timeline = run(overlapped(0, 0, at=1), [10.0], [8.0], [([1.0], [2.0], [INF])])
    assert timeline.step_time_s == near(23.0)
    assert timeline.exposed_communication_s == near(3.0)


def test_a_collective_that_arrives_within_a_kernel_waits_for_its_tail() -> None:
    # Two collectives, the first ending 3 s into a kernel of 10 s whose last 4 s leave room: the second starts at 6.
    program = program_of(("backward", 0, ops(0, 0)))
    insertions = (
        Insertion(0, 1, (*reduce_async(0, 0), *reduce_async(1, 2))),
        Insertion(0, 2, (Instruction(WAIT, 1), Instruction(WAIT, 3))),
    )
    free, tails = [1.0], [4.0]
    timeline = run(with_edits(program, *insertions, groups=("dp", "dp")), [10.0], [3.0, 2.0], [(free, free, tails)] * 2)
    assert [each.start_s - timeline.end_s[0] for each in timeline.communications] == [near(0.0), near(6.0)]


@pytest.mark.parametrize(
    ("wave_s", "lasting_s"),
    [
        (0.0, 14.0),  # 4 of its 10 done beside the collective, in 8 s, and 6 after it
        (4.0, 16.0),  # the first 2 of these 6 end a wave that began beside the collective
        (10.0, 20.0),  # all its blocks were handed out beside it
    ],
)
def test_the_wave_of_blocks_that_is_on_keeps_its_pace(wave_s: float, lasting_s: float) -> None:
    timeline = run(overlapped(0, 0, at=1), [10.0], [8.0], [([2.0], [1.0], [INF], [wave_s])])
    assert timeline.communications[0].end_s - timeline.end_s[0] == near(8.0)
    assert timeline.end_s[1] - timeline.start_s[1] == near(lasting_s)


@given(
    kernel_s=st.floats(1e-5, 1e-3), factors=st.tuples(*[st.floats(1.0, 2.0)] * 2), wave=st.floats(0.05, 1.0),
    begins_s=st.floats(0.0, 5.0),
)  # fmt: skip
def test_no_pace_is_kept_of_a_kernel_that_ended_with_the_collective(kernel_s, factors, wave, begins_s) -> None:
    """But for rounding, by which a moment of it may seem to be left, or less than nothing."""
    slowdown = Slowdown(*(np.full(3, value) for value in (*factors, INF, wave * kernel_s)))
    device = DeviceClock(Launch(), [slowdown], 3)
    device.reserve(3)
    device.issue(np.full(3, begins_s), np.full(3, kernel_s))
    device.add(StreamTask(1, kernel_s * factors[0] / factors[1], 0, begins_s))
    run_alone(device.run_all())
    assert device.end_s[2] == pytest.approx(begins_s + kernel_s * (factors[0] + 2), abs=1e-6 * kernel_s + 1e-12)


def test_one_clock_waits_for_what_runs_beside_it() -> None:
    timeline = run(overlapped(0, 1, at=1), [10.0, 2.0], [5.0], simulator=simulate_one_clock)
    assert timeline.step_time_s == near(15.0)
    assert timeline.communications[0].end_s == near(15.0)


def test_a_wait_for_nothing_is_refused() -> None:
    program = with_edits(program_of(("backward", 0, ops(0))), Insertion(0, 1, (Instruction(WAIT, 7),)))
    with pytest.raises(KeyError):
        run(program, [1.0], [1.0])


seconds = st.floats(0.1, 10.0)


@given(
    device_s=st.lists(seconds, min_size=2, max_size=6),
    collective_s=seconds,
    factors=st.tuples(st.floats(1, 3), st.floats(1, 3)),
    faster=st.floats(0.1, 1.0),
    host_s=st.floats(1e-4, 2.0),
)
def test_a_faster_wire_is_never_slower(device_s, collective_s, factors, faster, host_s) -> None:
    program = overlapped(*range(len(device_s)), at=1)
    compute, communication = factors
    slowed = [([compute] * len(device_s), [communication] * len(device_s), [INF] * len(device_s))]
    launch = Launch(latency_s=0.5, queue_depth=4)
    slow = run(program, device_s, [collective_s], slowed, host_s, launch)
    fast = run(program, device_s, [collective_s * faster], slowed, host_s, launch)
    assert fast.step_time_s <= slow.step_time_s * (1 + 1e-9)


@given(device_s=st.lists(seconds, min_size=2, max_size=6), collective_s=seconds, host_s=st.floats(1e-4, 2.0))
def test_the_step_is_at_least_its_critical_path(device_s, collective_s, host_s) -> None:
    timeline = run(overlapped(*range(len(device_s)), at=1), device_s, [collective_s], host_s=host_s)
    assert timeline.step_time_s >= max(sum(device_s), device_s[0] + collective_s) * (1 - 1e-9)
    assert 0 <= timeline.exposed_communication_s <= timeline.communication_s + 1e-9
