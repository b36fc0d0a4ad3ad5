"""A rank's step, ready for its timeline at several speeds of host and interconnect; and the timelines of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from math import hypot

import numpy as np

from perfmodel.cost.collectives import CollectiveCost, collective_cost, eager_share
from perfmodel.cost.contention import Slowdown, beside_message, slowdowns
from perfmodel.cost.host import host_costs, paced_by_host
from perfmodel.cost.kernels.kernel_cost import KernelCost
from perfmodel.cost.kernels.lookup import kernel_costs
from perfmodel.cost.l2_cache import resident_shares
from perfmodel.cost.memory_contention import memory_sharing
from perfmodel.cost.power import Clock, lowered_clock
from perfmodel.cost.routing import Route, route_of
from perfmodel.hardware.interconnect import Interconnect, Role
from perfmodel.hardware.profile import Profile
from perfmodel.prediction.breakdown import bubble_of_busy
from perfmodel.program.program import COLLECTIVE, COMPUTE, Collective, Program
from perfmodel.program.ranks import RankProgram
from perfmodel.scenario.scenario import Scenario
from perfmodel.simulate.engine import simulate, simulate_together
from perfmodel.simulate.one_clock import simulate_one_clock
from perfmodel.simulate.timed_step import TimedStep, launched_positions, timed_step
from perfmodel.simulate.timeline import Timeline


class CostedRank:
    """A rank's step with the costs of its parts, from which timelines at several host and interconnect speeds are
    simulated.

    Parameters
    ----------
    program : Program
        The rank's step.
    profile : Profile
        Costs of kernels and of the host.
    scenario : Scenario
        What is predicted.
    interconnect : Interconnect or None
        The scenario's; None where one rank communicates with nobody.
    exact : bool
        Use what was measured for scenarios.
    speed : float
        Of the GPU, relative to the profile's.

    Notes
    -----
    The clock is that of a device which never waits for another rank, until :func:`costed_ranks` says how long it does.
    """

    def __init__(
        self,
        program: Program,
        profile: Profile,
        scenario: Scenario,
        interconnect: Interconnect | None,
        exact: bool = True,
        speed: float = 1.0,
    ) -> None:
        self.program, self.profile = program, profile
        self._exact, self._speed, self._matmul_tf32 = exact, speed, scenario.matmul_tf32
        self.costs = costs = kernel_costs(program.operations, profile, scenario.matmul_tf32, exact=exact)
        self.routes = [route_of(each.members, scenario, profile) for each in program.collectives]
        self.collectives = [
            _collective_cost(each, route, exact) for each, route in zip(program.collectives, self.routes, strict=True)
        ]
        self._kernels = np.array([cost.kernels for cost in costs])
        positions = launched_positions(program, self._kernels)
        self._operation, stream = program.instructions.a[positions], program.instructions.stream[positions]
        self._beside = dict.fromkeys(self._operation[stream != COMPUTE].tolist())
        self._lasts_s = _durations_s(program, positions, costs, profile)
        self._host_s = host_costs(program, profile, scenario.precision, interconnect)
        self._paced_by_host = paced_by_host(program)
        self._rerun_spread = (interconnect.rerun_spread or 0.0) if interconnect is not None else 0.0
        self._interconnects = _as_heard(program.collectives, [route.interconnect for route in self.routes])
        self._eager_share = np.array(
            [
                eager_share(each.size_bytes, interconnect)
                for each, interconnect in zip(program.collectives, self._interconnects, strict=True)
            ]
        )
        self.run_at(self.lowered_clock())

    def run_at(self, clock: Clock | None) -> None:
        """Set the device's clock from now on; None for the full one."""
        self.clock, operation = clock, self._operation
        at_clock_s = self._lasts_s if clock is None else self._lasts_s * clock.factor[operation]
        self._duration_s = at_clock_s / self._speed
        self._slowdowns = self._slowed_by(self._interconnects)
        self._waiting = self._while_waiting()
        tail_s = self._slowdowns[0].tail_s if self._slowdowns else None
        self._sharing = memory_sharing(
            self.program.operations,
            self.costs,
            operation,
            self._duration_s,
            self._beside,
            self.profile.device,
            tail_s,
        )

    def _slowed_by(self, interconnects: Sequence[Interconnect]) -> tuple[Slowdown, ...]:
        return slowdowns(
            self.program,
            self.costs,
            self._operation,
            self._duration_s,
            interconnects,
            matmul_tf32=self._matmul_tf32,
            exact=self._exact,
        )

    def _while_waiting(self) -> tuple[Slowdown, ...]:
        """Return by how much messages that wait for another rank slow this rank's kernels."""
        if not self.program.exchanges or not self._slowdowns:
            return ()
        known: dict[int, Interconnect] = {}
        return self._slowed_by(
            [known.setdefault(id(each.interconnect), beside_message(each.interconnect, "wait")) for each in self.routes]
        )

    def lowered_clock(self, full: Timeline | None = None) -> Clock | None:
        """Return the clock to which the power limit lowers the device's; None if it does not.

        full: the step of a pipeline's rank at full clock, which says how long it waits for other ranks. Both are in
        seconds of the profile's GPU: a GPU twice as fast waits twice as many of these.
        """
        if not self.profile.power.kinds:
            return None
        calls = np.bincount(self._operation, minlength=len(self.costs))
        total_s = np.bincount(self._operation, weights=self._lasts_s, minlength=len(self.costs))
        waits_s, busiest_s = _communication_s(self.program, self.collectives)
        least_s, bubbles = max(float(self._host_s.sum()), busiest_s), 0.0
        if full is not None:
            least_s, bubbles = full.step_time_s * self._speed, bubble_of_busy(full)
        return lowered_clock(
            self.program.operations, self.costs, calls, total_s, self.profile, waits_s, least_s, bubbles
        )

    def work(self, slowness: float, interconnect_factor: float = 1.0) -> TimedStep:
        """Return the step at one speed of host and interconnect.

        slowness, interconnect_factor: factors on host seconds and on the seconds of collectives.
        """
        collective_s = np.array([cost.time_s for cost in self.collectives]) * interconnect_factor
        host_s = self._host_s * np.where(self._paced_by_host, slowness, 1.0)
        return timed_step(
            self.program,
            self._duration_s,
            self._kernels,
            host_s,
            collective_s,
            self._slowdowns,
            self._sharing,
            self._waiting,
            self._eager_share,
        )

    @property
    def interconnect_spread(self) -> float:
        """A standard deviation of collectives, relative; 0 without any."""
        total_s = sum(cost.time_s for cost in self.collectives)
        if total_s == 0:
            return 0.0
        spread = sum(cost.time_s * cost.spread for cost in self.collectives) / total_s
        return hypot(spread, self._rerun_spread)


def costed_ranks(
    ranks: Sequence[RankProgram],
    profile: Profile,
    scenario: Scenario,
    interconnect: Interconnect | None,
    *,
    exact: bool = True,
    slowness: float = 1.0,
) -> list[CostedRank]:
    """Return each program with its costs.

    Ranks of a pipeline run at the speed of their own GPU, the slowest of a stage's replicas. Other ranks meet in every
    collective, and the slowest of all comes last to each: its step is everybody's.

    Where the power limit lowers a clock, ranks of a pipeline are first simulated at full clock: while they wait for
    each other, they draw less.
    """
    are_together = any(each.program.exchanges for each in ranks)
    speeds = scenario.hardware.gpu_speeds or (1.0,) * scenario.hardware.gpus
    steps = [
        CostedRank(
            each.program,
            profile,
            scenario,
            interconnect,
            exact,
            min(speeds[rank] for rank in each.ranks) if are_together else min(speeds),
        )
        for each in ranks
    ]
    if are_together and any(step.clock is not None for step in steps):
        for step in steps:
            step.run_at(None)
        for step, full in zip(steps, timelines_of(steps, slowness), strict=True):
            step.run_at(step.lowered_clock(full))
    return steps


def timelines_of(steps: Sequence[CostedRank], slowness: float, interconnect_factor: float = 1.0) -> list[Timeline]:
    """Return one timeline for each rank; ranks that send each other messages are simulated together.

    slowness, interconnect_factor: see :meth:`CostedRank.work`.
    """
    works = [step.work(slowness, interconnect_factor) for step in steps]
    programs, profile = [step.program for step in steps], steps[0].profile
    sends = any(program.exchanges for program in programs)
    if profile.device.kind == "cpu":
        if sends:
            raise RuntimeError("ranks that are simulated on one clock send each other messages")
        return [simulate_one_clock(program, work) for program, work in zip(programs, works, strict=True)]
    if sends:
        return simulate_together(programs, works, profile.launch)
    return [simulate(program, work, profile.launch) for program, work in zip(programs, works, strict=True)]


def _collective_cost(collective: Collective, route: Route, exact: bool) -> CollectiveCost:
    kind, dtype, size_bytes, ranks, *_ = collective
    return collective_cost(kind, ranks, dtype, size_bytes, route.interconnect, exact=exact, sharing=route.sharing)


def _as_heard(collectives: Sequence[Collective], interconnects: Sequence[Interconnect]) -> list[Interconnect]:
    """Return the interconnect whose couplings slow a rank's kernels; for messages, that of the rank's role."""
    roles: dict[tuple[int, Role], Interconnect] = {}
    found = []
    for collective, interconnect in zip(collectives, interconnects, strict=True):
        if not collective.role:
            found.append(interconnect)
            continue
        role: Role = "send" if collective.role == "send" else "receive"
        found.append(roles.setdefault((id(interconnect), role), beside_message(interconnect, role)))
    return found


def _communication_s(program: Program, costs: Sequence[CollectiveCost]) -> tuple[float, float]:
    """Return the seconds of collectives on the compute stream, and all seconds of the group with most of them."""
    columns, waits_s, of_groups_s = program.instructions, 0.0, dict[str, float]()
    is_collective = columns.kind == COLLECTIVE
    for number, stream in zip(columns.a[is_collective].tolist(), columns.stream[is_collective].tolist(), strict=True):
        group, time_s = program.collectives[number].group, costs[number].time_s
        of_groups_s[group] = of_groups_s.get(group, 0.0) + time_s
        waits_s += time_s if stream == COMPUTE else 0.0
    return waits_s, max(of_groups_s.values(), default=0.0)


def _durations_s(program: Program, positions: np.ndarray, costs: list[KernelCost], profile: Profile) -> np.ndarray:
    """Return the seconds of each launch: t = cold - (cold - warm) x data + code_miss_s x (1 - code).

    data, code: shares of both that it finds in the cache (:mod:`perfmodel.cost.l2_cache`).
    """
    operation, code_miss_s = program.instructions.a[positions], profile.cache.code_miss_s or 0.0
    warm_s = np.array([cost.time_s for cost in costs])[operation]
    cold_s = np.array([cost.cold_time_s for cost in costs])[operation]
    if np.array_equal(warm_s, cold_s) and not code_miss_s:
        return np.asarray(warm_s)
    found = resident_shares(program, profile.cache_capacity_bytes, positions)
    return np.asarray(cold_s - (cold_s - warm_s) * found.data + code_miss_s * (1 - found.code))
