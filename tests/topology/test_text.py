"""What `perfmodel topology` prints, whole."""

from __future__ import annotations

import pytest

from perfmodel.errors import PerfModelError
from perfmodel.topology.graph import rates_of, topology
from perfmodel.topology.matrix import parse_matrix
from perfmodel.topology.sources import described
from perfmodel.topology.text import topology_text
from tests.places import TESTS

DATA = TESTS / "data" / "topology"

FOUR = """\
four, H200
4 GPUs, 1 NVSwitch, 4 host bridges, 1 NUMA node, 1 machine

links           number  GB/s each way  source
NVLink x 18     4       450            datasheet
PCIe            4       63             datasheet
inside the CPU  5       unknown

CPU0: NUMA node 0, 64 processors 0-63, nearest to GPU0, GPU1, GPU2, GPU3

best way, GB/s in one direction
      GPU0      GPU1      GPU2      GPU3
GPU0            NV18 450  NV18 450  NV18 450
GPU1  NV18 450            NV18 450  NV18 450
GPU2  NV18 450  NV18 450            NV18 450
GPU3  NV18 450  NV18 450  NV18 450

ring: GPU0 - GPU1 - GPU2 - GPU3
its narrowest hop: GPU0 to GPU1, NV18 450 GB/s, on GPU0 - NVSwitch0; 4 of 4 hops are like it

tp: 2 groups of 2 ranks, each inside a machine
  0 1
  2 3
dp: 2 groups of 2 ranks, each inside a machine
  0 2
  1 3
"""

MANY = """\
4x8:nvswitch=450GB/s,network=8x50GB/s
32 GPUs, 4 NVSwitches, 32 NICs, 4 machines

links    number  GB/s each way  source
NVLink   32      450            stated
network  32      50             stated

best way, GB/s in one direction
from GPU0  to             GPUs
NV 450     GPU1 to GPU7   7
NET 50     GPU8 to GPU31  24

ring: GPU0 - GPU1 - GPU2 - GPU3 - GPU4 - GPU5 - GPU6 - GPU7 - ... - GPU24 - GPU25 - GPU26 - GPU27 - GPU28 - GPU29 - GPU30 - GPU31
its narrowest hop: GPU7 to GPU8, NET 50 GB/s, on NIC0 - network; 4 of 32 hops are like it

tp: 2 groups of 16 ranks, 2 of them across machines
  0 1 ... 15  on machines 0 1
  16 17 ... 31  on machines 2 3
dp: 16 groups of 2 ranks, 16 of them across machines
  0 16  on machines 0 2
  1 17  on machines 0 2
  2 18  on machines 0 2
  3 19  on machines 0 2
  4 20  on machines 0 2
  5 21  on machines 0 2
  6 22  on machines 0 2
  7 23  on machines 0 2
  and 8 more
"""


def test_four_gpus_whole() -> None:
    matrix = parse_matrix((DATA / "h200-x4.txt").read_text())
    assert topology_text(topology(matrix, rates_of("H200"), "four, H200"), {"tp": 2, "dp": 2}) == FOUR


def test_many_machines_whole() -> None:
    graph = described("4x8:nvswitch=450GB/s,network=8x50GB/s")
    assert topology_text(graph, {"tp": 16, "dp": 2}) == MANY


def test_nics_and_what_nobody_knows() -> None:
    text = topology_text(topology(parse_matrix((DATA / "hgx8-repaired.txt").read_text())))
    assert "\nNIC0 (mlx5_0): nearest GPU5 (PIX)\n" in text
    assert "\nCPU1: NUMA node 1, 6 processors 1,3,5,7,9,11, nearest to GPU4, GPU5, GPU6, GPU7\n" in text
    nic = next(line for line in text.splitlines() if line.startswith("NIC0  "))
    through, itself = "PIX via GPU5 unknown", "PIX unknown"
    assert nic.split("  ") == ["NIC0", *5 * [through], itself, *2 * [through]]
    known = topology_text(topology(parse_matrix((DATA / "hgx8-repaired.txt").read_text()), rates_of("H200")))
    assert "PIX via GPU5 ≤ 63" in known


def test_one_gpu() -> None:
    assert topology_text(described("1x1")) == "1x1\n1 GPU, 1 machine\n"


def test_layout_of_another_size() -> None:
    with pytest.raises(PerfModelError, match=r"must multiply to the number of GPUs, 2 \(got tp\(4\)\)"):
        topology_text(described("1x2:pcie"), {"tp": 4})
