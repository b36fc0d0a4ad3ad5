"""The stage that measures messages between two ranks; test_worker.py runs it over gloo."""

from __future__ import annotations

import pytest

from calibrate.interconnect.p2p import MessageStage
from calibrate.interconnect.request import Found, Request
from calibrate.interconnect.worker import Worker
from perfmodel.units import KIB


class Ranks:
    """Of which this one has no part in the messages."""

    rank, size = 2, 3

    def largest(self, value: float) -> float:
        return value

    def together(self) -> None:
        """All are here."""


def test_a_rank_without_a_partner_only_keeps_its_host_busy() -> None:
    found = MessageStage(Ranks(), None, "cpu", None, KIB, 1.0, 2).run()  # type: ignore[arg-type]
    assert (found.collectives, found.contention) == ({}, {})
    assert len(found.host) == 12


def test_it_is_a_stage_of_its_own() -> None:
    asked = Request("nvlink", 2, "cuda", 60.0, stages=("p2p",), passes=1)
    assert [name for name, _ in Worker(asked, Ranks(), Found()).stages()] == ["group of 2", "p2p"]  # type: ignore[arg-type]


class Sweep:
    """Takes ``takes_s`` of a clock a pass."""

    def __init__(self, clock: Clock, takes_s: float) -> None:
        self.clock, self.takes_s = clock, takes_s
        self.asked: list[tuple[float, bool]] = []

    def run(self, budget_s: float, only_disputed: bool) -> list[tuple[str, object]]:
        self.asked.append((budget_s, only_disputed))
        self.clock.now_s += self.takes_s
        return []


class Clock:
    now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


@pytest.mark.parametrize(
    ("budget_s", "passes", "expected"),
    [
        (60.0, 2, [(5 / 3, False), (2.0, False), (3.0, True)]),
        (3.0, 2, [(1.0, False), (1.0, False), (1.0, True)]),
        (60.0, 1, [(5.0, False)]),
    ],
)
def test_passes_share_the_time_there_is(
    monkeypatch: pytest.MonkeyPatch, budget_s: float, passes: int, expected: list[tuple[float, bool]]
) -> None:
    clock = Clock()
    monkeypatch.setattr("calibrate.interconnect.p2p.time", clock)
    monkeypatch.setattr("calibrate.interconnect.p2p.call_records", lambda *arguments: {})
    stage = MessageStage(Ranks(), None, "cpu", None, KIB, budget_s, passes)  # type: ignore[arg-type]
    stage._sweeps = sweep = Sweep(clock, 1.0)  # type: ignore[assignment]
    stage.run()
    assert sweep.asked == [(pytest.approx(share_s), disputed) for share_s, disputed in expected]
