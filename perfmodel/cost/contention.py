"""How much computing and communicating slow each other while both run on one device.

A collective's kernels hold multiprocessors and draw on memory bandwidth, so operators take longer beside them, and they
beside operators; one that arrives while an operator still has blocks to hand out waits until it has handed out the
last. How much depends on what the operator needs. Kinds of operators that differ in that are measured beside
collectives, and a step's operators take the coupling of their kind (:data:`KIND_OF`).

A GEMM that fills the device once loses most: with a share s of the device gone, one wave becomes two; and the
longer one runs, the longer a collective may have to wait for it. GEMMs are therefore measured small and large, and
what lies between takes its coupling by the logarithm of its time. Both are stand-ins: waves depend on the kernel, as
does whether each multiprocessor works on one block until the GEMM ends. An operator that was itself measured beside
collectives takes its own coupling.

Blocks do not move. Those handed out beside a collective stay on the multiprocessors that they share with it, or crowd
the others, also after it has ended: the wave of blocks that is on keeps its pace to its end. (gpt-large under zero2, on
two H200s: a GEMM that takes 155 us alone, and 200 us beside a gather, takes 211 us where only its first 134 us lie
beside one; a factor that holds only while both run makes that 185: tests/simulate/test_recorded_step.py.) A wave is
taken to last as long as the last one, the tail.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from perfmodel.cost.kernels.kernel_cost import KernelCost
from perfmodel.hardware.interconnect import Coupling, Interconnect, Role
from perfmodel.program.program import Program
from perfmodel.trace.kernel_key import kernel_key

LIST = "optimizer"  # many kernels, each placed anew

# By cost class: the measured kind whose needs are nearest.
KIND_OF = {
    "attention": "attention",
    "row": "row",
    "batch": "row",
    "reduction": "row",
    "full": "row",
    "column": "row",
    "optimizer": LIST,
    "gemm": "gemm",
    "convolution": "convolution",
}
CONVOLUTION = "convolution"
OTHERWISE = "pointwise"
PAUSE = "pause"


@dataclass(frozen=True)
class Slowdown:
    """The factors by which the entries of a step and one kind of task slow each other, and how long a task waits for an
    entry.

    Parameters
    ----------
    compute_factor, communication_factor : numpy.ndarray
        How many times as long as alone each entry, and the task, take while both run; at least 1.
    tail_s : numpy.ndarray
        The last of each entry's seconds alone, in which all its blocks have been handed to multiprocessors: a task that
        arrives earlier waits until then. Infinite where it never waits.
    wave_s : numpy.ndarray or None
        Seconds alone of a wave of each entry's blocks; None or 0 where the slowdown ends with the task.
    pause_s : float
        The part of ``compute_factor`` that is a longer gap before each kernel.
    """

    compute_factor: np.ndarray
    communication_factor: np.ndarray
    tail_s: np.ndarray
    wave_s: np.ndarray | None = None
    pause_s: float = 0.0


def operator_kind(cost: KernelCost, is_list: bool) -> str:
    """Return the kind of an operator, of those that contention is measured for.

    is_list: whether it works on a list of tensors, as foreach optimizers do.
    """
    kind = KIND_OF.get(cost.kind.split("_")[0], OTHERWISE)
    if kind != "gemm":
        return LIST if is_list else kind
    return _gemm_kind(cost)


def _gemm_kind(cost: KernelCost) -> str:
    return "gemm_fp32" if cost.arithmetic == "fp32" else "gemm_bf16"


def beside_message(interconnect: Interconnect, role: Role) -> Interconnect:
    """The interconnect with the couplings of a rank in that role of a message between two, for :func:`slowdowns`.

    Where no kinds of operators were measured beside that role, with those of collectives, and so with the kernels that
    were measured beside collectives, if not beside the role. A rank that sends and receives at once (a
    :class:`~perfmodel.program.program.Collective` whose role is ``both``) is taken as one that receives.
    """
    own = interconnect.own_message_couplings.get(role, {})
    if role in interconnect.message_couplings:
        found = {"couplings": interconnect.message_couplings[role], "own_couplings": own}
        return interconnect.model_copy(update=found)
    return interconnect.model_copy(update={"own_couplings": interconnect.own_couplings | own}) if own else interconnect


def slowdowns(
    program: Program,
    costs: list[KernelCost],
    operation: np.ndarray,
    duration_s: np.ndarray,
    interconnects: Sequence[Interconnect],
    *,
    matmul_tf32: bool = False,
    exact: bool = True,
) -> tuple[Slowdown, ...]:
    """Return the slowdown of each collective of the program, with a column for each launch; empty if none was measured.

    Parameters
    ----------
    operation, duration_s
        By launch, its distinct operation and its seconds alone.
    interconnects
        By collective.
    matmul_tf32
        Whether float32 GEMMs may use TF32.
    exact
        Use what was measured of a scenario's own kernels. Without, only what is known of their kinds.

    Notes
    -----
    Assumes: all collectives over one interconnect slow an operator alike, holding as many multiprocessors each.
    """
    has_own = exact and any(each.own_couplings for each in interconnects)
    if not has_own and not any(each.couplings for each in interconnects):
        return ()
    keys = [kernel_key(each, matmul_tf32) if has_own else "" for each in program.operations]
    kinds = [
        operator_kind(cost, each.base_name.startswith(("_foreach_", "_fused_")))
        for cost, each in zip(costs, program.operations, strict=True)
    ]
    distinct = {id(each): each for each in interconnects}
    found = {key: _slowdown(kinds, keys, costs, operation, duration_s, each) for key, each in distinct.items()}
    return tuple(found[id(each)] for each in interconnects)


def _slowdown(
    kinds: list[str],
    keys: list[str],
    costs: list[KernelCost],
    operation: np.ndarray,
    duration_s: np.ndarray,
    interconnect: Interconnect,
) -> Slowdown:
    """Return the slowdown beside collectives of one interconnect.

    kinds, keys: of each distinct operation; an empty key is in no table.
    """
    if CONVOLUTION not in interconnect.couplings:  # measured since; until then the nearest to it
        kinds = [_gemm_kind(cost) if kind == CONVOLUTION else kind for kind, cost in zip(kinds, costs, strict=True)]
    own = interconnect.own_couplings
    found = [
        _values(own[key]) if key in own else _of_kind(kind, cost, interconnect)
        for kind, key, cost in zip(kinds, keys, costs, strict=True)
    ]
    compute, communication, tail = (np.array(column)[operation] for column in zip(*found, strict=True))
    is_one = np.array([kind != LIST for kind in kinds])[operation]
    wave_s = np.where(is_one, tail, 0.0) * duration_s
    return Slowdown(compute, communication, tail * duration_s, wave_s, _pause_s(interconnect))


def _pause_s(interconnect: Interconnect) -> float:
    """Return by how much the gap before a kernel is longer beside a collective."""
    pause = interconnect.couplings.get(PAUSE)
    return 0.0 if pause is None else (pause.compute_factor - 1) * pause.kernel_s


def _of_kind(kind: str, cost: KernelCost, interconnect: Interconnect) -> tuple[float, float, float]:
    """Return compute_factor, communication_factor and tail_share of an operator of that kind, pauses included."""
    pause_s = _pause_s(interconnect)
    time_s = cost.time_s if cost.scaling is None else cost.scaling.warm.before_s  # as couplings were measured
    if time_s <= 0 or kind == LIST:  # measured with as many kernels as it has
        return _coupling(kind, time_s, interconnect, 0.0)
    compute, communication, tail = _coupling(kind, time_s, interconnect, pause_s)
    return compute + cost.kernels * pause_s / cost.time_s, communication, tail


def _coupling(kind: str, time_s: float, interconnect: Interconnect, pause_s: float) -> tuple[float, float, float]:
    """Return the three factors of an operator that takes ``time_s`` alone.

    pause_s: the longer gap before a kernel, which the measured factors include and which is taken out.
    """
    large = interconnect.couplings.get(kind)
    small = interconnect.couplings.get(f"{kind}_small")
    if large is None or small is None or large.kernel_s <= small.kernel_s:
        only = large or small
        return (1.0, 1.0, 1.0) if only is None else _values(only, pause_s)
    between = float(np.log(max(time_s, 1e-9) / small.kernel_s) / np.log(large.kernel_s / small.kernel_s))
    share = min(max(between, 0.0), 1.0)
    compute, communication, tail = (
        a + share * (b - a) for a, b in zip(_values(small, pause_s), _values(large, pause_s), strict=True)
    )
    return compute, communication, tail


def _values(coupling: Coupling, pause_s: float = 0.0) -> tuple[float, float, float]:
    compute = max(coupling.compute_factor - pause_s / coupling.kernel_s, 1.0)
    return compute, coupling.communication_factor, coupling.tail_share
