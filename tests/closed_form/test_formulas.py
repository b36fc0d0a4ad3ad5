"""Names, units, numeric functions and what is printed."""

from __future__ import annotations

import numpy as np
import pytest
import sympy

from perfmodel.closed_form.formulas import QUANTITIES, describe, find_formula, formulas, lambdified
from tests.refusals import refused

NAMES = [formula.name for formula in formulas()]
VALUES = {
    "gradient_bytes": 1e9,
    "bandwidth_bytes_per_s": 1e11,
    "call_s": 1e-4,
    "backward_s": 2e-2,
    "buckets": 12.0,
    "bucket_bytes": 4e7,
    "bucket": 3.0,
    "parameters": 40.0,
    "memory_bytes_per_s": 3e12,
    "parameter_bytes": 5e8,
    "root_parameter_bytes": 7e7,
    "optimizer_state_bytes": 1.1e9,
    "ranks": 16.0,
    "replicas": 2.0,
    "micro_batches": 3.0,
    "stages": 4.0,
    "pipeline_micro_batches": 24.0,
    "virtual_stages": 2.0,
    "stage": 3.0,
    "forward_s": 1e-2,
    "input_backward_s": 1.2e-2,
    "weight_backward_s": 9e-3,
    "micro_batch_s": 3e-2,
    "stage_s": 0.5,
    "micro_batch_cost_s": 1e-3,
}
# powers of (second, byte)
DIMENSIONS = {"s": (1, 0), "bytes": (0, 1), "bytes/s": (-1, 1), "1": (0, 0)}


def test_names_are_distinct_and_each_quantity_is_used() -> None:
    assert len(set(NAMES)) == len(NAMES)
    used = {quantity for formula in formulas() for quantity in formula.quantities}
    assert used == set(QUANTITIES)
    assert set(VALUES) == {quantity.name for quantity in QUANTITIES}


@pytest.mark.parametrize("name", NAMES)
def test_units_of_both_sides_agree(name: str) -> None:
    """Counting in other seconds and bytes changes the value just as it changes its unit."""
    formula = find_formula(name)
    seconds, size = 7.0, 3.0

    def scaled(unit: str, value: float) -> float:
        of_seconds, of_bytes = DIMENSIONS[unit]
        return value * seconds**of_seconds * size**of_bytes

    known = {each.name: VALUES[each.name] for each in formula.quantities}
    others = {each.name: scaled(each.unit, VALUES[each.name]) for each in formula.quantities}
    function = lambdified(name)
    assert function(**others) == pytest.approx(scaled(formula.unit, function(**known)))
    endings = {"s": ("_s",), "bytes": ("_bytes",), "1": ("_buckets", "_micro_batches", "_fraction")}
    assert name.endswith(endings[formula.unit]) or name.startswith("ddp_best_bucket_bytes_")


@pytest.mark.parametrize("name", NAMES)
def test_the_plain_form_is_the_expression(name: str) -> None:
    formula = find_formula(name)
    again = sympy.sympify(
        formula.plain, locals={each.symbol: sympy.Symbol(each.symbol, positive=True) for each in QUANTITIES}
    )
    assert sympy.simplify(again - formula.expression) == 0
    assert formula.latex.count("{") == formula.latex.count("}")


def test_numeric_functions_take_arrays() -> None:
    given = {name: VALUES[name] for name in ("gradient_bytes", "bandwidth_bytes_per_s", "call_s", "backward_s")}
    buckets = np.array([1.0, 10.0, 100.0, 1000.0])
    exposed_s = lambdified("ddp_exposed_s")
    assert exposed_s(**given, buckets=buckets).tolist() == [float(exposed_s(**given, buckets=n)) for n in buckets]


def test_known_answer() -> None:
    """100 MB at 10 GB/s: 10 ms on the wire; backward 20 ms; 1 ms a call. Ten buckets: 2 ms each, ready every 2 ms."""
    given = {"gradient_bytes": 1e8, "bandwidth_bytes_per_s": 1e10, "call_s": 1e-3, "backward_s": 20e-3}
    assert lambdified("ddp_boundary_buckets")(**given) == pytest.approx(10)
    assert lambdified("ddp_best_bucket_bytes")(**given) == pytest.approx(1e7)
    exposed_s = lambdified("ddp_exposed_s")
    assert [exposed_s(**given, buckets=n) for n in (1, 5, 10, 20)] == pytest.approx([11e-3, 3e-3, 2e-3, 11e-3])


def test_the_list_names_every_formula() -> None:
    lines = describe().splitlines()
    assert [line.split(" = ")[0] for line in lines[::2]] == NAMES
    assert lines[:2] == [
        "ddp_overhead_s = alpha*n + G/(B*n)",
        "    what DDP adds to a step whose backward takes as long as sending its gradients",
    ]


def test_one_formula_in_full() -> None:
    assert (
        describe("ddp_exposed_compute_bound_s")
        == """\
ddp_exposed_compute_bound_s: ddp_exposed_s where reductions always wait for gradients: the last bucket, in s

         G
    α + ───
        B⋅n

    G      gradients of one rank (bytes; gradient_bytes)
    B      algbw of a large all-reduce: size over time (bytes/s; bandwidth_bytes_per_s)
    alpha  cost a call: what an all-reduce of no bytes takes (s; call_s)
    n      number of equal buckets (a number; buckets)

plain:   alpha + G/(B*n)
latex:   \\alpha + \\frac{G}{B n}
follows: ddp_bucket_end_s of i = n, less T_b; holds where n <= ddp_boundary_buckets
assumes: an all-reduce of S bytes takes alpha + S / B
assumes: equal buckets, reduced one after another, each as soon as its gradients are ready
assumes: n is continuous: try the whole numbers on both sides; it cannot exceed the number of parameters
assumes: computing and reducing do not slow each other, and the host keeps up
assumes: copies into and out of buckets are not counted (4 G / M in all)
source:  derived in perfmodel/closed_form/data_parallel.py"""
    )


@pytest.mark.parametrize("ask", [find_formula, lambdified, describe])
def test_an_unknown_name_is_one_sentence(ask) -> None:
    with refused("formula", "ddp_exposd_s", "ddp_exposed_s"):
        ask("ddp_exposd_s")
