"""Times of operators of a kind that nobody measured: rough, and said to be.

An operator counts as measured where its class was, and where the class has kernels of many kinds (pooling, batch norm),
where it was itself. Elementwise operators are one kind: any of them tells of the others. Of the rest

- indexing and transforms take about as long as an elementwise kernel of the same bytes: to a factor of 3;
- scans, sorts, selections and factorisations take on a GPU as long again as their steps wait for each other
  (:mod:`perfmodel.cost.kernels.dependent_steps`): to a factor of 5, factorisations to one of 10;
- on a CPU scans, sorts and transforms take many times as long as an elementwise kernel (:data:`CPU_TIMES`), and
  factorisations as long as their arithmetic: to a factor of 10;
- a reduction by the curve of column sums, which are the same template of kernels: to a factor of 3;
- what is not known at all: as an elementwise kernel, or as long as its arithmetic where that is known (distances
  between rows), to a factor of 10. Arithmetic that is not known no factor covers.

The factors are guesses that are held against an H200 (bench/results/estimates-h200.json; `python -m bench.estimates
--measured` that file prints all counts). 69 calls were predicted before they were measured, in two rounds, and 60 lie
within the factors: 38 of the 45 of the first round and 22 of the 24 of the second. After the first, the rules of
factorisations (4 of 6), indexing (3 of 5) and counting (none of 1) were rewritten by these twelve calls; the second
held the new rules against others of the same kinds (factorisations 14 of 14, indexing 7 of 8, counting 1 of 2). Of
the 42 calls whose times are known to the rules, these twelve included, 34 have a say in a constant and eight in a
factor alone; all lie within the factors.

Of the 57 calls that are held out still, 53 lie within, four outside: bincount, which synchronises (8 times as long as
estimated), a gather of whole columns (5 times), the gradient of distances (13 times) and bicubic interpolation (16
times). On a CPU nothing was held out.

Arithmetic in float64, 8 bits and complex numbers runs on other units, or by other kernels, than any that GEMMs were
measured on, and counts as not measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from perfmodel.cost.kernels.classify import classify
from perfmodel.cost.kernels.dependent_steps import dependent_steps_s
from perfmodel.cost.kernels.forms import parameter_key
from perfmodel.cost.kernels.roofline import busy_time_s
from perfmodel.trace.operation import Operation

if TYPE_CHECKING:
    from perfmodel.cost.kernels.features import Features
    from perfmodel.hardware.profile import CurveRecord, Device

NORMAL_90 = 1.645  # two-sided 90 % of a normal distribution
NEAR, MIDDLE, FAR = 3.0, 5.0, 10.0  # factors within which an estimate is said to lie
HARDLY_KNOWN = 8.0  # from this factor on, how long an operator takes says little of how long it may
FACTORS: Mapping[str, float] = {
    "index": NEAR, "scan": MIDDLE, "fft": NEAR, "sort": MIDDLE, "linear_algebra": FAR, "other": FAR,
}  # fmt: skip
# How many times as long as an elementwise kernel of the same bytes: arithmetic limits them on a CPU, not memory.
# By class, and by operator where one is unlike the others of its class: the geometric mean of one or two operators at
# 512 x 512 and 2048 x 2048 elements on one core of a Xeon, rounded (bench/results/cpu-times-xeon.json).
CPU_TIMES: Mapping[str, float] = {"scan": 2.5, "sort": 70.0, "fft": 1.5, "logcumsumexp": 150.0, "topk": 30.0}
# By curve: the parameter and the label that tell kinds of kernels apart which do not tell of each other.
OWN_KINDS = {"pooling": ("slowness", "operator"), "batch_norm": ("passes", "kernel")}
PRODUCTS = ("gemm", "convolution", "attention")
PRODUCT_DTYPES = frozenset({"float32", "bfloat16", "float16"})


def spread_of_factor(factor: float) -> float:
    """Standard deviation of a normally distributed logarithm nine tenths of which lie within this factor.

    >>> round(spread_of_factor(10.0), 2)
    1.4
    """
    return math.log(factor) / NORMAL_90


def factor_of_spread(spread: float) -> float:
    """The inverse of :func:`spread_of_factor`."""
    return math.exp(NORMAL_90 * spread)


class Estimate(NamedTuple):
    """A correction of a curve's prediction for an operator of a kind that was not measured.

    The operator takes ``times`` as long, at least ``least_s``, and ``more_s`` longer. ``spread`` is the least spread of
    the logarithm.
    """

    times: float
    more_s: float
    spread: float
    least_s: float = 0.0

    def time_s(self, curve_s: float) -> float:
        """Return the seconds of the operator where the curve says ``curve_s``."""
        return max(curve_s * self.times, self.least_s) + self.more_s


def estimate_of(
    operation: Operation, features: Features, record: CurveRecord, device: Device, is_stand_in: bool
) -> Estimate | None:
    """Return the correction of a prediction by this curve; None where the operator's kind was measured.

    is_stand_in: the curve is another class's.
    """
    kind = classify(operation)
    if kind in FACTORS:
        times = CPU_TIMES.get(operation.base_name, CPU_TIMES.get(kind, 1.0)) if device.kind == "cpu" else 1.0
        arithmetic_s = busy_time_s(operation, device, matmul_tf32=False, memory_bytes=0.0)
        return Estimate(times, dependent_steps_s(operation, device), factor_spread(kind, device), arithmetic_s)
    if is_stand_in or not _is_known(features, record) or not _has_units(operation, kind):
        return Estimate(1.0, 0.0, spread_of_factor(NEAR))
    return None


def factor_spread(kind: str, device: Device) -> float:
    """The spread of an estimate of this class of operators, one of :data:`FACTORS`."""
    return spread_of_factor(FAR if device.kind == "cpu" and kind != "index" else FACTORS[kind])


def _is_known(features: Features, record: CurveRecord) -> bool:
    parameter, label = OWN_KINDS.get(features.curve, (None, None))
    if parameter is None or label is None:
        return True
    return parameter_key(parameter, features.labels[label]) in record.parameters


def _has_units(operation: Operation, kind: str) -> bool:
    """Whether GEMMs were measured in the dtype, if it is one."""
    if not kind.startswith(PRODUCTS):
        return True
    return all(spec.dtype in PRODUCT_DTYPES for spec in operation.input_tensors()[:2])
