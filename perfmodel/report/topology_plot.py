"""The picture of a topology: GPUs in a row, NVLink below them, PCIe, CPUs and the network above."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from perfmodel.report.canvas import axes_or_new, save_figure
from perfmodel.report.topology_text import LINKS, Link, alike, gb_per_s

if TYPE_CHECKING:
    import networkx as nx
    from matplotlib.axes import Axes

MOST_MACHINES = 2  # drawn; the rest are like them
FEW_LEAVES = 10  # GPUs and NICs in the row, up to which everything is in full size
LINK_COLOURS = {"nvlink": "#228833", "pcie": "#4477AA", "host": "#888888", "smp": "#AA3377", "network": "#EE7733"}
BOX_COLOURS = {
    "gpu": "#CFE8D5",
    "nvswitch": "#A8D5B3",
    "pcie_switch": "#CFDDEC",
    "host_bridge": "#DDDDDD",
    "cpu": "#EBD3E2",
    "nic": "#FBDCC6",
    "node": "#EEEEEE",
    "network": "#F7C6A0",
}
NAMES = {"nvswitch": "NVSwitch", "pcie_switch": "switch", "host_bridge": "bridge", "node": "machine"}

_Places = dict[str, tuple[float, float]]


def save_topology_plot(graph: nx.Graph, path: Path) -> Path:
    """Write the picture as a PNG."""
    leaves = sum(kind in ("gpu", "nic") for _, kind in _shown(graph).nodes(data="kind"))
    width_inch = min(max(9.0, 1.25 * leaves), 22.0)
    return save_figure(path, graph.graph["title"], (width_inch, 7.5), [lambda ax: plot_topology(graph, ax)])


def plot_topology(graph: nx.Graph, ax: Axes | None = None) -> Axes:
    """Devices as boxes on rows by what they are, links as lines by kind; the legend says how wide each sort is."""
    ax = axes_or_new(ax)
    shown = _shown(graph)
    places = positions(shown)
    leaves = sum(y == places[_first_gpu(shown)][1] for _, y in places.values())
    size = 13 * min(1.0, (FEW_LEAVES / leaves) ** 0.5)
    for link, edges in alike(shown).items():
        for number, (a, b) in enumerate(edges):
            _draw_link(ax, link, places[a], places[b], size, named=number == 0)
    for a, b in (pair for pair in shown.edges if shown.edges[pair]["source"] == "assumed"):
        _line(ax, places[a], places[b], color=LINK_COLOURS["host"], linewidth=1.5, linestyle=":")
    for node, (x, y) in places.items():
        _draw_box(ax, shown, node, x, y, places, size)
    xs, ys = zip(*places.values(), strict=True)
    ax.set_xlim(min(xs) - 0.8, max(xs) + 0.8)
    lowest = min([*ys, *(line.get_ydata().min() for line in ax.lines)])
    ax.set_ylim(lowest - 0.45, max(ys) + 0.45)
    ax.set_axis_off()
    _legend(ax, shown)
    hidden = len(_machines(graph)) - len(_machines(shown))
    if hidden:
        ax.set_title(f"and {hidden} more machine{'s' if hidden > 1 else ''} like these")
    return ax


def _machines(graph: nx.Graph) -> list[str]:
    return list(dict.fromkeys(node for _, node in graph.nodes(data="node") if node))


def _first_gpu(graph: nx.Graph) -> str:
    return next(node for node, kind in graph.nodes(data="kind") if kind == "gpu")


def _shown(graph: nx.Graph) -> nx.Graph:
    drawn = ["", *_machines(graph)[:MOST_MACHINES]]
    return graph.subgraph(node for node, machine in graph.nodes(data="node") if machine in drawn)


def _level(graph: nx.Graph, node: str) -> int:
    """The row of a vertex, counted from below, before empty rows are left out."""
    kind = graph.nodes[node]["kind"]
    if kind == "nic" and any(graph.edges[node, other]["kind"] == "network" for other in graph[node]):
        return 7
    if kind == "pcie_switch" and graph.nodes[node].get("upper"):
        return 3
    return {"nvswitch": 0, "gpu": 1, "nic": 1, "pcie_switch": 2, "host_bridge": 4, "cpu": 5, "node": 6, "network": 8}[kind]


def positions(graph: nx.Graph) -> _Places:
    """Where each vertex is drawn: what hangs on one vertex stands side by side, and the vertex above their middle.

    Examples
    --------
    >>> from perfmodel.hardware.topology_sources import described
    >>> positions(described("1x2:pcie"))
    {'GPU0': (0.0, 0.0), 'GPU1': (1.0, 0.0), 'PCIe0': (0.5, 1.0)}
    """
    rank = {node: index for index, node in enumerate(graph.graph.get("order", sorted(graph, key=_natural)))}
    levels = {node: _level(graph, node) for node in graph}
    rows = {level: float(row) for row, level in enumerate(sorted(set(levels.values())))}
    below: dict[str, list[str]] = {}
    for node in sorted(graph, key=lambda node: (levels[node], rank[node])):
        under = [other for other in graph[node] if levels[other] < levels[node] and levels[node] > 1]
        found = dict.fromkeys(leaf for other in sorted(under, key=rank.__getitem__) for leaf in below[other])
        below[node] = list(found) or ([node] if levels[node] == 1 else [])
    tops = sorted(graph, key=lambda node: (-levels[node], rank[node]))
    across = {leaf: float(x) for x, leaf in enumerate(dict.fromkeys(leaf for top in tops for leaf in below[top]))}
    places = {}
    for node in sorted(graph, key=rank.__getitem__):
        leaves = below[node] or [leaf for leaf in graph[node] if leaf in across]
        x = sum(across[leaf] for leaf in leaves) / max(len(leaves), 1)
        if levels[node] == 7:
            x += _offset(graph, node, len(leaves))
        places[node] = (x, rows[levels[node]])
    return places


def _natural(name: str) -> tuple[str, int]:
    stem = name.rstrip("0123456789")
    return stem, int(name[len(stem) :] or 0)


def _offset(graph: nx.Graph, nic: str, room: int) -> float:
    """Of one of a machine's NICs from the middle of the machine, which is ``room`` GPUs wide."""
    machine = graph.nodes[nic]["node"]
    nics = sorted((node for node in graph if graph.nodes[node] == graph.nodes[nic] | {"node": machine}), key=_natural)
    return ((nics.index(nic) + 0.5) / len(nics) - 0.5) * room


def _line(ax: Axes, a: tuple[float, float], b: tuple[float, float], **style: object) -> None:
    ax.plot([a[0], b[0]], [a[1], b[1]], zorder=1, **style)


def _draw_link(
    ax: Axes, link: Link, a: tuple[float, float], b: tuple[float, float], size: float, named: bool
) -> None:
    import numpy as np

    style = {"color": LINK_COLOURS[link.kind], "linewidth": 4 if link.kind == "nvlink" else 2.5}
    if a[1] != b[1]:
        _line(ax, a, b, **style)
        x, y = (a[0] + b[0]) / 2, (a[1] + b[1]) / 2
    else:  # two GPUs: a bow below them
        angle = np.linspace(0, np.pi, 60)
        depth = 0.35 + 0.3 * abs(b[0] - a[0])
        middle, radius = (a[0] + b[0]) / 2, abs(b[0] - a[0]) / 2
        ax.plot(middle + radius * np.cos(angle), a[1] - depth * np.sin(angle), zorder=1, **style)
        x, y = middle, a[1] - depth
    if named or a[1] == b[1]:
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
        ax.text(x, y, _short(link, named), size=size - 2, ha="center", va="center", color=style["color"], bbox=box, zorder=2)


def _short(link: Link, whole: bool) -> str:
    code = (f"NV{link.links or ''}" if link.kind == "nvlink" else "")
    rate = "" if link.bandwidth_bytes_per_s is None or not whole else f"{gb_per_s(link.bandwidth_bytes_per_s)} GB/s"
    return "\n".join(filter(None, (code, rate))) or "?"


def _draw_box(ax: Axes, graph: nx.Graph, node: str, x: float, y: float, places: Mapping[str, tuple[float, float]], size: float) -> None:
    from matplotlib.patches import FancyBboxPatch

    kind = graph.nodes[node]["kind"]
    reach = [places[other][0] for other in graph[node]] if kind in ("nvswitch", "network", "node", "cpu") else []
    half = max(0.36, (max(reach, default=x) - min(reach, default=x)) / 2 + 0.1)
    middle = x if not reach else (max(reach) + min(reach)) / 2
    shape = FancyBboxPatch((middle - half, y - 0.16), 2 * half, 0.32, boxstyle="round,pad=0.02,rounding_size=0.06", facecolor=BOX_COLOURS[kind], edgecolor="#444444", zorder=3)
    ax.add_patch(shape)
    ax.text(middle, y, _label(graph, node), size=size, ha="center", va="center", zorder=4)


def _label(graph: nx.Graph, node: str) -> str:
    found = graph.nodes[node]
    if found["kind"] in NAMES:
        return NAMES[found["kind"]]
    if found["kind"] == "cpu" and found["numa"] is not None:
        return f"{node}, NUMA node {found['numa']}"
    return node


def _legend(ax: Axes, graph: nx.Graph) -> None:
    from matplotlib.lines import Line2D

    entries = []
    for link in alike(graph):
        rate = gb_per_s(link.bandwidth_bytes_per_s) + ("" if link.bandwidth_bytes_per_s is None else " GB/s")
        source = f" ({link.source})" if link.source else ""
        name = LINKS[link.kind] + (f" x {link.links}" if link.links else "")
        entries.append(Line2D([], [], color=LINK_COLOURS[link.kind], linewidth=4, label=f"{name}: {rate}{source}"))
    if entries:
        ax.legend(handles=entries, loc="upper center", bbox_to_anchor=(0.5, -0.01), ncols=min(3, len(entries)), frameon=False)


def _unused(entries: Iterable[str]) -> None: ...
