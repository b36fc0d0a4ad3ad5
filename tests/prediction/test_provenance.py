"""Shares that add up, and what a profile is said to leave out."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from perfmodel.cost.collectives import CollectiveCost
from perfmodel.cost.kernels.estimates import spread_of_factor
from perfmodel.cost.kernels.kernel_cost import KernelCost, ScaledTime, Scaling, Source
from perfmodel.cost.routing import Route
from perfmodel.hardware.interconnect import CallRecord, CollectiveSegment, Coupling, Interconnect
from perfmodel.hardware.profile import Cache, Launch, find_profile, load_profile
from perfmodel.prediction.prediction import KernelUse
from perfmodel.prediction.provenance import (
    Talk,
    batches_messages,
    collective_shares,
    communication_warnings,
    host_warnings,
    kernel_shares,
    kernel_warnings,
    message_assumptions,
    scaled_share,
    scaling_assumptions,
    sharding_warnings,
    unsteady_warnings,
)
from perfmodel.program.program import HOST, Collective, Insertion, Instruction, Program
from perfmodel.program.ranks import rank_programs
from perfmodel.scenario.yaml_file import load_question, with_assignments
from perfmodel.simulate.timeline import Communication
from perfmodel.trace.trace import EventKind
from tests.places import ROOT
from tests.report.synthetic import prediction, profile, timeline

EXACT = CollectiveCost(1.0, 0.0, "exact")
FAR = CollectiveCost(3.0, 0.0, "extrapolated")
SIZE = Collective("all_reduce", "float32", 4, 4)
CALLS = {"all_reduce": CallRecord(time_s=1e-6)}
COUPLINGS = {"gemm_fp32": Coupling(compute_factor=1.1, communication_factor=1.1, tail_share=0.5)}
BYTES = {"4": 1}


def test_scaling_names_what_differs_in_the_datasheet() -> None:
    known = load_profile(find_profile("h200-sxm-x4"))
    changes = ["device.peak_flops_per_s.bf16=2e15", "device.l2_bytes=125829120", "device.peak_memory_bytes_per_s=8e12"]
    asked = with_assignments(known, [f"hardware.{change}" for change in changes])
    use = prediction().kernels[0]
    before = ScaledTime(before_s=2.0, following_s=1.25, log_ratio=-1.0)
    cost = use.cost._replace(time_s=1.0, cold_time_s=1.0, scaling=Scaling(before, before))
    kernels = [replace(use, cost=cost, count=1, total_s=1.0), replace(use, total_s=3.0)]
    assert scaled_share(kernels) == 0.25
    (text,) = scaling_assumptions(kernels, asked)
    for part in ("8 TB/s instead of 4.8 TB/s", "2000 TFLOP/s instead of 989.5 TFLOP/s", "59.6 MiB instead of", "25 %"):
        assert part in text
    assert list(scaling_assumptions([use], asked)) == []
    assert list(scaling_assumptions(kernels, known)) == []


def program(*collectives: Collective) -> Program:
    return replace(prediction().program, collectives=collectives)


def test_kernels_by_source() -> None:
    assert kernel_shares(prediction().kernels) == {
        "exact": pytest.approx(30 / 37),
        "curve": pytest.approx(2 / 37),
        "extrapolated": 0.0,
        "estimated": 0.0,
        "roofline": pytest.approx(5 / 37),
    }
    unstable = profile().model_copy(update={"unstable": (prediction().kernels[0].key,)})
    assert [warning.split(":")[0] for warning in kernel_warnings([prediction().kernels], unstable)] == [
        "14 % of the device time is from a roofline",
        "1 kernel of this step was measured unstable",
    ]


def test_collectives_by_their_time_alone_as_often_as_they_run() -> None:
    """One of 1 s three times, and one of 3 s that is slowed to 5."""
    ran = [Communication(number, 0, 1, 0.0, 0.0, end_s) for number, end_s in [(0, 1.0), (0, 1.0), (0, 1.0), (1, 5.0)]]
    found = collective_shares(replace(timeline(), communications=tuple(ran)), [EXACT, FAR])
    assert found == {"exact": 0.5, "curve": 0.0, "extrapolated": 0.5}
    assert collective_shares(timeline(), []) == {}


@pytest.mark.parametrize(
    ("known", "named"),
    [
        ({"host": CALLS, "couplings": COUPLINGS, "communicator_bytes": BYTES}, []),
        ({"host": {"reference": CALLS["all_reduce"]}, "couplings": COUPLINGS, "communicator_bytes": BYTES}, ["host call times"]),
        ({"host": CALLS, "communicator_bytes": BYTES}, ["couplings"]),
        ({"host": CALLS, "couplings": COUPLINGS}, ["communicator_bytes"]),
        ({}, ["host call times", "couplings", "communicator_bytes"]),
    ],
)  # fmt: skip
def test_what_an_interconnect_lacks_is_named_once(known: dict[str, object], named: list[str]) -> None:
    wires = Interconnect.model_validate({"backend": "nccl", **known})
    found = list(communication_warnings([Talk(program(SIZE), [EXACT], [Route("w", wires)])], profile(), "w"))
    assert len(found) == bool(named)
    words = "".join(found)
    assert [name for name in ("host call times", "couplings", "communicator_bytes") if f"no {name} (" in words] == named
    assert list(communication_warnings([Talk(program(), [], [])], profile(), "w")) == []


@pytest.mark.parametrize(("measured", "warns"), [({}, True), ({"fsdp forward group": CALLS["all_reduce"]}, False)])
def test_calls_of_fully_shard_that_were_not_measured_are_named(measured: dict[str, CallRecord], warns: bool) -> None:
    known = {"host": CALLS | measured, "couplings": COUPLINGS, "communicator_bytes": BYTES}
    wires = Interconnect.model_validate({"backend": "nccl", **known})
    calls = Insertion(0, 0, (Instruction(HOST, call="fsdp forward group"),))
    sharded = replace(program(SIZE), insertions=(calls,))
    waiting = Launch(waiting_gap_s=(0.0, 1e-6))
    told = profile().model_copy(update={"launch": waiting})
    found = list(communication_warnings([Talk(sharded, [EXACT], [Route("w", wires)])], told, "w"))
    assert ["no times of fully_shard's hooks" in each for each in found] == [True] * warns
    (first, *others) = communication_warnings([Talk(sharded, [EXACT], [Route("w", wires)])], profile(), "w")
    assert "no waiting_gap_s" in first
    assert others == found


def test_ranks_that_drift_apart_are_told_of() -> None:
    (told,) = unsteady_warnings([1.0, 1.002])
    assert "(1 s to 1.002 s a step)" in told
    assert list(unsteady_warnings([1.0, 1.0005])) == list(unsteady_warnings([2.0])) == []


def test_a_cpu_needs_neither_couplings_nor_memory() -> None:
    wires = Interconnect(backend="gloo", host=CALLS)
    assert list(communication_warnings([Talk(program(SIZE), [EXACT], [Route("w", wires)])], profile("cpu"), "w")) == []


SENT = Collective("send_recv", "float32", 4 * 2**20, 2, "pp", "send")
EXCHANGED = Collective("exchange", "float32", 4 * 2**20, 2, "pp", "both")
OF_MESSAGES = {"isend": CALLS["all_reduce"], "pp forward": CALLS["all_reduce"]}
KNOWN: dict[str, object] = {
    "host": OF_MESSAGES,
    "communicator_bytes": BYTES,
    "message_couplings": dict.fromkeys(("send", "receive", "wait"), COUPLINGS),
    "messages_ahead": {"1024": 8},
}


@pytest.mark.parametrize(
    ("left_out", "named"),
    [
        ({}, []),
        ({"host": {"pp forward": CALLS["all_reduce"]}}, ["times of messages' calls"]),
        ({"host": {"isend": CALLS["all_reduce"]}}, ["times of the pipeline's own calls"]),
        ({"host": {}}, ["host call times"]),
        ({"message_couplings": {}, "couplings": COUPLINGS}, ["message_couplings"]),
        ({"message_couplings": {}}, ["couplings", "message_couplings"]),
        ({"message_couplings": {"send": COUPLINGS}}, ["message_couplings of receive and wait"]),
        ({"messages_ahead": {}}, ["messages_ahead"]),
    ],
)
def test_what_an_interconnect_lacks_for_messages_is_named(left_out: dict[str, object], named: list[str]) -> None:
    """Once for all ranks; couplings of collectives are not missed where only messages go."""
    wires = Interconnect.model_validate({"backend": "nccl", **KNOWN, **left_out})
    calls = Insertion(0, 0, (Instruction(HOST, call="pp forward"), Instruction(HOST, call="isend again")))
    rank = Talk(replace(program(SENT), insertions=(calls,)), [EXACT], [Route("w", wires)])
    silent = Talk(program(SENT), [EXACT], [Route("w", wires)])
    found = list(communication_warnings([silent, rank, rank], profile(), "w"))
    assert len(found) == bool(named)
    words = "".join(found)
    assert words.count("no ") - words.count("no more") == len(named)
    assert all(f"no {name} (" in words for name in named)


def test_beside_collectives_couplings_of_collectives_are_missed() -> None:
    wires = Interconnect.model_validate({"backend": "nccl", **KNOWN})
    rank = Talk(program(SENT, SIZE), [EXACT, EXACT], [Route("w", wires)] * 2)
    (found,) = communication_warnings([rank], profile(), "w")
    assert found.startswith("interconnect w has no couplings (")


def test_messages_are_extrapolated_in_size() -> None:
    curve = CollectiveSegment(least_bytes=1, most_bytes=2**20, alpha_s=1e-6, beta_s_per_byte=0.0)
    segments = {"send_recv 2": (curve,), "exchange 2": (curve,)}
    wires = Interconnect.model_validate({"backend": "nccl", "segments": segments, **KNOWN})
    first, second = (Talk(program(each), [FAR], [Route("w", wires)]) for each in (SENT, EXCHANGED))
    assert list(communication_warnings([first, second, first], profile(), "w")) == [
        "messages of 4 MiB are extrapolated from sizes of up to 1 MiB by the end of their curve: `perfmodel calibrate "
        "--interconnect w --ranks 2 --scenario FILE` measures them"
    ]


def test_the_worst_rank_is_told() -> None:
    """Its roofline counts, not the measured kernels of the other; equal ones are told of the first."""
    good = [use for use in prediction().kernels if use.cost.source == "exact"]
    (rank, *_) = kernel_warnings([good, prediction().kernels, prediction().kernels], profile())
    assert rank.startswith("14 % of the device time of rank 1 is from a roofline")
    curves = [use for use in prediction().kernels if use.cost.source != "roofline"]
    (rank,) = kernel_warnings([good, curves], profile())
    assert rank.startswith("6 % of the device time of rank 1 is from fitted curves")
    assert list(kernel_warnings([good, good], profile())) == []


def use(name: str, source: Source, total_s: float, factor: float) -> KernelUse:
    spread = spread_of_factor(factor)
    cost = KernelCost(total_s, spread, source, "other", 0.0, 0.0, "fp32", 1, total_s)
    return KernelUse(f"aten.{name}(float32[8,8])", cost, 1, total_s)


def test_what_was_not_measured_is_named_however_short_it_seems() -> None:
    """First what may take longest; a name once, and four of them."""
    good = [each for each in prediction().kernels if each.cost.source == "exact"]
    names = ("sort.default", "sort.default", "fft", "svd", "topk.default", "median.dim", "mode.default")
    few = [use(name, "estimated", (1 + i) * 1e-12, 30 if name == "fft" else 9) for i, name in enumerate(names)]
    (told,) = kernel_warnings([[*good, *few]], profile())
    assert told.startswith(
        "not measured, and estimated at best to a factor of 30 (fft) and 9 (mode, median.dim, topk) and up to 9 (2 more);"
    )


def test_each_operator_has_the_factor_that_it_is_estimated_to() -> None:
    """A matrix multiplication to a factor of 3, though another kernel is estimated to 10; the same name to its worst."""
    good = [use for use in prediction().kernels if use.cost.source == "exact"]
    busy_s = sum(use.total_s for use in good)
    factors = {"mm.default": (3,), "complex.default": (10,), "gather.default": (3, 5), "sort.default": (5,)}
    rough = [use(name, "estimated", busy_s, factor) for name, each in factors.items() for factor in each]
    (warning,) = kernel_warnings([[*good, *rough]], profile())
    groups = dict(re.findall(r"(\d+) \(([^)]*)\)", warning))
    assert {factor: set(names.split(", ")) for factor, names in groups.items()} == {
        "3": {"mm"}, "5": {"gather", "sort"}, "10": {"complex"},
    }  # fmt: skip


def test_a_rough_time_is_told_of_where_it_may_count() -> None:
    good = [use for use in prediction().kernels if use.cost.source == "exact"]
    busy_s = sum(use.total_s for use in good)
    assert list(kernel_warnings([[*good, use("gather.default", "estimated", 0.003 * busy_s, 3)]], profile())) == []
    (told,) = kernel_warnings([[*good, use("gather.default", "estimated", 0.004 * busy_s, 3)]], profile())
    assert told.startswith("not measured, and estimated at best to a factor of 3 (gather);")


def test_shapes_outside_those_of_a_curve_are_told_of_where_they_count() -> None:
    good = [use for use in prediction().kernels if use.cost.source == "exact"]
    assert list(kernel_warnings([[*good, use("mean.dim", "extrapolated", 1e-9, 1.5)]], profile())) == []
    (told,) = kernel_warnings([[*good, use("mean.dim", "extrapolated", 10e-6, 1.5)]], profile())
    assert told.startswith(
        "25 % of the device time is from curves outside the shapes that they were fitted on (mean.dim)"
    )


def test_a_cache_whose_misses_of_code_were_not_measured_is_told_of() -> None:
    good = [use for use in prediction().kernels if use.cost.source == "exact"]
    of_before, known = (
        profile().model_copy(update={"cache": Cache(capacity_bytes=1.0, code_miss_s=miss_s)}) for miss_s in (None, 0.0)
    )
    (told,) = kernel_warnings([good], of_before)
    assert "no cache.code_miss_s" in told
    assert list(kernel_warnings([good], known)) == []


@pytest.mark.parametrize(
    ("torch", "batched", "words"),
    [
        ("2.9.1", True, "all on the pipeline's communicator, as torch 2.9 posts them"),
        ("2.12.0a0", False, "on a communicator of each two ranks, as torch 2.12 posts them"),
        (
            "",
            False,
            "on a communicator of each two ranks, as torch 2.12 and later post them (the profile names no torch",
        ),
    ],
)
def test_torch_s_version_says_how_single_messages_are_posted(torch: str, batched: bool, words: str) -> None:
    known = profile().model_copy(update={"provenance": {"torch": torch}})
    assert batches_messages(known) is batched
    (found,) = message_assumptions([program(EXCHANGED), program(SENT)], known)
    assert found.startswith(f"single messages {words}")
    assert list(message_assumptions([program(EXCHANGED), program(SIZE)], known)) == []


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_sharding_without_blocks_is_said_to_be_one_group(strategy: str) -> None:
    scenario, _ = load_question(ROOT / "scenarios/gpt2.7b-zero3.yaml", [f"parallelism.strategy={strategy}"])
    known = rank_programs(scenario)[0].program
    steady = known.trace.steady
    is_border = (steady.kind == EventKind.BLOCK_ENTER) | (steady.kind == EventKind.BLOCK_EXIT)
    kind = np.where(is_border, EventKind.NODE, steady.kind)
    unknown = replace(known, trace=replace(known.trace, steady=replace(steady, kind=kind)))
    assert list(sharding_warnings(scenario, known)) == []
    (warning,) = sharding_warnings(scenario, unknown)
    assert "one group" in warning
    target = scenario.model.model_copy(update={"family": None, "target": "nets:Net"})
    (warning,) = sharding_warnings(scenario.model_copy(update={"model": target}), unknown)
    assert "model.blocks" in warning and "parallelism.fsdp.wrap: root" in warning
    asked, _ = load_question(ROOT / "scenarios/gpt2.7b-zero3.yaml", ["parallelism.fsdp.wrap=root"])
    assert list(sharding_warnings(asked, unknown)) == []


def test_what_the_host_takes_unmeasured_is_named() -> None:
    scenario, known = load_question(ROOT / "scenarios" / "gpt2.7b.yaml")
    assert list(host_warnings(known, scenario)) == []
    kept = {key: record for key, record in known.host.items() if key not in ("node", "optimizer adamw foreach")}
    (text,) = host_warnings(known.model_copy(update={"host": kept}), scenario)
    assert "(node, optimizer adamw foreach)" in text
    forward = scenario.model_copy(update={"mode": "forward"})
    (text,) = host_warnings(known.model_copy(update={"host": kept}), forward)
    assert "(node)" in text
