"""The choice of a scenario's own kernels that are measured with a collective or a receive that waits, as JSON for
ranks.

How much a kernel is slowed follows from its waves of blocks, so kinds of operators
(:mod:`calibrate.interconnect.contention`) say it only roughly; the kernels that carry a step are measured themselves.
No torch is loaded here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from calibrate.jobs import Job, job
from perfmodel.cost.kernels.kernel_cost import KernelCost
from perfmodel.hardware.interconnect import MESSAGES, Role
from perfmodel.program.program import Program
from perfmodel.scenario.scenario import Scenario
from perfmodel.trace.operation import decode_operation, encode_operation
from perfmodel.trace.phases import BACKWARDS

CLASSES = ("gemm", "attention", "row")  # first words of cost classes; the others hardly depend on the shape
PHASES = ("forward", *BACKWARDS)  # under which communication lies
LEAST_SHARE = 0.01  # of the step's device time
MOST_KERNELS = 12  # of a scenario
GATHERING = ("zero2", "zero3")
WAIT: Role = "wait"  # in place of a collective


class OwnKernel(NamedTuple):
    """A kernel that carries a scenario's step.

    Parameters
    ----------
    job : Job
        The operator call.
    collective : str
        Kind that it is measured with, or ``wait``, a receive that waits.
    launches : int
        Device launches of a call.
    share : float
        Share of the steps' device time.
    """

    job: Job
    collective: str
    launches: int
    share: float


def own_kernels(
    program: Program, costs: Sequence[KernelCost], matmul_tf32: bool, collective: str
) -> tuple[OwnKernel, ...]:
    """Return the kernels of one program that take the most device time in forward and backward, largest first.

    Parameters
    ----------
    costs : sequence of KernelCost
        Costs by distinct operation.
    collective : str
        What the kernels are to be measured with.
    """
    columns = program.instructions
    operation, run = columns.a[columns.launches], columns.run[columns.launches]
    time_s = np.array([cost.time_s for cost in costs])
    is_under = np.array([each.phase in PHASES for each in program.runs], dtype=bool)[run]
    under_s = np.bincount(operation[is_under], weights=time_s[operation[is_under]], minlength=len(costs))
    total_s = float(time_s[operation].sum())
    found: dict[str, OwnKernel] = {}
    for index in np.flatnonzero(under_s).tolist():
        if costs[index].kind.split("_")[0] in CLASSES:
            wanted = job(program.operations[index], "scenario", matmul_tf32)
            share = float(under_s[index]) / total_s + (found[wanted.key].share if wanted.key in found else 0.0)
            found[wanted.key] = OwnKernel(wanted, collective, costs[index].kernels, share)
    large = [each for each in found.values() if each.share >= LEAST_SHARE]
    return tuple(sorted(large, key=lambda each: -each.share)[:MOST_KERNELS])


def together(scenarios: Iterable[Sequence[OwnKernel]]) -> tuple[OwnKernel, ...]:
    """Return the kernels of all scenarios, by the sum of their shares.

    Each key occurs at most once with a collective, that of the first scenario that has it, and once with a receive
    that waits.
    """
    found: dict[tuple[str, bool], OwnKernel] = {}
    shares: Counter[tuple[str, bool]] = Counter()
    for each in (kernel for kernels in scenarios for kernel in kernels):
        key = each.job.key, each.collective == WAIT
        found.setdefault(key, each)
        shares[key] += each.share  # type: ignore[assignment]
    return tuple(
        each._replace(share=shares[key]) for key, each in sorted(found.items(), key=lambda one: -shares[one[0]])
    )


def measured_with(scenario: Scenario, kinds: Iterable[str]) -> tuple[str, ...]:
    """Return what a scenario's kernels are measured with: a collective, a receive that waits, or both.

    One kind of collective, if there is any, since all over one interconnect are taken to slow a kernel equally.
    Receives that wait, if there are messages: a message that moves is soon over.

    Parameters
    ----------
    kinds : iterable of str
        Kinds of collectives that it sends over the interconnect.
    """
    found = set(kinds)
    gathers = scenario.parallelism.strategy in GATHERING and "all_gather" in found
    collective = ("all_gather" if gathers else "all_reduce",) if found.difference(MESSAGES) else ()
    return (*collective, WAIT) if found.intersection(MESSAGES) else collective


def encode_own(kernels: Iterable[OwnKernel]) -> list[list[object]]:
    """Return the kernels as plain data for JSON."""
    return [
        [each.job.key, each.job.tf32, encode_operation(each.job.operation), each.collective, each.launches, each.share]
        for each in kernels
    ]


def decode_own(rows: list[list[object]]) -> tuple[OwnKernel, ...]:
    """Read kernels from plain data; the inverse of :func:`encode_own`."""
    return tuple(
        OwnKernel(
            Job(str(key), decode_operation(operation), bool(tf32), "scenario"),  # type: ignore[arg-type]
            str(collective),
            int(launches),  # type: ignore[call-overload]
            float(share),  # type: ignore[arg-type]
        )
        for key, tf32, operation, collective, launches, share in rows
    )
