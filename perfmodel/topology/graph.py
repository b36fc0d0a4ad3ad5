"""A machine as a networkx graph of GPUs, switches, host bridges, CPUs and NICs.

Vertices have ``kind`` (gpu, nvswitch, pcie_switch, host_bridge, cpu, nic, node, network) and ``node``, the machine they
belong to. Edges have ``kind`` (nvlink, pcie, host, smp, network), ``links`` (how many are bonded, or None),
``bandwidth_bytes_per_s`` of one direction, or None where nobody said, and ``source``: stated, datasheet, measured, or
assumed (taken to be wide enough never to be the narrowest). A CPU is a NUMA node of it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import combinations, pairwise
from typing import TYPE_CHECKING, NamedTuple

from perfmodel.errors import PerfModelError
from perfmodel.topology.matrix import PCIE_CODES, Matrix, nvlinks
from perfmodel.units import GB

if TYPE_CHECKING:
    import networkx as nx

MOST_LINKS = 18  # NVLinks of any GPU so far


class Rate(NamedTuple):
    """Rate of one direction of a link, and its source; without a number if the link is assumed to be wide enough."""

    bytes_per_s: float | None
    source: str

    def times(self, links: int) -> Rate:
        """Return the rate of a bond of that many links."""
        return self._replace(bytes_per_s=None if self.bytes_per_s is None else links * self.bytes_per_s)


ASSUMED = Rate(None, "assumed")


class Rates(NamedTuple):
    """Rates of a machine's links, as far as they are known.

    Attributes
    ----------
    links : int or None
        NVLinks of a GPU.
    nvlink, pcie, nic, smp : Rate or None
        Rates of one NVLink, of PCIe, of one NIC, and of the link between processors.
    """

    links: int | None = None
    nvlink: Rate | None = None
    pcie: Rate | None = None
    nic: Rate | None = None
    smp: Rate | None = None


def _generation(links: int, nvlink_gb_per_s: float, giga_transfers_per_s: float) -> Rates:
    pcie_bytes_per_s = 16 * giga_transfers_per_s * 1e9 * 128 / 130 / 8  # 16 lanes
    return Rates(links, Rate(nvlink_gb_per_s * GB, "datasheet"), Rate(pcie_bytes_per_s, "datasheet"))


# By compute capability, and by words of the name. Sources: NVIDIA's datasheets of V100, A100, H100, H200, HGX B200.
GENERATIONS = {
    (7, 0): (("V100",), _generation(6, 25, 8)),
    (8, 0): (("A100",), _generation(12, 25, 16)),
    (9, 0): (("H100", "H200"), _generation(18, 25, 32)),
    (10, 0): (("B200", "GB200"), _generation(18, 50, 32)),
}


def rates_of(gpu: str, compute_capability: tuple[int, int] | None = None) -> Rates:
    """Return the datasheet's rates of a GPU's links, by its name or else its generation; nothing for other GPUs.

    >>> rates_of("NVIDIA H200").nvlink
    Rate(bytes_per_s=25000000000.0, source='datasheet')
    >>> rates_of("NVIDIA L4")
    Rates(links=None, nvlink=None, pcie=None, nic=None, smp=None)
    """
    words = set(re.split(r"[^A-Z0-9]+", gpu.upper()))
    for names, rates in GENERATIONS.values():
        if words.intersection(names):
            return rates
    return GENERATIONS[compute_capability][1] if compute_capability in GENERATIONS else Rates()


class Builder:
    """Adds vertices and edges with all their attributes to ``graph``, whose ``title`` says what it is of."""

    def __init__(self, title: str) -> None:
        import networkx as nx

        self.graph: nx.Graph = nx.Graph(title=title)
        self._counts: dict[str, int] = {}

    def vertex(self, name: str, kind: str, node: str = "node0", **more: object) -> str:
        """Named so."""
        self.graph.add_node(name, kind=kind, node=node, **more)
        return name

    def next(self, prefix: str, kind: str, **more: object) -> str:
        """The next one of this prefix: PCIe0, PCIe1, ..."""
        number = self._counts.get(prefix, 0)
        self._counts[prefix] = number + 1
        name = self.vertex(f"{prefix}{number}", kind)
        self.graph.nodes[name].update(more)
        return name

    def edge(self, a: str, b: str, kind: str, rate: Rate | None, links: int | None = None) -> None:
        """Add an edge; its rate is that of all its links together."""
        bandwidth, source = rate or (None, None)
        self.graph.add_edge(a, b, kind=kind, links=links, bandwidth_bytes_per_s=bandwidth, source=source)


def topology(matrix: Matrix, rates: Rates | None = None, title: str | None = None) -> nx.Graph:
    """The graph of one machine whose devices reach each other as the matrix says.

    Bonds of NVLinks join two GPUs, or go through an NVSwitch where all of a group have the same bond to each other and
    that takes more links than a GPU has. PCIe is a tree: devices, switches, host bridges, CPUs, the machine.

    Raises
    ------
    PerfModelError
        If the codes cannot all be true of one tree; the sentence names the two devices.

    Notes
    -----
    Assumes, where NVLink hides how two GPUs hang on PCIe: a host bridge each, and one CPU unless their NUMA nodes
    differ. Every PCIe link of a GPU and of switches is as wide as the GPU's; of a NIC's nothing is known.
    """
    rates = rates or Rates()
    build = Builder(title or matrix.where)
    for device in matrix.devices:
        kind = "gpu" if device in matrix.gpus else "nic"
        build.vertex(device, kind, numa=matrix.numa[device], label=matrix.nic_names.get(device, device))
    _add_nvlinks(build, matrix, rates)
    _add_pcie(build, matrix, rates)
    for (a, b), code in matrix.codes.items():
        if (found := code_between(build.graph, a, b)) != code:
            raise PerfModelError(
                f"{matrix.where}: {a} and {b} must be {found} as the other pairs have it (got {code})."
                f" Save the matrix of one machine, as it was printed."
            )
    return build.graph


def _add_nvlinks(build: Builder, matrix: Matrix, rates: Rates) -> None:
    import networkx as nx

    bonds = nx.Graph()
    for (a, b), code in matrix.codes.items():
        if (links := nvlinks(code)) is not None:
            bonds.add_edge(a, b, links=links)
    for part in nx.connected_components(bonds):
        gpus = sorted(part, key=matrix.devices.index)
        pairs = {(a, b): bonds[a][b]["links"] for a, b in combinations(gpus, 2) if bonds.has_edge(a, b)}
        most = max(pairs.values())
        is_even = set(pairs.values()) == {most} and len(pairs) == math.comb(len(gpus), 2)
        if is_even and most * (len(gpus) - 1) > (rates.links or MOST_LINKS):
            hub = build.next("NVSwitch", "nvswitch")
            pairs = {(gpu, hub): most for gpu in gpus}
        for (a, b), links in pairs.items():
            build.edge(a, b, "nvlink", rates.nvlink and rates.nvlink.times(links), links)


def _add_pcie(build: Builder, matrix: Matrix, rates: Rates) -> None:
    """Add PCIe from the devices upwards: devices that are joined at a level share that level's vertex."""
    root = build.vertex("node0", "node")
    one_switch, switches, bridges = (_joined(matrix, code) for code in ("PIX", "PXB", "PHB"))
    groups = _by_numa(_joined(matrix, "NODE"), matrix)
    for devices in groups:
        numa, cpus = _common(matrix.numa, devices), _common(matrix.cpu_affinity, devices)
        cpu = build.next("CPU", "cpu", numa=numa, cpus=cpus)
        build.edge(cpu, root, *(("smp", rates.smp) if len(groups) > 1 else ("host", None)))
        for below_bridge in (group for group in bridges if group <= devices):
            bridge = build.next("Bridge", "host_bridge")
            build.edge(bridge, cpu, "host", None)
            for group in (group for group in switches if group <= below_bridge):
                parts = [sorted(part, key=matrix.devices.index) for part in one_switch if part <= group]
                _hang(build, bridge, parts, rates)


def _hang(build: Builder, bridge: str, parts: list[list[str]], rates: Rates) -> None:
    """Devices below a host bridge: one by itself, several on a switch, or several switches on another."""

    def join(below: str, above: str) -> None:
        is_nic = build.graph.nodes[below]["kind"] == "nic"
        build.edge(below, above, "pcie", rates.nic if is_nic else rates.pcie)

    if len(parts) == len(parts[0]) == 1:
        join(parts[0][0], bridge)
        return
    top = bridge
    if len(parts) > 1:
        top = build.next("PCIe", "pcie_switch", upper=True)
        join(top, bridge)
    for part in parts:
        switch = build.next("PCIe", "pcie_switch", upper=False)
        join(switch, top)
        for device in part:
            join(device, switch)


def _common(affinity: dict[str, str | None], devices: frozenset[str]) -> str | None:
    """Return what all devices have in common, among those for which it is known."""
    found = {affinity[device] for device in devices} - {None}
    return found.pop() if len(found) == 1 else None


def _joined(matrix: Matrix, level: str) -> list[frozenset[str]]:
    """Groups of devices that reach each other at this PCIe code or a nearer one."""
    import networkx as nx

    near = PCIE_CODES[: PCIE_CODES.index(level) + 1]
    graph = nx.Graph()
    graph.add_nodes_from(matrix.devices)
    graph.add_edges_from(pair for pair, code in matrix.codes.items() if code in near)
    groups = [frozenset(part) for part in nx.connected_components(graph)]
    return sorted(groups, key=lambda group: min(map(matrix.devices.index, group)))


def _by_numa(groups: list[frozenset[str]], matrix: Matrix) -> list[frozenset[str]]:
    """Groups put together that no cell keeps apart and whose NUMA nodes do not differ."""
    merged: list[frozenset[str]] = []
    for group in groups:
        for index, other in enumerate(merged):
            apart = any(matrix.codes[a, b] == "SYS" for a in group for b in other)
            numa = {matrix.numa[device] for device in group | other} - {None}
            if not apart and len(numa) < 2:
                merged[index] = other | group
                break
        else:
            merged.append(group)
    return merged


def code_between(graph: nx.Graph, a: str, b: str) -> str:
    """Return the code of the matrix for two devices of one machine: NVLinks if they have a bond, else the path over
    PCIe.
    """
    import networkx as nx

    hubs = [hub for hub in nx.common_neighbors(graph, a, b) if graph.nodes[hub]["kind"] == "nvswitch"]
    if hubs:
        return route_code(graph, (a, hubs[0], b))
    if graph.has_edge(a, b):
        return route_code(graph, (a, b))
    wires = nx.subgraph_view(graph, filter_edge=lambda u, v: graph[u][v]["kind"] != "nvlink")
    return route_code(graph, nx.shortest_path(wires, a, b))


def route_code(graph: nx.Graph, nodes: Sequence[str]) -> str:
    """The code of a way: NV18 (NV where links are not counted), PIX, PXB, PHB, NODE, SYS, or NET between machines."""
    edges = [graph[a][b] for a, b in pairwise(nodes)]
    kinds = {edge["kind"] for edge in edges}
    if kinds == {"nvlink"}:
        links = {edge["links"] for edge in edges}
        return "NV" if None in links else f"NV{min(links)}"
    if "network" in kinds:
        return "NET"
    passed = [graph.nodes[node]["kind"] for node in nodes[1:-1]]
    for kind, code in (("node", "SYS"), ("cpu", "NODE"), ("host_bridge", "PHB")):
        if kind in passed:
            return code
    return "PXB" if passed.count("pcie_switch") > 1 else "PIX"
