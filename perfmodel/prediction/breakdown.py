"""What a rank's timeline amounts to: its operators, where its time goes, its arithmetic, and what it moves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from perfmodel.cost.kernels.kernel_cost import KernelCost
from perfmodel.cost.kernels.work import model_flops
from perfmodel.prediction.prediction import KernelUse
from perfmodel.program.program import Program
from perfmodel.simulate.timeline import Timeline
from perfmodel.trace.kernel_key import kernel_key
from perfmodel.trace.phases import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, BACKWARDS, FORWARD, REDUCE, SCALE

# Which part of the step a phase's device time is counted in.
PART_OF_PHASE = {
    FORWARD: "forward_s",
    BACKWARD: "backward_s",
    BACKWARD_INPUT: "backward_s",
    BACKWARD_WEIGHT: "backward_s",
    REDUCE: "backward_s",
    SCALE: "backward_s",
}
ROUNDING = 1e-9  # relative; closer times are equal


class RankFigures(NamedTuple):
    """Kernels, breakdown and busy times of one rank's step.

    Attributes
    ----------
    kernels, breakdown
        As in :class:`~perfmodel.prediction.prediction.Prediction`.
    busy_s, host_busy_s : float
        Seconds in which the compute stream works, and the host.
    """

    kernels: tuple[KernelUse, ...]
    breakdown: dict[str, float]
    busy_s: float
    host_busy_s: float

    @property
    def load_s(self) -> float:
        """Seconds that the rank's step takes at least, however little it waits for others."""
        return max(self.busy_s, self.host_busy_s)

    @property
    def is_held_by_host(self) -> bool:
        return self.host_busy_s > self.busy_s


def rank_figures(timeline: Timeline, program: Program, costs: Sequence[KernelCost], matmul_tf32: bool) -> RankFigures:
    """Return the figures of one rank's step.

    costs: of each distinct operation. matmul_tf32: whether float32 GEMMs may use TF32.
    """
    kernels = kernel_uses(timeline, program, costs, matmul_tf32)
    return RankFigures(kernels, breakdown(timeline), timeline.busy_s, timeline.host_busy_s)


def busiest(timelines: Sequence[Timeline]) -> int:
    """Return the first of the ranks whose compute streams work longest."""
    most_s = max(each.busy_s for each in timelines)
    return next(at for at, each in enumerate(timelines) if each.busy_s >= most_s * (1 - ROUNDING))


def bubble_of_busy(timeline: Timeline) -> float:
    """Seconds of bubble for each in which the compute stream works."""
    return timeline.bubble_s / timeline.busy_s if timeline.busy_s > 0 else 0.0


def kernel_uses(
    timeline: Timeline, program: Program, costs: Sequence[KernelCost], matmul_tf32: bool
) -> tuple[KernelUse, ...]:
    """Distinct operators of the step, largest first; their totals add up to the time that the device is busy, and that
    of what runs beside the compute stream.

    costs: by distinct operation. matmul_tf32: whether float32 products may use TF32.
    """
    operation = np.array([*timeline.operation, *(each.operation for each in timeline.side)], dtype=np.int64)
    lasts_s = np.array([*(timeline.end_s - timeline.start_s), *(each.end_s - each.start_s for each in timeline.side)])
    counts = np.bincount(operation, minlength=len(costs))
    totals_s = np.bincount(operation, weights=lasts_s, minlength=len(costs))
    uses = [
        KernelUse(kernel_key(program.operations[i], matmul_tf32), costs[i], int(counts[i]), float(totals_s[i]))
        for i in np.flatnonzero(counts).tolist()
    ]
    return tuple(sorted(uses, key=lambda use: -use.total_s))


def breakdown(timeline: Timeline) -> dict[str, float]:
    """Seconds that add up to the step: device time by phase, communication that nothing hides, and the rest, when the
    device waits for the host.
    """
    parts = {"forward_s": 0.0, "backward_s": 0.0, "optimizer_s": 0.0, "exposed_communication_s": 0.0, "bubble_s": 0.0}
    busy = np.bincount(timeline.run, weights=timeline.end_s - timeline.start_s, minlength=len(timeline.phases))
    for span, seconds in zip(timeline.phases, busy.tolist(), strict=True):
        parts[PART_OF_PHASE.get(span.phase, "optimizer_s")] += seconds
    parts["exposed_communication_s"] = timeline.exposed_communication_s
    parts["bubble_s"] = timeline.bubble_s
    parts["host_bound_s"] = max(timeline.step_time_s - sum(parts.values()), 0.0)  # rounding takes it below
    parts["communication_s"] = timeline.communication_s
    return parts


def step_flops(timeline: Timeline, program: Program) -> float:
    """Arithmetic of forward, three times that when training: backward needs twice forward, recomputing is not counted.

    Counted as MFU is: matrix products, convolutions and attention, causal attention in full.
    """
    in_forward = np.array([run.phase == FORWARD for run in program.runs], dtype=bool)
    flops = np.array([model_flops(operation) for operation in program.operations])[timeline.operation]
    forward = float(np.sum(flops[in_forward[timeline.run]]))
    return forward * (3 if any(run.phase in BACKWARDS for run in program.runs) else 1)


def communication_bytes(timeline: Timeline, program: Program) -> dict[str, int]:
    """Bytes of a step's communication by group: of collectives, as nccl-tests counts sizes
    (:func:`~perfmodel.hardware.interconnect.collective_key`); of messages, all that the rank sends and receives.

    Assumes: messages that are exchanged are equally long, as activations and their gradients over one border are.
    """
    found: Counter[str] = Counter()
    for each in timeline.communications:
        messages = 1 if each.exchange < 0 else len(program.exchanges[each.exchange])
        collective = program.collectives[each.collective]
        found[collective.group] += messages * collective.size_bytes
    return dict(found)
