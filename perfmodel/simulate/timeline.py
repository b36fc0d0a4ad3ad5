"""When everything happens: what interpreter 1 (:mod:`perfmodel.simulate.engine`) returns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class PhaseSpan:
    """From the device reaching the phase's mark to it reaching the next phase's; seconds from the step's start."""

    phase: str
    micro_batch: int
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Communication:
    """One collective of the step. collective: index into the program's. run: index into ``phases``. stream: 0 where it
    runs on the compute stream. Seconds as in :class:`Timeline`.
    """

    collective: int
    run: int
    stream: int
    issue_s: float
    start_s: float
    end_s: float

    def shifted(self, seconds: float) -> Communication:
        times_s = (self.issue_s + seconds, self.start_s + seconds, self.end_s + seconds)
        return Communication(self.collective, self.run, self.stream, *times_s)


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


@dataclass(frozen=True)
class Timeline:
    """One steady step of one rank. Columns have one entry an operator launched on the compute stream (on a CPU, where
    one processor runs them all, on any), in launch order.

    operation: index into the program's operations. run: index into ``phases``. module: index into the trace's modules,
    -1 outside. stream: 0 is the compute stream. host_start_s, issue_s: the host begins the call, and has launched it.
    start_s, end_s: the device runs it (several kernels count as one). All seconds from the step's start on the host.
    host_span_s: host times of the phases, (start, end). host_busy_s: seconds the host worked (neither waiting nor
    held back). communications, side: collectives, and the operators of other streams, each by start; what sums the
    columns counts neither.
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

    @property
    def busy_s(self) -> float:
        """Seconds the compute stream worked."""
        return float(np.sum(self.end_s - self.start_s))

    @property
    def communication_s(self) -> float:
        """Seconds in which at least one collective ran."""
        return float(np.sum(np.diff(self._communication, axis=1)))

    @property
    def exposed_communication_s(self) -> float:
        """Of these, the seconds in which the compute stream ran no operator."""
        busy_s = np.concatenate([[0.0], np.cumsum(self.end_s - self.start_s)])

        def busy_until_s(time_s: np.ndarray) -> np.ndarray:
            index = np.searchsorted(self.end_s, time_s)
            on = np.clip(time_s - np.append(self.start_s, np.inf)[index], 0.0, None)
            return np.asarray(busy_s[index] + on)

        edges_s = self._communication
        return max(self.communication_s - float(np.sum(np.diff(busy_until_s(edges_s), axis=1))), 0.0)

    @property
    def _communication(self) -> np.ndarray:
        """Rows (start, end) of the stretches in which collectives ran, disjoint and ascending."""
        merged: list[list[float]] = []
        for each in self.communications:
            if merged and each.start_s <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], each.end_s)
            else:
                merged.append([each.start_s, each.end_s])
        return np.array(merged).reshape(-1, 2)
