"""Samples in relation to reference runs: on a host whose speed wanders, records come out as on a steady one."""

from __future__ import annotations

import itertools

import pytest
import torch

from calibrate.host import costs
from calibrate.host.pieces import HostPieces
from calibrate.host.records import Case, call_records, in_turn
from calibrate.host.reference import HostReference, at_speed, wander
from calibrate.timing.host_stopwatch import OperatorTimes, Seen, Work
from perfmodel.hardware.profile import HostRecord

MS, US = 1e-3, 1e-6


class FakeClock:
    """Work takes its seconds times the slowness of the moment; every reading of the clock is one more moment."""

    def __init__(self, slowness: list[float]) -> None:
        self.now_s = 0.0
        self.slowness = itertools.cycle(slowness)
        self.slow = next(self.slowness)

    def perf_counter(self) -> float:
        return self.now_s

    def work(self, seconds: float) -> None:
        self.now_s += seconds * self.slow

    def wander(self) -> None:
        self.slow = next(self.slowness)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock([1.0, 2.0, 0.5, 4.0])


def reference_on(clock: FakeClock, reference_s: float | None = None) -> HostReference:
    """Whose runs take 2 ms of the clock's work."""
    return HostReference("cpu", reference_s, clock.perf_counter, lambda: clock.work(2 * MS))


def test_a_sample_is_taken_in_relation_to_the_runs_around_it(clock) -> None:
    reference = reference_on(clock)
    assert reference.reference_s == pytest.approx(2 * MS)
    samples_s: list[float] = []
    reference.beat()  # at 1, 2 and 0.5 times the time
    for seconds in (30 * US, 20 * US):
        reference.note(samples_s, seconds)
        clock.wander()
        assert len(samples_s) < 2
        reference.beat()
    assert samples_s == pytest.approx([30 * US / 1.5, 20 * US / 1.25])


def test_a_given_speed_is_kept(clock) -> None:
    reference = reference_on(clock, 6 * MS)
    samples_s: list[float] = []
    reference.beat()
    reference.note(samples_s, 10 * US)
    reference.beat()
    assert samples_s == pytest.approx([30 * US])


def test_records_of_a_wandering_host_are_those_of_a_steady_one(clock) -> None:
    """Speeds from half to four times, changing from group to group: every sample is what it is at speed one."""
    reference = reference_on(clock)
    calls = costs.ExampleCalls("cpu", reference, HostPieces(), clock.perf_counter)
    seen = Seen(calls=[("f", Work(["mm"], 0, 1))])
    case = Case("f", [lambda: clock.work(30 * US)] * 2, seen)
    for _ in range(4):
        calls.sample_forward([case])
        clock.wander()
    assert case.forward_s == pytest.approx([30 * US] * 4 * costs.ROUNDS)
    record = call_records([case], (), OperatorTimes("cuda", reference))["call f(mm)"]
    assert (record.time_s, record.spread) == (pytest.approx(30 * US), pytest.approx(0, abs=1e-9))
    found = reference.record()
    assert found.samples == 8
    assert found.time_s == pytest.approx(3 * MS)  # between runs at 1 1 2 2 0.5 0.5 4 4 times 2 ms
    at_median = at_speed({"f": record}, found.time_s / reference.reference_s)["f"]
    assert at_median.time_s == pytest.approx(45 * US)


def test_rounds_lie_between_reference_runs(clock) -> None:
    reference = reference_on(clock)

    def stopwatch() -> float:
        began_s = clock.now_s
        clock.work(5 * US)
        return clock.now_s - began_s

    clock.wander()
    assert in_turn([stopwatch, lambda: 1.0], reference) == [pytest.approx([5 * US] * 60), pytest.approx([0.5] * 60)]
    assert len(reference.runs_s) == 60 // 12 + 1


def test_single_interruptions_are_no_wander() -> None:
    assert wander([1.0, 1.0, 50.0, 1.0, 1.0] * 4) == 0
    assert wander([1.0] * 5 + [2.0] * 5 + [3.0] * 5) == pytest.approx(0.5)


def test_the_work_trains_nothing_and_leaves_no_gradient_growing() -> None:
    reference = HostReference("cpu")
    before = [parameter.clone() for parameter in reference._layer.parameters()]
    assert len(reference.run(3)) == 3
    reference.disturb(2)
    assert all(torch.equal(a, b) for a, b in zip(before, reference._layer.parameters(), strict=True))
    states = reference._optimizer.state.values()
    assert {int(state["step"]) for state in states} == {5 + 2 + 5 + 2 + 3 + 2}  # warm-up, first sample and these


def test_records_at_another_speed() -> None:
    records = {"a": HostRecord(time_s=2.0, spread=0.1, samples=3)}
    assert at_speed(records, 1.5) == {"a": HostRecord(time_s=3.0, spread=0.1, samples=3)}
