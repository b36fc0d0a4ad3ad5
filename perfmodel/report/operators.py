"""Operators of a predicted step, by their index in the trace: their names and their costs."""

from __future__ import annotations

import numpy as np

from perfmodel.prediction.prediction import KernelUse, Prediction
from perfmodel.trace.kernel_key import kernel_key
from perfmodel.trace.operation import Operation


def profiler_name(operation: Operation) -> str:
    """The operator as torch.profiler names it.

    >>> profiler_name(Operation("aten.mm.default"))
    'aten::mm'
    """
    namespace, base = operation.name.split(".")[:2]
    return f"{namespace}::{base}"


def use_by_operation(prediction: Prediction) -> dict[int, KernelUse]:
    """Return the kernel key and its cost for each operation that the step launches on any stream."""
    by_key = {use.key: use for use in prediction.kernels}
    operations, timeline = prediction.program.operations, prediction.timeline
    tf32 = prediction.scenario.matmul_tf32
    launched = {*np.unique(timeline.operation).tolist(), *(each.operation for each in timeline.side)}
    return {index: by_key[kernel_key(operations[index], tf32)] for index in sorted(launched)}


def seconds_by_kind(prediction: Prediction) -> dict[str, float]:
    """Device seconds of the step by cost class, largest first."""
    totals: dict[str, float] = {}
    for use in prediction.kernels:
        totals[use.cost.kind] = totals.get(use.cost.kind, 0.0) + use.total_s
    return dict(sorted(totals.items(), key=lambda item: -item[1]))
