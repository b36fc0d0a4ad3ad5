"""Interconnects measured between two gloo ranks on one machine or two, and merged into a profile."""

import json
import re
import socket
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from calibrate.interconnect import contention
from calibrate.interconnect import worker as communication_stages
from calibrate.interconnect.merging import merged
from calibrate.interconnect.own_contention import OwnKernel, encode_own
from calibrate.interconnect.request import Found, Request, asked_in, exact_collectives, measure, measured_in
from calibrate.jobs import job
from calibrate.this_machine import launcher
from calibrate.this_machine.launcher import Launch
from perfmodel.cost.collectives import collective_cost
from perfmodel.errors import PerfModelError
from perfmodel.hardware import host_calls
from perfmodel.hardware.interconnect import (
    REFERENCE,
    CallRecord,
    CollectiveRecord,
    ContentionRecord,
    Interconnect,
    TransferRecord,
)
from perfmodel.hardware.profile import Device, Profile
from perfmodel.program.program import Collective
from perfmodel.trace.operation import Operation, TensorSpec
from perfmodel.units import KIB
from tests.calibrate.interconnect import quick_worker

QUICK = Request(
    "gloo",
    2,
    "cpu",
    budget_s=60.0,
    exact=(("all_reduce", "float32", 5000, 2), ("broadcast", "float8_e5m2", 1024, 2)),
    stages=("collectives",),
    most_bytes=2 * KIB,
)


KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
REFUSED = "broadcast 2 float8_e5m2 1024"


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """Every stage that ranks on a CPU have, measured between two of them in few rounds, and the file that it leaves."""
    kept = tmp_path_factory.mktemp("two_ranks") / "kept.json"
    messages = tuple((kind, "bfloat16", 3000, 2) for kind in ("exchange", "send_recv"))
    stages = ("collectives", "calls", "collective calls", "p2p")
    asked = replace(QUICK, exact=(*QUICK.exact, *messages), stages=stages, profile="then")
    run_ranks = launcher.run_ranks

    def with_few_rounds(launch):
        program = ("-m", "tests.calibrate.interconnect.quick_worker", *launch.program[2:])
        run_ranks(replace(launch, program=program))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher, "run_ranks", with_few_rounds)
        found = measure(asked, 240.0, kept)
    return asked, found, kept


def test_collectives_of_two_ranks(two_ranks):
    _, found, _ = two_ranks
    assert (found.interconnect.backend, found.interconnect.nodes, found.interconnect.contention) == ("gloo", 1, {})
    grid = {f"{kind} 2 float32 {size}" for kind in KINDS for size in (1024, 2048)}
    records = {key: each for key, each in found.interconnect.collectives.items() if key.startswith(KINDS)}
    assert set(records) == grid | {"all_reduce 2 float32 5000", REFUSED}
    assert {key for key, record in records.items() if record.origin == "scenario"} == set(records) - grid
    assert records[REFUSED].time_s is None
    assert "RuntimeError: " in records[REFUSED].error
    for key in set(records) - {REFUSED}:
        assert records[key].time_s > 1e-6
        assert records[key].samples >= 2 * 5
    assert set(found.interconnect.segments) == {f"{kind} 2" for kind in (*KINDS, "send_recv", "exchange")}


def test_the_file_of_finished_stages_holds_what_was_measured(two_ranks):
    asked, found, kept = two_ranks
    assert list(found.stages_s) == ["group of 2", "calls", "collective calls", "p2p"]
    assert measured_in(kept, asked) == found
    wanted = asked_in(kept)
    assert wanted is not None
    assert (wanted.profile, wanted.ranks, wanted.nodes, wanted.stages) == ("then", 2, 1, asked.stages)


def test_calls_of_two_ranks(two_ranks):
    _, found, _ = two_ranks
    host = found.interconnect.host
    names = {"all_reduce", "all_gather", "reduce_scatter", "broadcast"}
    of_offloading = host_calls.HOST_OPTIMIZER_CALLS | host_calls.COPY_CALLS  # which a CPU does not do
    assert set(host) == host_calls.MEASURED - of_offloading | {REFERENCE}
    assert all(host[name].time_s > 0 for name in names)
    assert all(call.time_s >= 0 for call in host.values())
    assert found.transfers == {}


def test_calls_of_sharded_steps(two_ranks):
    """Loops over 32 parameters take more over DTensors, however few rounds are timed."""
    host = two_ranks[1].interconnect.host
    sharded = {f"fsdp {what} {each}" for what in ("forward", "gather", "reduce") for each in ("group", "parameter")}
    loops = ("clip", "zero_grad", "optimizer adamw foreach", "optimizer adamw fused", "optimizer sgd-momentum for-loop")
    over_dtensors = {f"dtensor {loop}{each}" for loop in loops for each in ("", " parameter")}
    assert sharded | over_dtensors <= set(host)
    assert "dtensor optimizer sgd fused" not in host  # torch has no rule for it
    assert all(sum(host[name].time_s for name in each) > 0 for each in (sharded, over_dtensors))


def test_messages_of_two_ranks(two_ranks):
    found = two_ranks[1].interconnect
    records = {key: each for key, each in found.collectives.items() if key.startswith(("send_recv", "exchange"))}
    grid = {f"{kind} 2 float32 {size}" for kind in ("send_recv", "exchange") for size in (1024, 2048)}
    exact = {f"{kind} 2 bfloat16 3000" for kind in ("send_recv", "exchange")}
    assert set(records) == grid | exact
    assert {key for key, record in records.items() if record.origin == "scenario"} == exact
    assert all(record.time_s and record.samples >= 10 for record in records.values())
    assert {found.segments[f"{kind} 2"][0].points for kind in ("send_recv", "exchange")} == {2}
    assert found.message_couplings == {}


@pytest.mark.parametrize("kind", ["send_recv", "exchange"])
def test_messages_that_were_measured_are_predicted(two_ranks, kind):
    known = two_ranks[1].interconnect
    exact = collective_cost(kind, 2, "bfloat16", 3000, known)
    assert (exact.time_s, exact.source) == (known.collectives[f"{kind} 2 bfloat16 3000"].time_s, "exact")
    assert collective_cost(kind, 2, "float32", 1500, known).source == "curve"
    assert collective_cost(kind, 2, "float32", 9000, known).source == "extrapolated"


def test_calls_and_waits_of_messages_are_timed_first_and_in_a_row(two_ranks):
    host = two_ranks[1].interconnect.host
    for name in host_calls.MESSAGE_CALLS:
        assert host[name].time_s > 0
        assert host[name].samples == quick_worker.ROUNDS


def test_two_machines_measure_together():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        request = replace(
            QUICK, exact=(), most_bytes=KIB, passes=1, nodes=2, rendezvous=f"127.0.0.1:{free.getsockname()[1]}"
        )
    found = []
    machines = [threading.Thread(target=lambda: found.append(measure(request, 120.0))) for _ in range(2)]
    for machine in machines:
        machine.start()
    for machine in machines:
        machine.join()
    (first,) = [each for each in found if each is not None]
    assert len(found) == 2
    assert first.interconnect.nodes == 2
    assert len(first.interconnect.collectives) == 5


def test_what_a_run_that_is_ended_leaves(tmp_path, monkeypatch):
    """Stages that ended stay in the file; the error names the interconnect."""
    kept = tmp_path / "kept.json"
    kept.write_text("of an earlier run")

    def stop(launch):
        assert isinstance(launch, Launch)
        assert not kept.exists()
        data = {"collectives": {"all_reduce 2 float32 1024": {"time_s": 1e-3}}, "stages_s": {"group of 2": 1.0}}
        kept.write_text(json.dumps(data))
        raise PerfModelError(f"{launch.name}: stopped")

    monkeypatch.setattr("calibrate.this_machine.launcher.run_ranks", stop)
    with pytest.raises(PerfModelError, match="interconnect gloo: stopped"):
        measure(QUICK, 1.0, kept)
    found = measured_in(kept, QUICK)
    assert found.interconnect.collectives == {"all_reduce 2 float32 1024": CollectiveRecord(time_s=1e-3)}
    assert found.stages_s == {"group of 2": 1.0}


def test_time_is_up(tmp_path):
    sentence = "interconnect gloo: the run on 2 ranks must end within 2 s (it did not, and every rank was ended)"
    with pytest.raises(PerfModelError, match=re.escape(sentence)):
        measure(replace(QUICK, most_bytes=None), 2.0)


def profile(**keys):
    device = Device(kind="cuda", name="GPU", memory_bytes=1)
    return Profile(name="machine", device=device, **keys)


def test_merging_keeps_what_was_not_measured_again():
    times = {"all_reduce 2 float32 1024": 1.0, "all_reduce 2 float32 2048": 2.0}
    before = Interconnect(
        backend="nccl",
        collectives={key: CollectiveRecord(time_s=value) for key, value in times.items()},
        communicator_bytes={"2": 5},
        host={"wait": CallRecord(time_s=1.0), "all_reduce": CallRecord(time_s=2.0)},
    )
    now = Interconnect(
        backend="nccl",
        collectives={
            "all_reduce 2 float32 1024": CollectiveRecord(time_s=1.5),
            "all_reduce 2 float32 2048": CollectiveRecord(error="out of memory"),
            "all_reduce 2 float32 4096": CollectiveRecord(error="out of memory"),
        },
        communicator_bytes={"3": 6},
        host={"wait": CallRecord(time_s=1.5)},
    )
    copied = {"p2p 1024": TransferRecord(time_s=1.0), "p2p 2048": TransferRecord(time_s=1.0)}
    old = profile(interconnects={"nvlink": before}, interconnect="nvlink", transfers=copied)
    again = {"p2p 1024": TransferRecord(error="lost"), "p2p 2048": TransferRecord(time_s=2.0)}
    new = merged(old, "nvlink", now, again)
    found = new.interconnects["nvlink"]
    assert found.collectives == {
        "all_reduce 2 float32 1024": CollectiveRecord(time_s=1.5),
        "all_reduce 2 float32 2048": CollectiveRecord(time_s=2.0),
        "all_reduce 2 float32 4096": CollectiveRecord(error="out of memory"),
    }
    assert found.communicator_bytes == {"2": 5, "3": 6}
    assert {name: call.time_s for name, call in found.host.items()} == {"wait": 1.5, "all_reduce": 2.0}
    assert {key: record.time_s for key, record in new.transfers.items()} == {"p2p 1024": 1.0, "p2p 2048": 2.0}
    assert [each.points for each in found.segments["all_reduce 2"]] == [2]


def test_the_first_interconnect_is_the_machines_own():
    first = merged(profile(), "nvlink", Interconnect(backend="nccl"))
    second = merged(first, "two-nodes", Interconnect(backend="nccl", nodes=2))
    assert (second.interconnect, list(second.interconnects)) == ("nvlink", ["nvlink", "two-nodes"])
    assert second.transfers == {}


def test_each_exact_collective_is_asked_for_once():
    twice = Collective(kind="all_reduce", dtype="float32", size_bytes=4, ranks=2)
    assert exact_collectives([twice, twice]) == (("all_reduce", "float32", 4, 2),)


class Waiting:
    """A rank whose others come at once."""

    rank = 0

    def together(self):
        """All are here."""


class Group:
    """Uses the time of a sweep on a clock of its own."""

    def __init__(self, clock, takes_s):
        self.clock, self.takes_s, self.budgets_s = clock, takes_s, []

    def run(self, budget_s, only_disputed):
        self.budgets_s.append(budget_s)
        self.clock.now_s += self.takes_s
        return [(f"key {only_disputed}", CollectiveRecord(time_s=1.0))]


class Clock:
    now_s = 0.0

    def perf_counter(self):
        return self.now_s


def test_a_sweep_leaves_what_it_does_not_need_to_the_next(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(communication_stages, "time", clock)
    worker = communication_stages.Worker(replace(QUICK, ranks=3, budget_s=40.0), Waiting(), Found())
    worker._sweeps = {3: Group(clock, 4.0), 2: Group(clock, 12.0)}
    names = []
    monkeypatch.setattr(worker, "_first_pass", worker._sweep)
    for name, run in worker.stages():
        names.append(name)
        run()
    assert names == 3 * ["group of 3", "group of 2"]
    assert worker._sweeps[3].budgets_s == [10.0, 12.0, 8.0]
    assert worker._sweeps[2].budgets_s == [12.0, 20.0, 4.0]
    assert set(worker.found.collectives) == {"key False", "key True"}


X = TensorSpec((8, 8), (8, 1), "float32")
OWN = OwnKernel(job(Operation("aten.mm.default", (X, X), (), (X,)), "scenario"), "all_gather", 1, 0.5)
ON_GPUS = Request("nvlink", 2, "cuda", 60.0, stages=("contention", "transfers"), passes=1)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({}, ["contention", "transfers"]),
        ({"own": (OWN,)}, ["contention", "own contention", "transfers"]),
        ({"own": (OWN,), "stages": ()}, ["own contention"]),
        ({"stages": (), "nodes": 2}, ["own contention"]),  # rank 0 may be on the other machine
        ({"own": (OWN,), "device": "cpu"}, []),
    ],
)
def test_own_kernels_are_a_stage_of_their_own(changes, names):
    worker = communication_stages.Worker(replace(ON_GPUS, **changes), Waiting(), Found())
    assert [name for name, _ in worker.stages()] == ["group of 2", *names]


def test_all_ranks_measure_the_kernels_of_rank_0(monkeypatch, tmp_path):
    """This rank chose none; what it finds for those of rank 0 is kept and fitted."""
    pair = ContentionRecord(compute_factor=1.5, communication_factor=1.0, compute_s=1e-4, communication_s=1e-3)
    asked = []

    class Bench:
        @classmethod
        def on_gpus(cls, group):
            return cls()

        def own_records(self, wanted, budget_s, report):
            asked.append((wanted, budget_s))
            return {each.job.key: {"all_gather 2 float32 8": pair} for each in wanted}

    def broadcast(objects, src):
        assert (objects, src) == ([[]], 0)
        objects[0] = encode_own([OWN])

    monkeypatch.setattr(contention, "ContentionBench", Bench)
    monkeypatch.setattr(dist, "broadcast_object_list", broadcast)
    request = replace(ON_GPUS, nodes=2, own_budget_s=9.0)
    worker = communication_stages.Worker(request, Waiting(), Found())
    dict(worker.stages())["own contention"]()
    assert asked == [((OWN,), 9.0)]
    kept = tmp_path / "kept.json"
    kept.write_text(json.dumps(worker.found.model_dump()))
    found = measured_in(kept, request).interconnect
    assert found.own_contention == {OWN.job.key: {"all_gather 2 float32 8": pair}}
    assert found.own_couplings[OWN.job.key].compute_factor == pytest.approx(1.5, rel=0.05)
    assert found.couplings == {}


@pytest.mark.parametrize(("asked", "budgets_s"), [("gather wait wait", [3.0, 7.0]), ("wait", [9.0]), ("gather", [9.0])])
def test_kernels_beside_a_receive_that_waits_have_their_part_of_the_time(monkeypatch, asked, budgets_s):
    """Those beside collectives may use 3 s of 9 and take 2."""
    clock = Clock()
    monkeypatch.setattr(communication_stages, "time", clock)
    kinds = {"gather": OWN, "wait": OWN._replace(collective="wait")}
    wanted = tuple(kinds[name] for name in asked.split())
    pair = ContentionRecord(compute_factor=1.5, communication_factor=1.0, compute_s=1e-4, communication_s=1e-3)
    given_s = []

    class Bench:
        @classmethod
        def on_gpus(cls, group):
            return cls()

        def own_records(self, chosen, budget_s, report):
            given_s.append(budget_s)
            clock.now_s += 2.0
            return {each.job.key: {f"{each.collective} 2 float32 8": pair} for each in chosen}

        own_waiting = own_records

    monkeypatch.setattr(contention, "ContentionBench", Bench)
    monkeypatch.setattr("calibrate.interconnect.p2p_contention.MessageContention", Bench)
    monkeypatch.setattr(dist, "broadcast_object_list", lambda objects, src: None)
    worker = communication_stages.Worker(replace(ON_GPUS, own=wanted, own_budget_s=9.0), Waiting(), Found())
    worker._benches[2] = SimpleNamespace(group=None)
    dict(worker.stages())["own contention"]()
    assert given_s == budgets_s
    assert set(worker.found.own_contention[OWN.job.key]) == {f"{each.collective} 2 float32 8" for each in wanted}
