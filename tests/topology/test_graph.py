"""Graphs of machines: the matrix comes back from them, and paths, rings and groups are those one finds by hand."""

from __future__ import annotations

import math
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.errors import PerfModelError
from perfmodel.hardware.interconnect import CollectiveRecord, Interconnect
from perfmodel.hardware.profile import Device, Profile, save_profile
from perfmodel.topology.graph import Rate, Rates, code_between, rates_of, topology
from perfmodel.topology.matrix import Matrix, parse_matrix
from perfmodel.topology.paths import GREEDY_RING, Paths, groups, parse_layout, ring_order
from perfmodel.topology.paths import Path as Way
from perfmodel.topology.sources import described, find_topology, from_profile
from tests.places import TESTS
from tests.refusals import refused

DATA = TESTS / "data" / "topology"
H200 = rates_of("NVIDIA H200")
GEN5_BYTES_PER_S = 16 * 32e9 * 128 / 130 / 8
# DGX-1 with V100, as its user guide draws it: six NVLinks a GPU
CUBE = {
    (0, 1): 1, (0, 2): 1, (0, 3): 2, (0, 4): 2, (1, 2): 2, (1, 3): 1, (1, 5): 2, (2, 3): 2,
    (2, 6): 1, (3, 7): 1, (4, 5): 1, (4, 6): 1, (4, 7): 2, (5, 6): 2, (5, 7): 1, (6, 7): 2,
}  # fmt: skip


def saved(name: str) -> Matrix:
    return parse_matrix((DATA / name).read_text(), name)


def matrix_of(codes: dict[tuple[str, str], str], numa: dict[str, str] | None = None) -> Matrix:
    """From one order of each pair; devices in the order in which they are named."""
    devices = tuple(dict.fromkeys(device for pair in codes for device in pair))
    both = codes | {(b, a): code for (a, b), code in codes.items()}
    unknown: dict[str, str | None] = dict.fromkeys(devices)
    return Matrix("box", devices, both, unknown, {**unknown, **(numa or {})}, {})


def cube() -> Matrix:
    gpus = [(a, b) for a in range(8) for b in range(a + 1, 8)]
    codes = {(f"GPU{a}", f"GPU{b}"): f"NV{CUBE[a, b]}" if (a, b) in CUBE else "SYS" for a, b in gpus}
    return matrix_of(codes, {f"GPU{gpu}": str(gpu // 4) for gpu in range(8)})


def best(graph: Any, a: str, b: str) -> Way:
    return Paths(graph).best(a, b)


def assert_comes_back(matrix: Matrix) -> None:
    graph = topology(matrix)
    assert {pair: code_between(graph, *pair) for pair in matrix.codes} == matrix.codes


def kinds(graph: Any) -> dict[str, int]:
    found = [kind for _, kind in graph.nodes(data="kind")]
    return {kind: found.count(kind) for kind in dict.fromkeys(found)}


@pytest.mark.parametrize("matrix", [saved("h200-x4.txt"), saved("hgx8-repaired.txt"), cube()], ids=["4", "8", "cube"])
def test_the_matrix_comes_back(matrix: Matrix) -> None:
    assert_comes_back(matrix)


def test_one_bond_to_all_that_no_gpu_has_links_for_is_a_switch() -> None:
    graph = topology(saved("h200-x4.txt"), H200)
    assert kinds(graph) == {"gpu": 4, "nvswitch": 1, "node": 1, "cpu": 1, "host_bridge": 4}
    edge = {"kind": "nvlink", "links": 18, "bandwidth_bytes_per_s": 450e9, "source": "datasheet"}
    assert [graph.edges[f"GPU{gpu}", "NVSwitch0"] for gpu in range(4)] == 4 * [edge]
    assert graph.nodes["CPU0"]["numa"] == "0"
    six_each = matrix_of({(f"GPU{a}", f"GPU{b}"): "NV4" for a in range(4) for b in range(a + 1, 4)})
    assert "nvswitch" not in kinds(topology(six_each))  # 3 x 4 links: an A100 has 12
    assert kinds(topology(six_each, rates_of("V100")))["nvswitch"] == 1  # but a V100 has 6


def test_the_eight_gpu_box() -> None:
    graph = topology(saved("hgx8-repaired.txt"), H200)
    assert kinds(graph) == {"gpu": 8, "nic": 1, "nvswitch": 1, "node": 1, "cpu": 2, "host_bridge": 8, "pcie_switch": 1}
    assert set(graph["PCIe0"]) == {"GPU5", "NIC0", "Bridge5"}
    assert graph.edges["PCIe0", "NIC0"] == {
        "kind": "pcie",
        "links": None,
        "bandwidth_bytes_per_s": None,
        "source": None,
    }
    assert graph.edges["PCIe0", "GPU5"]["bandwidth_bytes_per_s"] == pytest.approx(GEN5_BYTES_PER_S)
    assert [graph.nodes[f"CPU{cpu}"]["numa"] for cpu in range(2)] == ["0", "1"]


LEVELS = ["PIX", "PXB", "PHB", "NODE", "SYS"]


@given(st.data())
def test_every_pcie_tree_comes_back(data: st.DataObject) -> None:
    """Devices at addresses cpu.bridge.upper.lower: the code is how far up the first difference is."""
    count = data.draw(st.integers(2, 7))
    digits = st.tuples(*[st.integers(0, 1)] * 4)
    address = {f"GPU{i}" if i % 3 < 2 else f"NIC{i}": data.draw(digits) for i in range(count)}
    codes = {}
    names = list(address)
    for index, a in enumerate(names):
        for b in names[index + 1 :]:
            same = next((level for level in range(4) if address[a][level] != address[b][level]), 4)
            codes[a, b] = LEVELS[4 - same]
    matrix = matrix_of(codes)
    assert_comes_back(matrix)
    linked = {
        pair: f"NV{data.draw(st.integers(1, 4))}"
        if pair[0][0] + pair[1][0] == "GG" and data.draw(st.booleans())
        else code
        for pair, code in codes.items()
    }
    assert_comes_back(matrix_of(linked))


def test_virtual_machines_hide_numa_nodes() -> None:
    """All devices say NUMA 0, yet the codes keep them apart."""
    codes = {("GPU0", "NIC0"): "PIX", ("GPU1", "NIC0"): "SYS", ("GPU0", "GPU1"): "SYS"}
    assert_comes_back(matrix_of(codes, {"GPU0": "0", "GPU1": "0"}))
    codes |= {("GPU0", "GPU1"): "NV12"}
    assert_comes_back(matrix_of(codes, {"GPU0": "0", "GPU1": "0"}))


def test_codes_of_no_tree_are_refused() -> None:
    codes = {("GPU0", "NIC0"): "PIX", ("GPU1", "NIC0"): "PIX", ("GPU0", "GPU1"): "SYS"}
    with refused("GPU0 and GPU1", "PIX", "SYS"):
        topology(matrix_of(codes))


def test_rates() -> None:
    assert rates_of("Tesla V100-SXM2-32GB").nvlink == Rate(25e9, "datasheet")
    assert rates_of("NVIDIA B200")[:2] == (18, Rate(50e9, "datasheet"))
    assert rates_of("NVIDIA H20", (9, 0)) == rates_of("NVIDIA H100 80GB HBM3")
    assert rates_of("NVIDIA A100-SXM4-80GB").pcie == Rate(pytest.approx(31.5e9, rel=1e-3), "datasheet")
    assert rates_of("Radeon") == Rates()


def test_paths_of_the_eight_gpu_box() -> None:
    graph = topology(saved("hgx8-repaired.txt"), H200)
    assert best(graph, "GPU0", "GPU7") == (("GPU0", "NVSwitch0", "GPU7"), ("GPU0", "NVSwitch0"), 450e9, 450e9)
    near = best(graph, "GPU5", "NIC0")
    assert (near.nodes, near.bottleneck) == (("GPU5", "PCIe0", "NIC0"), ("PCIe0", "NIC0"))
    assert (near.bandwidth_bytes_per_s, near.limit_bytes_per_s) == (None, pytest.approx(GEN5_BYTES_PER_S))
    assert best(graph, "GPU0", "NIC0").nodes == ("GPU0", "NVSwitch0", "GPU5", "PCIe0", "NIC0")
    stated = topology(saved("hgx8-repaired.txt"), H200._replace(nic=Rate(50e9, "stated")))
    assert best(stated, "NIC0", "GPU0") == (
        ("NIC0", "PCIe0", "GPU5", "NVSwitch0", "GPU0"), ("NIC0", "PCIe0"), 50e9, 50e9,
    )  # fmt: skip
    assert best(graph, "GPU0", "GPU0") == (("GPU0",), None, None, None)
    with pytest.raises(PerfModelError, match=r"'GPU9' must be one of its devices. Did you mean 'GPU"):
        best(graph, "GPU0", "GPU9")


def test_paths_of_the_cube() -> None:
    """GPUs without a bond reach each other through one that has a wide one to both; others do not go round."""
    graph = topology(cube(), rates_of("V100"))
    assert best(graph, "GPU0", "GPU1") == (("GPU0", "GPU1"), ("GPU0", "GPU1"), 25e9, 25e9)
    assert best(graph, "GPU0", "GPU7") == (("GPU0", "GPU4", "GPU7"), ("GPU0", "GPU4"), 50e9, 50e9)
    ring = ring_order(graph)
    assert all(hop.bandwidth_bytes_per_s == 50e9 and len(hop.nodes) == 2 for hop in ring.hops)
    assert [hop.nodes for hop in ring_order(topology(cube())).hops] == [hop.nodes for hop in ring.hops]  # without rates


def pcie_box(order: list[int]) -> Matrix:
    """Four GPUs a CPU; order: which GPU is at which place of the two CPUs."""
    cpu = {f"GPU{gpu}": place // 4 for place, gpu in enumerate(order)}
    gpus = [f"GPU{gpu}" for gpu in range(8)]
    return matrix_of({(a, b): "PHB" if cpu[a] == cpu[b] else "SYS" for i, a in enumerate(gpus) for b in gpus[i + 1 :]})


@given(st.permutations(range(8)))
def test_a_ring_crosses_the_cpus_twice(order: list[int]) -> None:
    graph = topology(pcie_box(order), H200)
    ring = ring_order(graph)
    assert sorted(ring.order) == sorted(f"GPU{gpu}" for gpu in range(8))
    assert [hop.nodes[0] for hop in ring.hops] == list(ring.order)
    assert sum("node0" in hop.nodes for hop in ring.hops) == 2
    assert ring.bottleneck is not None
    assert {graph.nodes[end]["kind"] for end in ring.bottleneck.bottleneck or ()} == {"cpu", "node"}


def test_rings_of_few_and_of_many() -> None:
    assert ring_order(described("1x1")) == (("GPU0",), (), None)
    pair = ring_order(described("1x2:pcie=10GB/s"))
    assert [hop.nodes for hop in pair.hops] == [("GPU0", "PCIe0", "GPU1"), ("GPU1", "PCIe0", "GPU0")]
    many = ring_order(described("3x16:nvswitch=450GB/s,network=2x100Gb/s"))
    assert many.order == tuple(f"GPU{gpu}" for gpu in range(48))
    assert many.bottleneck is not None
    assert (many.bottleneck.nodes[0], many.bottleneck.nodes[-1]) == ("GPU15", "GPU16")
    assert many.bottleneck.bandwidth_bytes_per_s == 12.5e9


def test_a_ring_of_very_many_is_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perfmodel.topology.paths._greedy", lambda paths, gpus: gpus[::-1])
    few, many = (ring_order(described(f"1x{gpus}:pcie=10GB/s")) for gpus in (GREEDY_RING, GREEDY_RING + 1))
    assert few.order == tuple(f"GPU{gpu}" for gpu in reversed(range(GREEDY_RING)))
    assert many.order == tuple(f"GPU{gpu}" for gpu in range(GREEDY_RING + 1))


def test_no_way_leads_through_a_gpu_that_has_no_nvlink(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked for is searched, and nothing else: as many searches as there are pairs."""
    searched: list[tuple[str, str]] = []
    search = Paths._search
    monkeypatch.setattr(Paths, "_search", lambda paths, a, b: searched.append((a, b)) or search(paths, a, b))
    gpus = 1000
    ring = ring_order(described(f"1x{gpus}:pcie=10GB/s"))
    assert {hop.nodes[1] for hop in ring.hops} == {"PCIe0"}
    assert searched == [(hop.nodes[0], hop.nodes[-1]) for hop in ring.hops]


@given(st.integers(1, 3), st.integers(2, 5), st.floats(1, 900), st.floats(1, 900))
def test_a_path_is_as_wide_as_its_narrowest_link(nodes: int, gpus: int, inside: float, network: float) -> None:
    graph = described(f"{nodes}x{gpus}:pcie={inside:.3f}GB/s,network={network:.3f}GB/s")
    for other in range(1, nodes * gpus):
        path = best(graph, "GPU0", f"GPU{other}")
        rates = [graph.edges[pair]["bandwidth_bytes_per_s"] for pair in pairwise(path.nodes)]
        assert path.bandwidth_bytes_per_s == min(rate for rate in rates if rate is not None)
        expected = round(inside, 3) if other < gpus else min(round(inside, 3), round(network, 3))
        assert path.bandwidth_bytes_per_s == pytest.approx(expected * 1e9)


def test_descriptions() -> None:
    graph = described("2x8:nvswitch=450GB/s,network=8x400Gb/s")
    assert kinds(graph) == {"gpu": 16, "nvswitch": 2, "node": 2, "network": 1, "nic": 16}
    assert graph.edges["GPU8", "NVSwitch1"] == {
        "kind": "nvlink",
        "links": None,
        "bandwidth_bytes_per_s": 450e9,
        "source": "stated",
    }
    assert graph.edges["NIC8", "network"]["bandwidth_bytes_per_s"] == 50e9
    assert graph.nodes["GPU8"]["node"] == "node1"
    plain = described("2x4 nvlink,infiniband")
    assert plain.edges["GPU0", "GPU3"] == {
        "kind": "nvlink",
        "links": None,
        "bandwidth_bytes_per_s": None,
        "source": None,
    }
    assert best(plain, "GPU0", "GPU4").bandwidth_bytes_per_s is None
    assert described("1x8: nvswitch", H200).edges["GPU0", "NVSwitch0"]["bandwidth_bytes_per_s"] == 450e9
    bonds = described("1x2:nvlink=4x25GB/s").edges["GPU0", "GPU1"]
    assert (bonds["links"], bonds["bandwidth_bytes_per_s"], bonds["source"]) == (4, 100e9, "stated")
    assert code_between(described("1x2:host"), "GPU0", "GPU1") == "PHB"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("four GPUs", "topology: must be a description of at least one GPU (got 'four GPUs')."),
        ("0x8:nvlink", "topology: must be a description of at least one GPU (got '0x8:nvlink')."),
        ("1x8", "topology: must have one tier of nvswitch, pcie, host, nvlink (got '1x8')."),
        ("1x8:nvlink,pcie", "topology: must have one tier of nvswitch, pcie, host, nvlink (got '1x8:nvlink,pcie')."),
        ("2x1", "topology: must have one tier of network, infiniband, ethernet, roce (got '2x1')."),
        ("0x" + "9" * 400, "topology: must be a description of at least one GPU (got '0x99"),
        ("1x8:nvlnk", "topology '1x8:nvlnk': a tier must be a known one (got 'nvlnk'). Did you mean 'nvlink'?"),
        ("1x8:pcie,pcie", "topology '1x8:pcie,pcie': each tier must be given once (got pcie again). Leave one out."),
    ],
)  # fmt: skip
def test_descriptions_refused(text: str, sentence: str) -> None:
    with pytest.raises(PerfModelError) as caught:
        described(text)
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    "rate", ["", "fast", "450", "0GB/s", "0x25GB/s", "-1GB/s", "1e400GB/s", "2x1e299TB/s", "9" * 5000 + "x1GB/s"]
)
def test_a_rate_is_a_number_above_0_and_finite(rate: str) -> None:
    with pytest.raises(PerfModelError) as caught:
        described(f"1x2:pcie={rate}")
    rule = "the rate of pcie must be above 0 and finite, with a unit of K, M, G or T and B/s or b/s"
    assert f"{rule} (got {rate!r}). Write " in str(caught.value)


def test_a_rate_with_an_exponent() -> None:
    assert described("1x2:pcie=2.5e1GB/s").edges["GPU0", "PCIe0"]["bandwidth_bytes_per_s"] == 25e9


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("10000x8:nvswitch=450GB/s", "at most 1024 GPUs (got 80000)"),
        ("1x1025:pcie", "at most 1024 GPUs (got 1025)"),
        (f"1x{'9' * 400}", "at most 1024 GPUs (got inf)"),
        ("1x257:nvlink", "at most 32640 NVLink bonds between two GPUs (got 32896)"),
        ("2x1:network=513x1GB/s", "at most 1024 NICs (got 1026)"),
    ],
)
def test_more_than_is_answered_within_seconds(text: str, rule: str) -> None:
    with pytest.raises(PerfModelError) as caught:
        described(text)
    assert str(caught.value) == f"topology {text!r}: must have {rule}. Describe a smaller part of it."


def test_as_many_as_are_answered() -> None:
    assert kinds(described("2x512:pcie,network=512x1GB/s"))["gpu"] == 1024
    assert described("1x256:nvlink").number_of_edges() == 256 * 255 / 2


def profile(**fields: Any) -> Profile:
    device = Device(kind="cuda", name="NVIDIA H200", memory_bytes=1, compute_capability=(9, 0))
    return Profile(**{"name": "box", "device": device, "gpus": 4, **fields})


def sent(rate_bytes_per_s: float, nodes: int = 1) -> Interconnect:
    sizes = {1024: 1e6, 1 << 30: rate_bytes_per_s}
    records = {f"send_recv 2 float32 {size}": CollectiveRecord(time_s=size / rate) for size, rate in sizes.items()}
    return Interconnect(backend="nccl", nodes=nodes, collectives=records)


def test_profiles(tmp_path: Path) -> None:
    text = (DATA / "h200-x4.txt").read_text()
    graph = from_profile(profile(topology=text))
    assert graph.edges["GPU0", "NVSwitch0"]["bandwidth_bytes_per_s"] == 450e9
    assert graph.graph["title"] == "box, NVIDIA H200"
    alone = from_profile(profile(interconnect="nvlink", interconnects={"nvlink": sent(370e9)}))
    assert kinds(alone) == {"gpu": 4}
    assert best(alone, "GPU0", "GPU3") == (
        ("GPU0", "GPU3"),
        ("GPU0", "GPU3"),
        pytest.approx(370e9),
        pytest.approx(370e9),
    )
    assert alone.edges["GPU0", "GPU3"]["source"] == "measured"
    apart = from_profile(profile(interconnect="slow", interconnects={"slow": sent(6e9, nodes=2)}))
    path = best(apart, "GPU0", "GPU3")  # nobody measured the ways inside the machines
    assert (path.bandwidth_bytes_per_s, path.limit_bytes_per_s) == (None, pytest.approx(6e9))
    assert apart.edges["NIC0", "network"]["source"] == "measured"
    assert apart.edges["GPU0", "Bridge0"]["source"] is None
    cpu = Device(kind="cpu", name="cpu", memory_bytes=1)
    with pytest.raises(PerfModelError, match="box: must be the profile of GPUs"):
        from_profile(profile(device=cpu))
    with pytest.raises(PerfModelError, match=r"gpus must be a multiple of 3 machines \(got 4\)"):
        from_profile(profile(interconnect="x", interconnects={"x": sent(1e9, nodes=3)}))
    save_profile(profile(topology=text), tmp_path / "box.json")
    assert set(find_topology(str(tmp_path / "box.json"))) == set(graph)


def test_find_topology(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = DATA / "h200-x4.txt"
    assert find_topology(str(path)).edges["GPU0", "NVSwitch0"]["bandwidth_bytes_per_s"] is None
    assert find_topology(str(path), "H100").edges["GPU0", "NVSwitch0"]["bandwidth_bytes_per_s"] == 450e9
    assert len(find_topology("2x2:nvlink,network")) == 4 + 2 + 2 + 1
    assert "GPU3" in find_topology("h200-sxm-x4")
    with pytest.raises(PerfModelError, match=r"^nowhere: a saved `nvidia-smi topo -m`, a profile or a desc"):
        find_topology("nowhere")
    with pytest.raises(PerfModelError, match=r"gpu must have a datasheet here \(got 'H900'\)"):
        find_topology(str(path), "H900")
    script = tmp_path / "nvidia-smi"
    script.write_text(f'#!/bin/sh\nif [ "$1" = topo ]; then cat "{path}"; else echo NVIDIA H200; fi\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    here = find_topology()
    assert (here.graph["title"], here.edges["GPU0", "NVSwitch0"]["bandwidth_bytes_per_s"]) == ("NVIDIA H200", 450e9)


def test_groups_by_hand() -> None:
    found = groups({"tp": 4, "dp": 2, "pp": 2}, 16, 8)
    assert [group.ranks for group in found["tp"]] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)]
    assert [group.ranks for group in found["dp"]][:5] == [(0, 4), (1, 5), (2, 6), (3, 7), (8, 12)]
    assert [group.ranks for group in found["pp"]] == [(rank, rank + 8) for rank in range(8)]
    assert {name: {group.inside_node for group in each} for name, each in found.items()} == {
        "tp": {True}, "dp": {True}, "pp": {False},
    }  # fmt: skip
    assert found["pp"][0].nodes == (0, 1)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 8))
def test_each_rank_is_in_one_group_of_each(sizes: list[int], per_node: int) -> None:
    world = math.prod(sizes)
    found = groups({f"d{index}": size for index, size in enumerate(sizes)}, world, per_node)
    for name, members in found.items():
        assert sorted(rank for group in members for rank in group.ranks) == list(range(world))
        assert {len(group.ranks) for group in members} == {sizes[int(name[1:])]}
    for rank in range(world):  # its groups have nothing but itself in common
        mine = [set(group.ranks) for members in found.values() for group in members if rank in group.ranks]
        assert sum(len(group) - 1 for group in mine) == len(set.union(*mine)) - 1


def test_groups_refused() -> None:
    with pytest.raises(PerfModelError, match=r"must multiply to the number of GPUs, 8 \(got tp\(4\) x dp\(3\)\)"):
        groups({"tp": 4, "dp": 3}, 8, 8)
    with pytest.raises(PerfModelError, match="at least 1 GPU"):
        groups({"tp": 1}, 1, 0)
    assert parse_layout(" tp=4, dp=2") == {"tp": 4, "dp": 2}
    for text in ("tp", "tp=0", "tp=2,tp=2", ""):
        with pytest.raises(PerfModelError, match="groups must be NAME=SIZE"):
            parse_layout(text)
