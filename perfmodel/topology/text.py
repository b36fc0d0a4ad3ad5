"""`perfmodel topology`: what joins the devices, the best way between every two, the ring, the groups of a layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from rich.table import Table

from perfmodel.report.text.prediction import rendered
from perfmodel.topology.graph import code_between, route_code
from perfmodel.topology.matrix import PCIE_CODES, processors
from perfmodel.topology.paths import Path, Paths, RankGroup, Ring, groups, ring_order
from perfmodel.units import GB

if TYPE_CHECKING:
    import networkx as nx

WIDEST = 1000  # of a table: never wrapped
MOST_COLUMNS = 16  # of the matrix; of more devices, the ways from the first GPU are told apart
MOST_GROUPS = 8  # shown of a parallelism
KINDS = {  # one, several
    "gpu": ("GPU", "GPUs"),
    "nvswitch": ("NVSwitch", "NVSwitches"),
    "pcie_switch": ("PCIe switch", "PCIe switches"),
    "host_bridge": ("host bridge", "host bridges"),
    "cpu": ("NUMA node", "NUMA nodes"),
    "nic": ("NIC", "NICs"),
}
LINKS = {"nvlink": "NVLink", "pcie": "PCIe", "host": "inside the CPU", "smp": "between CPUs", "network": "network"}


def topology_text(graph: nx.Graph, layout: Mapping[str, int] | None = None) -> str:
    """Write the whole report.

    Parameters
    ----------
    graph
        The topology.
    layout : optional
        Sizes of parallelisms, innermost first, whose groups are listed at the end.

    Raises
    ------
    PerfModelError
        If the sizes of the layout do not multiply to the number of GPUs.
    """
    devices = {kind: [node for node, found in graph.nodes(data="kind") if found == kind] for kind in KINDS}
    gpus, nics = devices["gpu"], devices["nic"]
    machines = Counter(graph.nodes[gpu]["node"] for gpu in gpus)
    parts = [_counted(len(devices[kind]), *names) for kind, names in KINDS.items() if devices[kind]]
    parts += [_counted(len(machines), "machine", "machines")]
    sections = [f"{graph.graph['title']}\n{', '.join(parts)}"]
    if graph.number_of_edges():
        sections.append(rendered(_links(graph), WIDEST))
    if len(machines) == 1 and (devices["cpu"] or nics):
        sections.append("\n".join([*_numa_nodes(graph, devices["cpu"]), *_nearest(graph, nics, gpus)]))
    if len(gpus) > 1:
        table = _matrix(graph, gpus, gpus) if len(gpus) <= MOST_COLUMNS else _from_first(graph, gpus)
        sections.append("best way, GB/s in one direction\n" + rendered(table, WIDEST))
    if nics and len(machines) == 1 and len(gpus) <= MOST_COLUMNS:
        sections.append("best way to NICs\n" + rendered(_matrix(graph, nics, gpus), WIDEST))
    if len(gpus) > 1:
        sections.append(_ring(graph, ring_order(graph)))
    if layout is not None:
        per_node = max(machines.values())
        sections.append("\n".join(_groups(groups(layout, len(gpus), per_node))))
    return "\n\n".join(section.rstrip() for section in sections if section) + "\n"


def _counted(count: int, one: str, several: str) -> str:
    return f"{count} {one if count == 1 else several}"


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in headings:
        table.add_column(heading, no_wrap=True)
    return table


def gb_per_s(bandwidth_bytes_per_s: float | None, limit_bytes_per_s: float | None = None) -> str:
    """GB/s; of a way that nobody knows the whole of, what it cannot exceed.

    >>> gb_per_s(450e9), gb_per_s(None, 63.015e9), gb_per_s(None)
    ('450', '≤ 63', 'unknown')
    """
    if bandwidth_bytes_per_s is not None:
        return f"{bandwidth_bytes_per_s / GB:.3g}"
    return "unknown" if limit_bytes_per_s is None else f"≤ {limit_bytes_per_s / GB:.3g}"


def way_code(graph: nx.Graph, path: Path) -> str:
    """The code of a way, and the GPUs it leads through, if any: ``PIX via GPU5``."""
    through = [node for node in path.nodes[1:-1] if graph.nodes[node]["kind"] == "gpu"]
    return " ".join([route_code(graph, path.nodes), *(f"via {gpu}" for gpu in through)])


def _links(graph: nx.Graph) -> Table:
    """Write a row for each kind of equal links."""
    table = _table("links", "number", "GB/s each way", "source")
    for link, edges in alike(graph).items():
        table.add_row(link_name(link), str(len(edges)), gb_per_s(link.bandwidth_bytes_per_s), link.source or "")
    return table


class Link(NamedTuple):
    """What equal links have in common; see :mod:`perfmodel.topology.graph`."""

    kind: str
    links: int | None
    bandwidth_bytes_per_s: float | None
    source: str | None


def link_name(link: Link) -> str:
    """Name a link in words, with how many are bonded.

    >>> link_name(Link("nvlink", 18, None, None))
    'NVLink x 18'
    """
    return LINKS[link.kind] + (f" x {link.links}" if link.links else "")


def alike(graph: nx.Graph) -> dict[Link, list[tuple[str, str]]]:
    """The edges by what they are, widest first in each kind, without those that are assumed."""
    found: dict[Link, list[tuple[str, str]]] = {}
    for a, b, edge in graph.edges(data=True):
        if edge["source"] != "assumed":
            found.setdefault(Link(**edge), []).append((a, b))
    order = list(LINKS)
    ranked = sorted(
        found, key=lambda each: (order.index(each.kind), -(each.bandwidth_bytes_per_s or 0), -(each.links or 0))
    )
    return {link: found[link] for link in ranked}


def _numa_nodes(graph: nx.Graph, cpus: Sequence[str]) -> Iterable[str]:
    """Write the NUMA nodes with their processors and GPUs, as far as they are known."""
    for cpu in cpus:
        numa, affinity = graph.nodes[cpu]["numa"], graph.nodes[cpu]["cpus"]
        if numa is not None or affinity is not None:
            count = "" if affinity is None else f"{sum(map(len, processors(affinity)))} "
            near = ", ".join(_below(graph, cpu)) or "no GPU"
            yield f"{cpu}: NUMA node {numa or 'unknown'}, {count}processors {affinity or 'unknown'}, nearest to {near}"


def _below(graph: nx.Graph, top: str) -> Iterable[str]:
    """The GPUs that hang on one vertex of the PCIe tree."""
    import networkx as nx

    tree = nx.subgraph_view(graph, filter_edge=lambda a, b: graph[a][b]["kind"] in ("pcie", "host"))
    below = nx.node_connected_component(nx.restricted_view(tree, ["node0"], []), top)
    return (gpu for gpu, kind in graph.nodes(data="kind") if kind == "gpu" and gpu in below)


def _nearest(graph: nx.Graph, nics: Sequence[str], gpus: Sequence[str]) -> Iterable[str]:
    """NICs with the GPUs that reach them on the shortest way over PCIe."""
    for nic in nics:
        codes = {gpu: code_between(graph, gpu, nic) for gpu in gpus}
        best = min(codes.values(), key=PCIE_CODES.index)
        label = graph.nodes[nic].get("label", nic)
        nearest = ", ".join(gpu for gpu, code in codes.items() if code == best)
        yield f"{nic}{f' ({label})' if label != nic else ''}: nearest {nearest} ({best})"


def _matrix(graph: nx.Graph, rows: Sequence[str], columns: Sequence[str]) -> Table:
    paths = Paths(graph)
    table = _table("", *columns)
    for row in rows:
        table.add_row(row, *("" if row == column else _way(graph, paths.best(row, column)) for column in columns))
    return table


def _way(graph: nx.Graph, path: Path) -> str:
    return f"{way_code(graph, path)} {gb_per_s(path.bandwidth_bytes_per_s, path.limit_bytes_per_s)}"


def _from_first(graph: nx.Graph, gpus: Sequence[str]) -> Table:
    """Write, for many devices, to how many other GPUs the first one has each kind of path."""
    paths = Paths(graph)
    table = _table(f"from {gpus[0]}", "to", "GPUs")
    ways: dict[str, list[str]] = {}
    for gpu in gpus[1:]:
        ways.setdefault(_way(graph, paths.best(gpus[0], gpu)), []).append(gpu)
    for way, there in ways.items():
        table.add_row(way, there[0] if len(there) == 1 else f"{there[0]} to {there[-1]}", str(len(there)))
    return table


def _ring(graph: nx.Graph, ring: Ring) -> str:
    order = list(ring.order)
    if len(order) > MOST_COLUMNS:
        order = [*order[: MOST_COLUMNS // 2], "...", *order[-MOST_COLUMNS // 2 :]]
    worst = ring.bottleneck
    assert worst is not None
    narrow = f"{worst.nodes[0]} to {worst.nodes[-1]}, {_way(graph, worst)} GB/s"
    link = "" if worst.bottleneck is None or len(worst.nodes) == 2 else f", on {' - '.join(worst.bottleneck)}"
    alike = sum(_way(graph, hop) == _way(graph, worst) for hop in ring.hops)
    others = "" if alike == 1 else f"; {alike} of {len(ring.hops)} hops are like it"
    return f"ring: {' - '.join(order)}\nits narrowest hop: {narrow}{link}{others}"


def _groups(found: Mapping[str, Sequence[RankGroup]]) -> Iterable[str]:
    for name, members in found.items():
        across = sum(not group.inside_node for group in members)
        where = f"{across} of them across machines" if across else "each inside a machine"
        ranks = _counted(len(members[0].ranks), "rank", "ranks")
        yield f"{name}: {_counted(len(members), 'group', 'groups')} of {ranks}, {where}"
        for group in members[:MOST_GROUPS]:
            machines = "" if group.inside_node else f"  on machines {_numbers(group.nodes)}"
            yield f"  {_numbers(group.ranks)}{machines}"
        if len(members) > MOST_GROUPS:
            yield f"  and {len(members) - MOST_GROUPS} more"


def _numbers(values: Sequence[int]) -> str:
    """All, or of a long even row its ends.

    >>> _numbers((0, 4, 8)), _numbers(range(64)), _numbers(range(0, 64, 4))
    ('0 4 8', '0 1 ... 63', '0 4 ... 60')
    """
    steps = {b - a for a, b in pairwise(values)}
    if len(values) <= 8 or len(steps) > 1:
        return " ".join(map(str, values))
    return f"{values[0]} {values[1]} ... {values[-1]}"
