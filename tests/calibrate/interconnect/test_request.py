"""Measuring an interconnect, end to end over gloo on two ranks, and merging it into a profile. No test asserts a time."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from calibrate.interconnect import session
from calibrate.interconnect.request import Measured, Request, measure
from calibrate.interconnect.session import calibrate_interconnect
from calibrate.interconnect.sizes import ladder
from calibrate.this_machine.wirings import environment, nodes_of
from perfmodel.cost.piecewise import fit_curves
from perfmodel.errors import PerfModelError
from perfmodel.hardware.interconnect import CollectiveRecord, Interconnect, collective_key
from perfmodel.hardware.profile import Device, HostRecord, Profile, find_profile, load_profile, save_profile
from perfmodel.scenario import families
from perfmodel.scenario.scenario import Scenario


@pytest.fixture(scope="module")
def gloo() -> Measured:
    exact = (("all_reduce", "float32", 12344, 2),)
    found = measure(Request("gloo", 2, "cpu", 60.0, exact, most_bytes=4096), timeout_s=180)
    assert found is not None
    return found


def test_every_kind_is_measured_over_the_ladder_and_the_exact_sizes(gloo) -> None:
    found, stages_s = gloo.interconnect, gloo.stages_s
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
    keys = {collective_key(kind, 2, "float32", size) for kind in kinds for size in (1024, 2048, 4096)}
    assert set(found.collectives) == keys | {"all_reduce 2 float32 12344"}
    assert found.collectives["all_reduce 2 float32 12344"].origin == "scenario"
    assert all(record.time_s and record.samples > 1 for record in found.collectives.values())
    assert set(found.segments) == {f"{kind} 2" for kind in kinds}
    assert set(stages_s) == {"group of 2", "calls"}


def test_host_calls_are_measured(gloo) -> None:
    found = gloo.interconnect
    ddp = {"ddp forward", "ddp parameter", "ddp bucket"}
    sharded = {f"fsdp {what} {each}" for what in ("forward", "gather", "reduce") for each in ("group", "parameter")}
    loops = ("clip", "zero_grad", "optimizer adamw foreach", "optimizer adamw fused", "optimizer sgd-momentum for-loop")
    over_dtensors = {f"dtensor {loop}{each}" for loop in loops for each in ("", " parameter")}
    assert {"reference", "all_reduce", "all_reduce async", "wait", *ddp, *sharded, *over_dtensors} <= set(found.host)
    assert "dtensor optimizer sgd fused" not in found.host  # torch has no rule for it
    assert sum(found.host[name].time_s for name in sharded) > 0
    assert found.host["dtensor optimizer adamw for-loop parameter"].time_s > 0
    assert all(call.time_s >= 0 for call in found.host.values())
    assert (found.backend, found.nodes, found.contention) == ("gloo", 1, {})


def test_curves_leave_out_scenarios_sizes_and_failures() -> None:
    records = {
        "all_reduce 2 float32 1024": CollectiveRecord(time_s=1.0),
        "all_reduce 2 float32 1000": CollectiveRecord(time_s=9.0, origin="scenario"),
        "all_reduce 2 float32 2048": CollectiveRecord(error="out of memory"),
    }
    ((only,),) = fit_curves(records).values()
    assert (only.points, only.alpha_s) == (1, 1.0)


def test_the_ladder_is_finer_where_protocols_switch() -> None:
    sizes = ladder(2**20)
    assert sizes[:3] == [1024, 2048, 4096]
    assert sizes[-4:] == [3 * 2**17, 2**19, 3 * 2**18, 2**20][-4:] or sizes[-1] == 3 * 2**19
    assert sorted(sizes) == sizes


@pytest.mark.parametrize(
    ("name", "rank", "expected"),
    [
        ("nvlink", 3, {}),
        ("host-memory", 0, {"NCCL_P2P_DISABLE": "1"}),
        ("two-nodes", 1, {"NCCL_HOSTID": "node0", "NCCL_SOCKET_IFNAME": "lo"}),
        ("two-nodes", 2, {"NCCL_HOSTID": "node1", "NCCL_SOCKET_IFNAME": "lo"}),
    ],
)
def test_wirings_are_made_by_the_environment(name: str, rank: int, expected: dict[str, str]) -> None:
    assert environment(name, rank, 4) == expected
    assert nodes_of(name) == (2 if name == "two-nodes" else 1)


@pytest.mark.parametrize(
    ("name", "ranks", "sentence"),
    [("nvlnk", 2, "Did you mean 'nvlink'"), ("two-nodes", 3, "must be an even number")],
)
def test_wirings_that_cannot_be_had_are_one_sentence(name: str, ranks: int, sentence: str) -> None:
    with pytest.raises(PerfModelError, match=sentence):
        environment(name, 0, ranks)


def ddp_scenario() -> Scenario:
    return Scenario.model_validate(
        {
            "model": {"family": "gpt", "size": "tiny"},
            "batch": {"size": 1, "sequence_length": 8},
            "parallelism": {"dp": 2, "strategy": "ddp"},
            "hardware": {"profile": "cpu.json", "gpus": 2, "interconnect": "gloo"},
        }
    )


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Request, float]]:
    """What is to be measured, and the time limit."""
    asked: list[tuple[Request, float]] = []

    def measure(request: Request, timeout_s: float, kept: Path) -> Measured | None:
        asked.append((request, timeout_s))
        if request.nodes > 1:  # as where rank 0 is not
            return None
        kept.write_text("{}")
        return Measured(
            Interconnect(backend="gloo", provenance={"measured_at": "now"}), {}, {"group of 2": 0.5, "calls": 1.5}
        )

    monkeypatch.setattr(session, "measure", measure)
    return asked


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "cpu.json"
    known = Profile(name="cpu", device=Device(kind="cpu", name="cpu", memory_bytes=1))
    save_profile(known.model_copy(update={"host": {"reference": HostRecord(time_s=0.003)}}), path)
    return path


def test_an_interconnect_is_added_to_a_profile(path: Path, asked: list[tuple[Request, float]]) -> None:
    calibrate_interconnect(path, "gloo", "cpu", 2, [ddp_scenario()])
    found = load_profile(path)
    assert (list(found.interconnects), found.interconnect, found.gpus) == (["gloo"], "gloo", 2)
    assert found.provenance["interconnects_s"] == {"gloo": {"group of 2": 0.5, "calls": 1.5}}
    ((request, _),) = asked
    assert request.reference_s == 0.003
    assert request.stages == session.GENERAL
    assert [(kind, ranks) for kind, _, _, ranks in request.exact] == [("all_reduce", 2)]
    assert request.own == ()  # contention is measured on GPUs only


@pytest.mark.parametrize(
    ("nodes", "dp", "expected"),
    [
        (1, 4, {("all_gather", 2), ("reduce_scatter", 2), ("all_reduce", 2)}),
        (2, 4, {("all_reduce", 2)}),  # the shards of two ranks are inside the nodes
        (2, 2, {("all_gather", 2), ("reduce_scatter", 2)}),  # of which each has one
    ],
)
def test_groups_inside_a_node_are_not_asked_of_the_wires_between_nodes(
    path: Path, asked: list[tuple[Request, float]], nodes: int, dp: int, expected: set[tuple[str, int]]
) -> None:
    fsdp = {"replicate": 2} if dp == 4 else {}
    sections = {"parallelism": {"dp": dp, "strategy": "zero3", "fsdp": fsdp}, "hardware": {"profile": "c", "gpus": dp}}
    sharded = Scenario.model_validate(ddp_scenario().model_dump(exclude={"parallelism", "hardware"}) | sections)
    calibrate_interconnect(path, "gloo", "cpu", 4, [sharded], nodes=nodes, rendezvous="host:1" if nodes > 1 else None)
    ((request, _),) = asked
    assert {(kind, ranks) for kind, _, _, ranks in request.exact} == expected


@pytest.mark.parametrize(
    ("budget_s", "timeout_s", "expected"),
    [(None, None, (20.0, 400.0)), (10.0, None, (10.0, 400.0)), (90.0, None, (90.0, 470.0)), (90.0, 5.0, (90.0, 5.0))],
)
def test_limits(
    path: Path,
    asked: list[tuple[Request, float]],
    budget_s: float | None,
    timeout_s: float | None,
    expected: tuple[float, float],
) -> None:
    calibrate_interconnect(path, "gloo", "cpu", 2, budget_s=budget_s, timeout_s=timeout_s)
    ((request, limit_s),) = asked
    assert (request.budget_s, limit_s) == expected


def test_no_budget_leaves_what_scenarios_send(path: Path, asked: list[tuple[Request, float]]) -> None:
    calibrate_interconnect(path, "gloo", "cpu", 2, [ddp_scenario()], budget_s=0)
    ((request, _),) = asked
    assert (request.stages, len(request.exact), request.budget_s) == ((), 1, 20.0)
    with pytest.raises(
        PerfModelError, match=r"--budget 0 leaves only what scenarios send over gloo .* \(got nothing\)"
    ):
        calibrate_interconnect(path, "gloo", "cpu", 2, budget_s=0)


def cut_scenario(**hardware: object) -> Scenario:
    sections = {
        "batch": {"size": 8, "sequence_length": 4},
        "precision": "bf16",
        "parallelism": {"pp": {"stages": 2, "micro_batches": 4}},
        "hardware": {"profile": "cpu.json", "gpus": 2, **hardware},
    }
    return Scenario.model_validate(ddp_scenario().model_dump(exclude=set(sections)) | sections)


@pytest.mark.parametrize(("budget_s", "stages"), [(None, session.GENERAL), (0, ())])
def test_messages_of_a_pipeline_are_asked_for_in_both_forms(
    path: Path, asked: list[tuple[Request, float]], budget_s: float | None, stages: tuple[str, ...]
) -> None:
    """Hidden states of a micro-batch of two samples, and their gradients, which are as large."""
    scenario = cut_scenario()
    model = families.resolved(scenario.model)
    calibrate_interconnect(path, "gloo", "cpu", 4, [scenario], budget_s=budget_s)
    ((request, _),) = asked
    size_bytes = 2 * 4 * model.width * 2
    assert set(request.exact) == {(kind, "bfloat16", size_bytes, 2) for kind in ("send_recv", "exchange")}
    assert (len(request.exact), request.stages) == (2, stages)


def test_a_pipeline_over_another_interconnect_asks_for_nothing(path: Path, asked: list[tuple[Request, float]]) -> None:
    calibrate_interconnect(path, "gloo", "cpu", 2, [cut_scenario(interconnect="nvlink")])
    ((request, _),) = asked
    assert request.exact == ()


def test_kernels_of_all_stages_are_measured_beside_a_receive_that_waits(
    h200: Path, asked: list[tuple[Request, float]]
) -> None:
    calibrate_interconnect(h200, "nvlink", "cuda", 2, [cut_scenario()])
    ((request, _),) = asked
    assert {kind for kind, *_ in request.exact} == {"send_recv", "exchange"}
    assert {each.collective for each in request.own} == {"wait"}
    head = f"{families.resolved(cut_scenario().model).vocabulary}"  # which the last stage alone has
    assert any(head in each.job.key for each in request.own)


def test_kernels_of_a_pipeline_under_data_parallelism_are_measured_beside_both(
    h200: Path, asked: list[tuple[Request, float]]
) -> None:
    pipeline = cut_scenario(gpus=4)
    both = pipeline.parallelism.model_copy(update={"dp": 2})
    calibrate_interconnect(h200, "nvlink", "cuda", 4, [pipeline.model_copy(update={"parallelism": both})])
    ((request, _),) = asked
    keys = {
        beside: {each.job.key for each in request.own if each.collective == beside} for beside in ("all_reduce", "wait")
    }
    assert keys["all_reduce"] == keys["wait"] != set()
    assert len(request.own) == 2 * len(keys["wait"])


def test_messages_of_a_pipeline_are_measured_without_a_budget(path: Path) -> None:
    calibrate_interconnect(path, "gloo", "cpu", 2, [cut_scenario()], budget_s=0)
    found = load_profile(path).interconnects["gloo"]
    assert [key.split()[:3] for key in sorted(found.collectives)] == [
        ["exchange", "2", "bfloat16"],
        ["send_recv", "2", "bfloat16"],
    ]
    assert all(record.time_s and record.origin == "scenario" for record in found.collectives.values())
    assert found.host == {}


def sharded_scenario(profile: str) -> Scenario:
    sections = {
        "parallelism": {"dp": 2, "strategy": "zero3"},
        "hardware": {"profile": profile, "gpus": 2, "interconnect": "nvlink"},
    }
    return Scenario.model_validate(ddp_scenario().model_dump(exclude={"parallelism", "hardware"}) | sections)


@pytest.fixture
def h200(tmp_path: Path) -> Path:
    path = tmp_path / "h200.json"
    save_profile(load_profile(find_profile("h200-sxm-x4")), path)
    return path


@pytest.mark.parametrize(("budget_s", "stages"), [(None, session.GENERAL), (0, ())])
def test_on_gpus_scenarios_kernels_are_measured_beside_a_collective(
    h200: Path, asked: list[tuple[Request, float]], budget_s: float | None, stages: tuple[str, ...]
) -> None:
    scenario = sharded_scenario(str(h200))
    calibrate_interconnect(h200, "nvlink", "cuda", 2, [scenario, scenario], budget_s=budget_s)
    calibrate_interconnect(h200, "host-memory", "cuda", 2, [scenario], budget_s=5.0)
    (request, limit_s), (elsewhere, _) = asked
    assert (request.stages, limit_s) == (stages, 425.0)
    keys = [each.job.key for each in request.own]
    assert len(set(keys)) == len(keys) > 1
    assert any(key.startswith("aten.mm.default(") for key in keys)
    assert {each.collective for each in request.own} == {"all_gather"}
    assert [each.share for each in request.own] == sorted((each.share for each in request.own), reverse=True)
    assert elsewhere.own == ()


def test_a_profile_that_knows_no_kernels_leaves_them_out(
    path: Path, asked: list[tuple[Request, float]], capsys: pytest.CaptureFixture[str]
) -> None:
    calibrate_interconnect(path, "nvlink", "cuda", 2, [sharded_scenario(str(path))])
    ((request, limit_s),) = asked
    assert (request.own, limit_s) == ((), 400.0)
    assert "no kernels of its own are measured beside a collective: " in capsys.readouterr().err


def test_nothing_is_written_where_rank_0_is_not(path: Path, asked: list[tuple[Request, float]]) -> None:
    before = path.read_bytes()
    assert calibrate_interconnect(path, "gloo", "cpu", 4, nodes=2, rendezvous="host:1") is None
    assert (len(asked), path.read_bytes()) == (1, before)


FINISHED: dict[str, Any] = {
    "collectives": {"all_reduce 2 float32 1024": {"time_s": 1e-3}},
    "host": {"wait": {"time_s": 1e-6}},
    "provenance": {"measured_at": "earlier"},
    "stages_s": {"group of 2": 1.0, "calls": 2.0},
}


def finished(profile: str, stages: tuple[str, ...] = session.GENERAL) -> str:
    """What the file holds that a run's stages are kept in."""
    return json.dumps(FINISHED | {"asked": {"profile": profile, "ranks": 2, "nodes": 1, "stages": stages}})


def stopped_by(kind: type[BaseException]) -> Callable[[Request, float, Path], None]:
    """A measurement that ends so after its first stages."""

    def measure(request: Request, timeout_s: float, kept: Path) -> None:
        kept.write_text(finished(request.profile))
        raise kind

    return measure


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, PerfModelError])
def test_a_run_that_is_ended_leaves_its_finished_stages_in_the_profile(
    path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    monkeypatch.setattr(session, "measure", stopped_by(kind))
    for _ in range(2):
        with pytest.raises(kind):
            calibrate_interconnect(path, "gloo", "cpu", 2)
        wires = load_profile(path).interconnects["gloo"]
        assert wires.collectives == {"all_reduce 2 float32 1024": CollectiveRecord(time_s=1e-3)}
        assert wires.host["wait"].time_s == 1e-6
        assert wires.rerun_spread is None  # it was measured once
    assert os.listdir(path.parent) == ["cpu.json"]


def test_after_a_kill_the_next_start_keeps_the_stages_that_had_finished(
    path: Path, asked: list[tuple[Request, float]]
) -> None:
    kept = path.with_name("cpu.gloo.partial.json")
    kept.write_text(finished("None"))
    with pytest.raises(PerfModelError, match="--budget 0"):
        calibrate_interconnect(path, "gloo", "cpu", 2, budget_s=0)
    assert list(load_profile(path).interconnects["gloo"].collectives) == ["all_reduce 2 float32 1024"]
    kept.write_text(finished("None", ("calls",)))  # of a later run of one stage
    calibrate_interconnect(path, "gloo", "cpu", 2)
    assert os.listdir(path.parent) == ["cpu.json"]
    assert list(load_profile(path).interconnects["gloo"].collectives) == ["all_reduce 2 float32 1024"]
    assert [request.profile for request, _ in asked] == ["None"]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (finished("2026-01-01"), r"must belong to the profile .* for a profile of 2026-01-01\)\. Move it away"),
        (json.dumps(FINISHED), r"must belong to the profile .* of an unknown time\)"),
        ('{"collectives": 3}', r"collectives must be a mapping .*\. Delete it"),
        (
            finished("None").replace("0.001", "-1.0"),
            r"collectives\.all_reduce 2 float32 1024\.time_s must be greater than 0 \(got -1\.0\)\. Delete it",
        ),
        ('{"collectives": {', "must be whole JSON"),
    ],
)
def test_finished_stages_that_are_damaged_or_of_another_profile_stay_as_they_are(
    path: Path, asked: list[tuple[Request, float]], content: str, sentence: str
) -> None:
    kept, before = path.with_name("cpu.gloo.partial.json"), path.read_bytes()
    kept.write_text(content)
    with pytest.raises(PerfModelError, match=rf"cpu\.gloo\.partial\.json: .*{sentence}"):
        calibrate_interconnect(path, "gloo", "cpu", 2)
    assert (kept.read_text(), path.read_bytes(), asked) == (content, before, [])


@pytest.mark.parametrize(
    ("name", "device", "ranks", "sentence"),
    [
        ("nvlink", "cpu", 2, r"gloo on a CPU.* \(got nvlink on cpu\)\. Give --interconnect gloo, or --device cuda\.$"),
        ("gloo", "cuda", 2, r"gloo on a CPU.* \(got gloo on cuda\)\. Give --device cpu\.$"),
        ("gloo", "cpu", 1, "--ranks must be at least 2"),
    ],
)
def test_bad_requests_leave_the_profile_alone(
    tmp_path: Path, name: str, device: str, ranks: int, sentence: str
) -> None:
    with pytest.raises(PerfModelError, match=sentence):
        calibrate_interconnect(tmp_path / "absent.json", name, device, ranks)


def test_a_stage_alone_leaves_the_rest_and_says_when(path: Path, asked: list[tuple[Request, float]]) -> None:
    calibrate_interconnect(path, "gloo", "cpu", 2, [ddp_scenario()])
    known = load_profile(path)
    update = {"provenance": {"cpu": "a", "measured_at": "then"}, "communicator_bytes": {"2": 5}}
    wires = known.interconnects["gloo"].model_copy(update=update)
    stages = {"interconnects_s": {"gloo": {"calls": 2.5, "group of 2": 9.0, "transfers": 3.0}}}
    save_profile(known.model_copy(update={"interconnects": {"gloo": wires}, "provenance": stages}), path)
    calibrate_interconnect(path, "gloo", "cpu", 2, only=["calls", "p2p"])  # of which p2p does not come to run
    (_, (request, _)) = asked
    assert (request.stages, request.exact, request.own) == (("calls", "p2p"), (), ())
    found = load_profile(path)
    assert found.provenance["interconnects_s"] == {"gloo": {"calls": 1.5, "group of 2": 9.0, "transfers": 3.0}}
    assert found.interconnects["gloo"].communicator_bytes == {"2": 5}
    provenance = found.interconnects["gloo"].provenance
    assert provenance == {"cpu": "a", "measured_at": "then", "calls": {"again_at": "now"}}
    calibrate_interconnect(path, "gloo", "cpu", 2, only=["collectives"])  # group by group
    found = load_profile(path)
    assert found.interconnects["gloo"].provenance["collectives"] == {"again_at": "now"}
    assert found.provenance["interconnects_s"]["gloo"]["group of 2"] == 0.5


@pytest.mark.parametrize(
    ("only", "known", "options", "expected"),
    [
        (["cals"], True, {}, r"--only must name a stage of an interconnect \(got 'cals'\)\. Did you"),
        (["contention"], True, {}, r"--only contention must be given with --device cuda \(got cpu\)"),
        (["calls"], False, {}, r"that the profile has \(got gloo, which it has not\)\. Measure all of it first"),
        (["calls"], True, {"scenarios": [None]}, r"--only must be given without --scenario \(got both\)"),
        (["calls"], True, {"budget_s": 0}, r"--only must be given without --budget 0 \(got both\)"),
    ],
)
def test_only_is_for_stages_of_an_interconnect_that_is_known(
    path: Path,
    asked: list[tuple[Request, float]],
    only: list[str],
    known: bool,
    options: dict[str, Any],
    expected: str,
) -> None:
    if known:
        calibrate_interconnect(path, "gloo", "cpu", 2, [ddp_scenario()])
    with pytest.raises(PerfModelError, match=expected):
        calibrate_interconnect(path, "gloo", "cpu", 2, only=only, **options)
