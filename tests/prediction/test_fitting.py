"""What would make a step fit: closed forms of hand-made steps, and settings tried on traces that are at hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from perfmodel.prediction.fitting import (
    ACCUMULATION,
    BATCH_SIZE,
    CHECKPOINTING,
    OPTIMIZER,
    Fitting,
    Remedy,
    what_fits,
)
from perfmodel.prediction.predict import predict, predict_memories
from perfmodel.prediction.prediction import Prediction
from perfmodel.report.text.fitting import NONE_FITS, NONE_TRACED_FITS, fitting_lines
from perfmodel.scenario.scenario import MICRO_BATCHES
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
        (OPTIMIZER,), (OPTIMIZER, CHECKPOINTING),
        *[(OPTIMIZER, BATCH_SIZE, ACCUMULATION)] * 2, *[(OPTIMIZER, BATCH_SIZE)] * 2,
    ]  # fmt: skip


def test_what_fits_comes_first_and_the_nearest_of_what_does_not() -> None:
    tried = (Remedy({BATCH_SIZE: 1}, fits=True, needed_bytes=MIB), Remedy({BATCH_SIZE: 2}, False, 4 * MIB))
    lines = fitting_lines(Fitting(0, 3 * MIB, tried), lambda _: "command")
    assert lines == ["batch.size 1 fits: 1 MiB in use", "batch.size 2 does not fit: needs at least 4 MiB"]
    assert fitting_lines(Fitting(0, 3 * MIB, tried[1:]), lambda _: "command")[0] == NONE_FITS
    assert fitting_lines(Fitting(0, 3 * MIB, ()), lambda _: "command") == [NONE_FITS]


def test_what_may_fit_comes_before_what_does_not() -> None:
    tried = (Remedy({CHECKPOINTING: "full"}, None, None), Remedy({MICRO_BATCHES: 16}, False, 4 * MIB))
    assert fitting_lines(Fitting(0, 3 * MIB, tried), lambda _: "command") == [
        NONE_TRACED_FITS,
        f"{CHECKPOINTING} full is not yet traced: ask `command`",
        f"{MICRO_BATCHES} 16 does not fit: needs at least 4 MiB",
    ]
    assert NONE_TRACED_FITS not in fitting_lines(Fitting(0, 3 * MIB, tried[:1]), lambda _: "command")


def test_accumulation_keeps_the_global_batch(tmp_path: Path) -> None:
    """As far as the batch can be halved and no more than 1,024 micro-batches come of it."""
    path = tmp_path / "toy.yaml"
    path.write_text(YAML.replace("LAYERS", "1").replace("size: 64", "size: 12"))
    for accumulated, factors in ((1, [2, 4]), (512, [2]), (1024, [])):
        assignments = (f"training.gradient_accumulation={accumulated}",)
        remedies = what_fits(short_of(path, 7 * 10**8, *assignments)).remedies
        tried = {
            (each.values[BATCH_SIZE], each.values[ACCUMULATION]) for each in remedies if ACCUMULATION in each.values
        }
        assert tried == {(12 // factor, accumulated * factor) for factor in factors}


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
        Remedy({BATCH_SIZE: 16}, fits=True, needed_bytes=of_size[16]),
        Remedy({CHECKPOINTING: "full"}, fits=None, needed_bytes=None),
        *(Remedy({BATCH_SIZE: size, ACCUMULATION: 64 // size}, None, None) for size in (32, 16, 8, 4, 2, 1)),
        Remedy({OPTIMIZER: "fused"}, fits=None, needed_bytes=None),
        Remedy({BATCH_SIZE: 32}, fits=False, needed_bytes=least_bytes),
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
    accumulated = {BATCH_SIZE: ["32"], ACCUMULATION: ["2"]}
    fused = {OPTIMIZER: ["fused"]}
    assert asked == [
        {CHECKPOINTING: ["full"]},
        accumulated,
        {BATCH_SIZE: smaller},
        fused,
        {**fused, CHECKPOINTING: ["full"]},
        {**fused, **accumulated},
        {**fused, BATCH_SIZE: smaller},
    ]
    assert lines[2] == "batch.size 32 or 16 or 8 or 4 or 2 or 1 is not yet traced: ask `command`"
    needed = needs(scenario_file, "training.activation_checkpointing=full")
    again = fitting_lines(what_fits(short_of(scenario_file, needs(scenario_file) - 100 * MIB)), ask)
    assert again[0] == f"training.activation_checkpointing full fits: {format_bytes(needed)} in use"


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
