"""A step as the engine takes it: entries of the compute stream, host costs, and where clocks and streams meet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from perfmodel.cost.contention import Slowdown
from perfmodel.program.program import COLLECTIVE, COMPUTE, RECORD, WAIT, Program
from perfmodel.trace.trace import EventKind

LAUNCH, BLOCKING, MARK = 0, 1, 2  # entries: an operator, a collective on the compute stream, the start of a phase


@dataclass(frozen=True)
class SideWork:
    """The operators of side streams, with a column for each launch.

    Parameters
    ----------
    position : numpy.ndarray
        Place among the program's instructions.
    duration_s : numpy.ndarray
        Device seconds alone.
    kernels : numpy.ndarray
        Device launches.
    slowdown : numpy.ndarray
        Index into the step's slowdowns; -1 for none.
    """

    position: np.ndarray
    duration_s: np.ndarray
    kernels: np.ndarray
    slowdown: np.ndarray


@dataclass(frozen=True)
class TimedStep:
    """One step with its times, which are the same in every step.

    Columns have one value for each entry of the compute stream, in the order in which entries are issued.

    Parameters
    ----------
    position : numpy.ndarray
        Place of each entry among the program's instructions; a mark is issued before the instruction it stands at.
    source : numpy.ndarray
        LAUNCH, BLOCKING or MARK.
    duration_s, kernels : numpy.ndarray
        Device seconds alone and device launches of each entry; 0 for marks.
    host_s : numpy.ndarray
        Host seconds of every instruction.
    actions : tuple of int
        Positions of the other instructions at which clocks or streams meet.
    collective_s : numpy.ndarray
        Seconds alone of each of the program's collectives.
    slowdowns : tuple of Slowdown
        One for each collective, if ``contends``; then those of side operators; then one for each collective while it
        waits for another rank.
    contends : bool
        Whether it is known how collectives and operators slow each other.
    side : SideWork
        Operators of other streams.
    first_waiting_slowdown : int or None
        Index of the first slowdown of a collective that waits; None where waiting slows operators as moving does.
    eager_share : numpy.ndarray
        Of each collective that is a message: :func:`~perfmodel.cost.collectives.eager_share`.
    """

    position: np.ndarray
    source: np.ndarray
    duration_s: np.ndarray
    kernels: np.ndarray
    host_s: np.ndarray
    actions: tuple[int, ...]
    collective_s: np.ndarray
    slowdowns: tuple[Slowdown, ...]
    contends: bool
    side: SideWork
    first_waiting_slowdown: int | None
    eager_share: np.ndarray

    @property
    def launched_kernels(self) -> int:
        """Device launches of the step."""
        return int(self.kernels.sum() + self.side.kernels.sum())

    @cached_property
    def queued(self) -> np.ndarray:
        """Device launches by entry, including those of side streams that are issued since the entry before."""
        queued = self.kernels.copy()
        np.add.at(queued, self._after_side, self.side.kernels)
        return queued

    @cached_property
    def queued_until_side(self) -> np.ndarray:
        """Device launches of the step up to each one of a side stream, which is included."""
        before = np.concatenate([[0], np.cumsum(self.kernels)])[self._after_side]
        return np.asarray(before + np.cumsum(self.side.kernels))

    @property
    def _after_side(self) -> np.ndarray:
        """The entry that is issued after each launch of a side stream; the step's end comes after all."""
        return np.searchsorted(self.order, 2 * self.side.position + 1)

    @cached_property
    def host_until_s(self) -> np.ndarray:
        """Host seconds before each instruction, and those of the whole step."""
        return np.concatenate([[0.0], np.cumsum(self.host_s)])

    @cached_property
    def entry_host_s(self) -> np.ndarray:
        """Host seconds of the step until each entry is issued."""
        return np.asarray(self.host_until_s[self.position + (self.source != MARK)])

    @cached_property
    def order(self) -> np.ndarray:
        """Ascending: twice the position, and one more unless it is a mark."""
        return np.asarray(2 * self.position + (self.source != MARK))

    @cached_property
    def launches(self) -> np.ndarray:
        """Entries that are operators."""
        return np.flatnonzero(self.source == LAUNCH)

    @cached_property
    def marks(self) -> np.ndarray:
        """Entries that are the starts of phases, and the end of the step."""
        return np.flatnonzero(self.source == MARK)


def launched_positions(program: Program, kernels: np.ndarray) -> np.ndarray:
    """Return the positions of launches among the instructions.

    kernels: device launches of each distinct operation, 0 where it launches nothing.
    """
    columns = program.instructions
    positions = columns.launches
    return np.asarray(positions[kernels[columns.a[positions]] > 0])


def timed_step(
    program: Program,
    duration_s: np.ndarray,
    kernels: np.ndarray,
    host_s: np.ndarray,
    collective_s: np.ndarray | None = None,
    slowdowns: tuple[Slowdown, ...] = (),
    side_slowdowns: Mapping[int, Slowdown] | None = None,
    waiting_slowdowns: tuple[Slowdown, ...] = (),
    eager_share: np.ndarray | None = None,
) -> TimedStep:
    """Return the step with its columns in the order in which entries are issued.

    Parameters
    ----------
    program : Program
        One rank's step.
    duration_s : numpy.ndarray
        Device seconds alone of each launch, in the order of :func:`launched_positions`.
    kernels : numpy.ndarray
        Device launches of each distinct operation.
    host_s : numpy.ndarray
        Host seconds of each instruction.
    collective_s : numpy.ndarray, optional
        Seconds alone of each collective of the program.
    slowdowns : tuple of Slowdown
        One for each collective, with columns by launch; those of launches on side streams are not used.
    side_slowdowns : mapping of int to Slowdown, optional
        Likewise by distinct operation of side streams.
    waiting_slowdowns : tuple of Slowdown
        As ``slowdowns``, while a message waits for another rank; empty where that makes no difference.
    eager_share : numpy.ndarray, optional
        :func:`~perfmodel.cost.collectives.eager_share` of each collective; by default, senders wait for receivers.
    """
    columns = program.instructions
    seconds = np.zeros(0) if collective_s is None else collective_s
    everywhere = launched_positions(program, kernels)
    on_compute = columns.stream[everywhere] == COMPUTE
    launched, side = everywhere[on_compute], everywhere[~on_compute]
    is_collective = columns.kind == COLLECTIVE
    blocking = np.flatnonzero(is_collective & (columns.stream == COMPUTE))
    marks = np.append(run_starts(program), len(columns.kind))
    position = np.concatenate([launched, blocking, marks])
    source = np.repeat([LAUNCH, BLOCKING, MARK], [len(launched), len(blocking), len(marks)])
    order = np.argsort(2 * position + (source != MARK), kind="stable")
    lasts = np.concatenate([duration_s[on_compute], seconds[columns.a[blocking]], np.zeros(len(marks))])
    counts = np.concatenate([kernels[columns.a[launched]], np.ones(len(blocking)), np.zeros(len(marks))])
    is_side = is_collective & (columns.stream != COMPUTE)
    meets = np.isin(columns.kind, (EventKind.SYNC, RECORD, WAIT)) | (is_collective if is_side.any() else is_side)
    meets[side] = True
    sharing = side_slowdowns or {}
    slowdown_of = {number: len(slowdowns) + index for index, number in enumerate(sharing)}
    return TimedStep(
        position[order],
        source[order],
        lasts[order],
        counts[order].astype(np.int64),
        host_s,
        tuple(np.flatnonzero(meets).tolist()),
        seconds,
        tuple(_by_entry(each, order, on_compute) for each in (*slowdowns, *sharing.values(), *waiting_slowdowns)),
        bool(slowdowns),
        SideWork(
            side,
            duration_s[~on_compute],
            kernels[columns.a[side]],
            np.array([slowdown_of.get(number, -1) for number in columns.a[side].tolist()], dtype=np.int64),
        ),
        len(slowdowns) + len(sharing) if waiting_slowdowns else None,
        np.full(len(seconds), np.inf) if eager_share is None else eager_share,
    )


def _by_entry(slowdown: Slowdown, order: np.ndarray, on_compute: np.ndarray) -> Slowdown:
    """Return a slowdown with columns by entry, from columns by launch; entries that are no operators are not slowed."""

    def spread(column: np.ndarray, otherwise: float) -> np.ndarray:
        launched = column[on_compute]
        return np.asarray(np.concatenate([launched, np.full(len(order) - len(launched), otherwise)])[order])

    return Slowdown(
        spread(slowdown.compute_factor, 1.0),
        spread(slowdown.communication_factor, 1.0),
        spread(slowdown.tail_s, np.inf),
        None if slowdown.wave_s is None else spread(slowdown.wave_s, 0.0),
        slowdown.pause_s,
    )


def run_starts(program: Program) -> np.ndarray:
    """Return the instruction position at which each run of the program begins."""
    return np.searchsorted(program.instructions.run, np.arange(len(program.runs)), side="left")
