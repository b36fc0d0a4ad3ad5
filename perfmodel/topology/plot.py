"""The picture of a topology: GPUs in a row, NVLink below them, PCIe, CPUs and the network above."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from perfmodel.errors import PerfModelError
from perfmodel.report.plots.canvas import axes_or_new, save_figure
from perfmodel.report.plots.palette import INK, LINKS, TOPOLOGY_BOXES
from perfmodel.topology.text import Link, alike, gb_per_s, link_name

if TYPE_CHECKING:
    import networkx as nx
    from matplotlib.axes import Axes

MOST_MACHINES = 2  # drawn; the rest are like them
MOST_GPUS = 64  # drawn; links between more take minutes
MOST_LEAVES = 18  # GPUs and NICs in the row, up to which letters are in full size
BETWEEN_MACHINES = 0.4  # more than between GPUs
HALF_BOX, HALF_HEIGHT = 0.4, 0.17
# from below
LEVELS = ("nvswitch", "gpu", "pcie_switch", "upper switch", "host_bridge", "cpu", "node", "nic", "network")
NAMES = {"nvswitch": "NVSwitch", "pcie_switch": "switch", "host_bridge": "bridge", "node": "machine"}


class Place(NamedTuple):
    """Place of a box: its row ``y`` and the middles of the first and the last box that hang on it, or its own twice."""

    first: float
    last: float
    y: float

    @property
    def x(self) -> float:
        """Its middle."""
        return (self.first + self.last) / 2


def save_topology_plot(graph: nx.Graph, path: Path) -> Path:
    """Write the picture; see :func:`~perfmodel.report.plots.canvas.save_figure`.

    Raises
    ------
    PerfModelError
        If there are more GPUs to draw than can be told apart.
    """
    shown = _shown(graph)
    gpus = sum(kind == "gpu" for _, kind in shown.nodes(data="kind"))
    if gpus > MOST_GPUS:
        raise PerfModelError(
            f"--plot: at most {MOST_GPUS} GPUs can be drawn (got {gpus}). Leave it out, or describe a smaller part."
        )
    places = positions(shown)
    width_inch = min(max(9.5, 1.1 * (max(place.last for place in places.values()) + 1)), 18.0)
    height_inch = 2.5 + 1.0 * len({place.y for place in places.values()})
    return save_figure(path, graph.graph["title"], (width_inch, height_inch), [lambda ax: plot_topology(graph, ax)])


def plot_topology(graph: nx.Graph, ax: Axes | None = None) -> Axes:
    """Devices as boxes on rows by what they are, links as lines by kind; the legend says how wide each sort is.

    Dashed: nobody said how wide. Dotted: assumed to be wide enough. Of many machines, the first two.
    """
    ax = axes_or_new(ax)
    shown = _shown(graph)
    places = positions(shown)
    across = max(place.last for place in places.values()) + 1
    size = 13 * min(1.0, MOST_LEAVES / across)
    for a, b in (pair for pair in shown.edges if shown.edges[pair]["source"] == "assumed"):
        _draw_line(ax, places[a], places[b], color=LINKS["host"], linewidth=1.5, linestyle=":")
    for link, edges in alike(shown).items():
        from_left = sorted(edges, key=lambda pair: min(places[node].x for node in pair))
        for number, (a, b) in enumerate(from_left):
            _draw_link(ax, link, places[a], places[b], size - 1, is_first=number == 0)
    for node, place in places.items():
        _draw_box(ax, shown, node, place, size)
    lowest = min([place.y for place in places.values()] + [line.get_path().get_extents().y0 for line in ax.lines])
    spare = max(0.0, 5 - across) / 2  # a picture of few boxes is not blown up
    ax.set_xlim(-0.6 - spare, across - 0.4 + spare)
    ax.set_ylim(lowest - 0.35, max(place.y for place in places.values()) + 0.35)
    ax.set_axis_off()
    _add_legend(ax, shown)
    hidden = len(_machines(graph)) - len(_machines(shown))
    if hidden:
        ax.set_title(f"and {hidden} more machine{'s' if hidden > 1 else ''} like these")
    return ax


def _machines(graph: nx.Graph) -> list[str]:
    return list(dict.fromkeys(node for _, node in graph.nodes(data="node") if node))


def _shown(graph: nx.Graph) -> nx.Graph:
    """The first machines, without the vertex that only one CPU hangs on."""
    drawn = ["", *_machines(graph)[:MOST_MACHINES]]
    return graph.subgraph(
        name
        for name, found in graph.nodes(data=True)
        if found["node"] in drawn and not (found["kind"] == "node" and len(graph[name]) == 1)
    )


def _level(graph: nx.Graph, name: str) -> int:
    """Return the row of a vertex, counted from below; a NIC stands with the GPUs unless a network is above it."""
    kind = graph.nodes[name]["kind"]
    if kind == "nic" and all(edge["kind"] != "network" for edge in graph[name].values()):
        kind = "gpu"
    if graph.nodes[name].get("upper"):
        kind = "upper switch"
    return LEVELS.index(kind)


def positions(graph: nx.Graph) -> dict[str, Place]:
    """Return the place of each vertex: those that hang on one vertex stand side by side, and that vertex above them.

    Examples
    --------
    >>> from perfmodel.topology.sources import described
    >>> positions(described("1x2:pcie"))["PCIe0"]
    Place(first=0.0, last=1.0, y=1.0)
    """
    levels = {name: _level(graph, name) for name in sorted(graph, key=_natural)}
    base, upwards = LEVELS.index("gpu"), sorted(levels, key=levels.__getitem__)
    hanging = {
        name: [other for other in levels if graph.has_edge(name, other) and levels[other] < levels[name]]
        for name in levels
    }
    leaves: dict[str, list[str]] = {}
    for name in upwards:
        found = [leaf for other in hanging[name] for leaf in leaves[other]] if levels[name] > base else []
        leaves[name] = found or ([name] if levels[name] == base else [])
    downwards = sorted(levels, key=lambda name: -levels[name])
    row = list(dict.fromkeys(leaf for name in downwards for leaf in leaves[name]))
    machines = list(dict.fromkeys(graph.nodes[leaf]["node"] for leaf in sorted(row, key=_natural)))
    row.sort(key=lambda leaf: machines.index(graph.nodes[leaf]["node"]))
    at = {leaf: x + BETWEEN_MACHINES * machines.index(graph.nodes[leaf]["node"]) for x, leaf in enumerate(row)}
    rows = {level: float(y) for y, level in enumerate(sorted(set(levels.values())))}
    places: dict[str, Place] = {leaf: Place(float(x), float(x), rows[base]) for leaf, x in at.items()}
    for name in (name for name in upwards if name not in places):
        below = hanging[name] or list(graph[name])
        if graph.nodes[name]["kind"] == "nic":
            x = _nic_x(graph, name, [at[leaf] for leaf in leaves[name]])
            places[name] = Place(x, x, rows[levels[name]])
        else:
            middles = [places[other].x if other in places else at[other] for other in below]
            places[name] = Place(min(middles), max(middles), rows[levels[name]])
    return {name: places[name] for name in levels}


def _natural(name: str) -> tuple[str, int]:
    stem = name.rstrip("0123456789")
    return stem, int(name[len(stem) :] or 0)


def _nic_x(graph: nx.Graph, nic: str, over: list[float]) -> float:
    """One of a machine's NICs, which stand evenly over its GPUs."""
    machine = graph.nodes[nic]["node"]
    nics = [name for name, found in graph.nodes(data=True) if found["kind"] == "nic" and found["node"] == machine]
    share = (sorted(nics, key=_natural).index(nic) + 0.5) / len(nics)
    return min(over) - 0.5 + share * (max(over) - min(over) + 1)


def _draw_line(ax: Axes, a: Place, b: Place, **style: Any) -> float:
    """Draw a line from the middle of the narrower box straight to the other; return its place along the row."""
    narrow, wide = sorted((a, b), key=lambda place: place.last - place.first)
    x = min(max(narrow.x, wide.first), wide.last)
    ax.plot([narrow.x, x], [narrow.y, wide.y], zorder=1, **style)
    return (narrow.x + x) / 2


def _style(link: Link) -> dict[str, Any]:
    dashes = (0, (3, 1.5)) if link.bandwidth_bytes_per_s is None else "-"
    width = min(1.5 + (link.links or 1), 5) if link.kind == "nvlink" else 2.5
    return {"color": LINKS[link.kind], "linewidth": width, "linestyle": dashes}


def _draw_link(ax: Axes, link: Link, a: Place, b: Place, size: float, is_first: bool) -> None:
    """The first of its sort says how wide it is; NVLinks between two GPUs are bows, and each says how many it is."""
    import numpy as np

    code = f"NV{link.links or ''}" if link.kind == "nvlink" else ""
    rate = "" if link.bandwidth_bytes_per_s is None else f"{gb_per_s(link.bandwidth_bytes_per_s)} GB/s"
    if a.y != b.y:
        x, y = _draw_line(ax, a, b, **_style(link)), (a.y + b.y) / 2
        text = "\n".join(filter(None, (code, rate))) if is_first else ""
    else:
        angle, half = np.linspace(0, np.pi, 60), abs(b.x - a.x) / 2
        x, y, text = (a.x + b.x) / 2, a.y - 0.3 - 0.5 * half, code
        ax.plot(x + half * np.cos(angle), a.y - (a.y - y) * np.sin(angle), zorder=1, **_style(link))
    if text:
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
        ax.text(x, y, text, size=size, ha="center", va="center", color=LINKS[link.kind], bbox=box, zorder=2)


def _draw_box(ax: Axes, graph: nx.Graph, name: str, place: Place, size: float) -> None:
    from matplotlib.patches import FancyBboxPatch

    found = graph.nodes[name]
    label = NAMES.get(found["kind"], name)
    if found["kind"] == "cpu" and found["numa"] is not None and place.last > place.first:
        label = f"{name}, NUMA node {found['numa']}"
    corner = (place.first - HALF_BOX, place.y - HALF_HEIGHT)
    width = place.last - place.first + 2 * HALF_BOX
    shape = FancyBboxPatch(corner, width, 2 * HALF_HEIGHT, boxstyle="round,pad=0,rounding_size=0.06", zorder=3)
    shape.set(facecolor=TOPOLOGY_BOXES[found["kind"]], edgecolor=INK)
    ax.add_patch(shape)
    ax.text(place.x, place.y, label, size=size, ha="center", va="center", zorder=4)


def _add_legend(ax: Axes, graph: nx.Graph) -> None:
    from matplotlib.lines import Line2D

    entries = []
    for link in alike(graph):
        rate = gb_per_s(link.bandwidth_bytes_per_s) + ("" if link.bandwidth_bytes_per_s is None else " GB/s")
        source = f" ({link.source})" if link.source else ""
        entries.append(Line2D([], [], **_style(link), label=f"{link_name(link)}: {rate}{source}"))
    if entries:
        ax.legend(handles=entries, loc="upper center", bbox_to_anchor=(0.5, 0), ncols=2, frameon=False, handlelength=3)
