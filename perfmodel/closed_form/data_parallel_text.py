"""Words of the formulas of :mod:`perfmodel.closed_form.data_parallel`."""

from __future__ import annotations

from perfmodel.closed_form.formula_text import FormulaText

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

DATA_PARALLEL = (
    FormulaText(
        name="ddp_overhead_s",
        gives="what DDP adds to a step whose backward takes as long as sending its gradients",
        unit="s",
        derivation="ddp_exposed_communication_bound_s with T_b = G / B: the last bucket, and the cost of every call",
        assumptions=_MATCHED,
        source=_REDUCER,
    ),
    FormulaText(
        name="ddp_overhead_best_bucket_bytes",
        gives="bucket size at which ddp_overhead_s is least",
        unit="bytes",
        derivation="G / n where d ddp_overhead_s / dn = 0; the second derivative, 2 G / (B n^3), is positive",
        assumptions=_MATCHED,
        source=_OURS,
    ),
    FormulaText(
        name="ddp_overhead_best_buckets",
        gives="number of buckets at which ddp_overhead_s is least",
        unit="1",
        derivation="d ddp_overhead_s / dn = 0",
        assumptions=_MATCHED,
        source=_OURS,
    ),
    FormulaText(
        name="ddp_bucket_end_s",
        gives="when the last reduction would end were they busy without pause from bucket i on",
        unit="s",
        derivation="bucket i is ready at i T_b / n; n - i + 1 reductions of alpha + G / (n B) follow",
        assumptions=_PIPELINE,
        source=_REDUCER,
    ),
    FormulaText(
        name="ddp_exposed_s",
        gives="communication that backward does not hide",
        unit="s",
        derivation="the largest ddp_bucket_end_s over i, less T_b; it is linear in i, so i = 1 or i = n",
        assumptions=_PIPELINE,
        source=_REDUCER,
    ),
    FormulaText(
        name="ddp_exposed_by_bucket_bytes_s",
        gives="ddp_exposed_s as a function of the size of a bucket",
        unit="s",
        derivation="ddp_exposed_s with n = G / b",
        assumptions=_PIPELINE,
        source=_OURS,
    ),
    FormulaText(
        name="ddp_exposed_communication_bound_s",
        gives="ddp_exposed_s where reductions never wait for gradients",
        unit="s",
        derivation="ddp_bucket_end_s of i = 1, less T_b; holds where n >= ddp_boundary_buckets",
        assumptions=_PIPELINE,
        source=_OURS,
    ),
    FormulaText(
        name="ddp_exposed_compute_bound_s",
        gives="ddp_exposed_s where reductions always wait for gradients: the last bucket",
        unit="s",
        derivation="ddp_bucket_end_s of i = n, less T_b; holds where n <= ddp_boundary_buckets",
        assumptions=_PIPELINE,
        source=_OURS,
    ),
    FormulaText(
        name="ddp_boundary_buckets",
        gives="buckets up to which a step is compute-bound, and past which it is communication-bound",
        unit="1",
        derivation="alpha + G / (n B) = T_b / n; below 1 the step is communication-bound with any number",
        assumptions=_PIPELINE,
        source=_OURS,
    ),
    FormulaText(
        name="ddp_best_buckets",
        gives="number of buckets at which ddp_exposed_s is least",
        unit="1",
        derivation="compute-bound it falls with n; communication-bound it falls up to sqrt(T_b / alpha), then "
        "rises: the "
        "later of the boundary and that, and at least 1",
        assumptions=_PIPELINE,
        source=_OURS,
    ),
    FormulaText(
        name="ddp_best_bucket_bytes",
        gives="bucket size at which ddp_exposed_s is least",
        unit="bytes",
        derivation="G / ddp_best_buckets",
        assumptions=_PIPELINE,
        source=_OURS,
    ),
    FormulaText(
        name="ddp_best_bucket_bytes_communication_bound",
        gives="bucket size that exposes least where T_b - G / B <= sqrt(alpha T_b): more calls against an earlier "
        "start",
        unit="bytes",
        derivation="G / n where d ddp_exposed_communication_bound_s / dn = 0, at n = sqrt(T_b / alpha)",
        assumptions=_PIPELINE,
        source=_OURS,
    ),
    FormulaText(
        name="ddp_best_bucket_bytes_compute_bound",
        gives="bucket size that exposes least where T_b - G / B >= sqrt(alpha T_b): the least the interconnect "
        "keeps up with",
        unit="bytes",
        derivation="G / ddp_boundary_buckets",
        assumptions=(*_PIPELINE, "T_b > G / B"),
        source=_OURS,
    ),
    FormulaText(
        name="ddp_least_exposed_communication_bound_s",
        gives="ddp_exposed_s with buckets of ddp_best_bucket_bytes_communication_bound",
        unit="s",
        derivation="ddp_exposed_communication_bound_s at n = sqrt(T_b / alpha)",
        assumptions=_PIPELINE,
        source=_OURS,
    ),
    FormulaText(
        name="ddp_least_exposed_compute_bound_s",
        gives="ddp_exposed_s with buckets of ddp_best_bucket_bytes_compute_bound",
        unit="s",
        derivation="ddp_exposed_compute_bound_s at n = ddp_boundary_buckets",
        assumptions=(*_PIPELINE, "T_b > G / B"),
        source=_OURS,
    ),
    FormulaText(
        name="naive_overhead_s",
        gives="what an all-reduce of each gradient after backward adds to a step",
        unit="s",
        derivation="P calls and all bytes, one after another",
        assumptions=_AFTER,
        source=_OURS,
    ),
    FormulaText(
        name="flat_overhead_s",
        gives="what one all-reduce of the flattened gradients after backward adds to a step",
        unit="s",
        derivation="one call and all bytes; gradients are read and written into the buffer and again out of it",
        assumptions=(*_AFTER, "copies run at the memory's bandwidth"),
        source=_OURS,
    ),
    FormulaText(
        name="overlap_exposed_s",
        gives="what an all-reduce a parameter, as soon as its gradient is ready, adds to a step",
        unit="s",
        derivation="ddp_exposed_s with n = P",
        assumptions=(*_PIPELINE, "parameters of equal size"),
        source=_OURS,
    ),
)
