"""Recorded histories of the caching allocator, and an allocator that is asked for the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import NamedTuple

from perfmodel.hardware.profile import Device, KernelRecord, MemoryConstants, Profile
from perfmodel.simulate.memory.allocator import CachingAllocator, SegmentState


class Replay(NamedTuple):
    """peaks: of each step. segments: where each step starts, and at the end of the last. handed_out: every address, in
    order. allocated_bytes: after each of these.
    """

    peaks: list[dict[str, int]]
    segments: list[tuple[SegmentState, ...]]
    handed_out: list[int]
    allocated_bytes: list[int]


def replay(memory: dict, allocator: CachingAllocator) -> Replay:
    """Ask for what the recorded process asked for, which kept no block for another stream (``record_stream``)."""
    starts = memory["step_starts_at_event"]
    events, address_of = memory["events"], {}
    found = Replay([], [], [], [])

    def feed(part: Iterable[list]) -> None:
        for action, address, size, stream in part:
            if action == "alloc":
                address_of[address] = allocator.allocate(size, stream)
                found.handed_out.append(address_of[address])
                found.allocated_bytes.append(allocator.allocated_bytes)
            elif action == "free_requested":
                allocator.free(address_of.pop(address))

    feed(events[: starts[0]])
    for start, stop in pairwise(starts):
        before = allocator.allocated_bytes
        allocator.reset_peaks()
        found.segments.append(allocator.segments())
        feed(events[start:stop])
        found.peaks.append(
            {
                "allocated_before_bytes": before,
                "peak_allocated_bytes": allocator.peak_allocated_bytes,
                "peak_reserved_bytes": allocator.peak_reserved_bytes,
            }
        )
    found.segments.append(allocator.segments())
    return found


def recorded_places(memory: dict, asked: list[int]) -> Callable[[int], int]:
    """Gives segments the addresses that they had, in order, and notes in ``asked`` what is asked for."""
    addresses = iter([address for action, address, *_ in memory["events"] if action == "segment_alloc"])

    def place(size_bytes: int) -> int:
        asked.append(size_bytes)
        return next(addresses)

    return place


def recorded_segments(segments: list[dict]) -> list:
    """As the allocator reports them; what a free block was last requested as is not part of its state."""
    return [
        (
            segment["address"],
            segment["total_size"],
            segment["stream"],
            segment["segment_type"],
            tuple((a, size, 0 if state == "inactive" else asked, state) for a, size, asked, state in segment["blocks"]),
        )
        for segment in segments
    ]


MIB = 2**20


def h200(kernels: dict[str, KernelRecord] | None = None) -> Profile:
    """What the recording machine had, without any measured kernel."""
    return Profile(
        name="test",
        device=Device(kind="cuda", name="H200", memory_bytes=140 * 2**30, multiprocessors=132),
        kernels=kernels or {},
        memory=MemoryConstants(cublas_workspace_bytes=32 * MIB, cublaslt_workspace_bytes=MIB),
    )
