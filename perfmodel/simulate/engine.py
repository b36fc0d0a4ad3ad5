"""Interpreter 1: steps of a rank, or of ranks that send each other messages, and the timeline of one that is steady.

:mod:`perfmodel.simulate.host_clock` issues a rank's work, and :mod:`perfmodel.simulate.device_clock` runs it. On a CPU
there is one clock (:mod:`perfmodel.simulate.one_clock`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from perfmodel.hardware.profile import Launch
from perfmodel.program.program import COLLECTIVE, COMPUTE, Program
from perfmodel.simulate.host_clock import HostClock
from perfmodel.simulate.rendezvous import Clock, RankScheduler
from perfmodel.simulate.timed_step import BLOCKING, TimedStep
from perfmodel.simulate.timeline import Communication, SideKernel, Timeline, spans
from perfmodel.trace.trace import EventKind

STEADY = 1e-4  # steady ranks' steps differ by no more than this share of the longest
MOST_STEPS = 64  # that are simulated


def simulate(program: Program, work: TimedStep, launch: Launch) -> Timeline:
    """Simulate the steady step of a rank whose device has its own clock.

    Steps follow each other without synchronisation until the launch queue has filled; the last one is returned. The
    synchronised step starts with both clocks idle and ends when the host knows that the device is done.

    Assumes: every rank reaches a collective when this one does. Source of the recurrences: max-plus algebra of a FIFO
    queue.
    """
    (timeline,) = simulate_together([program], [work], launch)
    return timeline


def simulate_together(programs: Sequence[Program], works: Sequence[TimedStep], launch: Launch) -> list[Timeline]:
    """Simulate the steady step of ranks that send each other messages, each with a program of its own.

    All begin with idle clocks. In the long run their steps take equally long, so steps are simulated until the last but
    one takes all ranks the same (to 1 in 10,000; 64 steps at most); that one is returned. The last one is simulated
    because its messages hold up the last kernels of the step before.

    Raises
    ------
    PerfModelError
        If they wait for each other for ever.
    """
    launched = min(work.launched_kernels for work in works)
    trailing_steps = int(len(programs) > 1)
    steps = math.ceil(launch.queue_depth / max(launched, 1)) + 2 + trailing_steps
    synced = _RankGroup(programs, works, launch, 1)
    synced.run(wait=True)
    steady = _RankGroup(programs, works, launch, steps, trailing_steps)
    steady.run(wait=False)
    while not steady.is_steady and steps < MOST_STEPS:
        steps = min(2 * steps, MOST_STEPS)
        steady = _RankGroup(programs, works, launch, steps, trailing_steps)
        steady.run(wait=False)
    synced_step_s = max(rank.host_s for rank in synced.ranks)
    began_s = [rank.began_s for rank in steady.ranks]
    return [
        _timeline(program, work, rank, synced_step_s, rank.began_s - min(began_s))
        for program, work, rank in zip(programs, works, steady.ranks, strict=True)
    ]


class _RankGroup:
    """Ranks that run so many steps together. trailing_steps: steps after the one that is reported."""

    def __init__(
        self,
        programs: Sequence[Program],
        works: Sequence[TimedStep],
        launch: Launch,
        steps: int,
        trailing_steps: int = 0,
    ) -> None:
        self._scheduler, self._steps = RankScheduler(len(programs)), steps
        self.ranks = [
            HostClock(program, work, launch, steps, self._scheduler, number, trailing_steps)
            for number, (program, work) in enumerate(zip(programs, works, strict=True))
        ]

    def run(self, wait: bool) -> None:
        """Run all steps. wait: at the end, the hosts wait for their devices."""
        self._scheduler.run([self._clock(rank, wait) for rank in self.ranks])

    @property
    def is_steady(self) -> bool:
        """Whether the reported step takes all ranks equally long."""
        steps_s = [rank.step_s for rank in self.ranks]
        return max(steps_s) - min(steps_s) <= STEADY * max(steps_s)

    def _clock(self, rank: HostClock, wait: bool) -> Clock:
        for _ in range(self._steps):
            yield from rank.step()
        yield from rank.wait() if wait else rank.device.run_all()


def _timeline(program: Program, work: TimedStep, rank: HostClock, synced_step_s: float, began_s: float) -> Timeline:
    columns = program.instructions
    issue_s, start_s, end_s = (
        rank.issue_s[rank.reported],
        rank.device.start_s[rank.reported],
        rank.device.end_s[rank.reported],
    )
    origin_s = rank.began_s
    launches = work.launches
    position = work.position[launches]
    marks_s = end_s[work.marks] - origin_s
    return Timeline(
        operation=columns.a[position],
        run=columns.run[position],
        module=program.modules[position],
        stream=columns.stream[position],
        host_start_s=issue_s[launches] - work.host_s[position] - origin_s,
        issue_s=issue_s[launches] - origin_s,
        start_s=start_s[launches] - origin_s,
        end_s=end_s[launches] - origin_s,
        phases=spans(program, marks_s.tolist()),
        host_spans=spans(program, (issue_s[work.marks] - origin_s).tolist()),
        step_time_s=rank.step_s,
        synced_step_time_s=synced_step_s,
        host_busy_s=float(work.host_s.sum()),
        communications=_communications(program, work, rank, issue_s, start_s, end_s, origin_s),
        side=_side_kernels(program, work, rank, origin_s),
        began_s=began_s,
    )


def _communications(
    program: Program,
    work: TimedStep,
    rank: HostClock,
    issue_s: np.ndarray,
    start_s: np.ndarray,
    end_s: np.ndarray,
    origin_s: float,
) -> tuple[Communication, ...]:
    """Return collectives of side streams and of the compute stream, by start."""
    columns = program.instructions
    communications = [
        Communication(
            int(columns.a[at]),
            int(columns.run[at]),
            task.stream,
            issued_s,
            task.start_s,
            task.end_s,
            max(task.moves_s - task.start_s, 0.0),
            int(columns.b[at]) - 1,
        )
        for at, issued_s, task in rank.side_work
        if columns.kind[at] == COLLECTIVE
    ]
    for entry in np.flatnonzero(work.source == BLOCKING).tolist():
        at = int(work.position[entry])
        times_s = (float(issue_s[entry]), float(start_s[entry]), float(end_s[entry]))
        communications.append(Communication(int(columns.a[at]), int(columns.run[at]), COMPUTE, *times_s))
    return tuple(sorted((each.shifted(-origin_s) for each in communications), key=lambda each: each.start_s))


def _side_kernels(program: Program, work: TimedStep, rank: HostClock, origin_s: float) -> tuple[SideKernel, ...]:
    columns = program.instructions
    kernels = [
        SideKernel(
            operation=int(columns.a[at]),
            run=int(columns.run[at]),
            stream=task.stream,
            host_start_s=issued_s - float(work.host_s[at]) - origin_s,
            issue_s=issued_s - origin_s,
            start_s=task.start_s - origin_s,
            end_s=task.end_s - origin_s,
        )
        for at, issued_s, task in rank.side_work
        if columns.kind[at] == EventKind.OP
    ]
    return tuple(sorted(kernels, key=lambda each: each.start_s))
