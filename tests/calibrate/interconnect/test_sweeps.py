"""Which collectives a pass times, on a clock of its own and with a bench that measures what it is told."""

from __future__ import annotations

from calibrate.interconnect.collectives import Wanted, cost_s
from calibrate.interconnect.sweeps import LONGEST_S, Sweeps


class Bench:
    """One rank, whose collectives take ``once_s`` by size; a size that is not there fails."""

    def __init__(self, once_s: dict[int, list[float]]) -> None:
        self.once_s, self.now_s = once_s, 0.0
        self.timed: list[int] = []

    def clock(self) -> float:
        return self.now_s

    def agree(self, value: float) -> float:
        return value

    def measure(self, wanted: Wanted) -> tuple[list[float], str | None]:
        self.timed.append(wanted.size_bytes)
        if wanted.size_bytes not in self.once_s:
            return [], "out of memory"
        passes = self.once_s[wanted.size_bytes]
        seconds = passes.pop(0) if len(passes) > 1 else passes[0]
        self.now_s += cost_s(seconds)
        return [seconds] * 5, None


def wanted(size_bytes: int) -> Wanted:
    return Wanted("all_reduce", 2, "float32", size_bytes)


def sweeps(bench: Bench, **origins: str) -> Sweeps:
    asked = {wanted(int(size.removeprefix("of_"))): origin for size, origin in origins.items()}
    return Sweeps(bench, asked, bench.clock)  # type: ignore[arg-type]


def test_what_would_not_end_in_time_is_left_out_but_for_what_a_scenario_sends() -> None:
    """A size is expected to take as long as its bytes and the next smaller one say: 0.1 s, and 10 s of samples."""
    bench = Bench({1000: [0.01], 10000: [0.1], 20000: [0.2]})
    found = dict(sweeps(bench, of_1000="grid", of_10000="grid", of_20000="scenario").run(budget_s=2 * cost_s(0.01)))
    assert bench.timed == [1000, 20000]
    assert {key: record.origin for key, record in found.items()} == {
        wanted(1000).key: "grid",
        wanted(20000).key: "scenario",
    }


def test_sizes_that_take_too_long_are_left_out_whatever_the_budget() -> None:
    bench = Bench({1000: [LONGEST_S / 2], 3000: [3 * LONGEST_S / 2]})
    assert [key for key, _ in sweeps(bench, of_1000="grid", of_3000="grid").run(1e9)] == [wanted(1000).key]


def test_a_later_pass_times_only_what_the_first_could_and_a_last_one_what_is_disputed() -> None:
    bench = Bench({1000: [0.01], 2000: [0.02, 0.04, 0.03]})
    made = sweeps(bench, of_1000="grid", of_2000="grid", of_4000="scenario")
    first = dict(made.run(1e9))
    assert first[wanted(4000).key].error == "out of memory"
    list(made.run(1e9))
    assert bench.timed == [1000, 2000, 4000, 1000, 2000]
    (last,) = made.run(1e9, only_disputed=True)
    assert (last[0], last[1].time_s, last[1].samples) == (wanted(2000).key, 0.03, 15)
