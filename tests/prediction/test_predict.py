"""What `predict` does with the speed of hosts, GPUs and links."""

from __future__ import annotations

from pathlib import Path

import pytest

from perfmodel.accuracy.card import accuracy_card
from perfmodel.accuracy.comparison import predict_measurements
from perfmodel.errors import PerfModelError
from perfmodel.hardware.interconnect import CallRecord
from perfmodel.hardware.measurement import Measurement
from perfmodel.hardware.profile import (
    Cache,
    HostRecord,
    KernelRecord,
    Profile,
    find_profile,
    load_profile,
    save_profile,
)
from perfmodel.prediction.breakdown import PART_OF_PHASE
from perfmodel.prediction.predict import predict
from perfmodel.prediction.support import check_supported
from perfmodel.scenario.scenario import ParallelismSection, Scenario
from perfmodel.scenario.yaml_file import load_scenario
from perfmodel.trace.kernel_key import kernel_key
from perfmodel.trace.store import get_trace
from perfmodel.trace.trace import StorageKind
from tests.places import ROOT
from tests.prediction.toys import DATA, DEVICE, HOST, PROFILE, RANKS, SCENARIO, wired, with_hardware, with_ranks
from tests.refusals import refused

SCENARIOS = ROOT / "scenarios"


def test_host_costs_are_scaled_to_the_host_s_speed() -> None:
    usual, slow, unknown = (
        predict(SCENARIO, profile, host_reference_s=host_reference_s).timeline.host_busy_s
        for profile, host_reference_s in [
            (PROFILE, None),
            (PROFILE, 3e-3),
            (PROFILE.model_copy(update={"host": {"call": HOST["call"]}}), 3e-3),
        ]
    )
    assert usual > 0
    assert slow == pytest.approx(1.5 * usual)
    assert unknown == usual


def test_the_interval_of_a_host_bound_step_is_as_wide_as_the_host_wandered() -> None:
    """Variances add up, so what two intervals differ in is the host's part."""
    steady = PROFILE.model_copy(update={"host": HOST | {"reference": HostRecord(time_s=2e-3)}})
    found = [predict(SCENARIO, profile) for profile in (PROFILE, steady)]
    wide, narrow = (((high_s - low_s) / 2 / 1.645) ** 2 for low_s, high_s in (each.interval_s for each in found))
    step_s = found[0].step_time_s
    by_fifth_s, by_twentieth_s = (
        predict(SCENARIO, PROFILE, host_reference_s=2e-3 * slowness).step_time_s - step_s for slowness in (1.2, 1.05)
    )
    assert by_fifth_s > by_twentieth_s > 0
    assert wide - narrow == pytest.approx(by_fifth_s**2 - by_twentieth_s**2)
    assert found[0].bottleneck.startswith("the host")


def test_a_measurement_is_predicted_again_at_the_speed_beside_it(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_profile(PROFILE, tmp_path / "toy.json")
    usual_s = predict(SCENARIO, PROFILE).step_time_s
    slow_s = predict(SCENARIO, PROFILE, host_reference_s=4e-3).step_time_s
    plain = Measurement(
        name="plain",
        split="tuning",
        group="own",
        scenario=DATA,
        provenance={},
        warmup_steps=5,
        step_s=(slow_s,),
        synced_step_s=(slow_s,),
        phases_s={},
    )
    beside = plain.model_copy(update={"name": "beside", "host_reference_s": (3e-3, 4e-3, 5e-3)})
    first, second = accuracy_card(predict_measurements([plain, beside])).cases
    assert (first.name, first.error("step")) == ("beside", pytest.approx(usual_s / slow_s - 1))
    assert first.error("step_at_measured_host_speed") == pytest.approx(0)
    assert second.error("step_at_measured_host_speed") is None


def with_cache(capacity_bytes: float, cold_time_s: float) -> Profile:
    """Every kernel takes 1 ms warm."""
    operations = [operation for operation in get_trace(TRAINING).operations if operation.runs_on_device]
    record = KernelRecord(time_s=1e-3, cold_time_s=cold_time_s, kernels=1)
    kernels = {kernel_key(operation): record for operation in operations}
    return PROFILE.model_copy(update={"kernels": kernels, "cache": Cache(capacity_bytes=capacity_bytes)})


TRAINING = Scenario.model_validate(DATA | {"mode": "train"})


def test_launches_take_between_warm_and_cold_and_never_longer_with_a_larger_cache() -> None:
    found = [predict(TRAINING, with_cache(capacity, 3e-3)) for capacity in (1, 2e4, 1e5, 1e6, 1e12)]
    times_s = [prediction.step_time_s for prediction in found]
    assert times_s == sorted(times_s, reverse=True)
    assert len(set(times_s)) == len(times_s)
    launches = len(found[0].timeline.operation)
    assert times_s[0] <= 3e-3 * launches * (1 + 1e-9)
    assert times_s[-1] >= 1e-3 * launches * (1 - 1e-9)
    durations_s = found[2].timeline.end_s - found[2].timeline.start_s
    assert min(durations_s) >= 1e-3 * (1 - 1e-9)
    assert max(durations_s) <= 3e-3 * (1 + 1e-9)


def test_without_a_difference_the_cache_does_not_matter() -> None:
    assert predict(TRAINING, with_cache(1, 1e-3)).step_time_s == predict(TRAINING, with_cache(1e12, 1e-3)).step_time_s


def test_totals_of_kernels_add_up_to_the_busy_time() -> None:
    prediction = predict(TRAINING, with_cache(1e5, 3e-3))
    busy_s = sum(prediction.breakdown[part] for part in {*PART_OF_PHASE.values(), "optimizer_s"})
    assert sum(use.total_s for use in prediction.kernels) == pytest.approx(busy_s)
    assert all(1e-3 * (1 - 1e-9) <= use.mean_s <= 3e-3 * (1 + 1e-9) for use in prediction.kernels)


def test_the_step_is_the_slowest_rank_s() -> None:
    profile = wired()
    alike, one_slow, all_slow = (
        predict(with_hardware(gpu_speeds=speeds), profile)
        for speeds in (None, [1.0, 0.5, 1.0, 1.0], [0.5, 0.5, 0.5, 0.5])
    )
    assert one_slow.step_time_s == all_slow.step_time_s
    kernels_s = sum(alike.breakdown[part] for part in ("forward_s", "backward_s", "optimizer_s"))
    slowed_s = sum(one_slow.breakdown[part] for part in ("forward_s", "backward_s", "optimizer_s"))
    assert slowed_s == pytest.approx(2 * kernels_s, rel=1e-3)


def test_speeds_are_one_for_each_gpu() -> None:
    with refused("hardware.gpu_speeds", "hardware.gpus=4"):
        predict(with_hardware(gpu_speeds=[1.0, 2.0]), wired())


def test_faster_links_expose_less_communication() -> None:
    exposed = [
        predict(with_hardware(), wired(bandwidth_factor=factor)).breakdown["exposed_communication_s"]
        for factor in (0.5, 1.0, 2.0)
    ]
    assert exposed[0] > exposed[1] > exposed[2] > 0


def test_ranks_share_a_host_as_fast_as_when_all_ran_the_reference() -> None:
    host = {"reference": HostRecord(time_s=2e-3), "call": HostRecord(time_s=1e-5)}
    profiles = [wired(), wired(host={"reference": CallRecord(time_s=1e-3)})]
    alone, shared = (
        predict(with_hardware(), profile.model_copy(update={"host": host})).timeline.host_busy_s for profile in profiles
    )
    assert shared == pytest.approx(alone / 2)


def test_a_static_graph_does_not_accumulate() -> None:
    asked = {"training": {"gradient_accumulation": 2}, "parallelism": {**RANKS["parallelism"], "static_graph": True}}
    with refused("parallelism.static_graph", "false"):
        predict(Scenario.model_validate(RANKS | asked), wired())


def test_wires_that_differ_between_runs_widen_the_interval() -> None:
    widths = []
    for spread in (None, 0.1, 0.2):
        low_s, high_s = predict(with_hardware(), wired(rerun_spread=spread)).interval_s
        widths.append(high_s - low_s)
    assert widths[0] < widths[1] < widths[2]


def test_the_communicator_of_the_ranks_takes_device_memory() -> None:
    without, beside = (
        predict(with_hardware(), wired(communicator_bytes=taken)).memory
        for taken in ({}, {"library": 7, "4": 5, "2": 3})
    )
    assert without is not None
    assert beside is not None
    assert beside.device_bytes - without.device_bytes == 12


def test_more_gpus_than_were_measured_are_extrapolated_and_it_says_so() -> None:
    measured, more = (predict(with_ranks(ranks), wired()) for ranks in (4, 8))
    assert more.breakdown["communication_s"] != measured.breakdown["communication_s"]
    assert measured.collective_provenance == {"exact": 0, "curve": pytest.approx(1), "extrapolated": 0}
    assert more.collective_provenance == {"exact": 0, "curve": 0, "extrapolated": pytest.approx(1)}
    words = (
        "collectives of 8 ranks are extrapolated from those of 4 by ring formulas, as inside one node: `perfmodel "
        "calibrate --interconnect wires --ranks 8 --scenario FILE` measures them"
    )
    assert words in more.warnings
    assert not any("extrapolated" in warning for warning in measured.warnings)


NOTHING_MEASURED = {"all_gather 4": wired().interconnects["wires"].segments["all_reduce 4"]}
CPU = DEVICE.model_copy(update={"kind": "cpu"})


@pytest.mark.parametrize(
    "profile",
    [
        wired(segments=NOTHING_MEASURED),
        wired().model_copy(update={"interconnect": None}),
        wired().model_copy(update={"device": CPU}),
    ],
    ids=["no all_reduce", "no interconnect", "cpu"],
)
def test_more_gpus_are_refused_where_nothing_tells_of_them(profile: Profile) -> None:
    with pytest.raises(PerfModelError) as caught:
        predict(with_ranks(8), profile)
    assert str(caught.value) == (
        "hardware.gpus must be at most 4, what profile toy has (got 8), where it has no all_reduce of GPUs to extrapolate "
        "from. Use fewer, or measure it with `perfmodel calibrate --interconnect`."
    )


def test_ranks_of_zero1_hold_the_states_of_what_they_own() -> None:
    """All memory that two ranks differ in, before a step, are the optimizer states of their shares."""
    curve = wired().interconnects["wires"].segments["all_reduce 4"]
    wires = wired(segments={"all_reduce 4": curve, "broadcast 4": curve})
    sharded = with_ranks(4).model_copy(update={"parallelism": ParallelismSection(dp=4, strategy="zero1")})
    found = predict(sharded, wires)
    states = [memory.peak_kind_bytes[StorageKind.OPTIMIZER_STATE] for memory in found.rank_memories]
    whole = predict(with_ranks(4), wired()).rank_memories[0].peak_kind_bytes[StorageKind.OPTIMIZER_STATE]
    assert sum(states) == whole
    assert found.largest_memory is max(found.rank_memories, key=lambda each: each.device_bytes)


def test_no_node_has_hundreds_of_gpus() -> None:
    with pytest.raises(PerfModelError, match="at most 72 over wires, which joins the GPUs of one node"):
        predict(with_ranks(73), wired())
    assert predict(with_ranks(72), wired()).step_time_s > 0


@pytest.mark.parametrize(
    ("ranks", "measured", "asked", "sentence"),
    [
        (4, 2, 1, "2 for 4 GPUs over wires, which was measured with 4 ranks on 2 nodes (got 1)."),
        (4, 1, 2, "1 for 4 GPUs over wires, which was measured with 4 ranks on 1 node (got 2)."),
        (8, 2, 2, "4 for 8 GPUs over wires, which was measured with 4 ranks on 2 nodes (got 2)."),
    ],
)
def test_nodes_are_those_of_the_interconnect(ranks: int, measured: int, asked: int, sentence: str) -> None:
    with pytest.raises(PerfModelError) as caught:
        predict(with_ranks(ranks, nodes=asked), wired(nodes=measured))
    rule, remedy = f"hardware.nodes must be {sentence}", "Set it, or choose another hardware.interconnect."
    assert str(caught.value) == f"{rule} {remedy}"


def test_one_gpu_is_on_one_node() -> None:
    with refused("hardware.nodes", 1, 2):
        predict(Scenario.model_validate(DATA | {"hardware": {"profile": "toy.json", "nodes": 2}}), PROFILE)


@pytest.mark.parametrize("path", sorted(SCENARIOS.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_scenarios_are_supported(path: Path) -> None:
    """Those that ask about the reader's own machine name a profile that `make cpu` measures."""
    scenario = load_scenario(path)
    name = scenario.hardware.profile
    if name.endswith(".json"):
        assert path.stem.endswith("-cpu")
    else:
        check_supported(scenario, load_profile(find_profile(name)))


def test_what_is_assumed_is_said() -> None:
    assert predict(with_hardware(gpu_speeds=[1, 1, 1, 1]), wired()).assumptions == ()
    found = predict(with_hardware(gpu_speeds=[1, 0.5, 1, 1]), wired(bandwidth_factor=2))
    assert found.assumptions == ("links 2 x as fast as measured", "GPU speeds 1, 0.5, 1, 1")


def test_an_interconnect_that_lacks_something_says_so() -> None:
    warned = [warning for warning in predict(with_hardware(), wired()).warnings if warning.startswith("interconnect")]
    assert warned == [
        "interconnect wires has no host call times (a call is taken to cost no more than a kernel's launch), no couplings "
        "(kernels and collectives are taken not to slow each other), no communicator_bytes (communicators are taken to "
        "need no memory): `perfmodel calibrate --interconnect wires` measures what is missing"
    ]
