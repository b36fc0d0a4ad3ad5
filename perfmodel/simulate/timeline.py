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
class Timeline:
    """One steady step of one rank. Columns have one entry a launched operator, in launch order.

    operation: index into the trace's operations. run: index into ``phases``. module: index into the trace's modules, -1
    outside. stream: 0 is the compute stream. host_start_s, issue_s: the host begins the call, and has launched it.
    start_s, end_s: the device runs it (several kernels count as one). All seconds from the step's start on the host.
    host_span_s: host times of the phases, (start, end). host_busy_s: seconds the host worked (neither waiting nor
    held back).
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

    @property
    def busy_s(self) -> float:
        """Seconds the device worked."""
        return float(np.sum(self.end_s - self.start_s))
