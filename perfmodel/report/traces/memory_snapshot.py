"""A predicted memory timeline in the form of ``torch.cuda.memory._snapshot()``.

The file opens in https://pytorch.org/memory_viz and in ``python -m torch.cuda._memory_viz``: every allocation from the
building of the model to the end of the last step, with the operator and module that asked for it as its stack.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from perfmodel.errors import PerfModelError
from perfmodel.files.kinds import MEMORY_SNAPSHOT
from perfmodel.files.writing import write_atomically
from perfmodel.prediction.pipeline_ranks import with_largest_memory
from perfmodel.prediction.prediction import Prediction
from perfmodel.program.program import Program
from perfmodel.simulate.memory.allocator import SegmentEvent, SegmentState
from perfmodel.simulate.memory.request_place import OUTSIDE_STEPS, Caller, callers, step_of
from perfmodel.simulate.memory.walk import MemoryTimeline
from perfmodel.trace.trace import StorageKind

PICKLE_PROTOCOL = 4  # the newest that the viewer reads
NO_CATEGORY = "unknown"  # the viewer wants one entry of it once categories are used

Frames = list[dict[str, Any]]
Entry = dict[str, Any]


def save_memory_snapshot(prediction: Prediction, path: Path) -> int | None:
    """Write :func:`memory_snapshot` to ``path`` atomically.

    Returns
    -------
    int or None
        The rank that it shows; None if all ranks have the same memory.

    Raises
    ------
    PerfModelError
        If memory is not predicted, or the file cannot be written.
    """
    shown, rank = with_largest_memory(prediction)
    if shown.memory is None:
        raise PerfModelError(f"{path}: memory must be predicted for a snapshot (on a CPU it is not). Leave it out.")
    content = pickle.dumps(memory_snapshot(shown.program, shown.memory), protocol=PICKLE_PROTOCOL)
    write_atomically(path, content, MEMORY_SNAPSHOT)
    return rank


def memory_snapshot(program: Program, memory: MemoryTimeline) -> dict[str, Any]:
    """Segments as the last step leaves them, and the history that led there.

    Returns
    -------
    dict
        ``segments`` and ``device_traces`` (one device) as torch writes them; sizes in bytes. An entry's ``category`` is
        the :class:`StorageKind` of what it allocates; sizes of entries are what was asked for, not whole blocks.
    """
    frames_at: dict[int, Frames] = {}
    trace = list(_entries(program, memory, frames_at))
    return {
        "segments": [_segment(segment, frames_at) for segment in memory.allocator.segments()],
        "device_traces": [trace],
        "allocator_settings": {},
        "external_annotations": [],
    }


def _entries(program: Program, memory: MemoryTimeline, frames_at: dict[int, Frames]) -> Iterator[Entry]:
    """The history; ``frames_at`` ends as the stack of every block still held."""
    asked: dict[int, tuple[int, int]] = {}  # address: requested bytes, stream
    segments = iter(memory.allocator.segment_log)
    reserved_bytes = 0
    yield {"action": "snapshot", "addr": 0, "size": 0, "stream": 0, "frames": [], "category": NO_CATEGORY}
    for section, columns in memory.history:
        stacks = _stacks(program, section)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        for event, request_bytes, address, kind, stream, _, reserved_after_bytes in rows:
            frames = stacks[event] if event >= 0 else _OUTSIDE[section]
            while reserved_bytes != reserved_after_bytes:
                bought = next(segments)
                reserved_bytes += bought.bytes if bought.action == "segment_alloc" else -bought.bytes
                yield _entry(*bought, frames)
            if request_bytes:
                asked[address], frames_at[address] = (request_bytes, stream), frames
                category = StorageKind(kind).name.lower()
                yield _entry("alloc", address, request_bytes, stream, frames) | {"category": category}
            elif address in asked:
                block = asked.pop(address)
                del frames_at[address]
                yield _entry("free_requested", address, *block, frames)
                yield _entry("free_completed", address, *block, frames)
    yield from _ending(memory, segments)


def _ending(memory: MemoryTimeline, segments: Iterator[SegmentEvent]) -> Iterator[Entry]:
    """Return the frees that a request which did not fit caused in vain, and the request."""
    for event in segments:
        yield _entry(*event, [])
    error, place = memory.out_of_memory, memory.place
    if error is not None and place is not None:
        free_bytes = max(error.limit_bytes - error.reserved_bytes, 0)
        frames = _OUTSIDE.get(memory.stopped_in or "") or _frames(
            Caller(place.operator, place.module), _phase_text(place.phase, place.micro_batch)
        )
        yield _entry("oom", 0, error.requested_bytes, error.stream, frames) | {"device_free": free_bytes}


def _entry(action: str, address: int, size: int, stream: int, frames: Frames) -> Entry:
    return {"action": action, "addr": address, "size": size, "stream": stream, "frames": frames}


def _frame(name: str, place: str) -> dict[str, Any]:
    return {"name": name, "filename": place, "line": 0}


_OUTSIDE = {
    "model": [_frame("building the model and its inputs", "model")],
    "wrapping": [_frame("what the strategy keeps", "wrapping")],
}


def _stacks(program: Program, section: str) -> list[Frames]:
    """Name for each instruction of one step of the memory walk its operator, its module or autograd node, and its
    phase.
    """
    if section in OUTSIDE_STEPS:
        return []
    events, runs = step_of(program, section)
    stacks: list[Frames] = []
    for run in runs:
        place = _phase_text(run.phase, run.micro_batch)
        segment = slice(run.segment.start, run.segment.stop)
        known: dict[Caller, Frames] = {}
        for caller in callers(program.trace, events.kind[segment], events.a[segment]):
            if caller not in known:
                known[caller] = _frames(caller, place)
            stacks.append(known[caller])
    return stacks


def _phase_text(phase: str, micro_batch: int) -> str:
    return phase if micro_batch < 0 else f"{phase} of micro-batch {micro_batch}"


def _frames(caller: Caller, place: str) -> Frames:
    if not caller.operator:
        return [_frame("outside any operator", place)]
    return [_frame(name, place) for name in caller if name]


def _segment(segment: SegmentState, frames_at: dict[int, Frames]) -> dict[str, Any]:
    active = [block for block in segment.blocks if block.state != "inactive"]
    return {
        "device": 0,
        "address": segment.address,
        "total_size": segment.bytes,
        "allocated_size": sum(block.bytes for block in active if block.state == "active_allocated"),
        "active_size": sum(block.bytes for block in active),
        "requested_size": sum(block.requested_bytes for block in active),
        "stream": segment.stream,
        "segment_type": segment.pool,
        "segment_pool_id": [0, 0],
        "is_expandable": False,
        "frames": [],
        "blocks": [
            {
                "address": block.address,
                "size": block.bytes,
                "requested_size": block.requested_bytes,
                "state": block.state,
                "frames": frames_at.get(block.address, []),
            }
            for block in segment.blocks
        ],
    }
