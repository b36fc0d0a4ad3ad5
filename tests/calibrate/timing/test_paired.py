"""Rounds of timed calls between reference runs, on an injected clock."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from calibrate.host.reference import HostReference
from calibrate.timing.host_stopwatch import timed
from calibrate.timing.paired import paired_samples, timed_after_work

MS, US = 1e-3, 1e-6


class Host:
    """A clock that only work moves on, at a speed that changes whenever the reference has run, and what ran in order."""

    def __init__(self) -> None:
        self.now_s, self.slowness = 0.0, 1.0
        self.ran: list[str] = []

    def clock(self) -> float:
        return self.now_s

    def work(self, name: str, seconds: float) -> None:
        self.ran.append(name)
        self.now_s += seconds * self.slowness

    def reference(self, reference_s: float | None = None) -> HostReference:
        return HostReference("cpu", reference_s, self.clock, lambda: self.work("reference", 2 * MS))


@pytest.fixture
def host() -> Host:
    return Host()


def test_warm_up_does_not_count_and_each_round_lies_between_reference_runs(host: Host) -> None:
    reference = host.reference()
    host.ran.clear()

    def one_round() -> Iterator[tuple[str, float]]:
        for name, seconds in (("a", 30 * US), ("b", 50 * US)):
            yield name, timed(lambda name=name, seconds=seconds: host.work(name, seconds), host.clock)[0]

    samples_s = paired_samples(reference, one_round, rounds=3, warm_up=2)
    assert samples_s == {"a": pytest.approx([30 * US] * 3), "b": pytest.approx([50 * US] * 3)}
    runs = ["reference"] * 3  # two lead in
    assert host.ran == [*runs, "a", "b"] * 5 + runs
    assert len(reference.runs_s) == 6


def test_samples_are_at_the_speed_of_the_reference(host: Host) -> None:
    """The host slows down from round to round; what took as long as a hundredth of the reference always does."""
    reference = host.reference()

    def one_round() -> Iterator[tuple[str, float]]:
        seconds, _ = timed(lambda: host.work("a", 20 * US), host.clock)
        yield "a", seconds
        host.slowness *= 3  # so that the runs around it are once and three times as slow

    assert paired_samples(reference, one_round, rounds=4, warm_up=1)["a"] == pytest.approx([10 * US] * 4)


def test_work_that_the_host_does_not_pace_is_kept_as_timed(host: Host) -> None:
    reference = host.reference(4 * MS)

    def one_round() -> Iterator[tuple[str, float]]:
        yield "a", timed(lambda: host.work("a", 20 * US), host.clock)[0]

    assert paired_samples(reference, one_round, rounds=2, warm_up=1, as_timed=True)["a"] == pytest.approx([20 * US] * 2)
    assert paired_samples(reference, one_round, rounds=2, warm_up=1)["a"] == pytest.approx([40 * US] * 2)


def test_what_a_round_prepares_comes_before_the_reference_run(host: Host) -> None:
    reference = host.reference()
    host.ran.clear()

    def one_round() -> list[tuple[str, float]]:
        host.work("prepare", US)
        return [("a", US)]

    paired_samples(reference, one_round, rounds=1, warm_up=0)
    assert host.ran == ["prepare", *["reference"] * 6]


def test_a_call_after_work_is_timed_alone(host: Host) -> None:
    reference = host.reference()
    disturbed: list[int] = []
    reference.disturb = lambda layers=4: (disturbed.append(layers), host.work("disturb", MS))[0]
    host.ran.clear()
    seconds, result = timed_after_work(
        lambda: host.work("call", 7 * US), reference, "cpu", lambda call: timed(call, host.clock)
    )
    assert (seconds, result) == (pytest.approx(7 * US), None)
    assert (disturbed, host.ran) == ([1], ["disturb", "call"])
