"""The profiler trace of a step, and the form of an allocator history."""

import gzip
import json
from types import SimpleNamespace

import torch

from perfmodel.models.step import TrainingStep, build_module, make_inputs, make_optimizer
from perfmodel.scenario.scenario import Scenario
from validate.recording import AllocatorHistory, record_trace


def test_a_trace_holds_operators_and_phases(tmp_path):
    scenario = Scenario(
        model={"family": "gpt", "size": "tiny"},
        batch={"size": 1, "sequence_length": 8},
        hardware={"profile": "cpu"},
    )
    module = build_module(scenario)
    step = TrainingStep(module, make_inputs(scenario, "cpu"), make_optimizer(module.parameters(), scenario), scenario)
    path = tmp_path / "deeper" / "trace.json.gz"
    record_trace(step, path)
    names = [event.get("name") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]]
    phases = [name for name in names if str(name).startswith("perfmodel::")]
    assert sorted(phases) == [f"perfmodel::{phase}" for phase in ("backward", "forward", "optimizer", "zero_grad")]
    assert names.count("aten::mm") == 2 * 3 * 6 + 3  # four projections and two feed-forward products a layer, one head


def test_an_allocator_history_has_events_steps_and_blocks(tmp_path, monkeypatch):
    """Against a stand-in for CUDA's allocator, which records two events a step."""
    events = []
    segment = {
        "address": 4096,
        "total_size": 2048,
        "segment_type": "small",
        "stream": 0,
        "blocks": [
            {"size": 512, "requested_size": 400, "state": "active_allocated"},
            {"size": 1536, "state": "inactive"},
        ],
    }
    calls = []
    memory = SimpleNamespace(
        _record_memory_history=lambda **options: calls.append(options),
        _snapshot=lambda: {"device_traces": [events], "segments": [segment]},
    )
    monkeypatch.setattr(torch.cuda, "memory", memory)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    history = AllocatorHistory()
    history.start()
    for _ in range(2):
        history.step_starts_here()
        events += [{"action": "snapshot", "addr": 0, "size": 0, "stream": 0}]
        events += [{"action": name, "addr": 4096, "size": 400, "stream": 0} for name in ("alloc", "free_completed")]
    history.finish(tmp_path / "history.json.gz")

    assert calls[-1] == {"enabled": None}
    assert json.loads(gzip.decompress((tmp_path / "history.json.gz").read_bytes())) == {
        "events": [["alloc", 4096, 400, 0], ["free_completed", 4096, 400, 0]] * 2,
        "step_starts_at_event": [0, 2, 4],
        "segments": [
            {
                "address": 4096,
                "total_size": 2048,
                "segment_type": "small",
                "stream": 0,
                "blocks": [[4096, 512, 400, "active_allocated"], [4608, 1536, 1536, "inactive"]],
            }
        ],
    }
