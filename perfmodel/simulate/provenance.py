"""Where a prediction's numbers come from, what it assumes, and what its profile leaves out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from perfmodel.cost.collectives import CollectiveCost, extrapolation
from perfmodel.cost.groups import Route
from perfmodel.cost.host import REFERENCE
from perfmodel.hardware.interconnect import Interconnect
from perfmodel.hardware.profile import Profile
from perfmodel.program.program import Program
from perfmodel.program.shards import offloads
from perfmodel.simulate.prediction import KernelUse
from perfmodel.simulate.timeline import Timeline
from perfmodel.units import format_share
from perfmodel.workload.scenario import Scenario

OF_SHARDING = ("fsdp ", "dtensor ")  # begin calls that programs of fully_shard make


def kernel_shares(kernels: Sequence[KernelUse]) -> dict[str, float]:
    """Share of the device's busy time by source (exact, curve, roofline)."""
    busy_s = sum(use.total_s for use in kernels) or 1.0
    shares = dict.fromkeys(("exact", "curve", "roofline"), 0.0)
    for use in kernels:
        shares[use.cost.source] += use.total_s / busy_s
    return shares


def collective_shares(timeline: Timeline, costs: Sequence[CollectiveCost]) -> dict[str, float]:
    """Share of the collectives' time alone by source (exact, curve, extrapolated); empty where there are none."""
    if not timeline.communications:
        return {}
    seconds = dict.fromkeys(("exact", "curve", "extrapolated"), 0.0)
    for each in timeline.communications:
        seconds[costs[each.collective].source] += costs[each.collective].time_s
    total_s = sum(seconds.values()) or 1.0
    return {source: time_s / total_s for source, time_s in seconds.items()}


def assumptions(scenario: Scenario, interconnect: Interconnect | None, routes: Iterable[Route] = ()) -> tuple[str, ...]:
    """What nobody measured and the scenario or the profile supposes; each ends a sentence that begins "assuming".

    interconnect: the one in use; None where one rank talks to nobody. routes: of the step's collectives.
    """
    found = []
    if interconnect is not None and interconnect.bandwidth_factor != 1:
        found.append(f"links {interconnect.bandwidth_factor:g} x as fast as measured")
    inside = dict.fromkeys(route.name for route in routes if route.interconnect is not interconnect)
    found += [f"groups inside a node as over {name}" for name in inside]
    sharing = max((route.sharing for route in routes), default=1)
    if sharing > 1:
        found.append(f"{sharing} groups of replicas that share each node's wire evenly")
    if offloads(scenario.parallelism):
        found.append("copies between each GPU and the host as fast as those of one GPU alone in one direction")
    speeds = scenario.hardware.gpu_speeds or ()
    if any(speed != 1 for speed in speeds):
        found.append(f"GPU speeds {', '.join(f'{speed:g}' for speed in speeds)}")
    return tuple(found)


def kernel_warnings(kernels: Sequence[KernelUse], profile: Profile) -> Iterator[str]:
    """Kernels that were not measured, or not well."""
    shares = kernel_shares(kernels)
    if shares["roofline"] > 0.01:
        yield (
            f"{format_share(shares['roofline'])} of the device time is from a roofline: run `perfmodel "
            "calibrate --scenario` on this machine"
        )
    elif shares["curve"] > 0.05:
        yield (
            f"{format_share(shares['curve'])} of the device time is from fitted curves: `perfmodel calibrate "
            "--scenario` measures the exact kernels"
        )
    unstable = [use.key for use in kernels if use.key in profile.unstable]
    if unstable:
        yield (
            f"{len(unstable)} kernels of this step were measured unstable: `perfmodel profile show "
            f"{profile.name}` names them"
        )


def communication_warnings(
    program: Program, costs: Sequence[CollectiveCost], routes: Sequence[Route], profile: Profile, own: str
) -> Iterator[str]:
    """Collectives that are extrapolated, and what the interconnects that they run over lack; none where a step has no
    collectives.

    costs, routes: by collective. own: name of the interconnect in use.
    """
    ran = zip(program.collectives, costs, routes, strict=True)
    far = [(route, each) for each, cost, route in ran if cost.source == "extrapolated"]
    words = ((route.name, each.ranks, extrapolation(each.kind, each.ranks, route.interconnect)) for route, each in far)
    for name, ranks, text in dict.fromkeys(words):
        yield f"{text}: `perfmodel calibrate --interconnect {name} --ranks {ranks} --scenario FILE` measures them"
    calls = [call for call in program.instructions.calls if call.startswith(OF_SHARDING)]
    if calls and profile.device.kind == "cuda" and not profile.launch.waiting_gap_s:
        yield (
            "the profile has no waiting_gap_s (kernels are taken to follow each other as closely while other streams "
            "wait): `perfmodel calibrate --only waiting` measures it"
        )
    for name, interconnect in {route.name: route.interconnect for route in routes}.items():
        missing = list(_missing(profile, interconnect, name == own))
        if name == own and interconnect.host and any(call not in interconnect.host for call in calls):
            missing.append(
                "no times of fully_shard's hooks (their calls are taken to cost no more than what they launch)"
            )
        if missing:
            yield (
                f"interconnect {name} has {', '.join(missing)}: `perfmodel calibrate --interconnect {name}` measures "
                "what is missing"
            )


def _missing(profile: Profile, interconnect: Interconnect, has_calls: bool) -> Iterator[str]:
    """What a step on this device would use, with what is supposed instead. On a CPU neither kernels beside collectives
    nor device memory are predicted. has_calls: whether calls cost the host what they cost over this one.
    """
    if has_calls and not interconnect.host.keys() - {REFERENCE}:
        yield "no host call times (a call is taken to cost no more than a kernel's launch)"
    if profile.device.kind != "cuda":
        return
    if not interconnect.couplings:
        yield "no couplings (kernels and collectives are taken not to slow each other)"
    if not interconnect.communicator_bytes:
        yield "no communicator_bytes (communicators are taken to need no memory)"
