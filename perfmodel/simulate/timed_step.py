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
    """The operators of other streams than the compute stream. Columns by launch: position among the instructions,
    device seconds, device launches; kind: index into the step's slowdowns, -1 for none.
    """

    position: np.ndarray
    duration_s: np.ndarray
    kernels: np.ndarray
    kind: np.ndarray


@dataclass(frozen=True)
class TimedStep:
    """The same for every step. Columns by entry of the compute stream, in the order in which they are issued.

    position: among the instructions; a mark is issued ahead of the instruction it stands at. source: LAUNCH, BLOCKING
    or MARK. duration_s: device seconds, 0 for marks. kernels: device launches, 0 for marks. host_s: host seconds of
    every instruction. actions: positions of the other instructions that clocks or streams meet at. collective_s:
    seconds of each of the program's collectives alone. contends: whether it is known how these slow operators.
    slowdowns: by collective, if that is known, then by kind of side, then by collective while it waits for another
    rank. side: what else is launched. waiting: index of the first of the last, None where waiting is as moving. ahead:
    of each collective that is a message, the share it takes of the room for those whose receiver has not come.
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
    waiting: int | None
    ahead: np.ndarray

    @property
    def launched_kernels(self) -> int:
        """Device launches of the step."""
        return int(self.kernels.sum() + self.side.kernels.sum())

    @cached_property
    def queued(self) -> np.ndarray:
        """Device launches by entry, those of other streams that are issued since the entry before among them."""
        queued = self.kernels.copy()
        np.add.at(queued, self._after_side, self.side.kernels)
        return queued

    @cached_property
    def queued_until_side(self) -> np.ndarray:
        """Device launches of the step until each of the other streams, itself included."""
        before = np.concatenate([[0], np.cumsum(self.kernels)])[self._after_side]
        return np.asarray(before + np.cumsum(self.side.kernels))

    @property
    def _after_side(self) -> np.ndarray:
        """The entry issued after each launch of another stream; the step's end comes after all."""
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
    """Where the launches stand among the instructions. kernels: by distinct operation, 0 where nothing is launched."""
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
    beside_slowdowns: Mapping[int, Slowdown] | None = None,
    waiting_slowdowns: tuple[Slowdown, ...] = (),
    ahead: np.ndarray | None = None,
) -> TimedStep:
    """Columns of a step.

    duration_s: by launch, in order of :func:`launched_positions`. kernels: by distinct operation. host_s: by
    instruction. collective_s: by collective of the program. slowdowns: by collective, their columns by launch; those of
    launches on other streams are not used. beside_slowdowns: likewise, by distinct operation of other streams.
    waiting_slowdowns: as slowdowns, of messages that wait for another rank; empty where that makes no difference.
    ahead: by collective, see :func:`~perfmodel.cost.collectives.ahead_share`; by default, senders wait for receivers.
    """
    columns = program.instructions
    seconds = np.zeros(0) if collective_s is None else collective_s
    everywhere = launched_positions(program, kernels)
    on_compute = columns.stream[everywhere] == COMPUTE
    launched, beside = everywhere[on_compute], everywhere[~on_compute]
    is_collective = columns.kind == COLLECTIVE
    blocking = np.flatnonzero(is_collective & (columns.stream == COMPUTE))
    marks = np.append(run_starts(program), len(columns.kind))
    position = np.concatenate([launched, blocking, marks])
    source = np.repeat([LAUNCH, BLOCKING, MARK], [len(launched), len(blocking), len(marks)])
    order = np.argsort(2 * position + (source != MARK), kind="stable")
    lasts = np.concatenate([duration_s[on_compute], seconds[columns.a[blocking]], np.zeros(len(marks))])
    counts = np.concatenate([kernels[columns.a[launched]], np.ones(len(blocking)), np.zeros(len(marks))])
    is_beside = is_collective & (columns.stream != COMPUTE)
    meets = np.isin(columns.kind, (EventKind.SYNC, RECORD, WAIT)) | (is_collective if is_beside.any() else is_beside)
    meets[beside] = True
    sharing = beside_slowdowns or {}
    kinds = {number: len(slowdowns) + index for index, number in enumerate(sharing)}
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
            beside,
            duration_s[~on_compute],
            kernels[columns.a[beside]],
            np.array([kinds.get(number, -1) for number in columns.a[beside].tolist()], dtype=np.int64),
        ),
        len(slowdowns) + len(sharing) if waiting_slowdowns else None,
        np.full(len(seconds), np.inf) if ahead is None else ahead,
    )


def _by_entry(slowdown: Slowdown, order: np.ndarray, on_compute: np.ndarray) -> Slowdown:
    """Columns by entry from those by launch; what is no operator neither slows nor is slowed."""

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
    """Instruction position at which each run of the program begins."""
    return np.searchsorted(program.instructions.run, np.arange(len(program.runs)), side="left")
