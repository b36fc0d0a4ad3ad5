"""Sources of a topology: a short description, a profile, a saved matrix, or this machine."""

from __future__ import annotations

import math
import os
import re
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

from perfmodel.errors import PerfModelError, did_you_mean
from perfmodel.files.reading import read_text
from perfmodel.hardware.interconnect import Interconnect
from perfmodel.hardware.profile import Profile, catalog_names, find_profile, load_profile
from perfmodel.limits import MOST_TOPOLOGY_BONDS, MOST_TOPOLOGY_GPUS, MOST_TOPOLOGY_NICS
from perfmodel.topology.graph import ASSUMED, GENERATIONS, Builder, Rate, Rates, rates_of, topology
from perfmodel.topology.matrix import nvidia_smi, parse_matrix

if TYPE_CHECKING:
    import networkx as nx

_NETWORKS = ("network", "infiniband", "ethernet", "roce")
_HUBS = {  # name, kind and kind of the edges to it
    "nvswitch": ("NVSwitch", "nvswitch", "nvlink"),
    "pcie": ("PCIe", "pcie_switch", "pcie"),
    "host": ("Bridge", "host_bridge", "pcie"),
}
_INSIDE = (*_HUBS, "nvlink")
_Stated = tuple[int | None, Rate | None]  # how many links, and what each carries
_RATE = re.compile(r"(?:(\d+)x)?(\d+(?:\.\d+)?(?:e[+-]?\d+)?)([KMGT])(B|b|bit)/s")
GRAMMAR = "Write NODESxGPUS:TIER,TIER like 2x8:nvswitch=450GB/s,network=8x50GB/s."


def described(text: str, rates: Rates | None = None) -> nx.Graph:
    """Return the graph of a short description: ``2x8:nvswitch=450GB/s,network=8x50GB/s`` is 2 machines of 8 GPUs.

    It reads ``NODESxGPUS`` and, after a colon or a blank, tiers with commas between. One tier joins the GPUs of a
    machine: ``nvswitch``, ``nvlink`` (a bond between every two GPUs), ``pcie`` (one switch) or ``host`` (one host
    bridge). One joins machines: ``network``, or ``infiniband``, ``ethernet``, ``roce``. A tier may have a rate for one
    direction: ``450GB/s``, ``400Gb/s``, or ``18x25GB/s`` of 18 links a GPU, or of 8 NICs a machine for a network.
    Without a rate, nvswitch and pcie have the datasheet's if ``rates`` has it, and otherwise an unknown one.

    Raises
    ------
    PerfModelError
        If it cannot be read so, lacks a tier, or has more GPUs, NICs or bonds between two GPUs than
        :mod:`perfmodel.limits` allows.

    Notes
    -----
    Assumes: the links between GPUs and their NICs are never the narrowest of a path.
    """
    match = re.fullmatch(r"\s*(\d+)\s*x\s*(\d+)\s*(?:[:\s]\s*(.*))?", text, re.DOTALL)
    if match is None or not float(match[1]) * float(match[2]) >= 1:
        raise PerfModelError(f"topology: must be a description of at least one GPU (got {text!r}). {GRAMMAR}")
    _refuse_more("GPUs", float(match[1]) * float(match[2]), MOST_TOPOLOGY_GPUS, text)
    nodes, gpus = int(match[1]), int(match[2])
    tiers = _tiers(match[3] or "", text)
    inside = next((tier for tier in tiers if tier in _INSIDE), None)
    network = next((tier for tier in tiers if tier in _NETWORKS), None)
    for needed, tier, names in ((gpus > 1, inside, _INSIDE), (nodes > 1, network, _NETWORKS)):
        if (needed and tier is None) or sum(name in tiers for name in names) > 1:
            raise PerfModelError(f"topology: must have one tier of {', '.join(names)} (got {text!r}). {GRAMMAR}")
    if network is not None and nodes > 1:
        _refuse_more("NICs", nodes * (tiers[network][0] or 1), MOST_TOPOLOGY_NICS, text)
    if inside == "nvlink":
        _refuse_more("NVLink bonds between two GPUs", nodes * math.comb(gpus, 2), MOST_TOPOLOGY_BONDS, text)
    build = Builder(text.strip())
    for number in range(nodes):
        node, members = f"node{number}", [f"GPU{number * gpus + gpu}" for gpu in range(gpus)]
        for gpu in members:
            build.vertex(gpu, "gpu", node)
        tops = members
        if inside is not None and gpus > 1:
            tops = _add_inside(build, inside, tiers[inside], members, number, rates or Rates())
        if network is not None and nodes > 1:
            _add_nics(build, network, tiers[network], number, tops)
    return build.graph


def _refuse_more(what: str, count: float, most: int, text: str) -> None:
    if count > most:
        raise PerfModelError(
            f"topology {text!r}: must have at most {most} {what} (got {count:.7g}). Describe a smaller part of it."
        )


def _add_inside(build: Builder, tier: str, stated: _Stated, members: list[str], number: int, rates: Rates) -> list[str]:
    """Joins the GPUs of a machine; returns what its NICs are reached from."""
    links, rate = stated
    if rate is None and tier in ("nvswitch", "pcie"):
        links, rate = (rates.links, rates.nvlink) if tier == "nvswitch" else (None, rates.pcie)
    bond = rate and rate.times(links or 1)
    if tier == "nvlink":
        for a, b in combinations(members, 2):
            build.edge(a, b, "nvlink", bond, links)
        return members
    prefix, kind, edge = _HUBS[tier]
    hub = build.vertex(f"{prefix}{number}", kind, f"node{number}")
    for gpu in members:
        build.edge(gpu, hub, edge, bond, links)
    return members if kind == "nvswitch" else [hub]


def _add_nics(build: Builder, network: str, stated: _Stated, number: int, tops: list[str]) -> None:
    """The machine, which all its GPUs and NICs hang on, and its NICs."""
    count, rate = stated[0] or 1, stated[1]
    node = build.vertex(f"node{number}", "node", f"node{number}")
    build.vertex(network, "network", "")
    for top in tops:
        build.edge(top, node, "host", ASSUMED)
    for nic in range(number * count, (number + 1) * count):
        build.edge(node, build.vertex(f"NIC{nic}", "nic", node), "host", ASSUMED)
        build.edge(f"NIC{nic}", network, "network", rate)


def _tiers(text: str, whole: str) -> dict[str, _Stated]:
    found: dict[str, _Stated] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, rate = (word.strip() for word in part.partition("="))
        if name not in (*_INSIDE, *_NETWORKS):
            known = did_you_mean(name, (*_INSIDE, *_NETWORKS))
            raise PerfModelError(f"topology {whole!r}: a tier must be a known one (got {name!r}). {known} {GRAMMAR}")
        if name in found:
            raise PerfModelError(f"topology {whole!r}: each tier must be given once (got {name} again). Leave one out.")
        found[name] = _stated(name, rate, whole) if equals else (None, None)
    return found


def _stated(name: str, text: str, whole: str) -> _Stated:
    """The rate of a tier."""
    match = _RATE.fullmatch(text)
    count, one = None, 0.0
    if match is not None:
        count, number, prefix, unit = match.groups()
        one = float(number) * 1000 ** (1 + "KMGT".index(prefix)) / (1 if unit == "B" else 8)
    if not 0 < float(count or 1) * one < math.inf:
        raise PerfModelError(
            f"topology {whole!r}: the rate of {name} must be above 0 and finite, with a unit of K, M, G or T and B/s"
            f" or b/s (got {text!r}). {GRAMMAR}"
        )
    return int(count) if count else None, Rate(one, "stated")


def from_profile(profile: Profile) -> nx.Graph:
    """The graph of the machine a profile was measured on: by its matrix, or else by what its interconnect is called.

    Without a matrix, ``nvlink`` is a bond between every two GPUs and anything else a way through the host, as wide as
    the largest message that was sent between two ranks.

    Raises
    ------
    PerfModelError
        If it is the profile of a CPU, its matrix cannot be read, or its GPUs do not divide into the machines.
    """
    device = profile.device
    rates, title = rates_of(device.name, device.compute_capability), f"{profile.name}, {device.name}"
    if device.kind != "cuda":
        raise PerfModelError(f"{profile.name}: must be the profile of GPUs to have a topology (got {device.kind}).")
    if profile.topology is not None:
        return topology(parse_matrix(profile.topology, f"{profile.name}: topology"), rates, title)
    own = profile.interconnects.get(profile.interconnect or "")
    nodes, sent = (own.nodes, largest_message_bytes_per_s(own)) if own else (1, None)
    if profile.gpus % nodes:
        raise PerfModelError(f"{profile.name}: gpus must be a multiple of {nodes} machines (got {profile.gpus}).")
    inside = "nvlink" if profile.interconnect == "nvlink" else "host"
    graph = described(f"{nodes}x{profile.gpus // nodes}:{inside}" + (",network" if nodes > 1 else ""))
    graph.graph["title"] = title
    for _, _, edge in graph.edges(data=True):
        if sent is not None and edge["source"] is None and edge["kind"] == ("network" if nodes > 1 else edge["kind"]):
            edge.update(bandwidth_bytes_per_s=sent, source="measured")
    return graph


def largest_message_bytes_per_s(interconnect: Interconnect) -> float | None:
    """Bytes a second of the largest ``send_recv`` between two ranks that was measured, or None."""
    rates = {
        int(key.split()[3]): int(key.split()[3]) / record.time_s
        for key, record in interconnect.collectives.items()
        if key.startswith("send_recv 2 ") and record.time_s is not None
    }
    return rates[max(rates)] if rates else None


def find_topology(source: str | None = None, gpu: str | None = None) -> nx.Graph:
    """Return the graph of a saved matrix, a profile, a description, or this machine.

    Parameters
    ----------
    source : str or None
        A file with a matrix, a profile (file or catalog name), or a description; None for this machine.
    gpu : str or None
        GPU whose datasheet gives the rates of links, if neither a profile nor this machine names it.

    Raises
    ------
    PerfModelError
        If it is none of these, or cannot be read.
    """
    rates = Rates() if gpu is None else rates_of(gpu)
    if gpu is not None and rates == Rates():
        names = [name for each, _ in GENERATIONS.values() for name in each]
        raise PerfModelError(f"gpu must have a datasheet here (got {gpu!r}). {did_you_mean(gpu, names)}")
    if source is None:
        text = nvidia_smi("topo", "-m")
        name = (nvidia_smi("--query-gpu=name", "--format=csv,noheader").splitlines() or [""])[0]
        return topology(parse_matrix(text), rates_of(gpu or name), name or None)
    path = Path(source)
    if path.suffix == ".json" or source in catalog_names():
        return from_profile(load_profile(find_profile(source)))
    if not os.path.exists(path) and re.match(r"\s*\d+\s*x", source):
        graph = described(source, rates)
        graph.graph["title"] += f", {gpu}" if gpu else ""
        return graph
    text = read_text(path, "a saved `nvidia-smi topo -m`, a profile or a description", GRAMMAR)
    return topology(parse_matrix(text, source), rates, source if gpu is None else f"{source}, {gpu}")
