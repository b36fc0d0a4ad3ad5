"""Optional recordings of a real run: the caching allocator's history, and a profiler trace of one step."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from perfmodel.files.kinds import ALLOCATOR_HISTORY, CHROME_TRACE
from perfmodel.files.writing import replacing, write_atomically
from perfmodel.models.step import TrainingStep

MOST_EVENTS = 5_000_000


class AllocatorHistory:
    """Every request to CUDA's caching allocator from :meth:`start` on, with where each step begins."""

    def __init__(self) -> None:
        self.step_starts: list[int] = []

    def start(self) -> None:
        torch.cuda.memory._record_memory_history(max_entries=MOST_EVENTS, context=None)

    def step_starts_here(self) -> None:
        self.step_starts.append(len(self._events()))

    def finish(self, path: Path) -> None:
        """Stop, and write events, step starts and the segments as they are: gzip JSON.

        ``events``: [action, address, bytes, stream]; an alloc's bytes are what was asked for. ``segments``: each with
        its blocks as [address, block bytes, requested bytes, state].
        """
        self.step_starts_here()
        segments = torch.cuda.memory._snapshot()["segments"]
        data = {
            "events": self._events(),
            "step_starts_at_event": self.step_starts,
            "segments": [_segment(segment) for segment in segments],
        }
        torch.cuda.memory._record_memory_history(enabled=None)
        content = gzip.compress(json.dumps(data, separators=(",", ":")).encode(), mtime=0)
        write_atomically(path, content, ALLOCATOR_HISTORY)

    @staticmethod
    def _events() -> list[list[Any]]:
        traces = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
        return [
            [event["action"], event["addr"], event["size"], event["stream"]]
            for event in traces
            if event["action"] != "snapshot"
        ]


def _segment(segment: dict[str, Any]) -> dict[str, Any]:
    address = segment["address"]
    blocks = []
    for block in segment["blocks"]:
        blocks.append([address, block["size"], block.get("requested_size", block["size"]), block["state"]])
        address += block["size"]
    return {
        "address": segment["address"],
        "total_size": segment["total_size"],
        "segment_type": segment["segment_type"],
        "stream": segment["stream"],
        "blocks": blocks,
    }


def record_trace(step: TrainingStep, path: Path, steps: int = 1) -> None:
    """Record a Chrome trace of steady steps, phases as ranges named ``perfmodel::<phase>``.

    It is written by torch's profiler. A step before them takes what the profiler's own start costs. Several steps are
    ranges ``ProfilerStep#<number>`` too.
    """
    cuda = step.device_type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU]
    if cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    for count in (1, steps):
        with torch.profiler.profile(activities=activities, record_shapes=True, acc_events=True) as profiler:
            for number in range(count):
                with torch.profiler.record_function(f"ProfilerStep#{number}") if steps > 1 else nullcontext():
                    step.run(_phase_ranges())
            if cuda:
                torch.cuda.synchronize()
    with replacing(path, CHROME_TRACE) as temporary:
        profiler.export_chrome_trace(str(temporary))


def _phase_ranges() -> Callable[[str, int], None]:
    """Return a mark that opens a profiler range for each phase and closes the one before."""
    opened: list[Any] = []

    def mark(phase: str, micro_batch: int) -> None:
        while opened:
            opened.pop().__exit__(None, None, None)
        if phase != "end":
            opened.append(torch.profiler.record_function(f"perfmodel::{phase}"))
            opened[-1].__enter__()

    return mark
