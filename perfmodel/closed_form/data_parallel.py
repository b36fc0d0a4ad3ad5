"""What data parallelism adds to a step, derived: every expression follows from the first two by sympy.

Backward takes T_b and its gradients become ready at a constant rate, so the i-th of n equal buckets is ready at
i T_b / n. Each is reduced in c = alpha + G / (n B), one after another, as soon as it is ready. Were the reductions busy
without pause from bucket i on, the last would end at

    F(i) = i T_b / n + (n - i + 1) c

and it really ends at the largest of these. F is linear in i, so that is F(1), where reductions never wait for
gradients (communication-bound, c > T_b / n), or F(n), where they always do (compute-bound). What lies past T_b is
exposed.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple


class DataParallelSymbols(NamedTuple):
    """Positive sympy symbols; :data:`perfmodel.closed_form.formulas.QUANTITIES` says what each is."""

    G: Any
    B: Any
    alpha: Any
    T_b: Any
    n: Any
    b: Any
    i: Any
    P: Any
    M: Any


class BucketPipeline(NamedTuple):
    """Exposed communication of bucketed reductions, as sympy expressions.

    Attributes
    ----------
    bucket_end
        F(i), in seconds.
    communication_bound, compute_bound, exposed
        F(1) - T_b, F(n) - T_b, and the larger of both, in seconds.
    boundary
        Number of buckets at which both are equal.
    best_communication_bound
        Number of buckets at which ``communication_bound`` is least.
    best
        Number of buckets at which ``exposed`` is least.
    least_communication_bound, least_compute_bound
        Seconds that are exposed with these numbers.
    matched
        Seconds that are exposed if backward takes as long as reducing at full bandwidth.
    """

    bucket_end: Any
    communication_bound: Any
    compute_bound: Any
    exposed: Any
    boundary: Any
    best_communication_bound: Any
    best: Any
    least_communication_bound: Any
    least_compute_bound: Any
    matched: Any


@cache
def symbols() -> DataParallelSymbols:
    """The symbols of the formulas of this module."""
    import sympy

    return DataParallelSymbols(*(sympy.Symbol(name, positive=True) for name in DataParallelSymbols._fields))


@cache
def bucket_pipeline() -> BucketPipeline:
    """Derive the pipeline of n equal buckets.

    The least of the larger of both: the compute-bound branch falls with n and the communication-bound one falls up to
    sqrt(T_b / alpha), then rises. Up to the boundary the first is the larger, past it the second. So the least is at
    the boundary or at sqrt(T_b / alpha), whichever is more; and there is at least one bucket.
    """
    import sympy

    s = symbols()
    call = s.alpha + s.G / (s.n * s.B)
    bucket_end = s.i * s.T_b / s.n + (s.n - s.i + 1) * call
    communication_bound = sympy.expand(bucket_end.subs(s.i, 1) - s.T_b)
    compute_bound = sympy.expand(bucket_end.subs(s.i, s.n) - s.T_b)
    slope = sympy.diff(bucket_end, s.i)
    boundary = _only_root(slope * s.n, s.n)
    best_communication_bound = _only_root(sympy.diff(communication_bound, s.n), s.n)
    return BucketPipeline(
        bucket_end=bucket_end,
        communication_bound=communication_bound,
        compute_bound=compute_bound,
        exposed=sympy.Max(communication_bound, compute_bound),
        boundary=boundary,
        best_communication_bound=best_communication_bound,
        best=sympy.Max(1, boundary, best_communication_bound),
        least_communication_bound=_tidy(communication_bound.subs(s.n, best_communication_bound)),
        least_compute_bound=_tidy(compute_bound.subs(s.n, boundary)),
        matched=sympy.expand(communication_bound.subs(s.T_b, s.G / s.B)),
    )


def expressions() -> dict[str, Any]:
    """Every expression under the name of its formula."""
    import sympy

    s, pipeline = symbols(), bucket_pipeline()
    matched_best = _only_root(sympy.diff(pipeline.matched, s.n), s.n)
    return {
        "ddp_overhead_s": pipeline.matched,
        "ddp_overhead_best_buckets": matched_best,
        "ddp_overhead_best_bucket_bytes": _tidy(s.G / matched_best),
        "ddp_bucket_end_s": pipeline.bucket_end,
        "ddp_exposed_s": pipeline.exposed,
        "ddp_exposed_by_bucket_bytes_s": _expanded(pipeline.exposed.subs(s.n, s.G / s.b)),
        "ddp_exposed_communication_bound_s": pipeline.communication_bound,
        "ddp_exposed_compute_bound_s": pipeline.compute_bound,
        "ddp_boundary_buckets": pipeline.boundary,
        "ddp_best_buckets": pipeline.best,
        "ddp_best_bucket_bytes": s.G / pipeline.best,
        "ddp_best_bucket_bytes_communication_bound": _tidy(s.G / pipeline.best_communication_bound),
        "ddp_best_bucket_bytes_compute_bound": _tidy(s.G / pipeline.boundary),
        "ddp_least_exposed_communication_bound_s": pipeline.least_communication_bound,
        "ddp_least_exposed_compute_bound_s": pipeline.least_compute_bound,
        "naive_overhead_s": s.P * s.alpha + s.G / s.B,  # a call each, all bytes, nothing hidden
        "flat_overhead_s": s.alpha + s.G / s.B + 4 * s.G / s.M,  # read and written, there and back
        "overlap_exposed_s": pipeline.exposed.subs(s.n, s.P),
    }


def _only_root(expression: Any, symbol: Any) -> Any:
    import sympy

    (root,) = sympy.solve(expression, symbol)
    return _tidy(root)


def _expanded(largest: Any) -> Any:
    return largest.func(*(term.expand() for term in largest.args))


def _tidy(expression: Any) -> Any:
    import sympy

    return sympy.simplify(expression)
