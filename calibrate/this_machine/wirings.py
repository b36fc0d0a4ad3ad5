"""The interconnects that the ranks of one machine can use, and what makes NCCL use each."""

from __future__ import annotations

from typing import Literal

from perfmodel.errors import PerfModelError, did_you_mean

INTERCONNECTS = ("nvlink", "host-memory", "two-nodes", "gloo")


def environment(name: str, rank: int, ranks: int) -> dict[str, str]:
    """Environment variables of one rank, to be set before CUDA and NCCL start.

    ``nvlink``, ``gloo``: the machine as it is. ``host-memory``: no copies between peers, as in a box with PCIe alone.
    ``two-nodes``: NCCL takes each half of the ranks for a host of its own, and joins them over loopback sockets.

    Raises
    ------
    PerfModelError
        If there is no such interconnect, or two nodes cannot have as many ranks each.
    """
    if name not in INTERCONNECTS:
        raise PerfModelError(f"the interconnect must be known (got {name!r}). {did_you_mean(name, INTERCONNECTS)}")
    if name == "host-memory":
        return {"NCCL_P2P_DISABLE": "1"}
    if name != "two-nodes":
        return {}
    if ranks % 2:
        raise PerfModelError(f"two-nodes: the ranks must be an even number (got {ranks}). Use 2 or 4.")
    return {"NCCL_HOSTID": f"node{2 * rank // ranks}", "NCCL_SOCKET_IFNAME": "lo"}


def members(size: int, ranks: int, nodes: int) -> list[int]:
    """Return which of the ranks make a group of ``size``: the first, or, where they are several nodes', some of each.

    >>> members(2, 4, 1), members(2, 4, 2), members(3, 4, 2)
    ([0, 1], [0, 2], [0, 1, 2])
    """
    return list(range(size)) if nodes == 1 else [index * ranks // size for index in range(size)]


def backend_of(device: str, interconnect: str | None) -> Literal["nccl", "gloo"]:
    """Return the library that ranks talk through.

    >>> backend_of("cuda", "nvlink"), backend_of("cuda", "gloo"), backend_of("cpu", None)
    ('nccl', 'gloo', 'gloo')
    """
    return "gloo" if device == "cpu" or interconnect == "gloo" else "nccl"


def nodes_of(name: str) -> int:
    """Return how many hosts the library sees."""
    return 2 if name == "two-nodes" else 1
