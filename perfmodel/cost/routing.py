"""Which interconnect a group of ranks uses, and how many groups send over the same links at the same time.

Ranks are numbered node by node, as torchrun numbers them. In one node a group is as fast as its number of ranks says,
whatever the other groups do: every GPU has links of its own. Over several nodes of g ranks each

    dp                 all ranks: the scenario's interconnect, measured that way
    shard, reshard     n consecutive ranks: where n divides g, none of them leaves its node and the profile's one-node
                       interconnect is theirs; else they are as all ranks
    replicate          ranks that hold the same of s shards, or stages of a pipeline of s ranks: min(s, g) of these
                       groups have ranks in a node, and all reduce at the same time over the link that the node has
    pp                 two ranks of a pipeline of n consecutive ones: as shard of n
"""

from __future__ import annotations

from typing import NamedTuple

from perfmodel.errors import PerfModelError
from perfmodel.hardware.interconnect import Interconnect
from perfmodel.hardware.profile import Profile
from perfmodel.program.program import PIPELINE, REPLICATE, Members
from perfmodel.scenario.scenario import Scenario
from perfmodel.scenario.yaml_file import interconnect_in_use

CONSECUTIVE = ("shard", "reshard", PIPELINE)
INSIDE_A_NODE = {"nccl": "nvlink", "gloo": "gloo"}  # what `perfmodel calibrate --interconnect` measures, by backend


class Route(NamedTuple):
    """The interconnect that a group of ranks uses.

    Attributes
    ----------
    name : str
        Of the interconnect in the profile.
    interconnect : Interconnect
        What was measured of it.
    sharing : int
        Groups that send over the same links at the same time.
    """

    name: str
    interconnect: Interconnect
    sharing: int = 1


def stays_in_a_node(group: str, ranks: int, ranks_per_node: int) -> bool:
    """Return whether every group of that name stays inside one node.

    >>> stays_in_a_node("shard", 2, 4), stays_in_a_node("shard", 3, 4), stays_in_a_node("replicate", 2, 4)
    (True, False, False)
    """
    return group in CONSECUTIVE and ranks_per_node % ranks == 0


def route_of(members: Members, scenario: Scenario, profile: Profile) -> Route:
    """Return the route of collectives among these ranks, by the rules of this module.

    Raises
    ------
    PerfModelError
        If nodes have unlike numbers of ranks, or the profile has no interconnect for a group inside a node.

    Notes
    -----
    Assumes: groups that share a link share it evenly, and latency is not shared. Not modelled: groups of another kind
    that send meanwhile, and the links that replicas inside one node share.
    """
    name = interconnect_in_use(scenario, profile)
    assert name is not None
    own, nodes, gpus = profile.interconnects[name], scenario.hardware.nodes, scenario.hardware.gpus
    if nodes == 1 or members.group == "dp":
        return Route(name, own)
    if gpus % nodes:
        raise PerfModelError(
            f"hardware.gpus must be as many on each of {nodes} nodes where ranks of a {members.group} group talk (got "
            f"{gpus}). Use a multiple."
        )
    per_node = gpus // nodes
    if members.group == REPLICATE:
        return Route(name, own, min(scenario.parallelism.ranks // members.ranks, per_node))
    section = scenario.parallelism.pp
    group, ranks = members if section is None else Members(PIPELINE, section.stages)
    if not stays_in_a_node(group, ranks, per_node):
        return Route(name, own)
    inside = _one_node(profile, own.backend)
    if inside is None:
        raise PerfModelError(
            f"profile {profile.name} must have an interconnect of one node for the {ranks} ranks of a "
            f"{group} group (it has {', '.join(profile.interconnects)}). Measure it with `perfmodel calibrate "
            f"--interconnect {INSIDE_A_NODE[own.backend]}`."
        )
    return Route(inside, profile.interconnects[inside])


def _one_node(profile: Profile, backend: str) -> str | None:
    """The machine's own, if it is inside one node, or else the first that is."""
    found = [name for name, each in profile.interconnects.items() if (each.nodes, each.backend) == (1, backend)]
    return profile.interconnect if profile.interconnect in found else next(iter(found), None)
