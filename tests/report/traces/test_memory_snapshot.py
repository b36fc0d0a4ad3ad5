"""The exported snapshot: its entries in full on a small step, and torch's own reader on it."""

from __future__ import annotations

import pickle
import pickletools
from dataclasses import replace
from pathlib import Path

import pytest

from perfmodel.errors import PerfModelError
from perfmodel.hardware.profile import Device, MemoryConstants, Profile
from perfmodel.program.program import Insertion, Instruction, Program
from perfmodel.report.traces.memory_snapshot import memory_snapshot, save_memory_snapshot
from perfmodel.simulate.memory.walk import MemoryTimeline, simulate_memory
from perfmodel.trace.operation import Operation, TensorSpec
from perfmodel.trace.trace import EventKind, Storage, StorageKind
from tests.builders import program_of
from tests.report.pipelines import with_larger_last
from tests.report.synthetic import prediction

MIB = 2**20
PLENTY_BYTES = 2**50
SPEC = TensorSpec.parse("float32[1024,1024]")
# Opcodes that the viewer's unpickler knows.
VIEWER_OPCODES = {
    "APPENDS", "APPEND", "BINGET", "BININT", "BININT1", "BININT2", "EMPTY_DICT", "EMPTY_LIST", "FRAME", "LONG1",
    "LONG_BINGET", "MARK", "MEMOIZE", "PROTO", "SETITEMS", "SETITEM", "SHORT_BINUNICODE", "BINUNICODE", "STOP",
    "NEWFALSE", "NEWTRUE", "NONE",
}  # fmt: skip


def small_program() -> Program:
    """A layer whose activation lives from forward into backward."""
    forward = [
        (EventKind.MODULE_ENTER, 0, 0),
        (EventKind.OP, 0, -1),
        (EventKind.ALLOC, 5, 4 * MIB),
        (EventKind.MODULE_EXIT, 0, 0),
    ]
    backward = [
        (EventKind.NODE, 0, 0),
        (EventKind.OP, 1, 0),
        (EventKind.ALLOC, 6, 3 * MIB),
        (EventKind.FREE, 5, 0),
        (EventKind.FREE, 6, 0),
    ]
    return program_of(
        ("forward", 0, forward),
        ("backward", 0, backward),
        operations=tuple(Operation(f"aten.{name}.default", (SPEC,), (), (SPEC,)) for name in ("gelu", "gelu_backward")),
        modules=(("layers.0", "Linear"),),
        nodes=("GeluBackward0",),
        persistent=(Storage(0, 24 * MIB, StorageKind.PARAMETER),),
        storage_kinds={5: StorageKind.ACTIVATION, 6: StorageKind.TEMPORARY},
    )


def memory_of(program: Program, memory_bytes: int = PLENTY_BYTES) -> MemoryTimeline:
    device = Device(kind="cuda", name="test", memory_bytes=memory_bytes)
    return simulate_memory(program, Profile(name="test", device=device, memory=MemoryConstants()))


def test_entries_in_full() -> None:
    program = small_program()
    snapshot = memory_snapshot(program, memory_of(program))
    forward, backward = "forward of micro-batch 0", "backward of micro-batch 0"
    gelu = [("aten.gelu.default", forward), ("layers.0", forward)]
    gelu_backward = [("aten.gelu_backward.default", backward), ("GeluBackward0", backward)]
    model = [("building the model and its inputs", "model")]
    (trace,) = snapshot["device_traces"]
    parameter, activation = trace[2]["addr"], trace[4]["addr"]
    step = [
        ("alloc", activation, 4 * MIB, "activation", gelu),
        ("alloc", activation + 4 * MIB, 3 * MIB, "temporary", gelu_backward),
        ("free_requested", activation, 4 * MIB, None, gelu_backward),
        ("free_completed", activation, 4 * MIB, None, gelu_backward),
        ("free_requested", activation + 4 * MIB, 3 * MIB, None, gelu_backward),
        ("free_completed", activation + 4 * MIB, 3 * MIB, None, gelu_backward),
    ]
    assert [
        (e["action"], e["addr"], e["size"], e.get("category"), [(f["name"], f["filename"]) for f in e["frames"]])
        for e in trace
    ] == [
        ("snapshot", 0, 0, "unknown", []),
        ("segment_alloc", parameter, 24 * MIB, None, model),
        ("alloc", parameter, 24 * MIB, "parameter", model),
        ("segment_alloc", activation, 20 * MIB, None, gelu),
        *step * 3,
    ]
    assert [(s["address"], s["total_size"], s["allocated_size"], s["segment_type"]) for s in snapshot["segments"]] == [
        (parameter, 24 * MIB, 24 * MIB, "large"),
        (activation, 20 * MIB, 0, "large"),
    ]
    assert [block for segment in snapshot["segments"] for block in segment["blocks"]] == [
        {
            "address": parameter,
            "size": 24 * MIB,
            "requested_size": 24 * MIB,
            "state": "active_allocated",
            "frames": [{"name": model[0][0], "filename": "model", "line": 0}],
        },
        {"address": activation, "size": 20 * MIB, "requested_size": 0, "state": "inactive", "frames": []},
    ]


def test_request_that_did_not_fit_is_the_last_entry() -> None:
    program = small_program()
    snapshot = memory_snapshot(program, memory_of(program, memory_bytes=40 * MIB))
    frames = [
        {"name": name, "filename": "forward of micro-batch 0", "line": 0} for name in ("aten.gelu.default", "layers.0")
    ]
    assert snapshot["device_traces"][0][-1] == {
        "action": "oom", "addr": 0, "size": 4 * MIB, "stream": 0, "frames": frames, "device_free": 16 * MIB,
    }  # fmt: skip


def test_blocks_are_shown_on_the_stream_they_were_made_for() -> None:
    """Made before a step's first event and freed at its end, where no stream is named."""
    program = small_program()
    insertions = (
        Insertion(0, 0, (Instruction(EventKind.ALLOC, 9, 12 * MIB, stream=3),)),
        Insertion(1, 9, (Instruction(EventKind.FREE, 9),)),
    )
    program = replace(program, insertions=insertions, first_insertions=insertions)
    snapshot = memory_snapshot(program, memory_of(program))
    (trace,) = snapshot["device_traces"]
    on_three = [entry for entry in trace if entry["stream"] == 3]
    steps = ["alloc", "free_requested", "free_completed"]
    assert [entry["action"] for entry in on_three] == ["segment_alloc", *steps * 3]
    assert {(entry["addr"], entry["size"]) for entry in on_three} == {(on_three[0]["addr"], 12 * MIB)}
    assert {entry["stream"] for entry in trace} == {0, 3}
    assert [segment["stream"] for segment in snapshot["segments"] if segment["total_size"] == 12 * MIB] == [3]
    full = memory_snapshot(program, memory_of(program, memory_bytes=30 * MIB))["device_traces"][0][-1]
    assert (full["action"], full["size"], full["stream"]) == ("oom", 12 * MIB, 3)


def test_torch_and_the_viewer_read_the_file(tmp_path: Path) -> None:
    from torch.cuda import _memory_viz

    program = small_program()
    path = tmp_path / "memory.pickle"
    assert save_memory_snapshot(prediction(program=program, memory=memory_of(program)), path) is None
    content = path.read_bytes()
    assert {opcode.name for opcode, _, _ in pickletools.genops(content)} <= VIEWER_OPCODES
    snapshot = pickle.loads(content)
    assert "cudaMalloc" in _memory_viz.trace(snapshot)
    assert "44.0MiB" in _memory_viz.segsum(snapshot)
    assert "aten.gelu" not in _memory_viz.memory(snapshot, format_flamegraph=str)
    assert "building the model" in _memory_viz.memory(snapshot, format_flamegraph=str)
    assert "Active Memory Timeline" in _memory_viz.trace_plot(snapshot)
    assert "Allocator State History" in _memory_viz.segment_plot(snapshot)


def test_of_ranks_that_differ_the_largest_is_written(tmp_path: Path) -> None:
    known, path = with_larger_last(), tmp_path / "memory.pickle"
    assert save_memory_snapshot(known, path) == 1
    assert known.largest_memory is not None
    assert pickle.loads(path.read_bytes()) == memory_snapshot(known.rank_programs[1], known.largest_memory)


def test_no_snapshot_without_memory(tmp_path: Path) -> None:
    with pytest.raises(PerfModelError, match=r"m\.pickle: memory must be predicted for a snapshot"):
        save_memory_snapshot(prediction("cpu"), tmp_path / "m.pickle")
