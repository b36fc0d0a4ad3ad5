"""Whole cases on two gloo ranks: what is measured, and every way in which a rank can fail its others."""

import gzip
import json
import os
import re
import subprocess
import textwrap
import time

import pytest

from calibrate.this_machine import launcher
from calibrate.this_machine.launcher import Alone, Launch, Ranks, run_ranks
from calibrate.this_machine.wirings import backend_of
from perfmodel.errors import PerfModelError
from perfmodel.scenario.scenario import Scenario
from tests.places import ROOT
from validate.overlap import TRACED_STEPS
from validate.run import measure
from validate.worker import Effort, Request, of_rank

QUICK = Effort(
    warmup_steps=4, warmup_s=0.0, steady_s=0.0, least_steps=5, most_steps=5, synced_s=0.0, least_synced_steps=2
)
AWKWARD = """
    import os, pathlib, time
    from types import SimpleNamespace
    from torch import nn

    class Awkward(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 1)

        def forward(self, x):
            rank, folder = os.environ["RANK"], pathlib.Path(os.environ["AWKWARD"])
            (folder / f"{rank}.part").write_text(str(os.getpid()))
            (folder / f"{rank}.part").rename(folder / rank)
            while not (folder / str(1 - int(rank))).exists():
                time.sleep(0.01)
            if rank == "1":
                time.sleep(600)
            return SimpleNamespace(loss=self.linear(x).mean())
"""
LIGHT = """
    import os, pathlib, sys, time
    from calibrate.this_machine.child_process import end_with_parent
    from calibrate.this_machine.launcher import telling

    folder, how, rank = pathlib.Path(sys.argv[1]), sys.argv[2], os.environ["RANK"]
    end_with_parent()
    with telling(folder, int(rank)):
        (folder / f"{rank}.part").write_text(str(os.getpid()))
        (folder / f"{rank}.part").rename(folder / rank)
        while not (folder / str(1 - int(rank))).exists():
            time.sleep(0.01)
        if rank == "1" and how == "raise":
            raise ValueError("only here")
        if rank == "1" and how == "exit":
            os._exit(3)
        time.sleep(600)
"""


def on_two_ranks(**keys):
    data = {
        "name": "pair",
        "model": {"family": "gpt", "size": "tiny"},
        "batch": {"size": 1, "sequence_length": 8},
        "parallelism": {"dp": 2, "strategy": "naive"},
        "hardware": {"profile": "cpu.json", "gpus": 2},
    }
    return Scenario.model_validate(data | keys)


@pytest.fixture
def awkward(tmp_path, monkeypatch):
    """A scenario whose rank 1 sleeps in its first forward; each rank writes its process id."""
    (tmp_path / "awkward.py").write_text(textwrap.dedent(AWKWARD))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("AWKWARD", str(tmp_path))

    model = {"target": "awkward:Awkward", "inputs": {"x": {"shape": ["batch", 4]}}}
    return on_two_ranks(model=model, batch={"size": 1})


def ends(pid, within_s=60.0):
    """Whether a process is gone, or only waits to be buried."""
    give_up_s = time.monotonic() + within_s
    while time.monotonic() < give_up_s:
        try:
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def test_every_rank_is_measured(tmp_path):
    asked = on_two_ranks(
        parallelism={"dp": 2, "strategy": "ddp", "bucket_cap_mb": 0.1}, training={"gradient_accumulation": 2}
    )
    measured = measure(asked, "cpu", effort=QUICK, trace=tmp_path / "pair.trace.json.gz", timeout_s=120)
    assert len(measured.ranks) == 2
    assert measured.phases_s == measured.ranks[0].phases_s
    assert measured.host_reference_s == measured.ranks[0].host_reference_s
    slowest = zip(*(rank.step_s for rank in measured.ranks), strict=True)
    assert measured.step_s == tuple(max(same) for same in slowest)
    assert {len(rank.step_s) for rank in measured.ranks} == {5}
    assert measured.ddp_buckets.rebuilt
    assert len(measured.ddp_buckets.rebuilt_bytes) > 2 > len(measured.ddp_buckets.initial_bytes)

    names = [event.get("name") for event in _events(tmp_path / "pair.rank1.trace.json.gz")]
    per_step = len(measured.ddp_buckets.rebuilt_bytes)
    assert names.count("gloo:all_reduce") == TRACED_STEPS * per_step
    assert sum(str(name).startswith("ProfilerStep#") for name in names) == TRACED_STEPS
    for rank in measured.communication:
        assert 0 < rank.since_last_arrival_s <= rank.communication_s * 1.001
        assert 0 <= rank.exposed_s <= rank.communication_s
        assert 0 <= rank.overlap_ratio < 1


def _events(path):
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def test_communication_after_backward_is_a_phase_of_its_own(tmp_path):
    hardware = {"profile": "cpu.json", "gpus": 2, "interconnect": "gloo"}
    asked = on_two_ranks(optimizer={"max_grad_norm": 1.0}, hardware=hardware)
    measured = measure(asked, "cpu", effort=QUICK, timeout_s=120)
    assert list(measured.phases_s) == ["zero_grad", "forward", "backward", "reduce", "clip", "optimizer"]
    assert (measured.ddp_buckets, measured.communication) == (None, ())


@pytest.fixture
def light(tmp_path):
    """Run two ranks that need no torch: rank 1 sleeps, raises or exits once both have written their process ids."""
    script = tmp_path / "light.py"
    script.write_text(textwrap.dedent(LIGHT))

    def run(how, timeout_s=120.0):
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        run_ranks(Launch("pair", [str(script), str(tmp_path), how], 2, "cpu", tmp_path, timeout_s, environment))

    return run


def test_a_rank_that_fails_is_named_and_ends_all(light, tmp_path, capsys):
    sentence = "pair: the step must run on 2 ranks of cpu (rank 1: ValueError: only here)"
    with pytest.raises(PerfModelError, match=re.escape(sentence)):
        light("raise")
    assert "Traceback" in capsys.readouterr().err
    assert ends((tmp_path / "0").read_text())


def test_a_rank_that_vanishes_ends_all(light, tmp_path):
    sentence = "pair: the step must run on 2 ranks of cpu (rank 1: exit code: 3)"
    with pytest.raises(PerfModelError, match=re.escape(sentence)):
        light("exit")
    assert ends((tmp_path / "0").read_text())


def test_a_rank_that_hangs_is_waited_for_so_long(awkward, tmp_path):
    sentence = "pair: every rank must take part in every collective in time (one did not: rank 0: "
    with pytest.raises(PerfModelError, match=re.escape(sentence)):
        measure(awkward, "cpu", allow_import=True, effort=QUICK, timeout_s=120, group_timeout_s=20)
    assert ends((tmp_path / "1").read_text())


def test_time_is_up_for_all_ranks(light, tmp_path, monkeypatch):
    """It is up as soon as both ranks run, however long the machine takes to start them."""
    wait = subprocess.Popen.wait

    def until_both_run(process, timeout=None):
        if timeout is None or timeout < 100:
            return wait(process, timeout)
        while not all((tmp_path / rank).exists() for rank in "01"):
            time.sleep(0.05)
        raise subprocess.TimeoutExpired(process.args, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", until_both_run)
    sentence = "pair: the run on 2 ranks must end within 150 s (it did not, and every rank was ended)"
    with pytest.raises(PerfModelError, match=re.escape(sentence)):
        light("sleep", timeout_s=150.0)
    assert all(ends((tmp_path / rank).read_text()) for rank in "01")


def command(**keys):
    settings = {"ranks": 4, "nodes": 1, "rendezvous": None} | keys
    program = ["-m", "worker"]
    return launcher._command(
        Launch("pair", program, device="cpu", folder=None, timeout_s=1.0, environment={}, **settings)
    )


def test_one_machine_meets_itself_and_several_where_they_are_told():
    alone, pair = command(), command(nodes=2, rendezvous="host:29500")
    assert [part for part in alone if part not in pair] == [
        "--rdzv-endpoint=127.0.0.1:0",
        "--nnodes=1",
        "--nproc-per-node=4",
        "--local-addr=127.0.0.1",
    ]
    assert [part for part in pair if part not in alone] == [
        "--rdzv-endpoint=host:29500",
        "--nnodes=2",
        "--nproc-per-node=2",
    ]


@pytest.mark.parametrize(
    ("nodes", "rendezvous", "sentence"),
    [
        (3, "host:1", "--nnodes must divide the ranks (got 4 ranks on 3)"),
        (0, None, "--nnodes must divide the ranks (got 4 ranks on 0)"),
        (2, None, "--rdzv must be given if and only if there are several nodes (got None for 2)"),
        (1, "host:1", "--rdzv must be given if and only if there are several nodes (got host:1 for 1)"),
        (2, "host", "--rdzv must be host:port (got 'host')"),
    ],
)
def test_nodes_that_cannot_be(nodes, rendezvous, sentence):
    with pytest.raises(PerfModelError, match=re.escape(sentence)):
        launcher.check_nodes(4, nodes, rendezvous)


class Store(dict):
    """Of torch.distributed, with every other rank's answers already there."""

    set = dict.__setitem__

    def get(self, key):
        return self[key]


def test_ranks_agree_on_the_largest_value():
    store = Store({"1/1": b"2.5", "2/1": b"0.5"})
    pair = Ranks(store, 0, 2)
    assert (pair.largest(1.0), pair.largest(1.0)) == (2.5, 1.0)
    assert Alone().largest(3.0) == 3.0


@pytest.mark.parametrize(
    ("device", "interconnect", "backend"),
    [("cpu", None, "gloo"), ("cuda", None, "nccl"), ("cuda", "two-nodes", "nccl"), ("cuda", "gloo", "gloo")],
)
def test_backends(device, interconnect, backend):
    assert backend_of(device, interconnect) == backend


def test_variables_of_a_rank_are_those_of_its_interconnect():
    assert launcher._environment(None, 3, 4) == {}
    assert launcher._environment("two-nodes", 3, 4) == {"NCCL_HOSTID": "node1", "NCCL_SOCKET_IFNAME": "lo"}


def test_more_ranks_than_gpus_are_refused():
    with pytest.raises(PerfModelError, match=re.escape("every rank must have a GPU of its own (rank 2 finds 2)")):
        launcher._take_gpu(2, 2)


def test_what_the_watchdog_of_nccl_says_is_told(tmp_path, capsys):
    log = "[rank1]:[E] [PG 0 Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)\nAborted\n"
    found = launcher._first_failure(Launch("pair", [], 2, "cuda", tmp_path, 1.0, {}), log)
    assert "one did not: rank ?: NCCL: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)" in str(found)
    assert capsys.readouterr().err == log


def test_the_cause_comes_before_those_it_stopped(tmp_path, capsys):
    told = [
        {"error": "Connection closed by peer", "kind": "RuntimeError", "rank": 0, "at_s": 1.0},
        {"error": "index out of range\nmore", "kind": "IndexError", "rank": 1, "at_s": 2.0},
    ]
    for failure in told:
        launcher._failure(tmp_path, failure["rank"]).write_text(json.dumps(failure))
    found = launcher._first_failure(Launch("pair", [], 2, "cpu", tmp_path, 1.0, os.environ.copy()), "")
    assert "(rank 1: IndexError: index out of range)" in str(found)


def test_each_rank_records_into_its_own_files():
    request = Request("a", "tuning", "own", {}, "cuda", trace="/r/a.trace.json.gz", history="/r/a.history.json.gz")
    assert (of_rank(request, 0).trace, of_rank(request, 0).history) == ("/r/a.trace.json.gz", "/r/a.history.json.gz")
    assert (of_rank(request, 1).trace, of_rank(request, 1).history) == ("/r/a.rank1.trace.json.gz", None)
