"""Answers about a topology: the best path between two devices, the ring over all GPUs, and the groups of a layout."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, pairwise, permutations
from typing import TYPE_CHECKING, Any, NamedTuple

from perfmodel.errors import PerfModelError, did_you_mean

if TYPE_CHECKING:
    import networkx as nx

EXACT_RING = 8  # GPUs; of more, rings are found machine by machine
GREEDY_RING = 64  # GPUs of a machine; of more, the ring is in their numbering order
# In order, which goes before which among equals. A link without a number counts as narrower than any with one, except
# NVLinks, of which more are wider: these numbers only put links in order.
_UNKNOWN = {"nvlink": 1e18, "pcie": 4.0, "host": 3.0, "smp": 2.0, "network": 1.0}


class Path(NamedTuple):
    """A path from the first of ``nodes`` to the last, in one direction.

    Attributes
    ----------
    bottleneck
        Its narrowest link.
    bandwidth_bytes_per_s : float or None
        Rate of that link; None if a link of the path has no number.
    limit_bytes_per_s : float or None
        Rate of the narrowest link that has one, which the path does not exceed.
    """

    nodes: tuple[str, ...]
    bottleneck: tuple[str, str] | None
    bandwidth_bytes_per_s: float | None
    limit_bytes_per_s: float | None


class Ring(NamedTuple):
    """A ring over all GPUs.

    Attributes
    ----------
    order
        The GPUs in order.
    hops
        Paths from each GPU to the next, and from the last to the first.
    bottleneck
        The narrowest of them.
    """

    order: tuple[str, ...]
    hops: tuple[Path, ...]
    bottleneck: Path | None


class RankGroup(NamedTuple):
    """Ranks that communicate with each other, and the machines that they are on."""

    ranks: tuple[int, ...]
    nodes: tuple[int, ...]

    @property
    def inside_node(self) -> bool:
        """True if all of its ranks are on one machine."""
        return len(self.nodes) == 1


def _width(edge: Mapping[str, Any]) -> float:
    """Return the key by which links are compared."""
    known: float | None = edge["bandwidth_bytes_per_s"]
    return _UNKNOWN[edge["kind"]] * (edge["links"] or 1) if known is None else known


class _Level(NamedTuple):
    """Links of at least some width.

    Attributes
    ----------
    between
        The links that end at no GPU.
    part
        The number of the connected component that each vertex lies in.
    """

    wide: nx.Graph
    between: nx.Graph
    part: dict[str, int]


class Paths:
    """Best paths of one graph; what they share is found once.

    The widest way runs over links no narrower than some width: the largest at which both ends are still joined.

    Notes
    -----
    Assumes: no other traffic, and links at their rates; what is achieved is less. A link whose rate nobody stated
    counts as narrower than any with a rate, unless it is an NVLink.
    """

    def __init__(self, graph: nx.Graph) -> None:
        import networkx as nx

        self._graph = graph
        self._gpus = {name: place for place, (name, kind) in enumerate(graph.nodes(data="kind")) if kind == "gpu"}
        self._found: dict[tuple[str, str], Path | None] = {}
        self._levels: list[_Level] = []
        self._peers = {name: self._over_nvlink(name) for name in self._gpus}
        wide = nx.Graph()
        wide.add_nodes_from(graph)
        order = list(_UNKNOWN)
        for width in sorted({_width(edge) for _, _, edge in graph.edges(data=True)}, reverse=True):
            for a, b, edge in graph.edges(data=True):
                if _width(edge) >= width:  # hops count first, then kinds
                    wide.add_edge(a, b, cost=1000 + order.index(edge["kind"]))
            between = wide.subgraph(set(graph).difference(self._gpus)).copy()
            parts = enumerate(nx.connected_components(between))
            self._levels.append(_Level(wide.copy(), between, {name: number for number, part in parts for name in part}))

    def _over_nvlink(self, gpu: str) -> set[str]:
        """GPUs that a bond, or an NVSwitch, joins to one."""
        found: set[str] = set()
        for hub, edge in self._graph[gpu].items():
            if edge["kind"] == "nvlink":
                found.update([hub] if hub in self._gpus else self._graph[hub])
        return found.intersection(self._gpus) - {gpu}

    def width(self, path: Path) -> float:
        """The rate of its bottleneck, for comparing: :func:`_width`."""
        return math.inf if path.bottleneck is None else _width(self._graph.edges[path.bottleneck])

    def best(self, a: str, b: str) -> Path:
        """The path from a to b whose narrowest link is widest; of equals the shortest, then NVLink before PCIe, and so
        on.

        GPUs do not pass on what is not for them, except one of the same machine over its NVLinks, where that is wider
        and there is no way by NVLink alone: NCCL uses them so to reach a peer (NVB) or a NIC (PXN).

        Raises
        ------
        PerfModelError
            If a or b is not in the graph, or nothing joins them.
        """
        for name in (a, b):
            if name not in self._graph:
                known = did_you_mean(name, self._graph)
                raise PerfModelError(f"topology: {name!r} must be one of its devices. {known}")
        if a == b:
            return Path((a,), None, None, None)
        found = self._direct(a, b)
        if found is None or not self._is_nvlink(found):
            found = max([found, *self._relayed(a, b)], key=lambda path: -1.0 if path is None else self.width(path))
        if found is None:
            raise PerfModelError(f"topology: {a} and {b} must be joined by links (they are not).")
        return found

    def _is_nvlink(self, path: Path) -> bool:
        return {self._graph.edges[pair]["kind"] for pair in pairwise(path.nodes)} == {"nvlink"}

    def _direct(self, a: str, b: str) -> Path | None:
        """Through no other GPU."""
        if (a, b) not in self._found:
            self._found[a, b] = self._search(a, b)
        return self._found[a, b]

    def _search(self, a: str, b: str) -> Path | None:
        import networkx as nx

        for wide, between, part in self._levels:
            if wide.has_edge(a, b):
                return self._path((a, b))
            there = [{part[each] for each in (name, *wide[name]) if each in part} for name in (a, b)]
            if not there[0].isdisjoint(there[1]):
                ends = self._gpus.keys() & {a, b}
                links = [(end, other, link) for end in ends for other, link in wide[end].items() if other in part]
                between.add_edges_from(links)
                nodes = nx.bidirectional_dijkstra(between, a, b, weight="cost")[1]
                between.remove_nodes_from(ends)
                return self._path(nodes)
        return None

    def _relayed(self, a: str, b: str) -> Iterable[Path]:
        """Through one GPU of the same machine that either end has NVLinks to."""
        machine = self._graph.nodes[a]["node"]
        if self._graph.nodes[b]["node"] != machine:
            return
        near = self._peers.get(a, set()) | self._peers.get(b, set())
        for gpu in sorted(near - {a, b}, key=self._gpus.__getitem__):
            if self._graph.nodes[gpu]["node"] == machine:
                first, second = self._direct(a, gpu), self._direct(gpu, b)
                if first and second and (self._is_nvlink(first) or self._is_nvlink(second)):
                    yield self._path([*first.nodes, *second.nodes[1:]])

    def _path(self, nodes: Sequence[str]) -> Path:
        edges = [(pair, self._graph.edges[pair]) for pair in pairwise(nodes)]
        edges = [(pair, edge) for pair, edge in edges if edge["source"] != "assumed"] or edges
        narrowest, _ = min(edges, key=lambda each: _width(each[1]))
        rates = [edge["bandwidth_bytes_per_s"] for _, edge in edges]
        limit = min((rate for rate in rates if rate is not None), default=None)
        return Path(tuple(nodes), narrowest, None if None in rates else limit, limit)


def ring_order(graph: nx.Graph) -> Ring:
    """The ring over all GPUs whose worst hop is widest, then the worst but one, and so on; then with fewest links.

    Exact for up to 8 GPUs. Of more, each machine's are put in order by themselves (more than 8 of them by always going
    on to the widest neighbour, more than 64 as they are numbered) and the machines follow each other.

    Notes
    -----
    Assumes: every hop has its path for itself. Two hops over one link, in the same direction, would halve it.
    """
    gpus = [node for node, kind in graph.nodes(data="kind") if kind == "gpu"]
    paths = Paths(graph)
    if len(gpus) <= EXACT_RING:
        parts = [gpus]
    else:
        by_node: dict[str, list[str]] = {}
        for gpu in gpus:
            by_node.setdefault(graph.nodes[gpu]["node"], []).append(gpu)
        parts = list(by_node.values())
    order = [gpu for part in parts for gpu in _in_order(paths, part)]
    if len(order) < 2:
        return Ring(tuple(order), (), None)
    hops = tuple(paths.best(a, b) for a, b in pairwise([*order, order[0]]))
    return Ring(tuple(order), hops, min(hops, key=paths.width))


def _in_order(paths: Paths, gpus: list[str]) -> Iterable[str]:
    if len(gpus) > GREEDY_RING:
        return gpus
    return (_exact if len(gpus) <= EXACT_RING else _greedy)(paths, gpus)


def _rank(paths: Paths, a: str, b: str) -> tuple[float, int]:
    """Greater is better: a wide way, and of equals one over few links."""
    path = paths.best(a, b)
    return paths.width(path), -len(path.nodes)


def _exact(paths: Paths, gpus: list[str]) -> Iterable[str]:
    if len(gpus) < 4:
        return gpus
    hops = {}
    for a, b in combinations(gpus, 2):
        hops[a, b] = hops[b, a] = _rank(paths, a, b)
    if len(set(hops.values())) == 1:
        return gpus
    best: tuple[list[float], int] | None = None
    order: Sequence[str] = gpus
    for rest in permutations(gpus[1:]):
        if gpus.index(rest[0]) > gpus.index(rest[-1]):  # the other way round
            continue
        there = [hops[pair] for pair in pairwise((gpus[0], *rest, gpus[0]))]
        found = (sorted(width for width, _ in there), sum(length for _, length in there))
        if best is None or found > best:
            best, order = found, (gpus[0], *rest)
    return order


def _greedy(paths: Paths, gpus: list[str]) -> Iterable[str]:
    order, left = [gpus[0]], gpus[1:]
    while left:
        here = order[-1]
        order.append(max(left, key=lambda gpu: _rank(paths, here, gpu)))
        left.remove(order[-1])
    return order


def parse_layout(text: str) -> dict[str, int]:
    """Sizes of parallelisms, innermost first.

    >>> parse_layout("tp=4,dp=2")
    {'tp': 4, 'dp': 2}
    """
    found: dict[str, int] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\w+)\s*=\s*([1-9]\d*)\s*", part)
        if match is None or match[1] in found:
            raise PerfModelError(f"groups must be NAME=SIZE,NAME=SIZE, each name once (got {text!r}).")
        found[match[1]] = int(match[2])
    return found


def groups(layout: Mapping[str, int], world_size: int, gpus_per_node: int) -> dict[str, tuple[RankGroup, ...]]:
    """The groups of ranks of each parallelism; ranks run along the first one first.

    rank = i_1 + n_1 (i_2 + n_2 (i_3 + ...)); a group varies one index and keeps the others.

    Raises
    ------
    PerfModelError
        If a size is below 1 or the sizes do not multiply to ``world_size``.

    Examples
    --------
    >>> groups({"tp": 2, "dp": 2}, 4, 2)["dp"]
    (RankGroup(ranks=(0, 2), nodes=(0, 1)), RankGroup(ranks=(1, 3), nodes=(0, 1)))
    """
    product = " x ".join(f"{name}({size})" for name, size in layout.items())
    if any(size < 1 for size in layout.values()) or math.prod(layout.values()) != world_size:
        raise PerfModelError(f"the sizes of groups must multiply to the number of GPUs, {world_size} (got {product}).")
    if gpus_per_node < 1:
        raise PerfModelError(f"a machine must have at least 1 GPU (got {gpus_per_node}).")
    found, stride = {}, 1
    for name, size in layout.items():
        firsts = (rank for rank in range(world_size) if rank // stride % size == 0)
        ranks = [tuple(range(first, first + stride * size, stride)) for first in firsts]
        found[name] = tuple(RankGroup(each, tuple(sorted({rank // gpus_per_node for rank in each}))) for each in ranks)
        stride *= size
    return found
