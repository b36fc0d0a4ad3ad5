"""Measurements of other tools in a profile."""

from __future__ import annotations

from pathlib import Path

import pytest

from calibrate.imported import import_measurements
from perfmodel.cost.collectives import collective_cost
from perfmodel.cost.piecewise import fit_curves
from perfmodel.cost.transfers import transfer_cost
from perfmodel.errors import PerfModelError
from perfmodel.hardware.imports import import_nccl_tests, import_nvbandwidth
from perfmodel.hardware.interconnect import CollectiveRecord, Interconnect
from perfmodel.hardware.profile import Device, Profile, load_profile, save_profile
from tests.places import TESTS
from tests.refusals import refused

DATA = TESTS / "data" / "imports"
NCCL, NVBANDWIDTH = DATA / "nccl-tests.txt", DATA / "nvbandwidth.json"
EMPTY = Profile(name="toy", device=Device(kind="cuda", name="Toy GPU", memory_bytes=2**30))


@pytest.fixture
def output(tmp_path: Path) -> Path:
    path = tmp_path / "toy.json"
    save_profile(EMPTY, path)
    return path


def test_collectives_go_under_their_interconnect_with_curves(output: Path) -> None:
    import_measurements(output, NCCL, "nvlink")
    found, records = load_profile(output), import_nccl_tests(NCCL).collectives
    wires = found.interconnects["nvlink"]
    assert (wires.collectives, wires.segments) == (records, fit_curves(records))
    assert wires.provenance == {"imported": ["nccl-tests.txt"]}
    assert (found.interconnect, found.gpus) == ("nvlink", max(int(key.split()[1]) for key in records))
    kind, ranks, dtype, size_bytes = next(key for key, each in records.items() if each.time_s is not None).split()
    cost = collective_cost(kind, int(ranks), dtype, int(size_bytes), wires)
    assert (cost.time_s, cost.source) == (records[f"{kind} {ranks} {dtype} {size_bytes}"].time_s, "exact")


def test_what_was_measured_otherwise_stays(output: Path) -> None:
    own = {"all_reduce 2 float32 12345": CollectiveRecord(time_s=1.0)}
    before = Interconnect(backend="nccl", collectives=own, provenance={"gpus": 2})
    save_profile(EMPTY.model_copy(update={"interconnects": {"mine": before}, "interconnect": "mine"}), output)
    import_measurements(output, NCCL)
    wires = load_profile(output).interconnects["mine"]
    assert wires.collectives == own | import_nccl_tests(NCCL).collectives
    assert wires.provenance == {"gpus": 2, "imported": ["nccl-tests.txt"]}


def test_copies_go_to_the_transfers(output: Path) -> None:
    import_measurements(output, NVBANDWIDTH)
    found = load_profile(output)
    assert found.transfers == import_nvbandwidth(NVBANDWIDTH)
    assert transfer_cost("h2d", "pinned", 2**20, found).time_s > 0


def test_collectives_need_a_name(output: Path) -> None:
    before = output.read_bytes()
    with pytest.raises(PerfModelError, match="collectives must go under the name of an interconnect"):
        import_measurements(output, NCCL)
    with pytest.raises(PerfModelError, match="nothing-here"):
        import_measurements(output, output.with_name("nothing-here"), "nvlink")
    assert output.read_bytes() == before


def test_nodes_are_those_of_the_header(output: Path, tmp_path: Path) -> None:
    """64 ranks on eight hosts once counted as one node."""
    ranks = "".join(
        f"#  Rank {rank:2} Group  0 Pid {1000 + rank} on  node{rank // 8} device {rank % 8:2} [0x05] GPU\n"
        for rank in range(64)
    )
    text = f"""# Collective test starting: all_reduce_perf
# nThread 1 nGpus 1 minBytes 1024 maxBytes 1073741824 step: 8(factor) warmup iters: 5 iters: 20
{ranks}#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
     1048576        262144     float     sum      -1   120.00    8.74   17.20      0   120.00    8.74   17.20      0
  1073741824     268435456     float     sum      -1  6000.00  178.96  352.32      0  6000.00  178.96  352.32      0
"""
    file = tmp_path / "nt64.txt"
    file.write_text(text)
    import_measurements(output, file, "infiniband")
    found = load_profile(output)
    assert (found.interconnects["infiniband"].nodes, found.gpus) == (8, 64)
    before = output.read_bytes()
    with refused("infiniband", 8, 1):
        import_measurements(output, NCCL, "infiniband")
    assert output.read_bytes() == before
