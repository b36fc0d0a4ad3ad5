"""The derivation: optima are optima, and a pipeline walked bucket by bucket agrees with every form."""

from __future__ import annotations

import math

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.closed_form.data_parallel import bucket_pipeline, expressions, symbols
from perfmodel.closed_form.formulas import lambdified

S = symbols()
PIPELINE = bucket_pipeline()


def walked_exposed_s(
    gradient_bytes: float, bandwidth_bytes_per_s: float, call_s: float, backward_s: float, buckets: int
) -> float:
    """The wire takes one bucket after another, each when it is ready."""
    free_s = 0.0
    for bucket in range(buckets):
        ready_s = backward_s * (bucket + 1) / buckets
        free_s = max(free_s, ready_s) + call_s + gradient_bytes / buckets / bandwidth_bytes_per_s
    return free_s - backward_s


def spread(low: float, high: float) -> st.SearchStrategy[float]:
    """Evenly over the logarithm."""
    return st.floats(math.log(low), math.log(high)).map(math.exp)


PARAMETERS = st.fixed_dictionaries(
    {
        "gradient_bytes": spread(1e6, 1e11),
        "bandwidth_bytes_per_s": spread(1e8, 1e12),
        "call_s": spread(1e-6, 1e-2),
        "backward_s": spread(1e-3, 10.0),
    }
)


def rounding_s(given: dict[str, float]) -> float:
    """What sums of terms of this size may be off by."""
    return 1e-9 * (given["backward_s"] + given["gradient_bytes"] / given["bandwidth_bytes_per_s"])


def test_the_end_is_linear_in_the_bucket_that_the_wire_is_busy_from() -> None:
    assert sympy.diff(PIPELINE.bucket_end, S.i, 2) == 0
    ends = (PIPELINE.bucket_end.subs(S.i, i) - S.T_b for i in (1, S.n))
    assert [sympy.simplify(end) for end in ends] == [
        sympy.simplify(PIPELINE.communication_bound),
        sympy.simplify(PIPELINE.compute_bound),
    ]


def test_both_regimes_meet_at_the_boundary() -> None:
    difference = PIPELINE.communication_bound - PIPELINE.compute_bound
    assert sympy.simplify(difference.subs(S.n, PIPELINE.boundary)) == 0
    # (n - 1) (c - T_b / n): of the sign of alpha + G / (n B) - T_b / n, wherever there are two buckets
    call = S.alpha + S.G / (S.n * S.B)
    assert sympy.simplify(difference - (S.n - 1) * (call - S.T_b / S.n)) == 0


def test_the_square_root_is_a_minimum_where_communication_bounds() -> None:
    slope = sympy.diff(PIPELINE.communication_bound, S.n)
    assert sympy.simplify(slope.subs(S.n, PIPELINE.best_communication_bound)) == 0
    assert sympy.diff(slope, S.n).is_positive
    assert PIPELINE.best_communication_bound == sympy.sqrt(S.T_b) / sympy.sqrt(S.alpha)


def test_more_buckets_always_expose_less_where_computing_bounds() -> None:
    assert sympy.diff(PIPELINE.compute_bound, S.n).is_negative


def test_matched_overhead_and_its_minimum() -> None:
    """s / (n w) + n o, least at n = sqrt(s / (w o)): the textbook's form."""
    found = expressions()
    overhead, best = found["ddp_overhead_s"], found["ddp_overhead_best_buckets"]
    assert sympy.simplify(overhead - (S.G / (S.n * S.B) + S.n * S.alpha)) == 0
    slope = sympy.diff(overhead, S.n)
    assert sympy.simplify(slope.subs(S.n, best)) == 0
    assert sympy.diff(slope, S.n).is_positive
    assert sympy.simplify(found["ddp_overhead_best_bucket_bytes"] - sympy.sqrt(S.G * S.B * S.alpha)) == 0


@given(given=PARAMETERS, buckets=st.integers(1, 300))
def test_exposed_is_what_the_walk_says(given: dict[str, float], buckets: int) -> None:
    walked_s = walked_exposed_s(**given, buckets=buckets)
    assert lambdified("ddp_exposed_s")(**given, buckets=buckets) == pytest.approx(walked_s, abs=rounding_s(given))
    size = {"bucket_bytes": given["gradient_bytes"] / buckets}
    by_size_s = lambdified("ddp_exposed_by_bucket_bytes_s")(**given, **size)
    assert by_size_s == pytest.approx(walked_s, abs=rounding_s(given))


@given(given=PARAMETERS, buckets=st.integers(2, 300))
def test_each_regime_is_exact_on_its_side_and_too_low_on_the_other(given: dict[str, float], buckets: int) -> None:
    walked_s = walked_exposed_s(**given, buckets=buckets)
    communication_s = lambdified("ddp_exposed_communication_bound_s")(**given, buckets=buckets)
    without_backward = {name: value for name, value in given.items() if name != "backward_s"}
    compute_s = lambdified("ddp_exposed_compute_bound_s")(**without_backward, buckets=buckets)
    is_communication_bound = buckets >= lambdified("ddp_boundary_buckets")(**given)
    exact_s, low_s = (communication_s, compute_s) if is_communication_bound else (compute_s, communication_s)
    assert exact_s == pytest.approx(walked_s, abs=rounding_s(given))
    assert low_s <= walked_s + rounding_s(given)


@given(given=PARAMETERS)
def test_the_best_whole_number_of_buckets_is_beside_the_best_number(given: dict[str, float]) -> None:
    best = float(lambdified("ddp_best_buckets")(**given))
    assert lambdified("ddp_best_bucket_bytes")(**given) == pytest.approx(given["gradient_bytes"] / best)
    exposed_s = lambdified("ddp_exposed_s")
    beside_s = min(exposed_s(**given, buckets=number) for number in {max(1, math.floor(best)), math.ceil(best)})
    numbers = {max(1, round(best * factor)) for factor in (0.01, 0.1, 0.3, 0.5, 0.8, 0.9, 1.1, 1.25, 2, 3, 10, 100)}
    tried_s = [exposed_s(**given, buckets=number) for number in {*numbers, *range(1, 50)}]
    assert min(tried_s) >= beside_s - rounding_s(given)
    assert exposed_s(**given, buckets=best) <= beside_s + rounding_s(given)


@given(given=PARAMETERS)
def test_the_best_of_the_regime_that_holds(given: dict[str, float]) -> None:
    wire_s = given["gradient_bytes"] / given["bandwidth_bytes_per_s"]
    backward_s, call_s = given["backward_s"], given["call_s"]
    best_bytes = lambdified("ddp_best_bucket_bytes")(**given)
    if call_s > backward_s:
        assert best_bytes == pytest.approx(given["gradient_bytes"])  # one call is all that pays
        return
    bounded = "communication" if backward_s - wire_s <= math.sqrt(call_s * backward_s) else "compute"
    without_bandwidth = {name: value for name, value in given.items() if name != "bandwidth_bytes_per_s"}
    takes = without_bandwidth if bounded == "communication" else given
    assert lambdified(f"ddp_best_bucket_bytes_{bounded}_bound")(**takes) == pytest.approx(best_bytes)
    least_s = lambdified(f"ddp_least_exposed_{bounded}_bound_s")(**given)
    assert least_s == pytest.approx(
        lambdified("ddp_exposed_by_bucket_bytes_s")(**given, bucket_bytes=best_bytes), abs=rounding_s(given)
    )


@given(given=PARAMETERS, parameters=st.integers(1, 300))
def test_overlap_is_a_bucket_a_parameter_and_naive_hides_nothing(given: dict[str, float], parameters: int) -> None:
    overlap_s = lambdified("overlap_exposed_s")(**given, parameters=parameters)
    assert overlap_s == pytest.approx(walked_exposed_s(**given, buckets=parameters), abs=rounding_s(given))
    after = {name: value for name, value in given.items() if name != "backward_s"}
    naive_s = lambdified("naive_overhead_s")(**after, parameters=parameters)
    assert naive_s >= overlap_s - rounding_s(given)
    at_once = {**given, "backward_s": 1e-12}  # nothing to hide behind: ready together
    assert naive_s == pytest.approx(walked_exposed_s(**at_once, buckets=parameters))
    flat_s = lambdified("flat_overhead_s")(**after, memory_bytes_per_s=1e13)
    copies_s = 4 * given["gradient_bytes"] / 1e13
    assert flat_s - copies_s == pytest.approx(naive_s - (parameters - 1) * given["call_s"])
