"""The verbs of the command line, for notebooks and programs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from math import hypot

import numpy as np

from perfmodel.cost.collectives import CollectiveCost, ahead_share, collective_cost
from perfmodel.cost.contention import Slowdown, beside_message, slowdowns
from perfmodel.cost.groups import Route, route_of
from perfmodel.cost.host import host_costs, host_slowness, host_spread, paced_by_host
from perfmodel.cost.kernels.cost import KernelCost
from perfmodel.cost.kernels.costs import kernel_costs
from perfmodel.cost.kernels.work import model_flops
from perfmodel.cost.power import Clock, lowered_clock
from perfmodel.cost.residency import resident_shares
from perfmodel.cost.sharing import memory_sharing
from perfmodel.hardware.interconnect import Interconnect, Role, communicators_bytes
from perfmodel.hardware.profile import Profile
from perfmodel.program.program import COLLECTIVE, COMPUTE, Collective, Program
from perfmodel.program.ranks import RankProgram, rank_programs
from perfmodel.simulate.engine import simulate, simulate_together
from perfmodel.simulate.memory import MemoryTimeline, simulate_memory
from perfmodel.simulate.one_clock import simulate_one_clock
from perfmodel.simulate.prediction import KernelUse, Prediction
from perfmodel.simulate.provenance import (
    assumptions,
    collective_shares,
    communication_warnings,
    kernel_shares,
    kernel_warnings,
)
from perfmodel.simulate.step_work import StepWork, launched_positions, step_work
from perfmodel.simulate.timeline import Timeline
from perfmodel.simulate.uncertainty import step_interval_s
from perfmodel.support import check_supported, interconnect_of
from perfmodel.units import format_share
from perfmodel.workload.keys import kernel_key
from perfmodel.workload.scenario import Scenario
from perfmodel.workload.scenario_file import interconnect_in_use

__all__ = ["predict"]

# Which part of the step a phase's device time is counted in.
PART_OF_PHASE = {
    "forward": "forward_s",
    "backward": "backward_s",
    "backward_input": "backward_s",
    "backward_weight": "backward_s",
    "reduce": "backward_s",
    "scale": "backward_s",
}


def predict(
    scenario: Scenario,
    profile: Profile,
    *,
    exact: bool = True,
    allow_import: bool = False,
    host_reference_s: float | None = None,
) -> Prediction:
    """How ``scenario`` behaves on the machine of ``profile``.

    exact: use kernel times measured for scenarios; without, only what the general grid tells.
    allow_import: the scenario's own model may be imported (which executes it) if its trace is not at hand.
    host_reference_s: the host's speed, as what one run of the profile's host reference takes; by default, the speed at
    which the profile, or its interconnect, was measured.

    Raises
    ------
    PerfModelError
        If the scenario asks for what the profile or perfmodel does not have.
    """
    check_supported(scenario, profile)
    interconnect = interconnect_of(scenario, profile)
    slowness, spread = host_slowness(profile, host_reference_s, interconnect), host_spread(profile)
    ranks = rank_programs(scenario, allow_import, batches_all=_batches_messages(profile))
    steps = [_Step(each.program, profile, scenario, interconnect, exact) for each in ranks]
    timelines = _timelines(steps, slowness)
    slowest = max(range(len(steps)), key=lambda index: timelines[index].step_time_s)
    memories = _memories(ranks, profile, scenario)
    step, timeline = steps[slowest], timelines[slowest]
    program = step.program
    along = steps if program.exchanges else [step]  # whose timelines depend on each other
    host_term_s = max(_step_time_s(along, slowness * (1 + spread)) - timeline.step_time_s, 0.0)
    wire_term_s = max(_step_time_s(along, slowness, 1 + step.wire_spread) - timeline.step_time_s, 0.0)
    clock_term_s = 0.0 if step.clock is None else step.clock.term_s
    place_of = {rank: at for at, each in enumerate(ranks) for rank in each.ranks}
    by_rank = [place_of[rank] for rank in sorted(place_of)] if program.exchanges else []
    shown = range(len(steps)) if program.exchanges else [slowest]
    uses = {at: _kernel_uses(timelines[at], steps[at].program, steps[at].costs, scenario) for at in shown}
    kernels = uses[slowest]
    breakdown = _breakdown(timeline)
    return Prediction(
        scenario=scenario,
        profile=profile,
        program=program,
        timeline=timeline,
        memory=memories[ranks[slowest].ranks[0]] if memories else None,
        rank_memories=memories,
        rank_timelines=tuple(timelines[at] for at in by_rank),
        rank_programs=tuple(steps[at].program for at in by_rank),
        rank_kernels=tuple(uses[at] for at in by_rank),
        interval_s=step_interval_s(timeline.step_time_s, kernels, host_term_s, wire_term_s, clock_term_s),
        kernels=kernels,
        breakdown=breakdown,
        clock=step.clock,
        bottleneck=_bottleneck(timeline.step_time_s, breakdown, kernels, host_term_s / spread),
        provenance=kernel_shares(kernels),
        model_flops=_model_flops(timeline, program),
        communication_bytes=_communication_bytes(timeline, program),
        collective_provenance=collective_shares(timeline, step.collectives),
        assumptions=assumptions(scenario, interconnect, step.routes),
        warnings=_warnings(kernels, step, profile, scenario),
    )


def slowest_speed(scenario: Scenario) -> float:
    """Of the ranks. All run the same program and meet in every collective, to which the slowest comes last: its step is
    everybody's, and the others wait for it there.
    """
    return min(scenario.hardware.gpu_speeds or (1.0,))


def _collective_cost(collective: Collective, route: Route, exact: bool) -> CollectiveCost:
    kind, dtype, size_bytes, ranks, *_ = collective
    return collective_cost(kind, ranks, dtype, size_bytes, route.interconnect, exact=exact, sharing=route.sharing)


def _batches_messages(profile: Profile) -> bool:
    """Whether the profile's torch hands single messages of pipelines to batch_isend_irecv, as those before 2.12 do."""
    found = re.match(r"(\d+)\.(\d+)", str(profile.provenance.get("torch", "")))
    return found is not None and tuple(map(int, found.groups())) < (2, 12)


class _Step:
    """What a step's timeline is made from, for several speeds of the host and of the wire."""

    def __init__(
        self, program: Program, profile: Profile, scenario: Scenario, interconnect: Interconnect | None, exact: bool
    ) -> None:
        self.program, self._matmul_tf32 = program, scenario.matmul_tf32
        self.costs = costs = kernel_costs(program.operations, profile, scenario.matmul_tf32, exact=exact)
        self.routes = [route_of(each.among, scenario, profile) for each in program.collectives]
        self.collectives = [
            _collective_cost(each, route, exact) for each, route in zip(program.collectives, self.routes, strict=True)
        ]
        self.profile = profile
        self._kernels = np.array([cost.kernels for cost in costs])
        positions = launched_positions(program, self._kernels)
        lasts_s = _durations_s(program, positions, costs, profile.cache_capacity_bytes)
        self._host_s = host_costs(program, profile, scenario.precision, interconnect)
        self._paced_by_host = paced_by_host(program)
        operation = program.instructions.a[positions]
        self.clock = self._lowered_clock(operation, lasts_s)
        at_clock_s = lasts_s if self.clock is None else lasts_s * self.clock.factor[operation]
        self._duration_s = at_clock_s / slowest_speed(scenario)
        self._rerun_spread = (interconnect.rerun_spread or 0.0) if interconnect is not None else 0.0
        wires = _as_heard(program.collectives, [route.interconnect for route in self.routes])
        self._slowdowns = slowdowns(
            program, costs, operation, self._duration_s, wires, matmul_tf32=scenario.matmul_tf32, exact=exact
        )
        self._waiting = self._while_waiting(operation, exact)
        self._ahead = np.array(
            [ahead_share(each.size_bytes, wire) for each, wire in zip(program.collectives, wires, strict=True)]
        )
        stream = program.instructions.stream[positions]
        beside = dict.fromkeys(operation[stream != COMPUTE].tolist())
        tail_s = self._slowdowns[0].tail_s if self._slowdowns else None
        self._sharing = memory_sharing(
            program.operations, costs, operation, self._duration_s, beside, profile.device, tail_s
        )

    def _while_waiting(self, operation: np.ndarray, exact: bool) -> tuple[Slowdown, ...]:
        """What messages that wait for another rank do to this one's kernels."""
        if not self.program.exchanges or not self._slowdowns:
            return ()
        known: dict[int, Interconnect] = {}
        wires = [
            known.setdefault(id(each.interconnect), beside_message(each.interconnect, "wait")) for each in self.routes
        ]
        return slowdowns(
            self.program, self.costs, operation, self._duration_s, wires, matmul_tf32=self._matmul_tf32, exact=exact
        )

    def _lowered_clock(self, operation: np.ndarray, lasts_s: np.ndarray) -> Clock | None:
        """operation, lasts_s: by launch, its distinct operation and its seconds at full clock."""
        if not self.profile.power.kinds:
            return None
        calls = np.bincount(operation, minlength=len(self.costs))
        total_s = np.bincount(operation, weights=lasts_s, minlength=len(self.costs))
        waits_s, busiest_s = _communication_s(self.program, self.collectives)
        least_s = max(float(self._host_s.sum()), busiest_s)
        return lowered_clock(self.program.operations, self.costs, calls, total_s, self.profile, waits_s, least_s)

    def work(self, slowness: float, wire: float = 1.0) -> StepWork:
        """slowness, wire: factors on host times and on collectives."""
        collective_s = np.array([cost.time_s for cost in self.collectives]) * wire
        host_s = self._host_s * np.where(self._paced_by_host, slowness, 1.0)
        return step_work(
            self.program,
            self._duration_s,
            self._kernels,
            host_s,
            collective_s,
            self._slowdowns,
            self._sharing,
            self._waiting,
            self._ahead,
        )

    @property
    def wire_spread(self) -> float:
        """A standard deviation of collectives, relative; 0 without any."""
        total_s = sum(cost.time_s for cost in self.collectives)
        if total_s == 0:
            return 0.0
        spread = sum(cost.time_s * cost.spread for cost in self.collectives) / total_s
        return hypot(spread, self._rerun_spread)


def _as_heard(collectives: Sequence[Collective], wires: Sequence[Interconnect]) -> list[Interconnect]:
    """What a rank's kernels have beside them: of messages, the coupling of its role."""
    roles: dict[tuple[int, Role], Interconnect] = {}
    found = []
    for collective, wire in zip(collectives, wires, strict=True):
        if not collective.role:
            found.append(wire)
            continue
        role: Role = "send" if collective.role == "send" else "receive"
        found.append(roles.setdefault((id(wire), role), beside_message(wire, role)))
    return found


def _timelines(steps: Sequence[_Step], slowness: float, wire: float = 1.0) -> list[Timeline]:
    """Of ranks that send each other messages, simulated together."""
    works = [step.work(slowness, wire) for step in steps]
    programs, profile = [step.program for step in steps], steps[0].profile
    if profile.device.kind == "cpu":
        return [simulate_one_clock(program, work) for program, work in zip(programs, works, strict=True)]
    if any(program.exchanges for program in programs):
        return simulate_together(programs, works, profile.launch)
    return [simulate(program, work, profile.launch) for program, work in zip(programs, works, strict=True)]


def _step_time_s(steps: Sequence[_Step], slowness: float, wire: float = 1.0) -> float:
    return max(timeline.step_time_s for timeline in _timelines(steps, slowness, wire))


def _memories(ranks: Sequence[RankProgram], profile: Profile, scenario: Scenario) -> tuple[MemoryTimeline, ...]:
    """Of every rank in order, the same one for those that are alike; none on a CPU. Each group of ranks that
    collectives run in has a communicator.
    """
    if profile.device.kind != "cuda":
        return ()
    found: dict[int, MemoryTimeline] = {}
    for each in ranks:
        groups = dict.fromkeys(collective.among for collective in each.program.collectives)
        communicators = [(among.ranks, route_of(among, scenario, profile).interconnect) for among in groups]
        outside_bytes = communicators_bytes(communicators)
        memory = simulate_memory(each.program, profile, scenario.matmul_tf32, outside_bytes)
        found |= dict.fromkeys(each.ranks, memory)
    return tuple(found[rank] for rank in sorted(found))


def _communication_s(program: Program, costs: Sequence[CollectiveCost]) -> tuple[float, float]:
    """Seconds of a step's collectives on the compute stream, and all seconds of the group that has most of them."""
    columns, waits_s, of_groups_s = program.instructions, 0.0, dict[str, float]()
    is_collective = columns.kind == COLLECTIVE
    for number, stream in zip(columns.a[is_collective].tolist(), columns.stream[is_collective].tolist(), strict=True):
        group, time_s = program.collectives[number].group, costs[number].time_s
        of_groups_s[group] = of_groups_s.get(group, 0.0) + time_s
        waits_s += time_s if stream == COMPUTE else 0.0
    return waits_s, max(of_groups_s.values(), default=0.0)


def _communication_bytes(timeline: Timeline, program: Program) -> dict[str, int]:
    """Bytes of a step's collectives by group, as nccl-tests counts sizes."""
    found: Counter[str] = Counter()
    for each in timeline.communications:
        found[program.collectives[each.collective].group] += program.collectives[each.collective].size_bytes
    return dict(found)


def _durations_s(program: Program, positions: np.ndarray, costs: list[KernelCost], capacity_bytes: float) -> np.ndarray:
    """Seconds of each launch: t = cold - (cold - warm) x share; share: what it finds in the cache, against alone."""
    operation = program.instructions.a[positions]
    warm_s = np.array([cost.time_s for cost in costs])[operation]
    cold_s = np.array([cost.cold_time_s for cost in costs])[operation]
    if np.array_equal(warm_s, cold_s):
        return np.asarray(warm_s)
    return np.asarray(cold_s - (cold_s - warm_s) * resident_shares(program, capacity_bytes, positions))


def _kernel_uses(
    timeline: Timeline, program: Program, costs: list[KernelCost], scenario: Scenario
) -> tuple[KernelUse, ...]:
    """Distinct operators of the step, largest first; their totals add up to the time that the device is busy, and that
    of what runs beside the compute stream.
    """
    operation = np.array([*timeline.operation, *(each.operation for each in timeline.side)], dtype=np.int64)
    lasts_s = np.array([*(timeline.end_s - timeline.start_s), *(each.end_s - each.start_s for each in timeline.side)])
    counts = np.bincount(operation, minlength=len(costs))
    totals_s = np.bincount(operation, weights=lasts_s, minlength=len(costs))
    uses = [
        KernelUse(kernel_key(program.operations[i], scenario.matmul_tf32), costs[i], int(counts[i]), float(totals_s[i]))
        for i in np.flatnonzero(counts).tolist()
    ]
    return tuple(sorted(uses, key=lambda use: -use.total_s))


def _breakdown(timeline: Timeline) -> dict[str, float]:
    """Seconds that add up to the step: device time by phase, communication that nothing hides, and the rest, when the
    device waits for the host.
    """
    parts = {"forward_s": 0.0, "backward_s": 0.0, "optimizer_s": 0.0, "exposed_communication_s": 0.0, "bubble_s": 0.0}
    busy = np.bincount(timeline.run, weights=timeline.end_s - timeline.start_s, minlength=len(timeline.phases))
    for span, seconds in zip(timeline.phases, busy.tolist(), strict=True):
        parts[PART_OF_PHASE.get(span.phase, "optimizer_s")] += seconds
    parts["exposed_communication_s"] = timeline.exposed_communication_s
    parts["bubble_s"] = timeline.bubble_s
    parts["host_bound_s"] = timeline.step_time_s - sum(parts.values())
    parts["communication_s"] = timeline.communication_s
    return parts


def _bottleneck(
    step_time_s: float, breakdown: dict[str, float], kernels: tuple[KernelUse, ...], host_limited_s: float
) -> str:
    """One sentence: what to change first.

    host_limited_s: how much of the step grows with the host's costs, d step / d log(host).
    """
    total = step_time_s
    if total <= 0 or not kernels:
        return "nothing runs on the device"
    if host_limited_s > total / 2:
        waiting = breakdown["host_bound_s"] / total
        follows, waits = format_share(min(host_limited_s / total, 1)), format_share(waiting)
        return f"the host: {follows} of the step follows it, the device waits {waits}"
    exposed_s = breakdown["exposed_communication_s"]
    by_kind: Counter[str] = Counter()
    for use in kernels:
        by_kind[use.cost.kind] += use.total_s  # type: ignore[assignment]
    kind, seconds = by_kind.most_common(1)[0]
    if exposed_s > seconds:
        return f"the wire: communication that nothing hides takes {format_share(exposed_s / total)} of the step"
    return f"the device: {kind.replace('_', ' ')} kernels take {format_share(seconds / total)} of the step"


def _model_flops(timeline: Timeline, program: Program) -> float:
    """Arithmetic of forward, three times that when training: backward needs twice forward, recomputing is not counted.

    Counted as MFU is: matrix products, convolutions and attention, causal attention in full.
    """
    in_forward = np.array([run.phase == "forward" for run in program.runs], dtype=bool)
    flops = np.array([model_flops(operation) for operation in program.operations])[timeline.operation]
    forward = float(np.sum(flops[in_forward[timeline.run]]))
    return forward * (3 if any(run.phase.startswith("backward") for run in program.runs) else 1)


def _warnings(kernels: tuple[KernelUse, ...], step: _Step, profile: Profile, scenario: Scenario) -> tuple[str, ...]:
    name, of_wires = interconnect_in_use(scenario, profile), tuple[str, ...]()
    if name is not None:
        of_wires = tuple(communication_warnings(step.program, step.collectives, step.routes, profile, name))
    return (*kernel_warnings(kernels, profile), *of_wires)
