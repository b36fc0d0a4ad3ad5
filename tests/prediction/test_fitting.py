"""What would make a step fit: closed forms of hand-made steps, and settings tried on traces that are at hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from perfmodel.prediction.fitting import BATCH_SIZE, CHECKPOINTING, OPTIMIZER, Remedy, what_fits
from perfmodel.prediction.predict import predict, predict_memories
from perfmodel.prediction.prediction import Prediction
from perfmodel.report.text.fitting import fitting_lines
from perfmodel.scenario.yaml_file import load_question
from perfmodel.simulate.memory.walk import simulate_memory
from perfmodel.trace.store import TraceNotKeptError, get_trace, only_kept_traces
from perfmodel.units import format_bytes
from tests.places import ROOT
from tests.report.synthetic import MIB, prediction, profile

YAML = """\
name: toy
model: {family: gpt, size: tiny, layers: LAYERS, width: 256}
batch: {size: 64, sequence_length: 128}
hardware: {profile: h200-sxm-x4}
"""


@pytest.fixture
def scenario_file(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Of a depth that no other test asks for, so that no trace of it is at hand."""
    path = tmp_path / "toy.yaml"
    path.write_text(YAML.replace("LAYERS", str(request.param)))
    return path


def needs(path: Path, *assignments: str) -> int:
    (memory,) = predict_memories(*load_question(path, assignments))
    return memory.needed_bytes


def short_of(path: Path, memory_bytes: int, *assignments: str) -> Prediction:
    question = load_question(path, [f"hardware.device.memory_bytes={memory_bytes}", *assignments])
    return predict(*question)


def with_capacity(memory_bytes: int, **changes: Any) -> Prediction:
    device = profile().device.model_copy(update={"memory_bytes": memory_bytes})
    small = profile().model_copy(update={"device": device})
    return prediction(profile=small, memory=simulate_memory(prediction().program, small), **changes)


def test_what_neither_batch_nor_checkpointing_changes() -> None:
    """Of the toy, the parameters and the gradients, 2 MiB each: backward ends with both, and 4 MiB of activations."""
    assert what_fits(with_capacity(10 * MIB)).fixed_bytes == 4 * MIB
    too_small = what_fits(with_capacity(3 * MIB))
    assert (too_small.fixed_bytes, too_small.capacity_bytes, too_small.is_fixed_too_much) == (4 * MIB, 3 * MIB, True)
    assert [tuple(each.values) for each in too_small.remedies] == [
        (OPTIMIZER,), (OPTIMIZER, BATCH_SIZE), (OPTIMIZER, BATCH_SIZE), (OPTIMIZER, CHECKPOINTING),
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_nothing_is_asked_of_a_step_that_fits_or_has_no_memory(kind: str) -> None:
    with pytest.raises(ValueError, match="not known not to fit"):
        what_fits(prediction(kind))


@pytest.mark.usefixtures("empty_cache")
@pytest.mark.parametrize("scenario_file", [3], indirect=True)
def test_the_largest_half_of_the_batch_that_fits_is_found(scenario_file: Path) -> None:
    of_size = {size: needs(scenario_file, f"batch.size={size}") for size in (64, 32, 16)}
    assert of_size[16] < of_size[32] < of_size[64]
    fitting = what_fits(short_of(scenario_file, of_size[16]))
    least_bytes = needs(scenario_file, "batch.size=32", f"hardware.device.memory_bytes={of_size[16]}")
    assert of_size[16] < least_bytes <= of_size[32]
    assert fitting.remedies == (
        Remedy({BATCH_SIZE: 32}, fits=False, needed_bytes=least_bytes),
        Remedy({BATCH_SIZE: 16}, fits=True, needed_bytes=of_size[16]),
        Remedy({OPTIMIZER: "fused"}, fits=None, needed_bytes=None),
        Remedy({CHECKPOINTING: "full"}, fits=None, needed_bytes=None),
    )
    assert not fitting.is_fixed_too_much


@pytest.mark.usefixtures("empty_cache")
@pytest.mark.parametrize("scenario_file", [5], indirect=True)
def test_what_has_no_trace_is_a_command(scenario_file: Path) -> None:
    fitting = what_fits(short_of(scenario_file, needs(scenario_file) - 100 * MIB))
    asked: list[dict[str, list[str]]] = []

    def ask(vary: dict[str, list[str]]) -> str:
        asked.append(vary)
        return "command"

    lines = fitting_lines(fitting, ask)
    smaller = ["32", "16", "8", "4", "2", "1"]
    assert asked == [
        {BATCH_SIZE: smaller},
        {OPTIMIZER: ["fused"]},
        {CHECKPOINTING: ["full"]},
        {OPTIMIZER: ["fused"], BATCH_SIZE: smaller},
        {OPTIMIZER: ["fused"], CHECKPOINTING: ["full"]},
    ]
    assert lines[0] == "batch.size 32 or 16 or 8 or 4 or 2 or 1: ask `command`"
    needed = needs(scenario_file, "training.activation_checkpointing=full")
    again = fitting_lines(what_fits(short_of(scenario_file, needs(scenario_file) - 100 * MIB)), ask)
    assert again[-1] == f"training.activation_checkpointing full fits: needs {format_bytes(needed)}"


def test_every_setting_that_is_tried_is_one_that_a_scenario_takes(tmp_path: Path) -> None:
    path = tmp_path / "toy.yaml"
    path.write_text(YAML.replace("LAYERS", "4").replace("x4}", "x4, gpus: 4, interconnect: nvlink}"))
    two_stages = ("parallelism.pp={stages: 2, micro_batches: 4, layers: [2, 2]}", "hardware.gpus=2")
    of_dp = ("parallelism.dp=4", "parallelism.strategy=ddp")
    tried = {}
    for assignments in (two_stages, of_dp, (*of_dp, "mode=forward")):
        fitting = what_fits(short_of(path, 8 * 10**8, *assignments))
        tried[assignments] = {key for each in fitting.remedies for key in each.values}
        for each in fitting.remedies:
            load_question(path, [*assignments, *(f"{key}={value}" for key, value in each.values.items())])
    assert "parallelism.strategy" in tried[of_dp]


@pytest.mark.usefixtures("empty_cache")
def test_no_trace_is_made_where_only_kept_ones_count(tmp_path: Path) -> None:
    path = tmp_path / "toy.yaml"
    path.write_text(YAML.replace("LAYERS", "7"))
    scenario, _ = load_question(path)
    with only_kept_traces(), pytest.raises(TraceNotKeptError):
        get_trace(scenario)
    trace = get_trace(scenario)
    with only_kept_traces():
        assert get_trace(scenario) is trace


@pytest.mark.parametrize(
    ("name", "memory_bytes", "rank"),
    [("gpt2.7b", 46e9, 0), ("gpt2.7b", 54e9, 0), ("gpt2.7b-1f1b", 24e9, 1)],
)
def test_shipped_scenarios_whose_optimizer_does_not_fit(name: str, memory_bytes: float, rank: int) -> None:
    """Its first step, which is longer than the steady one, takes the most in its foreach temporaries."""
    path = ROOT / "scenarios" / f"{name}.yaml"
    memory = predict_memories(*load_question(path, [f"hardware.device.memory_bytes={memory_bytes}"]))[rank]
    assert memory.place is not None
    assert (memory.place.step, memory.place.phase) == (1, "optimizer")
    assert memory.place.operator.startswith("aten._foreach_")
    assert memory.unlimited is not None
    assert memory.unlimited.device_bytes == predict_memories(*load_question(path))[rank].device_bytes
    assert memory_bytes < memory.needed_bytes < memory.unlimited.device_bytes
    for device_bytes, fits in ((memory.needed_bytes, True), (memory.needed_bytes - 1, False)):
        question = load_question(path, [f"hardware.device.memory_bytes={device_bytes}"])
        assert predict_memories(*question)[rank].fits is fits
    assert memory.missing_bytes == memory.needed_bytes - memory_bytes
