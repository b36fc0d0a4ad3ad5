"""What `predict` says of pipelines: ranks at speeds and clocks of their own, and figures of all of them."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from perfmodel.cost.kernels.work import model_flops
from perfmodel.hardware.interconnect import CollectiveSegment, Interconnect
from perfmodel.hardware.power import Power, PowerKind
from perfmodel.hardware.profile import Device, KernelRecord, Profile, find_profile, load_profile
from perfmodel.prediction.costed_rank import costed_ranks, timelines_of
from perfmodel.prediction.figures_of_merit import mfu, samples_per_step
from perfmodel.prediction.predict import predict
from perfmodel.prediction.prediction import Prediction
from perfmodel.program.ranks import rank_programs
from perfmodel.scenario.scenario import Scenario
from perfmodel.trace.kernel_key import kernel_key

MICRO_BATCHES = 4
MESSAGE_BYTES = 1 * 16 * 64 * 4  # one sample of 16 tokens, 64 wide, in fp32
IDLE_W, DRAW_W, LIMIT_W = 100.0, 1000.0, 700.0


def pipeline(schedule: str, virtual_stages: int = 1, dp: int = 1, **hardware: object) -> Scenario:
    section = {
        "stages": 2,
        "schedule": schedule,
        "micro_batches": MICRO_BATCHES,
        "virtual_stages": virtual_stages,
    }
    strategy = "none" if dp == 1 else "ddp"
    own = {"profile": "h200-sxm-x2", "gpus": 2 * dp, "interconnect": "nvlink", **hardware}
    return Scenario.model_validate(
        {
            "model": {"family": "gpt", "size": "tiny", "layers": 4},
            "batch": {"size": MICRO_BATCHES, "sequence_length": 16},
            "parallelism": {"dp": dp, "strategy": strategy, "pp": section},
            "hardware": own,
        }
    )


@cache
def toy(torch: str | None = None, power_limit_w: float | None = None) -> Profile:
    """Every kernel takes a millisecond, hosts nothing, a message a nanosecond; every kernel draws DRAW_W, and follows
    the clock.
    """
    programs = [*rank_programs(pipeline("gpipe")), *rank_programs(pipeline("zbv-zero-bubble", 2))]
    keys = {
        kernel_key(operation) for each in programs for operation in each.program.operations if operation.runs_on_device
    }
    curve = CollectiveSegment(least_bytes=1, most_bytes=2**30, alpha_s=1e-9, beta_s_per_byte=0.0)
    wires = ("send_recv 2", "exchange 2", "all_reduce 2", "all_reduce 4")
    follows = PowerKind(draw_w=DRAW_W, clock_share=1.0)
    kinds = ("gemm_bf16", "gemm_fp32", "attention", "row", "pointwise", "optimizer")
    return Profile(
        name="toy",
        device=Device(
            kind="cuda",
            name="Toy GPU",
            memory_bytes=2**36,
            power_limit_w=power_limit_w,
            peak_flops_per_s={"fp32": 1e12},
            peak_memory_bytes_per_s=1e12,
        ),
        gpus=4,
        provenance={} if torch is None else {"torch": torch},
        kernels={key: KernelRecord(time_s=1e-3, kernels=1) for key in keys},
        interconnects={"nvlink": Interconnect(backend="nccl", segments=dict.fromkeys(wires, (curve,)))},
        interconnect="nvlink",
        power=Power(idle_w=IDLE_W, limit_w=LIMIT_W, full_clock_hz=2e9, kinds=dict.fromkeys(kinds, follows)),
    )


def phases_s(prediction: Prediction, rank: int) -> dict[tuple[str, int], float]:
    """Device seconds by phase and micro-batch."""
    timeline = prediction.rank_timelines[rank]
    busy_s = np.bincount(timeline.run, weights=timeline.end_s - timeline.start_s, minlength=len(timeline.phases))
    named = zip(timeline.phases, busy_s.tolist(), strict=True)
    return {(span.phase, span.micro_batch): seconds for span, seconds in named}


def test_replicas_of_a_pipeline_are_alike() -> None:
    """They reduce over their own wires and move as many messages each; the last backward waits for what is reduced."""
    profile = load_profile(find_profile("h200-sxm-x4"))
    one, two = (predict(pipeline("interleaved-1f1b", 2, dp=dp), profile) for dp in (1, 2))
    assert two.rank_timelines == two.rank_timelines[:2] * 2
    assert len({id(each) for each in two.rank_timelines}) == 2
    assert (len(two.rank_memories), len(two.rank_programs), len(two.rank_kernels)) == (4, 4, 4)
    assert samples_per_step(two) == 2 * samples_per_step(one)
    assert two.step_time_s > one.step_time_s
    assert two.communication_bytes.pop("replicate") == sum(each.tensor.bytes for each in two.program.trace.parameters)
    assert two.communication_bytes == one.communication_bytes


def test_a_pipeline_keeps_what_all_its_ranks_do() -> None:
    found = predict(pipeline("1f1b"), load_profile(find_profile("h200-sxm-x2")))
    assert found.step_time_s == max(each.step_time_s for each in found.rank_timelines)
    for timeline, kernels in zip(found.rank_timelines, found.rank_kernels, strict=True):
        assert sum(use.total_s for use in kernels) == pytest.approx(timeline.busy_s)
    assert min(each.began_s for each in found.rank_timelines) == 0.0


@pytest.mark.parametrize(("speeds", "shown"), [(None, 1), ((1.0, 0.5), 1), ((0.5, 1.0), 0)])
def test_the_busiest_rank_is_shown(speeds: tuple[float, ...] | None, shown: int) -> None:
    found = predict(pipeline("1f1b", gpu_speeds=speeds), toy())
    assert found.shown_rank == shown
    assert found.timeline is found.rank_timelines[shown]
    assert found.program is found.rank_programs[shown]
    assert found.kernels is found.rank_kernels[shown]
    assert found.memory is found.rank_memories[shown]


def test_without_a_pipeline_no_rank_is_told_apart() -> None:
    alone = pipeline("gpipe").model_dump(mode="json") | {"parallelism": {}, "hardware": {"profile": "toy.json"}}
    found = predict(Scenario.model_validate(alone), toy())
    assert found.shown_rank is None
    assert found.rank_timelines == found.rank_programs == found.rank_kernels == ()


@pytest.mark.parametrize(("schedule", "virtual_stages"), [("1f1b", 1), ("zbv-zero-bubble", 2)])
def test_model_flops_are_of_the_whole_step_over_all_ranks(schedule: str, virtual_stages: int) -> None:
    """Also where a backward comes in two parts. MFU is all ranks' arithmetic over what all of them could do."""
    found = predict(pipeline(schedule, virtual_stages), toy())
    forward = 0.0
    for timeline, program in zip(found.rank_timelines, found.rank_programs, strict=True):
        phases = [timeline.phases[run].phase for run in timeline.run.tolist()]
        for at, phase in zip(timeline.operation.tolist(), phases, strict=True):
            forward += model_flops(program.operations[at]) if phase == "forward" else 0.0
    assert found.model_flops == pytest.approx(3 * forward / 2)
    assert mfu(found) == pytest.approx(3 * forward / (2 * 1e12 * found.step_time_s))


@pytest.mark.parametrize("speeds", [(1.0, 1.0), (1.0, 0.5)])
def test_the_slower_last_rank_sets_the_pace(speeds: tuple[float, ...]) -> None:
    """Between its forwards and its backwards nothing comes; then the first rank does the last backward, its optimizer
    and the next step's first forward.
    """
    even, found = (predict(pipeline("gpipe", gpu_speeds=each), toy()) for each in (None, speeds))
    first, last = (phases_s(found, rank) for rank in (0, 1))
    assert first == pytest.approx(phases_s(even, 0))
    assert last == pytest.approx({phase: time_s / speeds[1] for phase, time_s in phases_s(even, 1).items()})
    of_last_s = sum(time_s for (phase, _), time_s in last.items() if phase in ("forward", "backward"))
    once_s = first["scale", -1] + first["optimizer", -1]
    expected_s = first["forward", 0] + of_last_s + first["backward", MICRO_BATCHES - 1] + once_s
    assert found.step_time_s == pytest.approx(expected_s, rel=1e-6)
    assert found.rank_timelines[0].bubble_s == pytest.approx(expected_s - sum(first.values()), rel=1e-3)


def test_of_replicas_the_slowest_counts() -> None:
    """Ranks 0 and 2 have the first stage, 1 and 3 the second."""
    even, found = (predict(pipeline("gpipe", dp=2, gpu_speeds=each), toy()) for each in (None, (1.0, 0.8, 0.5, 1.0)))
    ratios = [b.busy_s / a.busy_s for a, b in zip(even.rank_timelines, found.rank_timelines, strict=True)]
    assert ratios == pytest.approx([2.0, 1.25, 2.0, 1.25])
    assert found.shown_rank == 0


def test_bubbles_are_named_with_the_rank_that_the_others_wait_for() -> None:
    even, skewed = (predict(pipeline("gpipe", gpu_speeds=each), toy()) for each in (None, (1.0, 0.1)))
    assert even.bottleneck.startswith("the device: pointwise kernels take ")
    bubbles = sum(each.bubble_s for each in skewed.rank_timelines) / 2 / skewed.step_time_s
    slowest = sum(use.total_s for use in skewed.rank_kernels[1] if use.cost.kind == "pointwise") / skewed.step_time_s
    assert skewed.bottleneck == (
        f"the pipeline's bubbles: {100 * bubbles:.0f} % of the step over all ranks; the other ranks wait for rank 1, whose "
        f"pointwise kernels take {100 * slowest:.0f} % of the step"
    )


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("torch", ["2.11.0+cu130", "2.13.0"])
def test_all_messages_count_that_the_rank_sends_and_receives(schedule: str, torch: str) -> None:
    """An activation and a gradient for each micro-batch, together or not."""
    found = predict(pipeline(schedule), toy(torch))
    assert sum(found.communication_bytes.values()) == 2 * MICRO_BATCHES * MESSAGE_BYTES


def test_a_clock_knows_that_the_device_idles_in_bubbles() -> None:
    """Work that draws 900 W above idle, all of which follows the clock, for 1 of 1 + b seconds: 900 r^3 / (1 + b) = 600."""
    cool, hot = (predict(pipeline("gpipe"), toy(power_limit_w=limit_w)) for limit_w in (None, LIMIT_W))
    assert cool.clock is None
    assert hot.clock is not None
    ratios = []
    for before, after in zip(cool.rank_timelines, hot.rank_timelines, strict=True):
        whole = 1 + before.bubble_s / before.busy_s
        ratio = min((whole * (LIMIT_W - IDLE_W) / (DRAW_W - IDLE_W)) ** (1 / 3), 1.0)
        assert before.busy_s / after.busy_s == pytest.approx(ratio, rel=1e-4)
        ratios.append(ratio)
    assert hot.clock.ratio == pytest.approx(ratios[1], rel=1e-4)
    assert ratios[1] < ratios[0] < 1


def test_with_bubbles_enough_the_full_clock_is_kept() -> None:
    """A rank that works half of the step draws 550 W on average."""
    speeds = (1.0, 0.3)
    cool, hot = (predict(pipeline("gpipe", gpu_speeds=speeds), toy(power_limit_w=each)) for each in (None, LIMIT_W))
    assert cool.rank_timelines[0].busy_s < 0.5 * cool.step_time_s
    assert hot.rank_timelines[0].busy_s == pytest.approx(cool.rank_timelines[0].busy_s)
    assert hot.rank_timelines[1].busy_s > 1.1 * cool.rank_timelines[1].busy_s


def test_a_clock_waits_as_long_for_others_on_a_gpu_of_another_speed() -> None:
    """Ranks that are all twice as fast bubble in proportion."""
    usual, fast = (
        predict(pipeline("gpipe", gpu_speeds=each), toy(power_limit_w=LIMIT_W)) for each in (None, (2.0, 2.0))
    )
    assert usual.clock is not None
    assert fast.clock is not None
    assert fast.clock.ratio == pytest.approx(usual.clock.ratio, rel=1e-6)


def test_senders_go_on_ahead_of_their_receivers_as_far_as_was_measured() -> None:
    """The last rank is fast, and its first gradient is taken at once; the other three, each after another backward of
    the slow rank, unless there is room for them.
    """
    profile, scenario = toy(), pipeline("gpipe", gpu_speeds=(0.5, 1.0))
    wires = profile.interconnects["nvlink"].model_copy(update={"messages_ahead": {MESSAGE_BYTES: MICRO_BATCHES}})
    ahead = profile.model_copy(update={"interconnects": {"nvlink": wires}})
    waits, goes_on = (predict(scenario, each) for each in (profile, ahead))
    slow, fast = (phases_s(waits, rank) for rank in (0, 1))
    of_slow_s = sum(slow["backward", micro_batch] for micro_batch in range(MICRO_BATCHES - 1))
    of_fast_s = sum(fast["backward", micro_batch] for micro_batch in range(1, MICRO_BATCHES))
    late_s, early_s = (from_last_backward_to_optimizer_s(each, 1) for each in (waits, goes_on))
    assert early_s == pytest.approx(fast["backward", MICRO_BATCHES - 1] + fast["scale", -1], rel=1e-6)
    assert late_s - early_s == pytest.approx(of_slow_s - of_fast_s, rel=1e-6)


def from_last_backward_to_optimizer_s(prediction: Prediction, rank: int) -> float:
    """Device seconds from the start of the one to the start of the other."""
    starts_s = {(span.phase, span.micro_batch): span.start_s for span in prediction.rank_timelines[rank].phases}
    return starts_s["optimizer", -1] - starts_s["backward", MICRO_BATCHES - 1]


def test_messages_are_not_simulated_on_one_clock() -> None:
    scenario, profile = pipeline("gpipe"), toy()
    on_cpu = profile.model_copy(update={"device": profile.device.model_copy(update={"kind": "cpu"})})
    steps = costed_ranks(rank_programs(scenario), on_cpu, scenario, on_cpu.interconnects["nvlink"])
    with pytest.raises(RuntimeError, match="on one clock send each other messages"):
        timelines_of(steps, 1.0)


def test_how_torch_posts_single_messages_is_said() -> None:
    said = {torch: predict(pipeline("1f1b"), toy(torch)).assumptions for torch in ("2.11.0+cu130", "2.13.0", None)}
    assert said == {
        "2.11.0+cu130": (
            "single messages all on the pipeline's communicator, as torch 2.11 posts them (2.12 and later: each two "
            "ranks on their own)",
        ),
        "2.13.0": (
            "single messages on a communicator of each two ranks, as torch 2.13 posts them (before 2.12: all on the "
            "pipeline's)",
        ),
        None: (
            "single messages on a communicator of each two ranks, as torch 2.12 and later post them (the profile names "
            "no torch; earlier ones post all on the pipeline's)",
        ),
    }


def test_warnings_are_of_all_ranks() -> None:
    """What the shown rank has measured, and the other has not, is told of that one."""
    profile = toy()
    found = predict(pipeline("gpipe"), profile)
    assert found.shown_rank == 1
    own = [{use.key for use in kernels} for kernels in found.rank_kernels]
    (embedding,) = [key for key in own[0] - own[1] if key.startswith("aten.embedding.default")][:1]
    some = {key: record for key, record in profile.kernels.items() if key != embedding}
    unstable = (next(iter(own[0] - own[1] - {embedding})), next(iter(own[1] - own[0])))
    slow = profile.device.model_copy(update={"peak_memory_bytes_per_s": 1e4})
    asked = profile.model_copy(update={"kernels": some, "unstable": unstable, "device": slow})
    warned = predict(pipeline("gpipe"), asked).warnings
    assert [each.split(" % ")[1] for each in warned if "roofline" in each] == [
        "of the device time of rank 0 is from a roofline: run `perfmodel calibrate --scenario` on this machine"
    ]
    assert sum(each.startswith("2 kernels of this step were measured unstable") for each in warned) == 1
