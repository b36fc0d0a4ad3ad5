"""Messages between two ranks over gloo, and which records they leave. No test asserts more of a time than its sign."""

from __future__ import annotations

import pytest

from calibrate.interconnect.p2p import CALL_ROUNDS, MessageStage
from calibrate.interconnect.request import Found, Measured, Request, measure
from calibrate.interconnect.worker import Worker
from perfmodel.cost.collectives import collective_cost
from perfmodel.units import KIB

EXACT = (("exchange", "bfloat16", 3000, 2), ("send_recv", "bfloat16", 3000, 2))


@pytest.fixture(scope="module")
def gloo() -> Measured:
    found = measure(Request("gloo", 2, "cpu", 60.0, EXACT, stages=("p2p",), most_bytes=2 * KIB), timeout_s=120)
    assert found is not None
    return found


def test_both_kinds_are_measured_over_the_ladder_and_the_exact_sizes(gloo: Measured) -> None:
    found = gloo.interconnect
    grid = {f"{kind} 2 float32 {size}" for kind in ("send_recv", "exchange") for size in (1024, 2048)}
    exact = {f"{kind} 2 bfloat16 3000" for kind in ("send_recv", "exchange")}
    assert set(found.collectives) == grid | exact
    assert {key for key, record in found.collectives.items() if record.origin == "scenario"} == exact
    assert all(record.time_s and record.samples >= 10 for record in found.collectives.values())
    assert set(found.segments) == {"send_recv 2", "exchange 2"}
    assert {curve[0].points for curve in found.segments.values()} == {2}
    assert (found.contention, found.message_couplings) == ({}, {})
    assert list(gloo.stages_s) == ["group of 2", "p2p"]


def test_what_was_measured_is_what_is_predicted(gloo: Measured) -> None:
    for kind in ("send_recv", "exchange"):
        exact = collective_cost(kind, 2, "bfloat16", 3000, gloo.interconnect)
        assert (exact.time_s, exact.source) == (
            gloo.interconnect.collectives[f"{kind} 2 bfloat16 3000"].time_s,
            "exact",
        )
        assert collective_cost(kind, 2, "float32", 1500, gloo.interconnect).source == "curve"
        assert collective_cost(kind, 2, "float32", 9000, gloo.interconnect).source == "extrapolated"


def test_calls_and_waits_are_timed_first_and_in_a_row(gloo: Measured) -> None:
    calls = ("isend", "irecv", "batch_isend_irecv")
    names = {f"{name}{what}{ending}" for name in calls for what in ("", " wait") for ending in ("", " again")}
    host = gloo.interconnect.host
    assert set(host) == names
    assert all(host[name].time_s > 0 and host[name].samples == CALL_ROUNDS for name in names)


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
