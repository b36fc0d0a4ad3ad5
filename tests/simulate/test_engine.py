"""Known answers of the two clocks, and properties that must hold whatever the numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.hardware.profile import Launch
from perfmodel.program.program import Program
from perfmodel.simulate.engine import simulate
from perfmodel.simulate.one_clock import simulate_one_clock
from perfmodel.simulate.timed_step import launched_positions, timed_step
from perfmodel.simulate.timeline import Timeline
from perfmodel.trace.trace import EventKind
from tests.builders import ops, program_of

LAUNCH = Launch(latency_s=2.0, queue_depth=1000, synchronize_s=3.0)


def run(program: Program, device_s: list[float], host_s: float, launch: Launch = LAUNCH, kernels: int = 1) -> Timeline:
    count = len(program.instructions.kind)
    launched = np.array([kernels if seconds > 0 else 0 for seconds in device_s])
    duration_s = np.array(device_s)[program.instructions.a[launched_positions(program, launched)]]
    return simulate(program, timed_step(program, duration_s, launched, np.full(count, host_s)), launch)


def test_device_bound_step_is_the_sum_of_its_kernels() -> None:
    timeline = run(program_of(("forward", 0, ops(0, 1, 0))), [10.0, 20.0], 1.0)
    assert timeline.step_time_s == pytest.approx(40.0)


def test_host_bound_step_is_the_sum_of_its_host_costs() -> None:
    timeline = run(program_of(("forward", 0, ops(0, 1, 0))), [1.0, 2.0], 5.0)
    assert timeline.step_time_s == pytest.approx(15.0)


def test_synced_step_adds_latency_and_synchronisation() -> None:
    # Host issues at 1, 2; device: 3 to 13, 13 to 23; the host knows at 26.
    timeline = run(program_of(("forward", 0, ops(0, 0))), [10.0], 1.0)
    assert timeline.synced_step_time_s == pytest.approx(26.0)


def test_whole_event_list_of_a_host_bound_step() -> None:
    timeline = run(program_of(("forward", 0, ops(0, 1)), ("backward", 0, ops(2))), [1.0, 4.0, 2.0], 3.0)
    # The host marks its step at 0 and issues at 3, 6, 9; kernels arrive 2 later and find the stream free.
    assert timeline.issue_s.tolist() == pytest.approx([3.0, 6.0, 9.0])
    assert timeline.start_s.tolist() == pytest.approx([5.0, 8.0, 12.0])
    assert timeline.end_s.tolist() == pytest.approx([6.0, 12.0, 14.0])
    # The forward mark is reached at the end of the step before's last kernel (14 - 9 = 5), the backward mark at 12.
    assert [(s.phase, s.start_s, s.end_s) for s in timeline.phases] == [
        ("forward", pytest.approx(5.0), pytest.approx(12.0)),
        ("backward", pytest.approx(12.0), pytest.approx(14.0)),
    ]


def test_host_only_operators_cost_host_time_and_launch_nothing() -> None:
    timeline = run(program_of(("forward", 0, ops(0, 1, 0))), [1.0, 0.0], 5.0)
    assert timeline.operation.tolist() == [0, 0]
    assert timeline.step_time_s == pytest.approx(15.0)


def test_a_wait_lets_the_device_run_dry() -> None:
    # op0 (10 s), then the host waits, then op1 (10 s): each step the device idles while the host returns and launches.
    program = program_of(("forward", 0, [(EventKind.OP, 0), (EventKind.SYNC, 0), (EventKind.OP, 1)]))
    timeline = run(program, [10.0, 10.0], 1.0)
    # From op0's end: 3 (synchronize) + 1 (op1's host cost) + 2 (latency), op1 10; the next op0 is issued meanwhile.
    assert timeline.start_s[1] - timeline.end_s[0] == pytest.approx(3.0 + 1.0 + 2.0)
    assert timeline.step_time_s == pytest.approx(10.0 + 6.0 + 10.0)


def test_the_queue_holds_the_host_back() -> None:
    launch = Launch(latency_s=0.0, queue_depth=4)
    timeline = run(program_of(("forward", 0, ops(*[0] * 40))), [10.0], 1.0, launch)
    ahead = [int(np.sum(timeline.start_s[:i] > t)) for i, t in enumerate(timeline.issue_s)]
    assert max(ahead) == 3  # with the one being issued, four have not started
    assert timeline.step_time_s == pytest.approx(400.0)


def test_a_short_queue_exposes_the_host_after_a_long_kernel() -> None:
    # 1 kernel of 100 s, then 20 of 1 s whose launches take 3 s each. With a deep queue the host is ahead by then.
    program = program_of(("forward", 0, ops(0, *[1] * 20)))
    deep = run(program, [100.0, 1.0], 3.0, Launch(queue_depth=1000))
    shallow = run(program, [100.0, 1.0], 3.0, Launch(queue_depth=2))
    assert deep.step_time_s == pytest.approx(120.0)
    assert shallow.step_time_s > 140.0


def test_operators_of_many_kernels_fill_the_queue_sooner() -> None:
    program = program_of(("forward", 0, ops(0, *[1] * 20)))
    one = run(program, [100.0, 1.0], 3.0, Launch(queue_depth=16))
    many = run(program, [100.0, 1.0], 3.0, Launch(queue_depth=16), kernels=8)
    assert many.step_time_s > one.step_time_s


def test_one_clock_adds_everything() -> None:
    program = program_of(("forward", 0, ops(0, 1)), ("backward", 0, ops(0)))
    work = timed_step(program, np.array([2.0, 5.0, 2.0]), np.array([1, 1]), np.full(3, 0.5))
    timeline = simulate_one_clock(program, work)
    assert timeline.step_time_s == timeline.synced_step_time_s == pytest.approx(10.5)
    assert [(s.phase, s.duration_s) for s in timeline.phases] == [
        ("forward", pytest.approx(8.0)),
        ("backward", pytest.approx(2.5)),
    ]


def test_accumulation_repeats_the_last_micro_batch() -> None:
    phases = [
        ("forward", 0, ops(0)),
        ("backward", 0, ops(1)),
        ("forward", 1, ops(2)),
        ("backward", 1, ops(3)),
        ("optimizer", -1, ops(4)),
    ]
    program = program_of(*phases, accumulation=4)
    assert [(run.phase, run.micro_batch) for run in program.runs] == [
        ("forward", 0), ("backward", 0), ("forward", 1), ("backward", 1), ("forward", 2), ("backward", 2),
        ("forward", 3), ("backward", 3), ("optimizer", -1),
    ]  # fmt: skip
    timeline = run(program, [1.0, 2.0, 4.0, 8.0, 16.0], 0.001)
    assert timeline.step_time_s == pytest.approx(1 + 2 + 3 * (4 + 8) + 16)


durations = st.lists(st.floats(0.01, 10.0), min_size=1, max_size=40)


@given(device_s=durations, host_s=st.floats(0.01, 10.0), latency_s=st.floats(0, 5), depth=st.integers(1, 30))
def test_no_step_beats_its_busiest_clock(device_s: list[float], host_s: float, latency_s: float, depth: int) -> None:
    program = program_of(("forward", 0, ops(*range(len(device_s)))))
    timeline = run(program, device_s, host_s, Launch(latency_s=latency_s, queue_depth=depth))
    busiest = max(sum(device_s), host_s * len(device_s))
    assert timeline.step_time_s >= busiest * (1 - 1e-9)
    assert np.all(timeline.start_s >= timeline.issue_s + latency_s - 1e-9)
    assert np.all(timeline.start_s[1:] >= timeline.end_s[:-1] - 1e-9)


@given(device_s=durations, host_s=st.floats(0.01, 10.0), depth=st.integers(1, 30), factor=st.floats(0.1, 1.0))
def test_a_faster_device_is_never_slower(device_s: list[float], host_s: float, depth: int, factor: float) -> None:
    program = program_of(("forward", 0, ops(*range(len(device_s)))))
    launch = Launch(latency_s=1.0, queue_depth=depth)
    slow = run(program, device_s, host_s, launch)
    fast = run(program, [seconds * factor for seconds in device_s], host_s, launch)
    assert fast.step_time_s <= slow.step_time_s * (1 + 1e-9)
    assert fast.synced_step_time_s <= slow.synced_step_time_s * (1 + 1e-9)


@given(device_s=durations, host_s=st.floats(0.01, 10.0), depth=st.integers(1, 8))
def test_blocks_agree_with_a_launch_by_launch_simulation(device_s: list[float], host_s: float, depth: int) -> None:
    program = program_of(("forward", 0, ops(*range(len(device_s)))))
    timeline = run(program, device_s, host_s, Launch(latency_s=0.5, queue_depth=depth))
    host, end, starts = 0.0, 0.0, []
    marks = []
    for _ in range(math.ceil(depth / len(device_s)) + 2):  # as many as the engine: level clocks settle late
        marks.append(max(host + 0.5, end))
        for seconds in device_s:
            host = max(host + host_s, starts[-depth] if len(starts) >= depth else 0.0)
            starts.append(max(host + 0.5, end))
            end = starts[-1] + seconds
    marks.append(max(host + 0.5, end))
    assert timeline.step_time_s == pytest.approx(marks[-1] - marks[-2], rel=1e-6)
