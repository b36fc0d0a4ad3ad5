"""Interpreter 2: what the caching allocator of one rank holds, request by request.

The program's allocations and frees, in the order of the host, go through :mod:`perfmodel.simulate.memory.allocator`:
the model
is built, the first step runs (it creates optimizer states and takes library workspaces), then steady steps until one
needs no new segment. Assumes the default allocator settings, that nobody else asks it for memory, and that no block is
given to ``record_stream`` (fully_shard gives none): what is freed serves its own stream again at once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from perfmodel.hardware.measurement import StepMemory
from perfmodel.hardware.profile import MemoryConstants, Profile
from perfmodel.program.program import Insertion, PhaseRun, Program, Rebuild
from perfmodel.simulate.memory.allocator import SEGMENT_ROUNDING_BYTES, CachingAllocator, OutOfMemoryError
from perfmodel.simulate.memory.columns import MemoryColumns, MemoryLog, held_after
from perfmodel.simulate.memory.request_place import OUTSIDE_STEPS, RequestPlace, request_place
from perfmodel.simulate.memory.requests import (
    Actions,
    ActionWriter,
    first_of_repeat,
    inserted_actions,
    memory_scripts,
    persistent_actions,
    with_inserted,
)
from perfmodel.simulate.memory.workspaces import Script
from perfmodel.trace.storage_reuse import renamed_on_repeat
from perfmodel.trace.trace import EventKind, StepEvents, StorageKind, Trace

MOST_STEADY_STEPS = 4


@dataclass(frozen=True)
class MemoryTimeline:
    """The memory of one rank, its steady step sampled at every allocation and free.

    Attributes
    ----------
    event : ndarray of int
        Index into ``program.instructions`` of each sample; the first sample (event 0) is what the step starts with.
        Where memory runs out in the first step, the index is into ``program.first_instructions``; while the model is
        built or wrapped, it is 0.
    allocated_bytes, reserved_bytes : ndarray of int
        After that event. Allocated counts whole blocks.
    kind_bytes : ndarray of int
        Allocated by :class:`StorageKind` (rows) at each sample (columns). Temporaries include workspaces.
    first, steady : StepMemory
        Start and peaks of the first and of the steady step.
    rebuilding : StepMemory or None
        The most that a step may reach in which something is rebuilt.
    rebuild_step : int or None
        Which step that is, counted from 1.
    outside_bytes : int
        Device memory outside the allocator: the context, and communicators.
    retries : int
        Times the device was full and cached segments were given back.
    step_retries : int
        Those of the last step, if it fits: each waits for the device, so a time predicted without them is too short.
    out_of_memory : OutOfMemoryError or None
        The request that the device could not serve; the timeline then ends there (``stopped_in`` says which section:
        ``model``, ``wrapping``, ``first``, ``early``, ``rebuilding`` or ``steady``, and ``place`` what asked for it).
    unlimited : MemoryTimeline or None
        Where it does not fit, the same on a device without a limit.
    least_limit_bytes : int or None
        Where it does not fit, the least that the allocator must be allowed for it to fit, if need be by giving cached
        segments back and asking again.
    history : tuple of (str, MemoryColumns)
        Everything that was asked, in order: ``model`` (and its inputs), ``first``, then ``steady`` once or more;
        ``wrapping`` is what a strategy asks for outside steps, ``rebuilding`` a step as in ``rebuilding`` and ``early``
        one between the first and that.
    allocator : CachingAllocator
        As the last step leaves it.
    """

    event: np.ndarray
    allocated_bytes: np.ndarray
    reserved_bytes: np.ndarray
    kind_bytes: np.ndarray
    first: StepMemory
    rebuilding: StepMemory | None
    rebuild_step: int | None
    steady: StepMemory
    outside_bytes: int
    retries: int
    step_retries: int
    out_of_memory: OutOfMemoryError | None
    stopped_in: str | None
    history: tuple[tuple[str, MemoryColumns], ...]
    allocator: CachingAllocator
    place: RequestPlace | None = None
    unlimited: MemoryTimeline | None = None
    least_limit_bytes: int | None = None

    @property
    def peak_allocated_bytes(self) -> int:
        """Peak of allocated bytes in the steady step."""
        return self.steady.peak_allocated_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        """Peak of reserved bytes in the steady step."""
        return self.steady.peak_reserved_bytes

    @property
    def device_bytes(self) -> int:
        """Peak of device memory in use for this process: segments, context and communicators."""
        steps = filter(None, (self.first, self.rebuilding, self.steady))
        return max(step.peak_reserved_bytes for step in steps) + self.outside_bytes

    @property
    def fits(self) -> bool:
        return self.out_of_memory is None

    @property
    def needed_bytes(self) -> int:
        """Device memory that the step needs: what it has in use at its peak, or, if it does not fit, the least in which
        it would.

        In the least memory the allocator may have to free cached segments, which takes time; ``unlimited.device_bytes``
        are enough to never do so. The least memory can be larger for a smaller batch, since fragmentation differs.
        """
        return self.device_bytes if self.least_limit_bytes is None else self.least_limit_bytes + self.outside_bytes

    @property
    def missing_bytes(self) -> int:
        """Device memory that is missing; 0 where everything fits."""
        if self.out_of_memory is None:
            return 0
        return self.needed_bytes - (self.out_of_memory.limit_bytes + self.outside_bytes)

    @property
    def peak_kind_bytes(self) -> dict[StorageKind, int]:
        """Allocated bytes by kind at the steady step's peak."""
        column = self.kind_bytes[:, self._peak_sample].tolist()
        return {kind: column[kind] for kind in StorageKind}

    @cached_property
    def _peak_sample(self) -> int:
        return int(np.argmax(self.allocated_bytes))


def simulate_memory(
    program: Program, profile: Profile, matmul_tf32: bool = False, communicators_bytes: int = 0
) -> MemoryTimeline:
    """Walk the program through the allocator of the profile's device.

    Parameters
    ----------
    program : Program
        One rank's.
    profile : Profile
        Device memory (the limit, less the context), measured scripts of its kernels, workspaces.
    matmul_tf32 : bool
        Whether float32 GEMMs may use TF32: part of the kernel keys the scripts are found under.
    communicators_bytes : int
        Device memory that communicators take outside the allocator.

    Returns
    -------
    MemoryTimeline
        Complete, or up to the request that did not fit and, in ``unlimited``, complete as if the device had no limit.

    Notes
    -----
    What a step that does not fit needs is found by walking it again under other limits. Segments are multiples of
    SEGMENT_ROUNDING_BYTES, so no other limits need be tried. Assumes: what fits under a limit fits under a larger one.
    """
    outside_bytes = profile.memory.context_bytes + communicators_bytes
    limit_bytes = profile.device.memory_bytes - outside_bytes
    scripts = memory_scripts(program.operations, profile, matmul_tf32)

    def walked(limit_bytes: int | None) -> MemoryTimeline:
        return _Walk(program, scripts, profile.memory, CachingAllocator(limit_bytes), outside_bytes).walked()

    found = walked(limit_bytes)
    if found.fits:
        return found
    unlimited = walked(None)
    least_bytes = _least_limit_bytes(limit_bytes, unlimited, lambda limit_bytes: walked(limit_bytes).fits)
    return replace(found, unlimited=unlimited, least_limit_bytes=least_bytes)


def _least_limit_bytes(refused_bytes: int, unlimited: MemoryTimeline, fits: Callable[[int], bool]) -> int:
    """The least limit that fits, above one that does not; as much as is reserved without a limit always does."""
    reserved_bytes = unlimited.device_bytes - unlimited.outside_bytes
    limits = range(0, reserved_bytes + 1, SEGMENT_ROUNDING_BYTES)
    lowest_bytes = max(refused_bytes + 1, unlimited.first.peak_allocated_bytes, unlimited.steady.peak_allocated_bytes)
    lowest = min(-(-lowest_bytes // SEGMENT_ROUNDING_BYTES), len(limits) - 1)
    return limits[bisect_left(limits, True, lo=lowest, hi=len(limits) - 1, key=fits)]


class _Walk:
    """The state of one walk through the model's construction, the first step and steady ones."""

    def __init__(
        self,
        program: Program,
        scripts: Sequence[Script],
        constants: MemoryConstants,
        allocator: CachingAllocator,
        outside_bytes: int,
    ) -> None:
        self._program = program
        self._outside_bytes = outside_bytes
        self._allocator = allocator
        self._writer = ActionWriter(program.trace, scripts, constants)
        self._sizes = _storage_bytes(program.trace)
        self._address_of: dict[int | tuple[int, int], int] = {}
        self._micro_batch = -1
        self._retries_before = 0  # the last step
        self._history: list[tuple[str, MemoryColumns]] = []
        self._steps: dict[str, StepMemory] = {}  # by section, the last of each
        self._refused: tuple[int, StorageKind, bool] | None = None  # event, what it holds, whether a strategy asked

    def walked(self) -> MemoryTimeline:
        """The timeline of everything, or of what came before the request that did not fit."""
        try:
            self._run()
        except OutOfMemoryError as error:
            return self._timeline(error)
        return self._timeline()

    def _run(self) -> None:
        trace = self._program.trace
        self._build()
        self._step("first", trace.first, self._program.first_runs, self._program.first_insertions)
        renamed = renamed_on_repeat(trace.steady, trace.steady.segments, self._sizes)
        if self._program.rebuild is not None:
            self._until_rebuilt(self._program.rebuild, renamed)
        for count in range(MOST_STEADY_STEPS):
            if count:
                self._rename(renamed)
            reserved_bytes = self._allocator.reserved_bytes
            self._step("steady", trace.steady, self._program.runs, self._program.insertions)
            if count and self._allocator.reserved_bytes == reserved_bytes:
                break

    def _build(self) -> None:
        """The model, what wraps it, and then its inputs."""
        persistent, setup = self._program.trace.persistent, self._program.setup
        if not setup:
            self._walk("model", [(-1, persistent_actions(persistent))])
            return
        self._walk("model", [(-1, persistent_actions(each for each in persistent if each.kind != StorageKind.INPUT))])
        self._walk("wrapping", [(-1, inserted_actions(setup))])
        self._walk("model", [(-1, persistent_actions(each for each in persistent if each.kind == StorageKind.INPUT))])

    def _until_rebuilt(self, rebuild: Rebuild, renamed: list[tuple[int, int]]) -> None:
        """The steps after the first, up to that in which something is rebuilt.

        What is rebuilt is made before what it replaces is given up, which lives until nothing waits for it any more:
        NCCL's watchdog looks every 100 ms, so it may be there all through this step. (Where the step before was waited
        for, as when memory is measured, it may be gone before.)
        """
        program = self._program
        for _ in range(2, rebuild.step):
            self._step("early", program.trace.steady, program.runs, program.insertions)
            self._rename(renamed)
        self._step("rebuilding", program.trace.steady, program.runs, (*rebuild.made, *program.insertions))
        self._walk("wrapping", [(-1, inserted_actions(rebuild.replaced))])
        self._rename(renamed)

    def _step(
        self, section: str, events: StepEvents, runs: Sequence[PhaseRun], insertions: Sequence[Insertion]
    ) -> None:
        allocator = self._allocator
        before, self._retries_before = allocator.allocated_bytes, allocator.retries
        allocator.reset_peaks()
        try:
            self._walk(section, self._actions(events, runs, insertions))
        finally:
            self._steps[section] = _step_memory(before, allocator)

    def _actions(
        self, events: StepEvents, runs: Sequence[PhaseRun], insertions: Sequence[Insertion]
    ) -> Iterator[tuple[int, Actions]]:
        """The actions of each run with the index of its first instruction, counting those of the trace only."""
        repeats = first_of_repeat(runs) if not self._program.in_flight else set[int]()
        inserted: dict[int, list[Insertion]] = {}
        for insertion in insertions:
            inserted.setdefault(insertion.run, []).append(insertion)
        renamed: list[tuple[int, int]] | None = None
        start = 0
        for position, run in enumerate(runs):
            if position in repeats:
                if renamed is None:
                    again = [segment for segment in events.segments if segment.micro_batch == run.segment.micro_batch]
                    renamed = renamed_on_repeat(events, again, self._sizes)
                self._rename(renamed)
            self._micro_batch = run.micro_batch
            own = self._writer.actions_of(events, run.segment)
            edited = inserted.get(position, ())
            yield start, with_inserted(own, edited, run.segment.start, self._writer.temporaries)
            start += run.segment.stop - run.segment.start

    def _rename(self, pairs: list[tuple[int, int]]) -> None:
        for freed, made in pairs:
            if made in self._address_of:
                self._address_of[freed] = self._address_of.pop(made)
        if self._program.in_flight:
            names = {made: freed for freed, made in pairs}
            for key in [key for key in self._address_of if isinstance(key, tuple) and key[0] in names]:
                self._address_of[names[key[0]], key[1]] = self._address_of.pop(key)

    def _walk(self, section: str, pieces: Iterable[tuple[int, Actions]]) -> None:
        log = MemoryLog()
        try:
            for start, actions in pieces:
                self._perform(actions, start, log)
        finally:
            self._history.append((section, log.columns()))

    def _perform(self, actions: Actions, start: int, log: MemoryLog) -> None:
        allocator, address_of = self._allocator, self._address_of
        allocate, free, micro_batch = allocator.allocate, allocator.free, self._micro_batch
        in_flight = self._program.in_flight
        addresses, allocated, reserved = log.address, log.allocated_bytes, log.reserved_bytes
        done = len(addresses)
        try:
            for request_bytes, slot, stream in zip(actions.request_bytes, actions.slot, actions.stream, strict=True):
                key = (slot, micro_batch) if in_flight and (slot < 0 or slot in in_flight) else slot
                if request_bytes:
                    address = address_of[key] = allocate(request_bytes, stream)
                else:
                    address = address_of.pop(key, -1)
                    if address >= 0:
                        free(address)
                    elif key != slot and micro_batch < 0:
                        address = self._free_all(slot)
                addresses.append(address)
                allocated.append(allocator.allocated_bytes)
                reserved.append(allocator.reserved_bytes)
        except OutOfMemoryError:
            refused = len(addresses) - done
            kind, is_inserted = StorageKind(actions.kind[refused]), self._writer.is_inserted(actions.slot[refused])
            self._refused = max(actions.event[refused] + start, min(start, 0)), kind, is_inserted
            raise
        finally:
            log.note(actions, start)

    def _free_all(self, slot: int) -> int:
        """Free the storage of every micro-batch; return the address of the last, -1 for none."""
        found = [key for key in self._address_of if isinstance(key, tuple) and key[0] == slot]
        address = -1
        for key in found:
            address = self._address_of.pop(key)
            self._allocator.free(address)
        return address

    def _timeline(self, out_of_memory: OutOfMemoryError | None = None) -> MemoryTimeline:
        """Return the timeline, whose samples are those of the last step that ran."""
        section, columns = self._history[-1]
        held, reserved_bytes = held_after(self._history[:-1])
        block_bytes = np.diff(columns.allocated_bytes, prepend=held.sum())
        of_kind = columns.kind == np.arange(len(StorageKind))[:, None]
        changes = np.concatenate([held[:, None], np.where(of_kind, block_bytes, 0)], axis=1)
        steps = list(self._steps.values()) or [_step_memory(0, self._allocator)]
        return MemoryTimeline(
            event=np.concatenate([[0], self._instructions_at(section, columns.event)]),
            allocated_bytes=np.concatenate([[held.sum()], columns.allocated_bytes]),
            reserved_bytes=np.concatenate([[reserved_bytes], columns.reserved_bytes]),
            kind_bytes=np.cumsum(changes, axis=1),
            first=steps[0],
            rebuilding=self._steps.get("rebuilding"),
            rebuild_step=self._program.rebuild.step if self._program.rebuild else None,
            steady=steps[-1],
            outside_bytes=self._outside_bytes,
            retries=self._allocator.retries,
            step_retries=0 if out_of_memory else self._allocator.retries - self._retries_before,
            out_of_memory=out_of_memory,
            stopped_in=section if out_of_memory else None,
            history=tuple(self._history),
            allocator=self._allocator,
            place=self._place(section),
        )

    def _instructions_at(self, section: str, events: np.ndarray) -> np.ndarray:
        """Return the places of events among the instructions of their step; 0 outside of steps."""
        if section in OUTSIDE_STEPS:
            return np.zeros(len(events), dtype=np.int64)
        program = self._program
        columns = program.first_instructions if section == "first" else program.instructions
        return np.asarray(np.flatnonzero(columns.event >= 0)[events])

    def _place(self, section: str) -> RequestPlace | None:
        if self._refused is None:
            return None
        event, holds, is_inserted = self._refused
        steps = sum(each not in OUTSIDE_STEPS for each, _ in self._history)
        return request_place(self._program, section, event, steps, holds, is_inserted)


def _step_memory(allocated_before_bytes: int, allocator: CachingAllocator) -> StepMemory:
    return StepMemory(
        allocated_before_bytes=allocated_before_bytes,
        peak_allocated_bytes=allocator.peak_allocated_bytes,
        peak_reserved_bytes=allocator.peak_reserved_bytes,
    )


def _storage_bytes(trace: Trace) -> dict[int, int]:
    sizes = {storage.id: storage.bytes for storage in trace.persistent}
    for events in (trace.first, trace.steady):
        made = events.kind == EventKind.ALLOC
        sizes.update(zip(events.a[made].tolist(), events.b[made].tolist(), strict=True))
    return sizes
