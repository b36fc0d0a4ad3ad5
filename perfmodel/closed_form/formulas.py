"""The formulas by name: what each gives, from what, under which assumptions; printed, and as numeric functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from perfmodel.closed_form.data_parallel import expressions, symbols
from perfmodel.errors import PerfModelError, did_you_mean


@dataclass(frozen=True)
class Quantity:
    """symbol: as the expression writes it. name: the argument of the numeric function. unit: SI, ``1`` for a count."""

    symbol: str
    name: str
    unit: str
    meaning: str


@dataclass(frozen=True)
class Formula:
    """One closed form.

    gives, unit: what its value is. quantities: what it is a function of, in the order of :data:`QUANTITIES`.
    expression: sympy's. derivation: how it follows. assumptions: what must hold. source: where it comes from.
    """

    name: str
    gives: str
    unit: str
    quantities: tuple[Quantity, ...]
    expression: Any
    derivation: str
    assumptions: tuple[str, ...]
    source: str

    @property
    def plain(self) -> str:
        """One line that sympy, and mostly Python, reads."""
        return str(self.expression)

    @property
    def latex(self) -> str:
        """For a paper or a notebook."""
        import sympy

        return str(sympy.latex(self.expression))


QUANTITIES = (
    Quantity("G", "gradient_bytes", "bytes", "gradients of one rank"),
    Quantity("B", "bandwidth_bytes_per_s", "bytes/s", "algbw of a large all-reduce: size over time"),
    Quantity("alpha", "call_s", "s", "cost a call: what an all-reduce of no bytes takes"),
    Quantity("T_b", "backward_s", "s", "backward alone, in which gradients become ready at a constant rate"),
    Quantity("n", "buckets", "1", "number of equal buckets"),
    Quantity("b", "bucket_bytes", "bytes", "size of each bucket"),
    Quantity("i", "bucket", "1", "which bucket, 1 is reduced first"),
    Quantity("P", "parameters", "1", "number of parameters, as many gradients"),
    Quantity("M", "memory_bytes_per_s", "bytes/s", "the device's memory bandwidth"),
)


class _Row(NamedTuple):
    """A :class:`Formula` without what sympy knows."""

    name: str
    gives: str
    unit: str
    derivation: str
    assumptions: tuple[str, ...]
    source: str


_LINEAR = "an all-reduce of S bytes takes alpha + S / B"
_PIPELINE = (
    _LINEAR,
    "equal buckets, reduced one after another, each as soon as its gradients are ready",
    "n is continuous: try the whole numbers on both sides; it cannot exceed the number of parameters",
    "computing and reducing do not slow each other, and the host keeps up",
    "copies into and out of buckets are not counted (4 G / M in all)",
)
_MATCHED = (*_PIPELINE, "T_b = G / B: computing a bucket's gradients takes as long as sending them")
_AFTER = (_LINEAR, "nothing else runs while gradients are reduced")
_OURS = "derived in perfmodel/closed_form/data_parallel.py"
_REDUCER = f"{_OURS}; order of reductions: torch/csrc/distributed/c10d/reducer.cpp"

_ROWS = (
    _Row(
        "ddp_overhead_s",
        "what DDP adds to a step whose backward takes as long as sending its gradients",
        "s",
        "ddp_exposed_communication_bound_s with T_b = G / B: the last bucket, and the cost of every call",
        _MATCHED,
        _REDUCER,
    ),
    _Row(
        "ddp_overhead_best_bucket_bytes",
        "bucket size at which ddp_overhead_s is least",
        "bytes",
        "G / n where d ddp_overhead_s / dn = 0; the second derivative, 2 G / (B n^3), is positive",
        _MATCHED,
        _OURS,
    ),
    _Row(
        "ddp_overhead_best_buckets",
        "number of buckets at which ddp_overhead_s is least",
        "1",
        "d ddp_overhead_s / dn = 0",
        _MATCHED,
        _OURS,
    ),
    _Row(
        "ddp_bucket_end_s",
        "when the last reduction would end were they busy without pause from bucket i on",
        "s",
        "bucket i is ready at i T_b / n; n - i + 1 reductions of alpha + G / (n B) follow",
        _PIPELINE,
        _REDUCER,
    ),
    _Row(
        "ddp_exposed_s",
        "communication that backward does not hide",
        "s",
        "the largest ddp_bucket_end_s over i, less T_b; it is linear in i, so i = 1 or i = n",
        _PIPELINE,
        _REDUCER,
    ),
    _Row(
        "ddp_exposed_by_bucket_bytes_s",
        "ddp_exposed_s as a function of the size of a bucket",
        "s",
        "ddp_exposed_s with n = G / b",
        _PIPELINE,
        _OURS,
    ),
    _Row(
        "ddp_exposed_communication_bound_s",
        "ddp_exposed_s where reductions never wait for gradients",
        "s",
        "ddp_bucket_end_s of i = 1, less T_b; holds where n >= ddp_boundary_buckets",
        _PIPELINE,
        _OURS,
    ),
    _Row(
        "ddp_exposed_compute_bound_s",
        "ddp_exposed_s where reductions always wait for gradients: the last bucket",
        "s",
        "ddp_bucket_end_s of i = n, less T_b; holds where n <= ddp_boundary_buckets",
        _PIPELINE,
        _OURS,
    ),
    _Row(
        "ddp_boundary_buckets",
        "buckets up to which a step is compute-bound, and past which it is communication-bound",
        "1",
        "alpha + G / (n B) = T_b / n; below 1 the step is communication-bound with any number",
        _PIPELINE,
        _OURS,
    ),
    _Row(
        "ddp_best_buckets",
        "number of buckets at which ddp_exposed_s is least",
        "1",
        "compute-bound it falls with n; communication-bound it falls up to sqrt(T_b / alpha), then rises: the "
        "later of the boundary and that, and at least 1",
        _PIPELINE,
        _OURS,
    ),
    _Row(
        "ddp_best_bucket_bytes",
        "bucket size at which ddp_exposed_s is least",
        "bytes",
        "G / ddp_best_buckets",
        _PIPELINE,
        _OURS,
    ),
    _Row(
        "ddp_best_bucket_bytes_communication_bound",
        "bucket size that exposes least where T_b - G / B <= sqrt(alpha T_b): more calls against an earlier start",
        "bytes",
        "G / n where d ddp_exposed_communication_bound_s / dn = 0, at n = sqrt(T_b / alpha)",
        _PIPELINE,
        _OURS,
    ),
    _Row(
        "ddp_best_bucket_bytes_compute_bound",
        "bucket size that exposes least where T_b - G / B >= sqrt(alpha T_b): the least with which the wire keeps up",
        "bytes",
        "G / ddp_boundary_buckets",
        (*_PIPELINE, "T_b > G / B"),
        _OURS,
    ),
    _Row(
        "ddp_least_exposed_communication_bound_s",
        "ddp_exposed_s with buckets of ddp_best_bucket_bytes_communication_bound",
        "s",
        "ddp_exposed_communication_bound_s at n = sqrt(T_b / alpha)",
        _PIPELINE,
        _OURS,
    ),
    _Row(
        "ddp_least_exposed_compute_bound_s",
        "ddp_exposed_s with buckets of ddp_best_bucket_bytes_compute_bound",
        "s",
        "ddp_exposed_compute_bound_s at n = ddp_boundary_buckets",
        (*_PIPELINE, "T_b > G / B"),
        _OURS,
    ),
    _Row(
        "naive_overhead_s",
        "what an all-reduce of each gradient after backward adds to a step",
        "s",
        "P calls and all bytes, one after another",
        _AFTER,
        _OURS,
    ),
    _Row(
        "flat_overhead_s",
        "what one all-reduce of the flattened gradients after backward adds to a step",
        "s",
        "one call and all bytes; gradients are read and written into the buffer and again out of it",
        (*_AFTER, "copies run at the memory's bandwidth"),
        _OURS,
    ),
    _Row(
        "overlap_exposed_s",
        "what an all-reduce a parameter, as soon as its gradient is ready, adds to a step",
        "s",
        "ddp_exposed_s with n = P",
        (*_PIPELINE, "parameters of equal size"),
        _OURS,
    ),
)


@cache
def formulas() -> tuple[Formula, ...]:
    """Every formula, derived when first asked for. ``perfmodel formula`` lists them."""
    found = expressions()
    return tuple(_formula(row, found[row.name]) for row in _ROWS)


def find_formula(name: str) -> Formula:
    """The formula of that name.

    Raises
    ------
    PerfModelError
        If there is none.
    """
    known = {each.name: each for each in formulas()}
    if name not in known:
        raise PerfModelError(f"formula must be a known one (got {name!r}). {did_you_mean(name, known)}")
    return known[name]


def lambdified(name: str) -> Callable[..., Any]:
    """The formula as a function of numbers or numpy arrays, all keyword arguments, named as :class:`Quantity` says.

    Raises
    ------
    PerfModelError
        If there is no formula of that name.

    Examples
    --------
    25 buckets of 4 MB, 1 ms each on the wire and 1 ms between one and the next; the last one is exposed:

    >>> exposed_s = lambdified("ddp_exposed_s")
    >>> seconds = exposed_s(gradient_bytes=1e8, bandwidth_bytes_per_s=5e9, call_s=2e-4, buckets=25, backward_s=25e-3)
    >>> f"{seconds:.6f}"
    '0.001000'
    """
    formula = find_formula(name)
    return _compiled(formula.name)


@cache
def _compiled(name: str) -> Callable[..., Any]:
    import numpy as np
    import sympy

    formula = find_formula(name)
    arguments = [sympy.Symbol(quantity.name, positive=True) for quantity in formula.quantities]
    renamed = {getattr(symbols(), each.symbol): new for each, new in zip(formula.quantities, arguments, strict=True)}

    def largest(*terms: Any) -> Any:  # sympy's own choice, numpy.amax of a list, refuses numbers beside arrays
        found = terms[0]
        for term in terms[1:]:
            found = np.maximum(found, term)
        return found

    function = sympy.lambdify(arguments, formula.expression.subs(renamed), modules=[{"Max": largest}, "numpy"])
    function.__doc__ = f"{formula.gives}, in {formula.unit}"
    found: Callable[..., Any] = function
    return found


def describe(name: str | None = None) -> str:
    """What `perfmodel formula` prints: every formula in two lines, or all that is known of one.

    Raises
    ------
    PerfModelError
        If there is no formula of that name.
    """
    if name is None:
        return "\n".join(f"{each.name} = {each.plain}\n    {each.gives}" for each in formulas())
    return _whole(find_formula(name))


def _whole(formula: Formula) -> str:
    import sympy

    drawn = sympy.pretty(formula.expression, use_unicode=True, wrap_line=False)
    wide = max(len(each.symbol) for each in formula.quantities)
    units = {each.symbol: "a number" if each.unit == "1" else each.unit for each in formula.quantities}
    lines = [
        f"{formula.name}: {formula.gives}" + ("" if formula.unit == "1" else f", in {formula.unit}"),
        "",
        *(f"    {line.rstrip()}" for line in drawn.splitlines()),
        "",
        *(
            f"    {each.symbol:<{wide}}  {each.meaning} ({units[each.symbol]}; {each.name})"
            for each in formula.quantities
        ),
        "",
        f"plain:   {formula.plain}",
        f"latex:   {formula.latex}",
        f"follows: {formula.derivation}",
        *(f"assumes: {each}" for each in formula.assumptions),
        f"source:  {formula.source}",
    ]
    return "\n".join(lines)


def _formula(row: _Row, expression: Any) -> Formula:
    free = {symbol.name for symbol in expression.free_symbols}
    quantities = tuple(each for each in QUANTITIES if each.symbol in free)
    return Formula(row.name, row.gives, row.unit, quantities, expression, row.derivation, row.assumptions, row.source)
