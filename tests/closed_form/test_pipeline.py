"""Every form is what torch's orders take and keep when they are executed, stage by stage, with messages that are free."""

from __future__ import annotations

import math

import pytest
import sympy
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from perfmodel.closed_form.formulas import find_formula, lambdified
from perfmodel.closed_form.pipeline import expressions, micro_batches, symbols
from perfmodel.errors import PerfModelError
from perfmodel.program.pipeline.schedules import Action, rank_actions
from perfmodel.scenario.rules import check_schedule
from perfmodel.scenario.scenario import Schedule
from tests.program.pipeline.executor import makespan, run

S = symbols()
UNIT = (1.0, 1.0, 1.0)
RANKS = st.integers(2, 7)
EXECUTED = settings(max_examples=40)
TIMES = st.tuples(*(st.integers(1, 20).map(float) for _ in range(3)))


def actions_of(schedule: Schedule, ranks: int, number: int, virtual: int = 1) -> tuple[tuple[Action, ...], ...]:
    """Of numbers that torch takes."""
    try:
        check_schedule(schedule, ranks, number, virtual)
    except PerfModelError:
        assume(False)
    return rank_actions(schedule, ranks, number, virtual)


def step_s(actions: tuple[tuple[Action, ...], ...], times: tuple[float, float, float] = UNIT) -> float:
    forward, inputs, weights = times
    return makespan(run(actions, {"F": forward, "I": inputs, "W": weights, "B": inputs + weights}))


def executed_fraction(
    schedule: Schedule, ranks: int, number: int, virtual: int = 1, times: tuple[float, float, float] = UNIT
) -> float:
    """Of the step of any rank: all have as much to compute."""
    return 1 - number * virtual * sum(times) / step_s(actions_of(schedule, ranks, number, virtual), times)


def fraction(name: str, **quantities: float) -> float:
    """The formula's, of those of the quantities that it has."""
    names = [quantity.name for quantity in find_formula(name).quantities]
    return float(lambdified(name)(**{each: quantities[each] for each in names}))


def quantities_of(ranks: int, number: int, virtual: int, times: tuple[float, float, float]) -> dict[str, float]:
    forward, inputs, weights = times
    return {
        "stages": ranks,
        "pipeline_micro_batches": number,
        "virtual_stages": virtual,
        "forward_s": forward,
        "input_backward_s": inputs,
        "weight_backward_s": weights,
    }


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@EXECUTED
@given(ranks=RANKS, number=st.integers(1, 30), times=TIMES)
def test_bubble_of_one_stage_a_rank(
    schedule: Schedule, ranks: int, number: int, times: tuple[float, float, float]
) -> None:
    found = executed_fraction(schedule, ranks, number, times=times)
    assert found == pytest.approx((ranks - 1) / (number + ranks - 1))
    assert fraction("pipeline_bubble_fraction", **quantities_of(ranks, number, 1, times)) == pytest.approx(found)


@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "looped-bfs"])
@EXECUTED
@given(ranks=RANKS, number=st.integers(1, 30), virtual=st.integers(1, 4), times=TIMES)
def test_bubble_of_interleaved_stages(
    schedule: Schedule, ranks: int, number: int, virtual: int, times: tuple[float, float, float]
) -> None:
    assume(number >= ranks or virtual == 1)
    found = executed_fraction(schedule, ranks, number, virtual, times)
    name = "pipeline_interleaved_bubble_fraction"
    assert fraction(name, **quantities_of(ranks, number, virtual, times)) == pytest.approx(found)


@EXECUTED
@given(ranks=RANKS, more=st.integers(0, 25), virtual=st.integers(1, 4), times=TIMES)
def test_bubble_of_interleaved_zero_bubble(
    ranks: int, more: int, virtual: int, times: tuple[float, float, float]
) -> None:
    number = ranks + more
    found = executed_fraction("interleaved-zero-bubble", ranks, number, virtual, times)
    name = "pipeline_zero_bubble_fraction"
    assert fraction(name, **quantities_of(ranks, number, virtual, times)) == pytest.approx(found)


@EXECUTED
@given(ranks=RANKS, more=st.integers(0, 25))
def test_bubble_of_the_v_of_zero_bubble(ranks: int, more: int) -> None:
    number = 2 * ranks - 1 + more
    found = executed_fraction("zbv-zero-bubble", ranks, number, 2)
    assert found == pytest.approx((ranks - 1) / (6 * number + ranks - 1))
    assert fraction("pipeline_zbv_bubble_fraction", **quantities_of(ranks, number, 2, UNIT)) == pytest.approx(found)


@EXECUTED
@given(ranks=RANKS, more=st.integers(0, 25), times=TIMES)
def test_bubble_of_dualpipev(ranks: int, more: int, times: tuple[float, float, float]) -> None:
    assume(times[0] >= times[1])
    number = 2 * ranks + more
    found = executed_fraction("dualpipev", ranks, number, 2, times)
    name = "pipeline_dualpipev_bubble_fraction"
    assert fraction(name, **quantities_of(ranks, number, 2, times)) == pytest.approx(found)


def test_where_the_forms_end() -> None:
    """Below the numbers of micro-batches, or outside the times, that they are stated for, steps take longer."""
    slow: tuple[tuple[str, Schedule, int, int, int, tuple[float, float, float]], ...] = (
        ("pipeline_interleaved_bubble_fraction", "interleaved-1f1b", 4, 3, 2, UNIT),
        ("pipeline_interleaved_bubble_fraction", "looped-bfs", 4, 3, 2, UNIT),
        ("pipeline_zero_bubble_fraction", "interleaved-zero-bubble", 4, 3, 2, UNIT),
        ("pipeline_zbv_bubble_fraction", "zbv-zero-bubble", 4, 5, 2, UNIT),
        ("pipeline_zbv_bubble_fraction", "zbv-zero-bubble", 4, 8, 2, (4.0, 3.0, 2.0)),
        ("pipeline_dualpipev_bubble_fraction", "dualpipev", 4, 8, 2, (2.0, 3.0, 1.0)),
    )
    for name, schedule, ranks, number, virtual, times in slow:
        found = executed_fraction(schedule, ranks, number, virtual, times)
        assert found > fraction(name, **quantities_of(ranks, number, virtual, times)) + 1e-3, schedule


@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "looped-bfs", "zbv-zero-bubble", "dualpipev"])
def test_one_communicator_for_all_holds_messages_up_past_two_ranks(schedule: Schedule) -> None:
    for ranks, holds_up in ((2, False), (3, True), (4, True)):
        number = 4 * ranks
        alone_s = step_s(rank_actions(schedule, ranks, number, 2))
        shared_s = step_s(rank_actions(schedule, ranks, number, 2, batches_all=True))
        assert (shared_s > alone_s) == holds_up


def in_flight(actions: tuple[tuple[Action, ...], ...]) -> list[int]:
    """Of each rank, the most forwards whose backward was not over."""
    peaks, now = [0] * len(actions), [0] * len(actions)
    for span in run(actions, {"F": 1.0, "I": 1.0, "W": 1.0, "B": 2.0}):
        now[span.rank] += {"F": 1, "I": 0}.get(span.compute.kind, -1)
        peaks[span.rank] = max(peaks[span.rank], now[span.rank])
    return peaks


@pytest.mark.parametrize(
    ("name", "schedule", "virtual_stages", "rounds"),
    [
        ("gpipe", "gpipe", (1,), (1, 2, 3)),
        ("gpipe", "looped-bfs", (1, 2, 3), (1, 2, 3)),
        ("1f1b", "1f1b", (1,), (1, 2, 3)),
        ("interleaved", "interleaved-1f1b", (1, 2, 3), (2, 3)),
        ("zero_bubble", "interleaved-zero-bubble", (1, 2, 3), (1, 2, 3)),
        ("zero_bubble", "zbv-zero-bubble", (2,), (2, 3)),
    ],
)
def test_micro_batches_in_flight(
    name: str, schedule: Schedule, virtual_stages: tuple[int, ...], rounds: tuple[int, ...]
) -> None:
    formula = f"pipeline_{name}_in_flight_micro_batches"
    for ranks in range(2, 7):
        for virtual in virtual_stages:
            for number in (ranks * each for each in rounds):
                known = quantities_of(ranks, number, virtual, UNIT)
                expected = [fraction(formula, **known, stage=rank + 1) for rank in range(ranks)]
                assert in_flight(rank_actions(schedule, ranks, number, virtual)) == expected


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@EXECUTED
@given(ranks=RANKS, number=st.integers(1, 30), stage=st.floats(0.1, 10), cost=st.floats(0.001, 1))
def test_step_of_equal_stages(schedule: Schedule, ranks: int, number: int, stage: float, cost: float) -> None:
    each = stage / number + cost
    found = step_s(actions_of(schedule, ranks, number), (each / 3, each / 3, each / 3))
    known = {"stages": ranks, "pipeline_micro_batches": number}
    assert lambdified("pipeline_equal_stages_s")(**known, micro_batch_s=each) == pytest.approx(found)
    assert lambdified("pipeline_step_s")(**known, stage_s=stage, micro_batch_cost_s=cost) == pytest.approx(found)


def test_the_best_number_of_micro_batches_is_a_minimum() -> None:
    cut = micro_batches()
    slope = sympy.diff(cut.step, S.m)
    assert sympy.simplify(cut.best**2 - S.T * (S.p - 1) / S.a) == 0
    assert sympy.simplify(slope.subs(S.m, cut.best)) == 0
    assert sympy.simplify(sympy.diff(slope, S.m) - 2 * S.T * (S.p - 1) / S.m**3) == 0  # positive
    assert sympy.simplify(cut.step.subs(S.m, cut.best) - cut.least) == 0


@given(ranks=st.integers(2, 64), stage=st.floats(0.01, 10), cost=st.floats(1e-5, 0.1))
def test_no_whole_number_beats_those_beside_the_best(ranks: int, stage: float, cost: float) -> None:
    known = {"stages": ranks, "stage_s": stage, "micro_batch_cost_s": cost}
    best = lambdified("pipeline_best_micro_batches")(**known)

    def takes_s(number: float) -> float:
        return float(lambdified("pipeline_step_s")(**known, pipeline_micro_batches=number))

    beside_s = min(takes_s(number) for number in {max(1, math.floor(best)), math.ceil(best)})
    assert min(takes_s(number) for number in range(1, 200)) >= beside_s * (1 - 1e-12)
    assert lambdified("pipeline_least_step_s")(**known) <= beside_s * (1 + 1e-12)


def test_published_forms() -> None:
    """GPipe's and 1F1B's (p - 1) / m of the work, interleaved a v-th of it, and ZB-H1's (p - 1) (T_F + T_I - T_W)."""
    found = expressions()

    def of_work(name: str) -> sympy.Expr:
        return sympy.simplify(1 / (1 / found[name] - 1))

    assert sympy.simplify(of_work("pipeline_bubble_fraction") - (S.p - 1) / S.m) == 0
    assert sympy.simplify(of_work("pipeline_interleaved_bubble_fraction") - (S.p - 1) / (S.m * S.v)) == 0
    zero = of_work("pipeline_zero_bubble_fraction") * S.m * (S.T_F + S.T_I + S.T_W)
    h1 = zero.subs({S.v: 1, S.T_F: 4, S.T_I: 5, S.T_W: 3})
    assert sympy.simplify(h1 - (S.p - 1) * (4 + 5 - 3)) == 0
