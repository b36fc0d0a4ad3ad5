"""How much computing and communicating slow each other while both run on one device.

A collective's kernels hold multiprocessors and draw on memory bandwidth, so operators take longer beside them, and they
beside operators; one that arrives while an operator still has blocks to hand out waits until it has handed out the
last. How much depends on what the operator needs. Kinds of operators that differ in that are measured beside
collectives, and a step's operators take the coupling of their kind (:data:`KIND_OF`).

A matrix product that fills the device once loses most: with a share s of the device gone, one wave becomes two. Small
products are therefore a kind of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from perfmodel.cost.kernels.cost import KernelCost
from perfmodel.hardware.interconnect import Interconnect
from perfmodel.program.program import Program

SMALL_S = 60e-6  # a matrix product that takes less runs in about one wave

# By cost class: the measured kind whose needs are nearest.
KIND_OF = {
    "attention": "attention",
    "row": "row",
    "batch": "row",
    "reduction": "row",
    "column": "row",
    "optimizer": "optimizer",
    "gemm": "gemm",
    "convolution": "gemm",
}
OTHERWISE = "pointwise"


@dataclass(frozen=True)
class Slowdown:
    """How the entries of a step and one kind of item slow each other, and how long an entry keeps the item waiting.

    Columns by entry. compute_factor, communication_factor: at least 1. tail_s: of the entry's seconds alone the last
    ones, in which all its blocks have been handed to multiprocessors: an item that arrives earlier waits until then.
    Infinite where it never waits.
    """

    compute_factor: np.ndarray
    communication_factor: np.ndarray
    tail_s: np.ndarray


def operator_kind(cost: KernelCost, is_list: bool) -> str:
    """What an operator is among those that contention is measured for.

    is_list: it works on a list of tensors, as foreach optimizers do.
    """
    kind = KIND_OF.get(cost.kind.split("_")[0], OTHERWISE)
    if kind != "gemm":
        return "optimizer" if is_list else kind
    arithmetic = "fp32" if cost.arithmetic == "fp32" else "bf16"
    return f"gemm_{arithmetic}_small" if cost.time_s < SMALL_S else f"gemm_{arithmetic}"


def slowdowns(
    program: Program,
    costs: list[KernelCost],
    operation: np.ndarray,
    duration_s: np.ndarray,
    interconnect: Interconnect | None,
) -> tuple[Slowdown, ...]:
    """By collective of the program, with a column a launch; empty where nothing was measured.

    operation, duration_s: by launch, its distinct operation and its seconds alone.

    Notes
    -----
    Assumes: all collectives over one interconnect slow an operator alike, holding as many multiprocessors each.
    """
    if not program.collectives or interconnect is None or not interconnect.couplings:
        return ()
    kinds = [
        operator_kind(cost, each.base_name.startswith(("_foreach_", "_fused_")))
        for cost, each in zip(costs, program.operations, strict=True)
    ]
    found = [_coupling(kind, interconnect) for kind in kinds]
    compute, communication, tail = (np.array(column)[operation] for column in zip(*found, strict=True))
    slowdown = Slowdown(compute, communication, tail * duration_s)
    return (slowdown,) * len(program.collectives)


def _coupling(kind: str, interconnect: Interconnect) -> tuple[float, float, float]:
    """Of a kind, or of the nearest that was measured: small products like large ones, bf16 like fp32."""
    nearest = (kind, kind.removesuffix("_small"), "gemm_bf16" if kind.startswith("gemm") else OTHERWISE)
    for name in nearest:
        if name in interconnect.couplings:
            known = interconnect.couplings[name]
            return known.compute_factor, known.communication_factor, known.tail_share
    return 1.0, 1.0, 1.0
