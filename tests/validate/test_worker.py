"""One case in this process, on the CPU: how many steps are run, and what the measurement says."""

import re
import sys
import textwrap
from dataclasses import replace
from types import SimpleNamespace

import pytest

from calibrate.this_machine.launcher import Alone
from perfmodel.errors import PerfModelError
from perfmodel.scenario.scenario import Scenario, workload_of
from validate import worker
from validate.worker import Effort, Request, measure_here

QUICK = Effort(
    warmup_steps=4, warmup_s=0.0, steady_s=0.0, least_steps=5, most_steps=5, synced_s=0.0, least_synced_steps=2
)
TINY = {
    "model": {"family": "gpt", "size": "tiny"},
    "batch": {"size": 1, "sequence_length": 8},
    "hardware": {"profile": "cpu"},
}


@pytest.fixture(autouse=True)
def threads():
    """Measuring sets one thread for the process; put it back."""
    before = worker.torch.get_num_threads()
    yield
    worker.torch.set_num_threads(before)


def request(**keys):
    return Request("tiny", "held-out", "own", TINY | keys, "cpu")


@pytest.mark.parametrize(
    ("step_s", "steady", "synced"),
    [(0.001, 60, 60), (0.1, 30, 15), (0.5, 12, 6), (5.0, 12, 6)],
)
def test_steps_fill_the_seconds_within_bounds(step_s, steady, synced):
    assert (Effort().steady_steps(step_s), Effort().synced_steps(step_s)) == (steady, synced)


def test_a_measurement_is_whole():
    measured = measure_here(request(optimizer={"max_grad_norm": 1.0}), QUICK)
    assert (measured.name, measured.split, measured.group) == ("tiny", "held-out", "own")
    assert (measured.warmup_steps, len(measured.step_s), len(measured.synced_step_s)) == (5, 5, 2)
    assert (measured.blocks, len(measured.host_reference_s)) == ((3, 2), 2)
    assert min(measured.host_reference_s) > 0
    assert list(measured.phases_s) == ["zero_grad", "forward", "backward", "clip", "optimizer"]
    for index, step_s in enumerate(measured.step_s):
        assert sum(samples[index] for samples in measured.phases_s.values()) == pytest.approx(step_s)
    assert (measured.memory, measured.device_used_bytes, measured.device_bytes) == ((), None, None)
    assert measured.provenance["threads"] == 1
    asked = Scenario.model_validate(TINY | {"optimizer": {"max_grad_norm": 1.0}})
    assert workload_of(Scenario.model_validate(measured.scenario)) == workload_of(asked)


@pytest.mark.parametrize(
    ("count", "step_s", "blocks"),
    [(60, 0.001, [15] * 4), (60, 0.03, [15] * 4), (30, 0.1, [5] * 6), (12, 5.0, [4] * 3), (13, 5.0, [4, 3, 3, 3])],
)
def test_steps_are_divided_into_blocks_of_half_a_second(count, step_s, blocks):
    assert worker._blocks(count, step_s) == blocks


def test_phases_of_blocks_are_put_together(monkeypatch):
    blocks = iter([[("forward", 0, 1.0), ("backward", 0, 2.0)] * 2, [("forward", 0, 3.0), ("backward", 0, 4.0)]])
    monkeypatch.setattr(worker, "_block", lambda step, count: next(blocks))
    speeds_s = iter([0.5, 0.25])
    found = worker._steady(None, [2, 1], SimpleNamespace(sample=lambda: next(speeds_s)), Alone())
    assert found == worker.Steady(
        step_s=[3, 3, 7],
        phases_s={"forward": [1, 1, 3], "backward": [2, 2, 4]},
        blocks=[2, 1],
        host_reference_s=[0.5, 0.25],
    )


def test_forward_only_has_only_a_forward_phase():
    assert list(measure_here(request(mode="forward"), QUICK).phases_s) == ["forward"]


def test_steps_skipped_by_the_scaler_are_refused(monkeypatch):
    scales = iter([65536.0, 32768.0])
    monkeypatch.setattr(worker, "_scale", lambda step: next(scales))
    with pytest.raises(PerfModelError, match=re.escape("the loss scale fell from 65536.0")):
        measure_here(request(precision="amp-fp16"), QUICK)


def test_a_missing_gpu_is_named(monkeypatch):
    monkeypatch.setattr(worker.torch.cuda, "is_available", lambda: False)
    with pytest.raises(PerfModelError, match=re.escape("--device cuda: torch must see a CUDA device (it sees none)")):
        measure_here(Request("tiny", "tuning", "own", TINY, "cuda"), QUICK)


def test_out_of_memory_on_the_cpu_is_a_failure_of_the_model(tmp_path):
    """There is no device whose memory could have run out."""
    source = """
        import torch
        class Full(torch.nn.Linear):
            def forward(self, x):
                raise torch.OutOfMemoryError("full")
        def build():
            return Full(8, 8)
        def loss(module, inputs):
            return module(inputs["x"]).sum()
    """
    (tmp_path / "own_full.py").write_text(textwrap.dedent(source))
    model = {"target": "own_full:build", "loss": "own_full:loss", "inputs": {"x": {"shape": ["batch", 8]}}}
    asked = replace(request(model=model, batch={"size": 1}), allow_import=True, folder=str(tmp_path))
    try:
        with pytest.raises(worker.torch.OutOfMemoryError, match="full"):
            measure_here(asked, QUICK)
    finally:
        sys.modules.pop("own_full", None)


@pytest.mark.gpu
def test_memory_of_the_first_steps_on_a_gpu(tmp_path):
    import gzip
    import json

    history = tmp_path / "history.json.gz"
    asked = Request("tiny", "tuning", "own", TINY, "cuda", history=str(history))
    measured = measure_here(asked, QUICK)
    assert len(measured.memory) == worker.MEMORY_STEPS == 4
    assert measured.memory[-1].peak_allocated_bytes == measured.memory[-2].peak_allocated_bytes
    assert measured.memory[0].allocated_before_bytes < measured.memory[1].allocated_before_bytes
    assert all(step.peak_allocated_bytes <= step.peak_reserved_bytes for step in measured.memory)
    assert measured.device_used_bytes < measured.device_bytes
    recorded = json.loads(gzip.decompress(history.read_bytes()))
    assert len(recorded["step_starts_at_event"]) == 3  # two steps and where the second ends
    assert recorded["step_starts_at_event"][-1] == len(recorded["events"])
