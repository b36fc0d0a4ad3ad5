"""Memory of micro-batches: what each has for itself, and what all of a rank's have from the start."""

from __future__ import annotations

from typing import Any

import pytest

from perfmodel.hardware.profile import Device, Profile
from perfmodel.program.pipeline.programs import pipeline_programs
from perfmodel.program.pipeline.storages import with_all_inputs
from perfmodel.scenario.scenario import Scenario
from perfmodel.simulate.memory.walk import MemoryTimeline, simulate_memory
from perfmodel.trace.store import get_stage_trace
from perfmodel.trace.trace import StorageKind

TOKENS, WIDTH = 4 * 8, 64  # of a micro-batch
ACTIVATION = TOKENS * WIDTH * 4
PROFILE = Profile(name="p", device=Device(kind="cuda", name="g", memory_bytes=10**12))


def scenario(
    schedule: str = "1f1b", micro_batches: int = 4, stages: int = 2, virtual_stages: int = 1, **parallelism: Any
) -> Scenario:
    section: dict[str, Any] = {
        "stages": stages, "schedule": schedule, "micro_batches": micro_batches, "virtual_stages": virtual_stages,
        "layers": [1] * stages * virtual_stages,
    }  # fmt: skip
    model = {"family": "gpt", "layers": stages * virtual_stages, "width": WIDTH, "heads": 2, "ffn_width": 128,
             "vocabulary": 1000, "attention": "eager"}  # fmt: skip
    return Scenario.model_validate(
        {
            "model": model,
            "batch": {"size": 4 * micro_batches, "sequence_length": 8},
            "parallelism": {"pp": section, **parallelism},
            "hardware": {"profile": "p", "gpus": stages * parallelism.get("dp", 1), "interconnect": "nvlink"},
        }
    )


@pytest.mark.parametrize("micro_batches", [1, 2, 6])
def test_inputs_are_of_all_micro_batches(micro_batches: int) -> None:
    asked = scenario(micro_batches=micro_batches, schedule="gpipe")
    for number, received in ((0, 1), (1, 1)):  # gradients of outputs; activations
        trace = with_all_inputs(get_stage_trace(asked, number), micro_batches)
        inputs = [each.bytes for each in trace.persistent if each.kind == StorageKind.INPUT]
        assert sorted(inputs) == sorted([TOKENS * 8 * micro_batches] + [ACTIVATION] * received * micro_batches)
        assert len({each.id for each in trace.persistent}) == len(trace.persistent)


def in_flight_bytes(schedule: str, micro_batches: int) -> list[int]:
    """By rank: the most that activations take in a steady step."""
    return [
        int(simulate_memory(program, PROFILE).kind_bytes[StorageKind.ACTIVATION].max())
        for program in pipeline_programs(scenario(schedule, micro_batches), True)
    ]


def test_gpipe_keeps_all_micro_batches_and_1f1b_as_many_as_stages_are_ahead() -> None:
    first, last = in_flight_bytes("gpipe", 1)
    for micro_batches in (4, 8):
        assert in_flight_bytes("gpipe", micro_batches) == pytest.approx(
            [first * micro_batches, last * micro_batches], rel=0.02
        )
        assert in_flight_bytes("1f1b", micro_batches) == pytest.approx([2 * first, last], rel=0.05)


@pytest.mark.parametrize(
    ("schedule", "virtual_stages"),
    [("gpipe", 1), ("1f1b", 1), ("interleaved-1f1b", 2), ("zbv-zero-bubble", 2), ("dualpipev", 2)],
)
def test_steady_steps_end_as_they_begin(schedule: str, virtual_stages: int) -> None:
    for program in pipeline_programs(scenario(schedule, 4, virtual_stages=virtual_stages), True):
        memory = simulate_memory(program, PROFILE)
        steps = [columns.allocated_bytes for step, columns in memory.history if step == "steady"]
        assert len(steps) >= 2
        assert steps[-1][-1] == steps[-2][-1]
        assert memory.fits


def ends(memory: MemoryTimeline, step: str) -> int:
    """Allocated bytes behind the last such step."""
    return int([columns.allocated_bytes for each, columns in memory.history if each == step][-1][-1])


@pytest.mark.parametrize(("schedule", "virtual_stages"), [("1f1b", 1), ("interleaved-1f1b", 2)])
def test_replicas_hold_gradients_and_buckets_or_buckets_alone(schedule: str, virtual_stages: int) -> None:
    """Of all parameters of the rank; in the step that rebuilds them, twice."""
    settings: list[dict[str, Any]] = [{}, *({"gradient_as_bucket_view": as_view} for as_view in (False, True))]
    asked = [
        scenario(schedule, virtual_stages=virtual_stages, **(each | {"dp": 2, "strategy": "ddp"} if each else {}))
        for each in settings
    ]
    for programs in zip(*(pipeline_programs(each, True) for each in asked), strict=True):
        plain, buckets, views = (simulate_memory(program, PROFILE) for program in programs)
        held = sum(each.tensor.bytes for each in programs[0].trace.parameters)
        slack = 512 * len(programs[0].trace.parameters)
        assert ends(buckets, "steady") - ends(plain, "steady") == pytest.approx(held, abs=slack)
        assert ends(views, "steady") == pytest.approx(ends(plain, "steady"), abs=slack)
        assert ends(buckets, "rebuilding") - ends(plain, "steady") == pytest.approx(2 * held, abs=2 * slack)
        assert buckets.rebuild_step == views.rebuild_step == 2
        for memory in (buckets, views):
            steps = [columns.allocated_bytes for step, columns in memory.history if step == "steady"]
            assert steps[-1][-1] == steps[-2][-1]
