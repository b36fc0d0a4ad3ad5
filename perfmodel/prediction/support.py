"""What a profile can predict: what it has not measured is refused in one sentence before any work is done."""

from __future__ import annotations

from perfmodel.cost.collectives import largest_group, measured_groups, nodes_of
from perfmodel.cost.routing import route_of
from perfmodel.cost.transfers import transfer_cost
from perfmodel.errors import PerfModelError
from perfmodel.hardware.interconnect import MESSAGES, Interconnect
from perfmodel.hardware.profile import Profile
from perfmodel.program.program import PIPELINE, REPLICATE, Members
from perfmodel.program.sharding import offloads, replicas_of, resharing_of, sharing_of
from perfmodel.scenario.rules import check_scenario
from perfmodel.scenario.scenario import Scenario
from perfmodel.scenario.yaml_file import interconnect_in_use

LARGEST_NODE = 72  # GPUs that NVLink joins in what is built today


def check_supported(scenario: Scenario, profile: Profile) -> None:
    """Refuse what cannot be predicted: what breaks a rule of scenarios, or needs what the profile has not measured.

    Raises
    ------
    PerfModelError
        In one sentence, before any work is done.
    """
    check_scenario(scenario, profile.device.kind)
    _check_gpus(scenario, profile)
    if scenario.parallelism.pp is not None:
        _check_messages(scenario, profile)
    if offloads(scenario.parallelism):
        for direction in ("h2d", "d2h"):
            transfer_cost(direction, "pinned", 1, profile)
    _check_nodes(scenario, profile)


def _check_messages(scenario: Scenario, profile: Profile) -> None:
    if profile.device.kind == "cpu":
        raise PerfModelError(
            "parallelism.pp must be left out on the CPU (got a pipeline): messages between ranks are predicted of GPUs "
            "alone. Choose a GPU's profile, or strategy ddp."
        )
    interconnect_of(scenario, profile)
    name, interconnect, _ = route_of(Members(PIPELINE, 2), scenario, profile)
    for kind in MESSAGES:
        if f"{kind} 2" not in interconnect.segments:
            raise PerfModelError(
                f"profile {profile.name} must know messages over {name} for a pipeline (it has no {kind} of 2 ranks). "
                f"Measure them with `perfmodel calibrate --interconnect {name} --only p2p`."
            )


def _check_gpus(scenario: Scenario, profile: Profile) -> None:
    """Refuse more GPUs than the profile has, without curves of collectives to extrapolate from; a CPU has none."""
    gpus, name = scenario.hardware.gpus, interconnect_in_use(scenario, profile)
    interconnect = profile.interconnects.get(name or "")
    if interconnect is not None and interconnect.nodes == 1 and gpus > max(profile.gpus, LARGEST_NODE):
        raise PerfModelError(
            f"hardware.gpus must be at most {LARGEST_NODE} over {name}, which joins the GPUs of one node (got {gpus}). "
            "Use fewer, or an interconnect of several nodes."
        )
    grows = profile.device.kind == "cuda" and interconnect is not None and measured_groups("all_reduce", interconnect)
    if gpus > profile.gpus and not grows:
        raise PerfModelError(
            f"hardware.gpus must be at most {profile.gpus}, what profile {profile.name} has (got {gpus}), where it has "
            "no all_reduce of GPUs to extrapolate from. Use fewer, or measure it with `perfmodel calibrate "
            "--interconnect`."
        )


def _check_nodes(scenario: Scenario, profile: Profile) -> None:
    asked, gpus = scenario.hardware.nodes, scenario.hardware.gpus
    interconnect = interconnect_of(scenario, profile)
    if interconnect is None:
        return
    nodes = nodes_of(gpus, interconnect)
    if asked != nodes:
        measured = largest_group("all_reduce", interconnect) or profile.gpus
        unit = "node" if interconnect.nodes == 1 else "nodes"
        raise PerfModelError(
            f"hardware.nodes must be {nodes} for {gpus} GPUs over {interconnect_in_use(scenario, profile)}, which was "
            f"measured with {measured} ranks on {interconnect.nodes} {unit} (got {asked}). Set it, or choose another "
            "hardware.interconnect."
        )
    section = scenario.parallelism
    groups = [sharing_of(section), replicas_of(section), resharing_of(section)]
    if section.pp is not None:
        groups = [Members(PIPELINE, 2), Members(REPLICATE, section.dp)]
    for members in filter(None, groups):
        route_of(members, scenario, profile)


def interconnect_of(scenario: Scenario, profile: Profile) -> Interconnect | None:
    """Return the interconnect that the scenario asks for, or the profile's own; None for a single rank.

    Raises
    ------
    PerfModelError
        If the profile has not measured it.
    """
    if scenario.parallelism.ranks == 1:
        return None
    name = interconnect_in_use(scenario, profile)
    if name is None or name not in profile.interconnects:
        known = ", ".join(profile.interconnects) or "none"
        raise PerfModelError(
            f"hardware.interconnect must be one that profile {profile.name} has measured (got {name}; it has {known})."
            " Measure it with `perfmodel calibrate --interconnect`."
        )
    return profile.interconnects[name]
