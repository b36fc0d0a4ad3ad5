"""What the ranks are asked to measure, by options, scenarios and what the profile has. Nothing is measured."""

from __future__ import annotations

from typing import Any

import pytest

from calibrate.interconnect.plan import InterconnectOptions, check_options, request_of, usual_timeout_s
from calibrate.stage_names import GENERAL
from perfmodel.hardware.interconnect import Interconnect
from perfmodel.hardware.profile import Device, HostRecord, Profile, find_profile, load_profile
from tests.calibrate.interconnect.scenarios import ddp_scenario, pipeline_scenario, sharded_scenario
from tests.refusals import refused


@pytest.fixture
def cpu() -> Profile:
    known = Profile(name="cpu", device=Device(kind="cpu", name="cpu", memory_bytes=1))
    return known.model_copy(update={"host": {"reference": HostRecord(time_s=0.003)}})


@pytest.fixture(scope="module")
def h200() -> Profile:
    return load_profile(find_profile("h200-sxm-x4"))


def gloo(ranks: int = 2, scenarios: Any = (), **options: Any) -> InterconnectOptions:
    return InterconnectOptions("gloo", "cpu", ranks, scenarios, **options)


def test_all_stages_are_asked_for_and_what_scenarios_send(cpu: Profile) -> None:
    request = request_of(gloo(scenarios=[ddp_scenario()]), cpu)
    assert (request.reference_s, request.stages, request.own) == (0.003, GENERAL, ())  # kernels are slowed on GPUs only
    assert [(kind, ranks) for kind, _, _, ranks in request.exact] == [("all_reduce", 2)]


@pytest.mark.parametrize(
    ("nodes", "dp", "expected"),
    [
        (1, 4, {("all_gather", 2), ("reduce_scatter", 2), ("all_reduce", 2)}),
        (2, 4, {("all_reduce", 2)}),  # the shards of two ranks are inside the nodes
        (2, 2, {("all_gather", 2), ("reduce_scatter", 2)}),  # of which each has one
    ],
)
def test_groups_inside_a_node_are_not_asked_of_the_interconnect_between_nodes(
    cpu: Profile, nodes: int, dp: int, expected: set[tuple[str, int]]
) -> None:
    scenario = sharded_scenario(dp, **({"replicate": 2} if dp == 4 else {}))
    request = request_of(gloo(4, [scenario], nodes=nodes, rendezvous="host:1" if nodes > 1 else None), cpu)
    assert {(kind, ranks) for kind, _, _, ranks in request.exact} == expected


@pytest.mark.parametrize(
    ("budget_s", "expected"), [(None, (20.0, 400.0)), (10.0, (10.0, 400.0)), (90.0, (90.0, 470.0))]
)
def test_a_longer_budget_moves_the_usual_time_limit(
    cpu: Profile, budget_s: float | None, expected: tuple[float, float]
) -> None:
    request = request_of(gloo(budget_s=budget_s), cpu)
    assert (request.budget_s, usual_timeout_s(request)) == expected


def test_no_budget_leaves_what_scenarios_send(cpu: Profile) -> None:
    request = request_of(gloo(scenarios=[ddp_scenario()], budget_s=0), cpu)
    assert (request.stages, len(request.exact), request.budget_s) == ((), 1, 20.0)
    with refused("--budget", "--scenario", "gloo", 2):
        request_of(gloo(budget_s=0), cpu)


@pytest.mark.parametrize(("budget_s", "stages"), [(None, GENERAL), (0, ())])
def test_messages_of_a_pipeline_are_asked_for_in_both_forms(
    cpu: Profile, budget_s: float | None, stages: tuple[str, ...]
) -> None:
    """Hidden states of a micro-batch of two samples, and their gradients, which are as large."""
    scenario = pipeline_scenario()
    request = request_of(gloo(4, [scenario], budget_s=budget_s), cpu)
    size_bytes = 2 * 4 * scenario.model.resolved().width * 2
    assert set(request.exact) == {(kind, "bfloat16", size_bytes, 2) for kind in ("send_recv", "exchange")}
    assert (len(request.exact), request.stages) == (2, stages)


def test_a_pipeline_over_another_interconnect_asks_for_nothing(cpu: Profile) -> None:
    assert request_of(gloo(scenarios=[pipeline_scenario(interconnect="nvlink")]), cpu).exact == ()


def test_kernels_of_all_stages_are_measured_beside_a_receive_that_waits(h200: Profile) -> None:
    scenario = pipeline_scenario()
    request = request_of(InterconnectOptions("nvlink", "cuda", 2, [scenario]), h200)
    assert {kind for kind, *_ in request.exact} == {"send_recv", "exchange"}
    assert {each.collective for each in request.own} == {"wait"}
    head = f"{scenario.model.resolved().vocabulary}"  # which the last stage alone has
    assert any(head in each.job.key for each in request.own)


def test_kernels_of_a_pipeline_under_data_parallelism_are_measured_beside_both(h200: Profile) -> None:
    request = request_of(InterconnectOptions("nvlink", "cuda", 4, [pipeline_scenario(dp=2)]), h200)
    keys = {
        beside: {each.job.key for each in request.own if each.collective == beside} for beside in ("all_reduce", "wait")
    }
    assert keys["all_reduce"] == keys["wait"] != set()
    assert len(request.own) == 2 * len(keys["wait"])


@pytest.mark.parametrize(("budget_s", "stages"), [(None, GENERAL), (0, ())])
def test_on_gpus_scenarios_kernels_are_measured_beside_a_collective(
    h200: Profile, budget_s: float | None, stages: tuple[str, ...]
) -> None:
    scenario = sharded_scenario()
    request = request_of(InterconnectOptions("nvlink", "cuda", 2, [scenario, scenario], budget_s=budget_s), h200)
    assert (request.stages, usual_timeout_s(request)) == (stages, 425.0)
    keys = [each.job.key for each in request.own]
    assert len(set(keys)) == len(keys) > 1
    assert any(key.startswith("aten.mm.default(") for key in keys)
    assert {each.collective for each in request.own} == {"all_gather"}
    assert [each.share for each in request.own] == sorted((each.share for each in request.own), reverse=True)


def test_a_scenario_of_another_interconnect_gives_no_kernels(h200: Profile) -> None:
    request = request_of(InterconnectOptions("host-memory", "cuda", 2, [ddp_scenario()], budget_s=5.0), h200)
    assert (request.own, request.exact) == ((), ())


def test_a_profile_that_knows_no_kernels_leaves_them_out(cpu: Profile, capsys: pytest.CaptureFixture[str]) -> None:
    request = request_of(InterconnectOptions("nvlink", "cuda", 2, [sharded_scenario()]), cpu)
    assert (request.own, usual_timeout_s(request)) == ((), 400.0)
    assert "no kernels of its own are measured beside a collective: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "device", "ranks", "key", "named"),
    [
        ("nvlink", "cpu", 2, "--interconnect", ("nvlink", "gloo", "--device cuda")),
        ("gloo", "cuda", 2, "--interconnect", ("gloo", "--device cpu")),
        ("gloo", "cpu", 1, "--ranks", (2, 1)),
        ("nvlnk", "cuda", 2, "interconnect", ("nvlnk", "nvlink")),
    ],
)
def test_options_that_no_machine_has_are_refused(
    name: str, device: str, ranks: int, key: str, named: tuple[object, ...]
) -> None:
    with refused(key, *named):
        check_options(InterconnectOptions(name, device, ranks))


@pytest.mark.parametrize(
    ("only", "known", "options", "key", "named"),
    [
        (["cals"], True, {}, "--only", ("'cals'", "'calls'")),
        (["contention"], True, {}, "--only contention", ("--device cuda", "cpu")),
        (["calls"], False, {}, "--only", ("gloo",)),
        (["calls"], True, {"scenarios": [None]}, "--only", ("--scenario",)),
        (["calls"], True, {"budget_s": 0}, "--only", ("--budget 0",)),
    ],
)
def test_only_is_for_stages_of_an_interconnect_that_is_known(
    cpu: Profile, only: list[str], known: bool, options: dict[str, Any], key: str, named: tuple[str, ...]
) -> None:
    profile = cpu.model_copy(update={"interconnects": {"gloo": Interconnect(backend="gloo")} if known else {}})
    with refused(key, *named):
        request_of(gloo(only=only, **options), profile)
