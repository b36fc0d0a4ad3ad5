"""Sentences on whether a step fits into device memory: how much it needs, and where it runs out."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from perfmodel.prediction.pipeline_ranks import largest_rank, on_rank
from perfmodel.prediction.prediction import Prediction
from perfmodel.simulate.memory.allocator import OutOfMemoryError
from perfmodel.simulate.memory.request_place import RequestPlace
from perfmodel.simulate.memory.walk import MemoryTimeline
from perfmodel.trace.trace import StorageKind
from perfmodel.units import MIB, format_bytes

SAME_BYTES = 4 * MIB  # that two figures of a step's need may differ by and still be said as one

AnswerRow = tuple[str, Text | str, str]

KIND_WORDS = {
    StorageKind.PARAMETER: "parameters",
    StorageKind.BUFFER: "buffers",
    StorageKind.INPUT: "inputs",
    StorageKind.GRADIENT: "gradients",
    StorageKind.OPTIMIZER_STATE: "optimizer states",
    StorageKind.ACTIVATION: "activations",
    StorageKind.TEMPORARY: "temporaries",
}


def memory_rows(prediction: Prediction) -> Iterator[AnswerRow]:
    """Yield the rows on memory of the answer: a name, a figure and a remark."""
    memory = prediction.largest_memory
    if memory is None:
        yield "memory", "not predicted", "on a CPU"
        return
    capacity_bytes, rank = prediction.profile.device.memory_bytes, largest_rank(prediction)
    if not memory.fits:
        yield (
            "memory",
            Text("does not fit", style="bold red"),
            shortage_text(memory, capacity_bytes, rank),
        )
        when, what = refusal_text(memory)
        yield "runs out", when, what
        return
    reserved = format_bytes(memory.peak_reserved_bytes)
    yield "memory", f"{format_bytes(memory.peak_allocated_bytes)} allocated", f"{reserved} reserved{on_rank(rank)}"
    if memory.rebuilding is not None:
        most = format_bytes(memory.rebuilding.peak_allocated_bytes)
        yield f"step {memory.rebuild_step}", f"up to {most}", "allocated, while buckets are rebuilt"
    yield "fits", "yes", f"{format_bytes(memory.device_bytes)} of {format_bytes(capacity_bytes)} in use"


def shortage_text(memory: MemoryTimeline, capacity_bytes: float, rank: int | None = None) -> str:
    """Say how much a step that does not fit needs.

    Parameters
    ----------
    memory : MemoryTimeline
        Of a step that does not fit.
    capacity_bytes : float
        The device's memory.
    rank : int, optional
        The rank whose memory it is, where ranks differ.

    Returns
    -------
    str
        ``needs at least 56 GiB: 10 GiB more than the device's 46 GiB``. Where the least is enough only if the allocator
        gives cached segments back and asks again, it goes on with what is enough without: ``; 60 GiB without allocator
        retries``.
    """
    needed, missing = format_bytes(memory.needed_bytes), format_bytes(memory.missing_bytes)
    least = f"needs at least {needed}{on_rank(rank)}: {missing} more than the device's {format_bytes(capacity_bytes)}"
    unlimited = memory.unlimited
    if unlimited is None or unlimited.device_bytes - memory.needed_bytes <= SAME_BYTES:
        return least
    return f"{least}; {format_bytes(unlimited.device_bytes)} without allocator retries"


def refusal_text(memory: MemoryTimeline) -> tuple[str, str]:
    """Say when a step that does not fit runs out of memory, and at which request."""
    refused, place = _refusal(memory)
    held = f"{format_bytes(refused.reserved_bytes)} of {format_bytes(max(refused.limit_bytes, 0))} are reserved"
    return _when(memory, place), f"{_asked(memory)} while {held}"


def refused_request_text(memory: MemoryTimeline) -> str:
    """Say on one line which request of a step that does not fit is refused."""
    _, place = _refusal(memory)
    return f"{_when(memory, place)}, {_asked(memory)}"


def _refusal(memory: MemoryTimeline) -> tuple[OutOfMemoryError, RequestPlace]:
    if memory.out_of_memory is None or memory.place is None:
        raise ValueError("this step fits")
    return memory.out_of_memory, memory.place


def _asked(memory: MemoryTimeline) -> str:
    refused, place = _refusal(memory)
    return f"{_at(memory, place)}: {format_bytes(refused.requested_bytes)} more for {KIND_WORDS[place.holds]}"


def _when(memory: MemoryTimeline, place: RequestPlace) -> str:
    if not place.phase:
        return f"after step {place.step}" if place.step else "before step 1"
    phase = place.phase.replace("_", " ")
    rebuilds = ", which rebuilds buckets" if memory.stopped_in == "rebuilding" else ""
    return f"step {place.step}, {phase}{rebuilds}"


def _at(memory: MemoryTimeline, place: RequestPlace) -> str:
    if not place.phase:
        return "wrapping the model" if memory.stopped_in == "wrapping" else "building the model"
    what = f"{place.operator} of {place.module}" if place.module else place.operator
    what = f"the strategy, after {what}" if place.is_inserted and what else what or "the strategy"
    return what if place.micro_batch < 0 else f"micro-batch {place.micro_batch}, {what}"
