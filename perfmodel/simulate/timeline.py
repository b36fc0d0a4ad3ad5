"""When everything happens: what interpreter 1 (:mod:`perfmodel.simulate.engine`) returns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from perfmodel.program.program import Program


@dataclass(frozen=True)
class PhaseSpan:
    """The time from the device's reaching the phase's mark to its reaching the next one, in seconds from the step's
    start.
    """

    phase: str
    micro_batch: int
    start_s: float
    end_s: float
    stage: int = -1  # of a pipeline, as in PhaseRun

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s

    def shifted(self, seconds: float) -> PhaseSpan:
        return PhaseSpan(self.phase, self.micro_batch, self.start_s + seconds, self.end_s + seconds, self.stage)


@dataclass(frozen=True)
class Communication:
    """One collective of the step; seconds as in :class:`Timeline`.

    Parameters
    ----------
    collective : int
        Index into the program's collectives.
    run : int
        Index into ``phases``.
    stream : int
        0 where it runs on the compute stream.
    issue_s, start_s, end_s : float
        When the host issued it, and when it started and ended.
    waits_s : float
        How long a message waits at first for the other rank.
    exchange : int
        Index of a message's exchange among the program's; -1 for other collectives.
    """

    collective: int
    run: int
    stream: int
    issue_s: float
    start_s: float
    end_s: float
    waits_s: float = 0.0
    exchange: int = -1

    def shifted(self, seconds: float) -> Communication:
        times_s = (self.issue_s + seconds, self.start_s + seconds, self.end_s + seconds)
        return Communication(self.collective, self.run, self.stream, *times_s, self.waits_s, self.exchange)


@dataclass(frozen=True)
class SideKernel:
    """One operator that ran on another stream than the compute stream. Fields as in :class:`Timeline`."""

    operation: int
    run: int
    stream: int
    host_start_s: float
    issue_s: float
    start_s: float
    end_s: float

    def shifted(self, seconds: float) -> SideKernel:
        begins_s, issue_s, start_s, end_s = (
            each + seconds for each in (self.host_start_s, self.issue_s, self.start_s, self.end_s)
        )
        return SideKernel(self.operation, self.run, self.stream, begins_s, issue_s, start_s, end_s)


@dataclass(frozen=True)
class Timeline:
    """One steady step of one rank, in seconds from the step's start on the host.

    Columns have one entry for each operator launched on the compute stream (on a CPU, where one processor runs them
    all, on any stream), in launch order.

    Parameters
    ----------
    operation, run, module : numpy.ndarray
        Index into the program's operations, into ``phases``, and into the trace's modules (-1 outside of modules).
    stream : numpy.ndarray
        0 is the compute stream.
    host_start_s, issue_s : numpy.ndarray
        When the host begins the call, and when it has launched it.
    start_s, end_s : numpy.ndarray
        When the device runs it; several kernels count as one.
    phases, host_spans : tuple of PhaseSpan
        Phases as the device and as the host runs them.
    step_time_s : float
        From the device's reaching this step to its reaching the next.
    synced_step_time_s : float
        Of a step that starts with both clocks idle and ends when the host knows that the device is done.
    host_busy_s : float
        Seconds in which the host worked, neither waiting nor held back.
    communications, side : tuple
        Collectives, and operators of other streams, each by start; what sums the columns counts neither.
    began_s : float
        Of ranks simulated together, how long after the first of their hosts this one began the step.
    """

    operation: np.ndarray
    run: np.ndarray
    module: np.ndarray
    stream: np.ndarray
    host_start_s: np.ndarray
    issue_s: np.ndarray
    start_s: np.ndarray
    end_s: np.ndarray
    phases: tuple[PhaseSpan, ...]
    host_spans: tuple[PhaseSpan, ...]
    step_time_s: float
    synced_step_time_s: float
    host_busy_s: float
    communications: tuple[Communication, ...] = ()
    side: tuple[SideKernel, ...] = ()
    began_s: float = 0.0

    def shifted(self, seconds: float) -> Timeline:
        """Return the timeline with everything so much later."""
        return replace(
            self,
            host_start_s=self.host_start_s + seconds,
            issue_s=self.issue_s + seconds,
            start_s=self.start_s + seconds,
            end_s=self.end_s + seconds,
            phases=tuple(each.shifted(seconds) for each in self.phases),
            host_spans=tuple(each.shifted(seconds) for each in self.host_spans),
            communications=tuple(each.shifted(seconds) for each in self.communications),
            side=tuple(each.shifted(seconds) for each in self.side),
        )

    @property
    def launches(self) -> tuple[SideKernel, ...]:
        """Every operator of every stream: those of the columns, then ``side``."""
        columns = (self.operation, self.run, self.stream, self.host_start_s, self.issue_s, self.start_s, self.end_s)
        return (*map(SideKernel, *(column.tolist() for column in columns)), *self.side)

    @property
    def busy_s(self) -> float:
        """Seconds the compute stream worked."""
        return float(np.sum(self.end_s - self.start_s))

    @property
    def communication_s(self) -> float:
        """Seconds in which at least one collective ran, or message moved."""
        return float(np.sum(np.diff(self._moving, axis=1)))

    @property
    def exposed_communication_s(self) -> float:
        """Seconds of communication in which the compute stream ran no operator."""
        return self._exposed_s(self._moving)

    @property
    def bubble_s(self) -> float:
        """Seconds in which the compute stream ran no operator, and all communication waited for another rank."""
        all_of_it = merged((each.start_s, each.end_s) for each in self.communications)
        return max(self._exposed_s(all_of_it) - self.exposed_communication_s, 0.0)

    @property
    def _moving(self) -> np.ndarray:
        return merged((each.start_s + each.waits_s, each.end_s) for each in self.communications)

    def _exposed_s(self, stretches_s: np.ndarray) -> float:
        """Return the seconds of these stretches, rows of (start, end), in which the compute stream is idle."""
        busy_s = np.concatenate([[0.0], np.cumsum(self.end_s - self.start_s)])

        def busy_until_s(time_s: np.ndarray) -> np.ndarray:
            index = np.searchsorted(self.end_s, time_s)
            on = np.clip(time_s - np.append(self.start_s, np.inf)[index], 0.0, None)
            return np.asarray(busy_s[index] + on)

        return max(float(np.sum(np.diff(stretches_s, axis=1) - np.diff(busy_until_s(stretches_s), axis=1))), 0.0)


def merged(stretches_s: Iterable[tuple[float, float]]) -> np.ndarray:
    """Return rows (start, end), disjoint and ascending, of all that the stretches cover.

    >>> merged([(4.0, 5.0), (0.0, 2.0), (1.0, 3.0)]).tolist()
    [[0.0, 3.0], [4.0, 5.0]]
    """
    found: list[list[float]] = []
    for start_s, end_s in sorted(stretches_s):
        if found and start_s <= found[-1][1]:
            found[-1][1] = max(found[-1][1], end_s)
        else:
            found.append([start_s, end_s])
    return np.array(found).reshape(-1, 2)


def spans(program: Program, marks_s: list[float]) -> tuple[PhaseSpan, ...]:
    """Return phases from the times of their starts and of the step's end."""
    return tuple(
        PhaseSpan(run.phase, run.micro_batch, start, end, run.stage)
        for run, start, end in zip(program.runs, marks_s[:-1], marks_s[1:], strict=True)
    )
