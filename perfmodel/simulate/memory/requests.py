"""Turn trace events into requests to the allocator: outputs, temporaries inside operators and library workspaces."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from perfmodel.hardware.profile import MemoryConstants, Profile
from perfmodel.program.program import COMPUTE, Insertion, Instruction, PhaseRun
from perfmodel.simulate.memory.workspaces import Script, script_by_rule, uses_cublas, uses_cublaslt
from perfmodel.trace.kernel_key import kernel_key
from perfmodel.trace.operation import Operation
from perfmodel.trace.phases import BACKWARD
from perfmodel.trace.trace import EventKind, Segment, StepEvents, Storage, StorageKind, Trace


@dataclass
class Actions:
    """Requests in order, as equally long columns.

    Parameters
    ----------
    request_bytes : list of int
        What an allocation asks for; 0 for a free.
    slot : list of int
        Which storage: its id; temporaries and workspaces have negative numbers.
    kind : list of int
        :class:`StorageKind` of what it holds.
    event : list of int
        The trace event that it belongs to, counted from the segment's start.
    stream : list of int
        Current stream of an allocation; a free goes to the stream of its block, whatever this says.
    """

    request_bytes: list[int] = field(default_factory=list)
    slot: list[int] = field(default_factory=list)
    kind: list[int] = field(default_factory=list)
    event: list[int] = field(default_factory=list)
    stream: list[int] = field(default_factory=list)

    def add(self, request_bytes: int, slot: int, kind: int, event: int, stream: int = COMPUTE) -> None:
        self.request_bytes.append(request_bytes)
        self.slot.append(slot)
        self.kind.append(kind)
        self.event.append(event)
        self.stream.append(stream)

    def extend(self, other: Actions, start: int, stop: int) -> None:
        self.request_bytes += other.request_bytes[start:stop]
        self.slot += other.slot[start:stop]
        self.kind += other.kind[start:stop]
        self.event += other.event[start:stop]
        self.stream += other.stream[start:stop]


Temporaries = Mapping[int, Sequence[tuple[int, int]]]  # by operation: request_bytes and slot as in Actions, in order


def memory_scripts(operations: Sequence[Operation], profile: Profile, matmul_tf32: bool) -> list[Script]:
    """Return the script of each operation: as measured under its kernel key, else by rule, else () (just outputs)."""
    return [_script(operation, profile, matmul_tf32) for operation in operations]


def _script(operation: Operation, profile: Profile, matmul_tf32: bool) -> Script:
    if not operation.runs_on_device:
        return ()
    record = profile.kernels.get(kernel_key(operation, matmul_tf32))
    if record is not None and record.memory_script:
        return record.memory_script
    return script_by_rule(operation, profile.device.multiprocessors)


def persistent_actions(storages: Iterable[Storage]) -> Actions:
    """Return the requests that build the model and its inputs."""
    actions = Actions()
    for storage in storages:
        if storage.bytes:
            actions.add(storage.bytes, storage.id, int(storage.kind), 0)
    return actions


def with_inserted(
    actions: Actions, insertions: Iterable[Insertion], start: int, temporaries: Temporaries | None = None
) -> Actions:
    """Return a segment's actions together with those that a strategy inserts between them.

    Parameters
    ----------
    actions : Actions
        The segment's own.
    insertions : iterable of Insertion
        What the strategy inserts; it belongs to the event before it.
    start : int
        The segment's first event.
    temporaries : mapping, optional
        Requests and frees of inserted operators.
    """
    result, done = Actions(), 0
    for insertion in insertions:
        rows = inserted_actions(insertion.instructions, insertion.event - start - 1, temporaries)
        if not rows.event:
            continue
        at = bisect_left(actions.event, insertion.event - start)
        result.extend(actions, done, at)
        result.extend(rows, 0, len(rows.event))
        done = at
    if not result.event:
        return actions
    result.extend(actions, done, len(actions.event))
    return result


def inserted_actions(rows: Iterable[Instruction], event: int = 0, temporaries: Temporaries | None = None) -> Actions:
    """Return what a strategy allocates and frees at one event, including temporaries of inserted operators."""
    actions = Actions()
    for row in rows:
        if row.kind in (EventKind.ALLOC, EventKind.FREE):
            actions.add(row.b if row.kind == EventKind.ALLOC else 0, row.a, int(row.holds), event, row.stream)
        elif row.kind == EventKind.OP and temporaries:
            for request_bytes, slot in temporaries.get(row.a, ()):
                actions.add(request_bytes, slot, StorageKind.TEMPORARY, event, row.stream)
    return actions


class ActionWriter:
    """Turns segments into :class:`Actions`, in the order in which they run first.

    A workspace is taken at the first product of each host thread (the autograd engine has its own) and kept, like the
    handle it belongs to.

    scripts: of the trace's operations, and then of those that a strategy inserts, which ask for their outputs
    themselves: of these only what the operator itself gives back is known here (``temporaries``).
    """

    def __init__(self, trace: Trace, scripts: Sequence[Script], constants: MemoryConstants) -> None:
        self._scripts = scripts[: len(trace.operations)]
        self._workspaces = [_workspaces(operation, constants) for operation in trace.operations]
        special = [bool(script or found) for script, found in zip(self._scripts, self._workspaces, strict=True)]
        self._is_special = np.array(special, dtype=bool)
        self._kinds = _kind_of_storage(trace)
        self._taken: set[tuple[str, str]] = set()
        self._next_temporary = -1
        self._companions: dict[int, list[int]] = {}
        self._written: dict[tuple[int, Segment, int], Actions] = {}
        inserted = enumerate(scripts[len(trace.operations) :], start=len(trace.operations))
        self.temporaries: Temporaries = {number: self._given_back(script) for number, script in inserted if script}

    def _given_back(self, script: Script) -> list[tuple[int, int]]:
        """Requests for what the script frees, and these frees."""
        freed = {-step for step in script if step < 0}
        slots: dict[int, int] = {}
        found = []
        number = 0
        for step in script:
            if step < 0:
                found.append((0, slots[-step]))
                continue
            number += 1
            if number in freed:
                slots[number] = self._new_slot()
                found.append((step, slots[number]))
        return found

    def is_inserted(self, slot: int) -> bool:
        """Whether a strategy, not the trace, asks for this storage."""
        of_operators = (own for given_back in self.temporaries.values() for _, own in given_back)
        return slot >= len(self._kinds) or slot in of_operators

    def actions_of(self, events: StepEvents, segment: Segment) -> Actions:
        """The segment's actions; written again only where workspaces have been taken since."""
        key = (id(events), segment, len(self._taken))
        known = self._written.get(key)
        if known is None:
            known = self._written[key] = self._write(events, segment)
        return known

    def _write(self, events: StepEvents, segment: Segment) -> Actions:
        """Requests of the trace as they are, but for what follows an operator that asks for more than its outputs."""
        window = slice(segment.start, segment.stop)
        kind, a, b = events.kind[window], events.a[window], events.b[window]
        is_request = ((kind == EventKind.ALLOC) & (b > 0)) | (kind == EventKind.FREE)
        position = np.flatnonzero(is_request)
        slot = a[position]
        plain = Actions(
            np.where(kind[position] == EventKind.ALLOC, b[position], 0).tolist(),
            slot.tolist(),
            self._kinds[slot].tolist(),
            position.tolist(),
            [COMPUTE] * len(position),
        )
        is_special = kind == EventKind.OP
        is_special[is_special] = self._is_special[a[is_special]]
        calls = np.flatnonzero(is_special)
        actions = Actions()
        done = 0
        thread = "engine" if segment.phase == BACKWARD else "main"
        for call, first in zip(calls.tolist(), np.searchsorted(position, calls).tolist(), strict=True):
            self._copy(actions, plain, done, first)
            done = first
            while (
                done < len(plain.event) and plain.request_bytes[done] and plain.event[done] == call + 1 + done - first
            ):
                done += 1
            outputs = list(zip(plain.slot[first:done], plain.request_bytes[first:done], strict=True))
            self._write_call(actions, int(a[call]), outputs, thread, call)
        self._copy(actions, plain, done, len(plain.event))
        return actions

    def _copy(self, actions: Actions, plain: Actions, start: int, stop: int) -> None:
        """The trace's own requests, and the ends of what lives as long as a storage that ends here."""
        if self._companions:
            ends = [
                at for at in range(start, stop) if not plain.request_bytes[at] and plain.slot[at] in self._companions
            ]
            for end in ends:
                actions.extend(plain, start, end + 1)
                start = end + 1
                for slot in self._companions.pop(plain.slot[end]):
                    actions.add(0, slot, StorageKind.TEMPORARY, plain.event[end])
        actions.extend(plain, start, stop)

    def _allocate(self, actions: Actions, storage: int, request_bytes: int, event: int) -> None:
        actions.add(request_bytes, storage, int(self._kinds[storage]), event)

    def _write_call(
        self, actions: Actions, operation: int, outputs: list[tuple[int, int]], thread: str, event: int
    ) -> None:
        script = self._scripts[operation]
        if script and script != tuple(request_bytes for _, request_bytes in outputs):
            self._write_script(actions, script, outputs, event)
        else:
            for storage, request_bytes in outputs:
                self._allocate(actions, storage, request_bytes, event)
        for name, request_bytes in self._workspaces[operation]:
            if (thread, name) not in self._taken:
                self._taken.add((thread, name))
                self._temporary(actions, request_bytes, event)

    def _temporary(self, actions: Actions, request_bytes: int, event: int) -> int:
        slot = self._new_slot()
        actions.add(request_bytes, slot, StorageKind.TEMPORARY, event)
        return slot

    def _new_slot(self) -> int:
        self._next_temporary -= 1
        return self._next_temporary + 1

    def _write_script(self, actions: Actions, script: Script, outputs: list[tuple[int, int]], event: int) -> None:
        """Run the script, its kept allocations being the trace's outputs.

        A kept one the trace knows nothing of (a generator's seed) lives as long as the last output; where there is none
        (the operator wrote into a given tensor), it was not made at all.
        """
        freed = {-step for step in script if step < 0}
        storage_of = _match([(n, size) for n, size in _allocations(script) if n not in freed], outputs)
        slots: dict[int, int] = {}
        unknown: list[int] = []
        number = 0
        for step in script:
            if step < 0:
                if -step in slots:
                    actions.add(0, slots[-step], StorageKind.TEMPORARY, event)
                continue
            number += 1
            if number in storage_of:
                self._allocate(actions, *storage_of[number], event)
            elif step and (number in freed or outputs):
                slots[number] = self._temporary(actions, step, event)
                if number not in freed:
                    unknown.append(slots[number])
        matched = {storage for storage, _ in storage_of.values()}
        for storage, request_bytes in outputs:
            if storage not in matched:
                self._allocate(actions, storage, request_bytes, event)
        if unknown:
            self._companions.setdefault(outputs[-1][0], []).extend(unknown)


def _kind_of_storage(trace: Trace) -> np.ndarray:
    """Return what each storage id holds."""
    known = {storage.id: storage.kind for storage in trace.persistent} | trace.storage_kinds
    named = [
        events.a[(events.kind == EventKind.ALLOC) | (events.kind == EventKind.FREE)]
        for events in (trace.first, trace.steady)
    ]
    highest = max([*known, *(int(ids.max(initial=-1)) for ids in named)], default=-1)
    kinds = np.full(highest + 1, StorageKind.TEMPORARY, dtype=np.int64)
    for number, kind in known.items():
        kinds[number] = kind
    return kinds


def _workspaces(operation: Operation, constants: MemoryConstants) -> list[tuple[str, int]]:
    found = []
    if constants.cublas_workspace_bytes and uses_cublas(operation):
        found.append(("cublas", constants.cublas_workspace_bytes))
    if constants.cublaslt_workspace_bytes and uses_cublaslt(operation):
        found.append(("cublaslt", constants.cublaslt_workspace_bytes))
    return found


def _allocations(script: Script) -> Iterable[tuple[int, int]]:
    return enumerate((step for step in script if step >= 0), start=1)


def _match(kept: list[tuple[int, int]], outputs: list[tuple[int, int]]) -> dict[int, tuple[int, int]]:
    """Which kept allocation (number, bytes) is which output (storage, bytes): equal sizes in order, then the rest."""
    waiting = list(outputs)
    found: dict[int, tuple[int, int]] = {}
    for number, size in kept:
        same = next((output for output in waiting if output[1] == size), None)
        if same is not None:
            found[number] = same
            waiting.remove(same)
    if len(kept) == len(outputs):
        rest = [number for number, _ in kept if number not in found]
        found.update(zip(rest, waiting, strict=True))
    return found


def first_of_repeat(runs: Sequence[PhaseRun]) -> set[int]:
    """Positions of the runs with which a repeated micro-batch begins."""
    found = set()
    for position, run in enumerate(runs):
        repeated = run.micro_batch != run.segment.micro_batch
        if repeated and (position == 0 or runs[position - 1].micro_batch != run.micro_batch):
            found.add(position)
    return found
