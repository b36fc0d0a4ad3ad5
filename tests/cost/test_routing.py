"""Which wires groups of ranks talk over: inside a node, between nodes, and how many at a time."""

from __future__ import annotations

from typing import Any

import pytest

from perfmodel.cost.collectives import collective_cost
from perfmodel.cost.routing import route_of
from perfmodel.errors import PerfModelError
from perfmodel.hardware.interconnect import CollectiveSegment, Interconnect
from perfmodel.hardware.profile import Device, Profile
from perfmodel.prediction.predict import predict
from perfmodel.prediction.prediction import Prediction
from perfmodel.program.program import Members
from perfmodel.scenario.scenario import Scenario
from tests.refusals import refused

DEVICE = Device(
    kind="cuda", name="Toy GPU", memory_bytes=2**36, peak_flops_per_s={"fp32": 1e9}, peak_memory_bytes_per_s=1e9
)
KINDS = ("all_reduce", "all_gather", "reduce_scatter")
FAST_S, SLOW_S = 1e-10, 1e-8  # a byte
LATENCY_S = 1e-5


def wires(beta_s_per_byte: float, nodes: int, groups: tuple[int, ...] = (2, 4), taken_bytes: int = 0) -> Interconnect:
    curve = CollectiveSegment(least_bytes=1, most_bytes=2**30, alpha_s=LATENCY_S, beta_s_per_byte=beta_s_per_byte)
    segments = {f"{kind} {ranks}": (curve,) for kind in KINDS for ranks in groups}
    communicators = {"library": 1000, "2": taken_bytes, "4": taken_bytes} if taken_bytes else {}
    return Interconnect(backend="nccl", nodes=nodes, segments=segments, communicator_bytes=communicators)


def profile(**interconnects: Interconnect) -> Profile:
    found = interconnects or {"slow": wires(SLOW_S, 2, taken_bytes=10), "fast": wires(FAST_S, 1, taken_bytes=1)}
    return Profile(name="toy", device=DEVICE, gpus=4, interconnects=found, interconnect=next(iter(found)))


def scenario(dp: int = 4, nodes: int = 2, interconnect: str | None = None, **fsdp: Any) -> Scenario:
    return Scenario.model_validate(
        {
            "model": {"family": "gpt", "size": "tiny"},
            "batch": {"size": 1, "sequence_length": 8},
            "parallelism": {"dp": dp, "strategy": "zero3", "fsdp": fsdp},
            "hardware": {"profile": "toy.json", "gpus": dp, "nodes": nodes, "interconnect": interconnect},
        }
    )


def routed(group: str, ranks: int, asked: Scenario, known: Profile | None = None) -> tuple[str, int]:
    found = route_of(Members(group, ranks), asked, known or profile())
    return found.name, found.sharing


@pytest.mark.parametrize(
    ("group", "ranks", "dp", "nodes", "expected"),
    [
        ("dp", 4, 4, 2, ("slow", 1)),
        ("shard", 2, 4, 2, ("fast", 1)),
        ("replicate", 2, 4, 2, ("slow", 2)),  # of two shards, each on both nodes
        ("shard", 2, 16, 2, ("fast", 1)),
        ("replicate", 8, 16, 2, ("slow", 2)),
        ("shard", 8, 16, 2, ("fast", 1)),
        ("replicate", 2, 16, 2, ("slow", 8)),
        ("shard", 8, 16, 4, ("slow", 1)),  # on two nodes of four ranks each
        ("replicate", 2, 16, 4, ("slow", 4)),  # of eight shards, of which a node has four
        ("shard", 3, 12, 3, ("slow", 1)),  # some lie across the border
        ("reshard", 2, 8, 2, ("fast", 1)),
        ("reshard", 4, 8, 4, ("slow", 1)),
    ],
)
def test_routes(group: str, ranks: int, dp: int, nodes: int, expected: tuple[str, int]) -> None:
    assert routed(group, ranks, scenario(dp, nodes)) == expected


@pytest.mark.parametrize(
    ("stages", "dp", "nodes", "messages", "reductions"),
    [
        (2, 2, 2, ("fast", 1), ("slow", 2)),  # a pipeline on each node, and ranks of both in each reduction
        (2, 4, 2, ("fast", 1), ("slow", 2)),
        (4, 2, 4, ("slow", 1), ("slow", 2)),  # of four groups that reduce, each node has two ranks
    ],
)
def test_routes_of_pipelines(
    stages: int, dp: int, nodes: int, messages: tuple[str, int], reductions: tuple[str, int]
) -> None:
    ranks = stages * dp
    parallelism = {"dp": dp, "strategy": "ddp", "pp": {"stages": stages, "micro_batches": 4}}
    hardware = {"profile": "toy.json", "gpus": ranks, "nodes": nodes}
    asked = Scenario.model_validate(
        scenario().model_dump(exclude_unset=True)
        | {"batch": {"size": 4, "sequence_length": 8}, "parallelism": parallelism, "hardware": hardware}
    )
    assert routed("pp", 2, asked) == routed("pp 0-1", 2, asked) == messages
    assert routed("replicate", dp, asked) == reductions


@pytest.mark.parametrize("group", ["dp", "shard", "replicate", "reshard"])
def test_inside_one_node_every_group_has_the_scenario_s_wires(group: str) -> None:
    assert routed(group, 2, scenario(nodes=1, interconnect="fast")) == ("fast", 1)


def test_the_machine_s_own_wires_go_before_others_of_one_node() -> None:
    known = {"other": wires(FAST_S, 1), "own": wires(FAST_S, 1), "slow": wires(SLOW_S, 2)}
    asked = scenario(interconnect="slow")
    for own, expected in [("own", "own"), ("slow", "other")]:
        made = profile(**known).model_copy(update={"interconnect": own})
        assert routed("shard", 2, asked, made) == (expected, 1)


def test_a_profile_without_wires_inside_a_node_is_refused() -> None:
    with refused("profile toy", "slow"):
        predict(scenario(replicate=2), profile(slow=wires(SLOW_S, 2)))


@pytest.mark.parametrize(("backend", "measured"), [("nccl", "nvlink"), ("gloo", "gloo")])
def test_the_remedy_measures_wires_of_the_same_library(backend: str, measured: str) -> None:
    """Those of the other are there, and do not serve."""
    slow = wires(SLOW_S, 2).model_copy(update={"backend": backend})
    other = wires(FAST_S, 1).model_copy(update={"backend": "gloo" if backend == "nccl" else "nccl"})
    with pytest.raises(PerfModelError, match=rf"`perfmodel calibrate --interconnect {measured}`\.$"):
        route_of(Members("shard", 2), scenario(), profile(slow=slow, other=other))


def test_nodes_of_unlike_numbers_of_ranks_are_refused() -> None:
    with refused("hardware.gpus", 4, 6):
        route_of(Members("shard", 3), scenario(6, 4), profile())


def test_groups_share_all_but_the_latency() -> None:
    known = wires(SLOW_S, 2)
    alone, shared = (collective_cost("all_reduce", 2, "float32", 2**20, known, sharing=each) for each in (1, 4))
    least_s = collective_cost("all_reduce", 2, "float32", 1, known).time_s
    assert shared.time_s == pytest.approx(least_s + 4 * (alone.time_s - least_s))
    fast = known.model_copy(update={"bandwidth_factor": 4.0})
    assert collective_cost("all_reduce", 2, "float32", 2**20, fast, sharing=4).time_s == pytest.approx(alone.time_s)


def times_s(found: Prediction) -> dict[str, list[float]]:
    """Of collectives by group, each over its bytes."""
    rates: dict[str, list[float]] = {}
    for ran in found.timeline.communications:
        called = found.program.collectives[ran.collective]
        rates.setdefault(called.group, []).append((ran.end_s - ran.start_s - LATENCY_S) / called.size_bytes)
    return rates


def test_a_step_gathers_inside_nodes_and_reduces_between_them() -> None:
    found = predict(scenario(replicate=2), profile())
    assert found.assumptions == (
        "groups inside a node as over fast",
        "2 groups of replicas that share each node's interconnect evenly",
    )
    rates = times_s(found)
    assert rates["shard"] == pytest.approx([FAST_S] * len(rates["shard"]), rel=1e-3)
    assert rates["replicate"] == pytest.approx([2 * SLOW_S] * len(rates["replicate"]), rel=1e-3)


def test_communicators_take_what_theirs_do() -> None:
    """One of each group, and the library once."""
    taken = {}
    for name, asked in {
        "all": scenario(),
        "hsdp": scenario(replicate=2),
        "resharded": scenario(reshard_after_forward=2),
    }.items():
        memory = predict(asked, profile()).memory
        assert memory is not None
        taken[name] = memory.outside_bytes
    assert taken == {"all": 1000 + 10, "hsdp": 1000 + 1 + 10, "resharded": 1000 + 10 + 1}
