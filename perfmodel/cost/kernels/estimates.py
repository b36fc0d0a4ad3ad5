"""Times of operators of a kind that nobody measured: rough, and said to be.

An operator counts as measured where its class was, and where the class has kernels of many kinds (pooling, batch norm),
where it was itself. Elementwise operators are one kind: any of them tells of the others. Of the rest

- indexing, scans, transforms and sorting take a few times as long as an elementwise kernel of the same bytes (how
  many: :data:`TIMES`, of a GPU and of a CPU), to a factor of 3; sorting, and all but indexing on a CPU, to one of 10;
- a reduction by the curve of column sums, which are the same template of kernels: to a factor of 3;
- a factorisation of n columns is n steps that wait for each other, of 4 us each, 30 times as many where it iterates
  (singular values, eigenvalues), one matrix after the other: to a factor of 10;
- what is not known at all: as an elementwise kernel, to a factor of 10.

The factor is meant to hold in nine of ten cases and is a guess: nothing was measured. Arithmetic in float64, integers
and complex numbers runs on other units than any that products were measured on, and counts as not measured either.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from perfmodel.cost.kernels.classify import classify
from perfmodel.cost.kernels.forms import parameter_key
from perfmodel.workload.ops import Operation

if TYPE_CHECKING:
    from perfmodel.cost.kernels.features import Features
    from perfmodel.hardware.profile import CurveRecord

NORMAL_90 = 1.645  # two-sided 90 % of a normal distribution
NEAR, FAR = 3.0, 10.0  # factors within which an estimate is meant to lie
HARDLY_KNOWN = 5.0  # from this factor on, how long an operator takes says little of how long it may
FACTORS: Mapping[str, float] = {
    "index": NEAR, "scan": NEAR, "fft": NEAR, "sort": FAR, "linear_algebra": FAR, "other": FAR,
}  # fmt: skip
# How many times as long as an elementwise kernel of the same bytes; on a CPU they are bound by arithmetic, not memory.
TIMES: Mapping[str, Mapping[str, float]] = {"cuda": {}, "cpu": {"scan": 20.0, "sort": 100.0, "fft": 2.0}}
# By curve: the parameter and the label that tell kinds of kernels apart which do not tell of each other.
OWN_KINDS = {"pooling": ("slowness", "operator"), "batch_norm": ("passes", "kernel")}
PRODUCTS = ("gemm", "convolution", "attention")
PRODUCT_DTYPES = frozenset({"float32", "bfloat16", "float16"})

STEP_S = 4e-6  # of a factorisation: a panel's kernels, which wait for each other
ITERATIONS = 30
ITERATIVE = ("svd", "eig", "eigh", "lstsq", "matrix_exp")


def spread_of_factor(factor: float) -> float:
    """Standard deviation of the logarithm of a time that lies within this factor in nine of ten cases.

    >>> round(spread_of_factor(10.0), 2)
    1.4
    """
    return math.log(factor) / NORMAL_90


def factor_of_spread(spread: float) -> float:
    """The inverse of :func:`spread_of_factor`."""
    return math.exp(NORMAL_90 * spread)


class Estimate(NamedTuple):
    """What is made of a curve's prediction where nothing of the operator's kind was measured. times: it is as long.
    spread: at least, of the logarithm.
    """

    times: float
    spread: float


def estimate_of(
    operation: Operation, features: Features, record: CurveRecord, device: str, is_stand_in: bool
) -> Estimate | None:
    """What to make of a prediction by this curve; None where the operator's kind was measured.

    device: ``cuda`` or ``cpu``. is_stand_in: the curve is another class's.
    """
    kind = classify(operation)
    if kind in FACTORS:
        factor = FAR if device == "cpu" and kind != "index" else FACTORS[kind]
        return Estimate(TIMES[device].get(kind, 1.0), spread_of_factor(factor))
    if is_stand_in or not _is_known(features, record) or not _has_units(operation, kind):
        return Estimate(1.0, spread_of_factor(NEAR))
    return None


def _is_known(features: Features, record: CurveRecord) -> bool:
    parameter, label = OWN_KINDS.get(features.curve, (None, None))
    if parameter is None or label is None:
        return True
    return parameter_key(parameter, features.labels[label]) in record.parameters


def _has_units(operation: Operation, kind: str) -> bool:
    """Whether products were measured in the dtype, if it is one."""
    if not kind.startswith(PRODUCTS):
        return True
    return all(spec.dtype in PRODUCT_DTYPES for spec in operation.input_tensors()[:2])


def factorisation_time_s(operation: Operation) -> float | None:
    """Seconds of an operator of linear algebra on matrices, one after the other; None where it has none.

    >>> from perfmodel.workload.ops import TensorSpec
    >>> x = TensorSpec.parse("float32[10,512,512]")
    >>> round(factorisation_time_s(Operation("aten.linalg_inv_ex.default", (x,))), 3)
    0.02
    """
    matrices = next((spec for spec in operation.input_tensors() if len(spec.shape) >= 2), None)
    if matrices is None:
        return None
    *batch, rows, columns = matrices.shape
    iterates = operation.base_name.rstrip("_").removeprefix("_").removeprefix("linalg_").startswith(ITERATIVE)
    return math.prod(batch) * min(rows, columns) * STEP_S * (ITERATIONS if iterates else 1)
