"""Traces of the recorded cases through the memory interpreter, against what the recorded processes asked for and held."""

from __future__ import annotations

import pytest

from perfmodel.hardware.profile import KernelRecord
from perfmodel.program.program import single_device_program
from perfmodel.simulate.memory.walk import MemoryTimeline, simulate_memory
from perfmodel.trace.kernel_key import kernel_key
from perfmodel.trace.trace import EventKind
from tests.simulate.memory.replays import h200
from tests.tracing.recordings import recorded, traced

TRANSFORMERS = [
    "bert-2layer-amp",
    "gpt-small2-amp",
    "gpt-small2-fp32",
    "gpt2-2layer-amp",
    "gpt2-2layer-fp32",
    "llama-2layer-bf16",
]


def predicted(case: str, kernels: dict[str, KernelRecord] | None = None) -> MemoryTimeline:
    return simulate_memory(single_device_program(traced(case)), h200(kernels))


def recorded_events(case: str, step: int) -> list[list]:
    memory = recorded(case)["memory"]
    start, stop = memory["step_starts_at_event"][step : step + 2]
    return [event for event in memory["events"][start:stop] if event[0] in ("alloc", "free_requested")]


@pytest.mark.parametrize("case", TRANSFORMERS)
@pytest.mark.parametrize(("part", "step"), [("first", 0), ("steady", 3)])
def test_every_allocation_in_order(case: str, part: str, step: int) -> None:
    """Outputs, temporaries inside operators and library workspaces, by size: the recorded list."""
    columns = [columns for name, columns in predicted(case).history if name == part][-1]
    sizes = [size for size in columns.request_bytes.tolist() if size]
    assert sizes == [size for action, _, size, _ in recorded_events(case, step) if action == "alloc"]


@pytest.mark.parametrize("case", ["gpt2-2layer-amp", "gpt2-2layer-fp32"])
def test_peaks_to_the_byte(case: str) -> None:
    timeline = predicted(case)
    peaks = recorded(case)["memory"]["peaks_of_step"]
    assert timeline.first.model_dump() == peaks[0]
    assert timeline.steady.model_dump() == peaks[3]


@pytest.mark.parametrize("case", [case for case in TRANSFORMERS if not case.startswith("gpt2")])
def test_peaks_of_the_other_transformers(case: str) -> None:
    """Within 0.3 %: equal blocks at other addresses; llama 0.6 %, as its process also cast the weights on the device."""
    relative, timeline = (6e-3 if case.startswith("llama") else 3e-3), predicted(case)
    peaks = recorded(case)["memory"]["peaks_of_step"]
    for ours, theirs in ((timeline.first, peaks[0]), (timeline.steady, peaks[3])):
        assert ours.allocated_before_bytes == pytest.approx(theirs["allocated_before_bytes"], rel=relative)
        assert ours.peak_allocated_bytes == pytest.approx(theirs["peak_allocated_bytes"], rel=relative)
        assert ours.peak_reserved_bytes == pytest.approx(theirs["peak_reserved_bytes"], rel=5 * relative)


@pytest.mark.parametrize("case", ["vgg16-fp32", "resnet50-amp-channels_last"])
def test_convolutions_without_a_profile_miss_their_workspaces_only(case: str) -> None:
    """cuDNN's workspaces are known from measurements alone: 1.5 % of these peaks, up to 7.2 % of what is reserved."""
    timeline = predicted(case)
    steady = recorded(case)["memory"]["peaks_of_step"][3]
    assert 0.985 <= timeline.peak_allocated_bytes / steady["peak_allocated_bytes"] < 1
    assert 0.928 <= timeline.peak_reserved_bytes / steady["peak_reserved_bytes"] < 1


def scripts_in_recording(case: str) -> dict[str, KernelRecord]:
    """What each convolution asked for in the recorded steady step, under its kernel key."""
    trace, events = traced(case), recorded_events(case, 3)
    rows = zip(trace.steady.kind.tolist(), trace.steady.a.tolist(), trace.steady.b.tolist(), strict=True)
    found: dict[str, KernelRecord] = {}
    position = to_skip = 0
    for kind, a, _ in rows:
        if kind in (EventKind.ALLOC, EventKind.FREE):
            position += 0 if to_skip else 1
            to_skip -= 1 if to_skip else 0
        elif kind == EventKind.OP and trace.operations[a].base_name.startswith("convolution"):
            outputs = [spec.bytes for spec in trace.operations[a].outputs]
            script, position = script_at(events, position, outputs)
            found[kernel_key(trace.operations[a])] = KernelRecord(memory_script=script)
            to_skip = len(outputs)
    return found


def script_at(events: list[list], position: int, outputs: list[int]) -> tuple[tuple[int, ...], int]:
    """The script that starts there: until every output was made and every other allocation freed."""
    script: list[int] = []
    held: dict[int, int] = {}
    waiting = list(outputs)
    while waiting or held or is_short_lived(events, position):
        action, address, size, _ = events[position]
        if action == "free_requested":
            script.append(-held.pop(address))
        else:
            script.append(size)
            if size in waiting and not is_short_lived(events, position):
                waiting.remove(size)
            else:
                held[address] = sum(step > 0 for step in script)
        position += 1
    return tuple(script), position


def is_short_lived(events: list[list], position: int) -> bool:
    """Whether the request is an allocation that is freed within the three after it."""
    after = events[position + 1 : position + 4]
    return events[position][0] == "alloc" and any(
        event[:2] == ["free_requested", events[position][1]] for event in after
    )


def test_measured_scripts_make_convolutions_exact() -> None:
    timeline = predicted("vgg16-fp32", scripts_in_recording("vgg16-fp32"))
    peaks = recorded("vgg16-fp32")["memory"]["peaks_of_step"]
    assert timeline.first.model_dump() == peaks[0]
    assert timeline.steady.model_dump() == peaks[3]
