"""The ten-second table, whole."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from perfmodel.cost.power import Clock
from perfmodel.hardware.measurement import StepMemory
from perfmodel.report.text.prediction import bar, describe, rendered, report
from perfmodel.simulate.memory.walk import simulate_memory
from tests.report.pipelines import PIPELINE, TWO_STAGES, pipeline, with_larger_last
from tests.report.synthetic import WHOLE, prediction, profile, scenario


def test_whole_report() -> None:
    assert rendered(report(prediction())) == WHOLE


def test_narrow_terminal_keeps_the_numbers() -> None:
    lines = rendered(report(prediction()), 72).splitlines()
    assert " 5 us   14 %      1   5 us  roofline  _foreach_add_.List([float32[8,8]]…" in lines


def test_cpu_says_what_it_does_not_know() -> None:
    lines = rendered(report(prediction("cpu"))).splitlines()
    assert "MFU           unknown             no datasheet peak in the profile" in lines
    assert "memory        not predicted       on a CPU" in lines


def test_what_does_not_fit_is_said() -> None:
    small = profile().model_copy(update={"device": profile().device.model_copy(update={"memory_bytes": 3 * 2**20})})
    memory = simulate_memory(prediction().program, small)
    lines = rendered(report(prediction(profile=small, memory=memory))).splitlines()
    assert lines[3:6] == [
        "memory        does not fit        needs at least 20 MiB: 17 MiB more than the device's 3 MiB",
        "runs out      before step 1       building the model: 2 MiB more for parameters while 0 B of 3 MiB are reserved",
        "step time     38 us               36 us to 40 us (90 %, uncalibrated), with enough memory",
    ]


def test_time_of_a_step_that_retries_is_a_bound() -> None:
    """Retries of earlier steps are none of its."""
    memory = replace(simulate_memory(prediction().program, profile()), retries=3)
    text = rendered(report(prediction(memory=memory)))
    assert "retries" not in text
    lines = rendered(report(prediction(memory=replace(memory, step_retries=2)))).splitlines()
    assert [line for line in lines if line.startswith(("step time", "throughput", "fits"))] == [
        "step time     over 38 us                and 2 allocator retries a step, which are not predicted",
        "throughput    under 105,263 samples/s   under 842,105 tokens/s",
        "fits          yes                       20 MiB of 64 MiB in use",
    ]


def test_a_lowered_clock_is_said() -> None:
    clock = Clock(0.9, 2e9, 700.0, {"gemm_bf16": 1.05}, np.array([1.05]), 1e-6)
    lines = rendered(report(prediction(clock=clock))).splitlines()
    expected = "clock         1.8 GHz             700 W lower it from 2 GHz: gemm bf16 kernels take 1.05 times as long"
    assert expected in lines


def test_the_step_that_rebuilds_buckets_is_named() -> None:
    rebuilding = StepMemory(allocated_before_bytes=0, peak_allocated_bytes=12 * 2**20, peak_reserved_bytes=20 * 2**20)
    memory = replace(simulate_memory(prediction().program, profile()), rebuilding=rebuilding, rebuild_step=3)
    lines = rendered(report(prediction(memory=memory))).splitlines()
    assert "step 3        up to 12 MiB        allocated, while buckets are rebuilt" in lines


def test_changed_profile_values_are_shown() -> None:
    changed = profile().model_copy(update={"provenance": {"set": {"hardware.device.memory_bytes": 3}}})
    lines = rendered(report(prediction(profile=changed))).splitlines()
    assert "changed by --set: hardware.device.memory_bytes=3" in lines


def test_collectives_say_where_they_come_from_and_what_is_assumed() -> None:
    shares = {"exact": 0.25, "curve": 0.0, "extrapolated": 0.75}
    supposed = ("links 2 x as fast as measured", "GPU speeds 1, 0.5")
    lines = rendered(report(prediction(collective_provenance=shares, assumptions=supposed))).splitlines()
    at = next(index for index, line in enumerate(lines) if line.startswith("where the numbers come from"))
    assert lines[at + 1 : at + 3] == [
        "of the collectives: 25.0 % measured sizes, 75.0 % extrapolated",
        "assuming links 2 x as fast as measured and GPU speeds 1, 0.5",
    ]


def test_a_pipeline_has_a_line() -> None:
    lines = rendered(report(pipeline())).splitlines()
    assert "pipeline      gpipe, stages of 1, 1 blocks, 2 micro-batches, bubbles 18.0 %" in lines
    loops = {"schedule": "looped-bfs", "micro_batches": 1, "virtual_stages": 2}
    looped = pipeline(computed_stages=TWO_STAGES, stage_blocks=(1, 2, 3, 4), **loops)
    lines = rendered(report(looped)).splitlines()
    assert "pipeline      looped-bfs, stages of 1, 2, 3, 4 blocks, 1 micro-batch, bubbles 18.0 %" in lines
    assert "   0    0, 2    1, 3  15 us    4 us           2 us         4 us      8 MiB" in lines
    assert not any(line.startswith("pipeline  ") for line in rendered(report(prediction())).splitlines())


RANKS = """\
ranks
                                           exposed  waiting for     memory
rank  stages  blocks   busy  bubble  communication     the host  allocated
   0       0       1  15 us    4 us           2 us         4 us      8 MiB
   1       1       1  16 us    5 us           2 us         2 us      1 MiB

where the time goes on rank 0
"""


def test_a_pipeline_has_a_row_for_each_rank_and_names_whose_the_rest_is() -> None:
    text = rendered(report(pipeline()))
    assert RANKS in text
    assert "largest kernels on rank 0" in text
    assert "memory        8 MiB allocated     20 MiB reserved on rank 0" in text
    assert " on rank" not in rendered(report(prediction()))


def test_replicas_of_a_pipeline_share_a_row() -> None:
    known = pipeline()
    columns = ("rank_memories", "rank_timelines", "rank_programs", "rank_kernels")
    twice = replace(
        known,
        scenario=scenario(parallelism={"dp": 2, "strategy": "ddp", "pp": PIPELINE}),
        **{name: getattr(known, name) * 2 for name in columns},
    )
    lines = rendered(report(twice)).splitlines()
    assert "0, 2       0       1  15 us    4 us           2 us         4 us      8 MiB" in lines
    assert "1, 3       1       1  16 us    5 us           2 us         2 us      1 MiB" in lines


def test_a_rank_that_does_not_fit_is_named() -> None:
    known = with_larger_last()
    small = profile().model_copy(update={"device": profile().device.model_copy(update={"memory_bytes": 3 * 2**20})})
    stopped = simulate_memory(known.program, small)
    shown = replace(known, profile=small, rank_memories=(known.rank_memories[0], stopped))
    text = rendered(report(shown))
    assert "does not fit        needs at least 20 MiB on rank 1: 17 MiB more than the device's 3 MiB" in text
    assert "   1       1       1  16 us    5 us           2 us         2 us  does not fit" in text


def test_a_small_mfu_is_not_nothing() -> None:
    step_s = prediction().step_time_s
    lines = rendered(report(prediction(model_flops=1.234e-5 * 1e9 * step_s))).splitlines()
    assert "MFU           0.0012 %            of 1 GFLOP/s" in lines


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mode": "forward"}, "gpt tiny, fp32, batch 4 x 8 tokens, forward only"),
        (
            {"optimizer": {"max_grad_norm": 1.0}, "training": {"gradient_accumulation": 2}},
            "gpt tiny, fp32, batch 4 x 8 tokens, adamw foreach, gradient clipping, 2 micro-batches a step",
        ),
        (
            {"training": {"activation_checkpointing": "full"}},
            "gpt tiny, fp32, batch 4 x 8 tokens, adamw foreach, full checkpointing",
        ),
        (
            {"training": {"activation_checkpointing": {"every": 2}}},
            "gpt tiny, fp32, batch 4 x 8 tokens, adamw foreach, checkpointing every 2 blocks",
        ),
        ({"model": {"family": "vgg16"}, "batch": {"size": 3}}, "vgg16, fp32, batch 3, adamw foreach"),
        (
            {
                "parallelism": {"pp": {"stages": 2, "micro_batches": 4}},
                "hardware": {"profile": "toy-gpu", "gpus": 2, "interconnect": "nvlink"},
            },
            "gpt tiny, fp32, batch 4 x 8 tokens, adamw foreach, 1f1b pipeline of 4 micro-batches on 2 GPUs over nvlink",
        ),
        (
            {"parallelism": {"dp": 3, "strategy": "ddp", "pp": {"stages": 2, "micro_batches": 4}}},
            "gpt tiny, fp32, batch 4 x 8 tokens, adamw foreach, 1f1b pipeline of 4 micro-batches on 2 GPUs, "
            "ddp on 3 such pipelines",
        ),
        (
            {"parallelism": {"pp": {"stages": 2, "micro_batches": 1, "schedule": "looped-bfs", "virtual_stages": 3}}},
            "gpt tiny, fp32, batch 4 x 8 tokens, adamw foreach, looped-bfs pipeline of 6 stages and 1 micro-batch on "
            "2 GPUs",
        ),
    ],
)
def test_question_in_one_line(changes: dict[str, object], words: str) -> None:
    assert describe(scenario(**changes)) == words


def test_bar_lengths() -> None:
    assert [len(bar(share)) for share in (0, 1 / 60, 0.5, 1)] == [0, 1, 15, 30]
