"""How much of what a launch touches is still in the device's cache from what ran before it in the step.

A microbenchmark repeats one call, so whatever fits stays in the cache; in a step other kernels run in between. Least
recently used by traffic, as a linear fall-off for each storage j that a launch touches:

    h_j = clip(1 - max(0, D_j + own - C) / C, 0, 1)

D_j: bytes that the device touched since j was last touched. own: the launch's bytes. C: effective capacity. Traffic,
not distinct bytes, ages the cache; reads and writes count alike.

New storages lie in blocks that the caching allocator hands out again, so they inherit what is cached of the block. Its
best fit is stood in for by the block of equal rounded size that was freed last; where there is none, the block is cold.

Code is read through the same cache: what passes since a kernel last ran ages its code as it does data. What fetching it
takes is :attr:`~perfmodel.hardware.profile.Cache.code_miss_s`.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from perfmodel.cost.kernels.classify import classify
from perfmodel.derived import Derived
from perfmodel.program.program import PhaseRun, Program
from perfmodel.trace.operation import Operation
from perfmodel.trace.storage_reuse import renamed_on_repeat
from perfmodel.trace.trace import EventKind, Segment, Trace

BLOCK_BYTES = 512  # the caching allocator's granule
SIMULATED_MICRO_BATCHES = 3  # the later ones find the cache as the third does
# Operators that read few rows of their first tensor, as many as they return.
ROW_READERS = frozenset(("embedding", "index_select", "gather", "index"))
OF_SHAPES = frozenset(("gemm", "convolution_forward", "convolution_backward"))  # whose library chooses code by shape


class Resident(NamedTuple):
    """Shares of data and code that each call finds in the cache.

    Attributes
    ----------
    data : numpy.ndarray
        Share of its bytes that it finds, of what it would find when repeated alone.
    code : numpy.ndarray
        Likewise of the code of its kernels.
    """

    data: np.ndarray
    code: np.ndarray

    def of(self, places: np.ndarray | slice) -> Resident:
        return Resident(self.data[places], self.code[places])


_SHARES = Derived[dict[tuple[tuple[Segment, ...], float], Resident]]()  # of traces, by runs and capacity


def resident_shares(program: Program, capacity_bytes: float, positions: np.ndarray) -> Resident:
    """Return what each launch finds in the cache.

    data = mean of h_j by bytes / clip(1 - max(0, own - C) / C, 0, 1), in a steady step. 1: as warm as alone; 0:
    nothing is found; 1 too where a launch touches nothing. code: h with own = 0, D since a call of the same code.

    Parameters
    ----------
    program
        One rank's step.
    capacity_bytes
        C; 0 where there is no cache.
    positions
        Where the launches stand among the program's instructions.

    Notes
    -----
    Remembered as long as the program's trace lives. What strategies insert is taken to find none of its data and all of
    its code (such calls come in rows of one kind), and to push out nothing. Assumes: calls of one operator's name and
    types run one code, GEMMs and convolutions one for each shape; all kernels of a call are of one.
    """
    if capacity_bytes <= 0:
        return Resident(np.zeros(len(positions)), np.ones(len(positions)))
    trace, key = program.trace, (tuple(run.segment for run in program.runs), capacity_bytes)
    known = _SHARES.of(trace, dict)
    if key not in known:
        known[key] = _all_shares(program, capacity_bytes)
    event = program.instructions.event
    shares = Resident(np.zeros(len(event)), np.ones(len(event)))
    for column, of_trace in zip(shares, known[key], strict=True):
        column[event >= 0] = of_trace
    return shares.of(positions)


def held_share(passed_bytes: np.ndarray | float, capacity_bytes: float) -> np.ndarray:
    """Return h for data that was touched so many bytes ago, its own bytes included: D + own.

    >>> float(held_share(15.0, 10.0))
    0.5
    """
    beyond = np.maximum(0.0, np.asarray(passed_bytes) - capacity_bytes)
    return np.asarray(np.clip(1 - beyond / capacity_bytes, 0.0, 1.0))


def _all_shares(program: Program, capacity_bytes: float) -> Resident:
    """Return shares of all instructions, from the second of two equal steps."""
    step = _Step.of(program)
    events = program.trace.steady
    counts = np.diff(events.touch_offsets)[step.order]
    starts = events.touch_offsets[:-1][step.order]
    touches = np.arange(int(counts.sum())) + np.repeat(starts - (np.cumsum(counts) - counts), counts)
    within = np.repeat(np.arange(len(step.order)), counts)
    launch = np.concatenate([within, within + len(step.order)])
    blocks = _blocks(program.trace, step, step.renamed(events.touches[touches], within), launch)
    sizes = np.tile(_touched_bytes(program.trace)[touches], 2).astype(float)
    own = np.bincount(launch, weights=sizes, minlength=2 * len(step.order))
    data = _data_shares(launch, blocks, sizes, own, capacity_bytes)
    code = _code_shares(np.tile(_codes(program.trace)[step.order], 2), own, capacity_bytes)
    second = slice(len(step.order), None)
    return _with_later_micro_batches(program, Resident(data, code).of(second))


@dataclass(frozen=True)
class _Step:
    """The simulated part of a step.

    Parameters
    ----------
    order : numpy.ndarray
        Index of each simulated event among the trace's.
    repeats : numpy.ndarray
        Whether each event belongs to a micro-batch that the trace does not hold.
    names, names_again : numpy.ndarray
        By storage id, the name under which the step itself makes it, on a first and on a repeated run.
    """

    order: np.ndarray
    repeats: np.ndarray
    names: np.ndarray
    names_again: np.ndarray

    @classmethod
    def of(cls, program: Program) -> _Step:
        first: dict[tuple[Segment, int], PhaseRun] = {}
        for run in program.runs:
            first.setdefault(_known_as(run), run)
        runs = list(first.values())
        repeated = [run.micro_batch != run.segment.micro_batch for run in runs]
        lengths = [run.segment.stop - run.segment.start for run in runs]
        again = dict.fromkeys(run.segment for run, repeats in zip(runs, repeated, strict=True) if repeats)
        return cls(
            np.concatenate([_none(), *(np.arange(run.segment.start, run.segment.stop) for run in runs)]),
            np.repeat(np.array(repeated, dtype=bool), lengths),
            _names(program.trace, program.trace.steady.segments),
            _names(program.trace, tuple(again)),
        )

    def renamed(self, storages: np.ndarray, at: np.ndarray) -> np.ndarray:
        """Storage ids of what stands at these places of the order, as the step itself names them."""
        return np.asarray(np.where(self.repeats[at], self.names_again[storages], self.names[storages]))


def _known_as(run: PhaseRun) -> tuple[Segment, int]:
    """Return a key that is equal for runs that find equal shares; the first of them is simulated."""
    return run.segment, min(run.micro_batch, SIMULATED_MICRO_BATCHES - 1)


def _none() -> np.ndarray:
    return np.zeros(0, dtype=np.int64)


def _names(trace: Trace, segments: tuple[Segment, ...]) -> np.ndarray:
    """Return for each storage id itself, or what these segments make in its place when they run again."""
    sizes = {storage.id: storage.bytes for storage in trace.persistent}
    largest = max(sizes, default=0)
    for events in (trace.first, trace.steady):
        made = events.kind == EventKind.ALLOC
        sizes.update(zip(events.a[made].tolist(), events.b[made].tolist(), strict=True))
        stored = np.isin(events.kind, (EventKind.ALLOC, EventKind.FREE))
        largest = max(largest, int(events.a[stored].max(initial=0)), int(events.touches.max(initial=0)))
    names = np.arange(largest + 1)
    if segments:
        for freed, made_again in renamed_on_repeat(trace.steady, segments, sizes):
            names[freed] = made_again
    return names


def _touched_bytes(trace: Trace) -> np.ndarray:
    """Return the steady step's touch_bytes, less the rows of a table that are not read."""
    events = trace.steady
    sizes = events.touch_bytes.copy()
    readers = [i for i, op in enumerate(trace.operations) if op.base_name in ROW_READERS and op.outputs]
    found = np.flatnonzero((events.kind == EventKind.OP) & np.isin(events.a, readers))
    for event in found[np.diff(events.touch_offsets)[found] > 0].tolist():
        first = events.touch_offsets[event]
        sizes[first] = min(sizes[first], trace.operations[events.a[event]].outputs[0].bytes)
    return sizes


def _data_shares(
    launch: np.ndarray, blocks: np.ndarray, sizes: np.ndarray, own: np.ndarray, capacity: float
) -> np.ndarray:
    """Return the relative share of each launch.

    launch, blocks, sizes: launch, block and bytes of every touch, in order. own: bytes of each launch.
    """
    held = held_share(_bytes_between(launch, blocks, own) + own[launch], capacity)
    found = np.bincount(launch, weights=held * sizes, minlength=len(own))
    alone = held_share(own, capacity) * own
    return np.where(own > 0, np.divide(found, alone, out=np.zeros(len(own)), where=alone > 0), 1.0)


def _code_shares(codes: np.ndarray, own: np.ndarray, capacity: float) -> np.ndarray:
    """Return the share of its code that each launch finds, from the number of each launch's code."""
    return held_share(_bytes_between(np.arange(len(codes)), codes, own), capacity)


def _bytes_between(launch: np.ndarray, names: np.ndarray, own: np.ndarray) -> np.ndarray:
    """Return D of each touch: the bytes of the launches since the name was last touched; infinite for the first."""
    until = np.cumsum(own)
    order = np.argsort(names, kind="stable")
    again = np.flatnonzero(names[order][1:] == names[order][:-1])
    here, before = order[again + 1], order[again]
    between = np.full(len(names), np.inf)
    between[here] = (until - own)[launch[here]] - until[launch[before]]
    return between


def _codes(trace: Trace) -> np.ndarray:
    """Return a number for each event's code: equal for equal kernels, and of its own for what launches nothing."""
    numbers: dict[object, int] = {}
    of_operation = np.array([numbers.setdefault(_code(op), len(numbers)) for op in trace.operations], dtype=np.int64)
    events = trace.steady
    is_op = events.kind == EventKind.OP
    codes = -1 - np.arange(len(events.kind))
    codes[is_op] = of_operation[events.a[is_op]]
    return codes


def _code(operation: Operation) -> object:
    if classify(operation) in OF_SHAPES:
        return operation
    return operation.name, tuple(spec.dtype for spec in operation.input_tensors())


def _blocks(trace: Trace, step: _Step, storages: np.ndarray, launch: np.ndarray) -> np.ndarray:
    """Return the block that every touch of two steps hits; a storage that no step makes is its own block."""
    storages, length = np.tile(storages, 2), len(step.order)
    births = _births(trace, step)
    if not len(births):
        return storages
    key = births[:, 0] * 2 * length + births[:, 1]
    order = np.argsort(key, kind="stable")
    last = order[np.maximum(np.searchsorted(key[order], storages * 2 * length + launch, side="right") - 1, 0)]
    is_born = (births[last, 0] == storages) & (births[last, 1] <= launch)
    return np.where(is_born, births[last, 2], storages)


def _births(trace: Trace, step: _Step) -> np.ndarray:
    """Return rows (storage, place in two steps, block) of every allocation; its place is that of the operator which
    asks.
    """
    kind, length = trace.steady.kind[step.order], len(step.order)
    moves = np.flatnonzero((kind == EventKind.ALLOC) | (kind == EventKind.FREE))
    operator = np.maximum.accumulate(np.where(kind == EventKind.OP, np.arange(length), 0))[moves].tolist()
    storages = step.renamed(trace.steady.a[step.order[moves]], moves).tolist()
    rounded = (-(-trace.steady.b[step.order[moves]] // BLOCK_BYTES)).tolist()
    is_alloc = (kind[moves] == EventKind.ALLOC).tolist()
    births: list[tuple[int, int, int]] = []
    free: dict[int, list[int]] = defaultdict(list)  # blocks by rounded size; the one freed last is handed out first
    held: dict[int, tuple[list[int], int]] = {}
    for offset in (0, length):
        for place, alloc, storage, size in zip(operator, is_alloc, storages, rounded, strict=True):
            if alloc:
                blocks = free[size]
                block = blocks.pop() if blocks else -1 - len(births)
                held[storage] = blocks, block
                births.append((storage, offset + place, block))
            elif storage in held:
                blocks, block = held.pop(storage)
                blocks.append(block)
    return np.array(births, dtype=np.int64)


def _with_later_micro_batches(program: Program, shares: Resident) -> Resident:
    """Return shares of the whole program: a later micro-batch finds what the last simulated one does."""
    found: dict[tuple[Segment, int], Resident] = {}
    parts, start = [Resident(_none().astype(float), _none().astype(float))], 0
    for run in program.runs:
        known = _known_as(run)
        if known not in found:
            stop = start + run.segment.stop - run.segment.start
            found[known], start = shares.of(slice(start, stop)), stop
        parts.append(found[known])
    return Resident(*map(np.concatenate, zip(*parts, strict=True)))
