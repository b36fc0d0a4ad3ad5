"""Where a prediction's numbers come from, what it assumes, and what its profile leaves out."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, get_args

from perfmodel.cost.collectives import CollectiveCost, extrapolation
from perfmodel.cost.host import missing_host_costs
from perfmodel.cost.kernels.estimates import HARDLY_KNOWN, factor_of_spread
from perfmodel.cost.kernels.scaling import before_scaling
from perfmodel.cost.routing import Route
from perfmodel.hardware import host_calls
from perfmodel.hardware.interconnect import MESSAGES, REFERENCE, Interconnect, Role
from perfmodel.hardware.profile import Profile
from perfmodel.prediction.prediction import KernelUse
from perfmodel.program.program import Collective, Program
from perfmodel.program.sharding import offloads
from perfmodel.program.strategies.fsdp.groups import blocks_of
from perfmodel.scenario.scenario import FsdpSection, Scenario
from perfmodel.simulate.timeline import Timeline
from perfmodel.units import format_bytes, format_bytes_per_s, format_flops_per_s, format_seconds, format_share

if TYPE_CHECKING:
    from perfmodel.simulate.memory.walk import MemoryTimeline

UNSTEADY = 1e-3  # ranks' steps differ by more
KERNEL_SOURCES = ("exact", "curve", "extrapolated", "estimated", "roofline")
NAMED = 4  # operators that a warning names at most
WORTH_NAMING = 0.01  # of the device time
ALONE_SINCE = (2, 12)  # torch posts single messages of pipelines by themselves


class Talk(NamedTuple):
    """A rank's communication: its program, and the cost and the route of each of the program's collectives."""

    program: Program
    costs: Sequence[CollectiveCost]
    routes: Sequence[Route]


def kernel_shares(kernels: Sequence[KernelUse]) -> dict[str, float]:
    """Return the share of the device's busy time by source.

    Sources are exact keys, fitted curves, curves outside the shapes that they were fitted on (extrapolated), operators
    of kinds that were not measured (estimated), and rooflines.
    """
    busy_s = sum(use.total_s for use in kernels) or 1.0
    shares = dict.fromkeys(KERNEL_SOURCES, 0.0)
    for use in kernels:
        shares[use.cost.source] += use.total_s / busy_s
    return shares


def scaled_share(kernels: Sequence[KernelUse]) -> float:
    """Return the share of the device's busy time of kernels whose times were scaled to another datasheet."""
    calls = [(use.count, before_scaling(use.cost, use.mean_s)) for use in kernels]
    busy_s = sum(count * each.before_s for count, each in calls) or 1.0
    return sum(count * each.following_s for count, each in calls) / busy_s


def scaling_assumptions(kernels: Sequence[KernelUse], profile: Profile) -> Iterator[str]:
    """Yield an assumption, as :func:`assumptions` does, where times are scaled to another datasheet than they were
    measured with.
    """
    share, measured = scaled_share(kernels), profile.as_measured
    if share > 0 and measured is not None:
        changes, share_text = ", ".join(_datasheet_changes(measured, profile)), format_share(share)
        yield (
            f"kernels as near to their rooflines as measured, with {changes} (which {share_text} of the measured "
            "device time follows)"
        )


def _datasheet_changes(measured: Profile, asked: Profile) -> Iterator[str]:
    """Yield in words what kernels' times are scaled by."""
    was, is_now = measured.device, asked.device
    before, after = was.peak_memory_bytes_per_s, is_now.peak_memory_bytes_per_s
    if before is not None and after is not None and before != after:
        yield f"memory at {format_bytes_per_s(after)} instead of {format_bytes_per_s(before)}"
    for kind, peak in is_now.peak_flops_per_s.items():
        if peak != was.peak_flops_per_s[kind]:
            yield f"{kind} at {format_flops_per_s(peak)} instead of {format_flops_per_s(was.peak_flops_per_s[kind])}"
    was_bytes, is_bytes = measured.cache_capacity_bytes, asked.cache_capacity_bytes
    if was_bytes != is_bytes:
        yield f"a cache that holds {format_bytes(is_bytes)} instead of {format_bytes(was_bytes)}"


def collective_shares(timeline: Timeline, costs: Sequence[CollectiveCost]) -> dict[str, float]:
    """Return the share of the collectives' time alone by source (exact, curve, extrapolated); empty without any."""
    if not timeline.communications:
        return {}
    seconds = dict.fromkeys(("exact", "curve", "extrapolated"), 0.0)
    for each in timeline.communications:
        seconds[costs[each.collective].source] += costs[each.collective].time_s
    total_s = sum(seconds.values()) or 1.0
    return {source: time_s / total_s for source, time_s in seconds.items()}


def assumptions(scenario: Scenario, interconnect: Interconnect | None, routes: Iterable[Route] = ()) -> tuple[str, ...]:
    """Return what nobody measured and the scenario or the profile supposes; each ends a sentence that begins
    "assuming".

    Parameters
    ----------
    scenario : Scenario
        What is predicted.
    interconnect : Interconnect or None
        The one in use; None where one rank communicates with nobody.
    routes : iterable of Route
        Of the step's collectives.
    """
    found = []
    if interconnect is not None and interconnect.bandwidth_factor != 1:
        found.append(f"links {interconnect.bandwidth_factor:g} x as fast as measured")
    inside = dict.fromkeys(route.name for route in routes if route.interconnect is not interconnect)
    found += [f"groups inside a node as over {name}" for name in inside]
    sharing = max((route.sharing for route in routes), default=1)
    if sharing > 1:
        found.append(f"{sharing} groups of replicas that share each node's interconnect evenly")
    if offloads(scenario.parallelism):
        found.append("copies between each GPU and the host as fast as those of one GPU alone in one direction")
    speeds = scenario.hardware.gpu_speeds or ()
    if any(speed != 1 for speed in speeds):
        found.append(f"GPU speeds {', '.join(f'{speed:g}' for speed in speeds)}")
    return tuple(found)


def batches_messages(profile: Profile) -> bool:
    """Return whether the profile's torch posts single messages of pipelines through batch_isend_irecv.

    Versions before 2.12 do; where no version is known, it is taken not to.
    """
    version = _torch_version(profile)
    return version is not None and version < ALONE_SINCE


def message_assumptions(programs: Iterable[Program], profile: Profile) -> Iterator[str]:
    """Yield assumptions, as :func:`assumptions` does, where ranks of a pipeline send single messages."""
    if not any(each.role in ("send", "receive") for program in programs for each in program.collectives):
        return
    version, since = _torch_version(profile), _dotted(ALONE_SINCE)
    if version is None:
        yield (
            f"single messages on a communicator of each two ranks, as torch {since} and later post them (the profile "
            "names no torch; earlier ones post all on the pipeline's)"
        )
    elif version < ALONE_SINCE:
        yield (
            f"single messages all on the pipeline's communicator, as torch {_dotted(version)} posts them ({since} and "
            "later: each two ranks on their own)"
        )
    else:
        yield (
            f"single messages on a communicator of each two ranks, as torch {_dotted(version)} posts them (before "
            f"{since}: all on the pipeline's)"
        )


def _torch_version(profile: Profile) -> tuple[int, int] | None:
    found = re.match(r"(\d+)\.(\d+)", str(profile.provenance.get("torch", "")))
    return None if found is None else (int(found[1]), int(found[2]))


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def kernel_warnings(
    kernels: Sequence[Sequence[KernelUse]], profile: Profile, given_as: str | None = None
) -> Iterator[str]:
    """Yield warnings of kernels that were not measured, or not well, and of what older profiles lack.

    Parameters
    ----------
    kernels : sequence of sequences of KernelUse
        Kernels of each rank of a pipeline in order, of which the worst is reported; else of one rank.
    profile : Profile
        That the kernels' costs come from.
    given_as : str or None
        The file or catalog name under which the profile is found, which need not be the profile's own name.
    """
    shares = [kernel_shares(each) for each in kernels]
    roofline, curve = (_worst(shares, source) for source in ("roofline", "curve"))
    if shares[roofline]["roofline"] > 0.01:
        yield (
            f"{_of_device_time(shares, roofline, 'roofline')} is from a roofline: run `perfmodel calibrate --scenario` "
            "on this machine"
        )
    elif shares[curve]["curve"] > 0.05:
        yield (
            f"{_of_device_time(shares, curve, 'curve')} is from fitted curves: `perfmodel calibrate --scenario` "
            "measures the exact kernels"
        )
    yield from _estimated(kernels)
    extrapolated = _worst(shares, "extrapolated")
    if shares[extrapolated]["extrapolated"] > WORTH_NAMING:
        uses = [use for use in kernels[extrapolated] if use.cost.source == "extrapolated"]
        yield (
            f"{_of_device_time(shares, extrapolated, 'extrapolated')} is from curves outside the shapes that they were "
            f"fitted on ({_named(uses)}): `perfmodel calibrate --scenario` measures them"
        )
    unstable = {use.key for each in kernels for use in each if use.key in profile.unstable}
    if unstable:
        counted = "1 kernel of this step was" if len(unstable) == 1 else f"{len(unstable)} kernels of this step were"
        found_as = shlex.quote(given_as or profile.name)
        yield f"{counted} measured unstable: `perfmodel profile show {found_as}` names unstable kernels"
    if profile.cache.capacity_bytes is not None and profile.cache.code_miss_s is None:
        yield (
            "the profile has no cache.code_miss_s (the code of kernels is taken to stay cached): measure it with "
            "`perfmodel calibrate --only cache`"
        )


def host_warnings(profile: Profile, scenario: Scenario) -> Iterator[str]:
    """Yield a warning of host costs that were not measured, as where a budget left them out: they count as nothing."""
    missing = missing_host_costs(profile, scenario)
    if missing:
        yield (
            f"the host takes no time for what the profile has no host costs of ({', '.join(missing)}): measure them "
            "with `perfmodel calibrate --resume`, or --scenario"
        )


def _estimated(kernels: Sequence[Sequence[KernelUse]]) -> Iterator[str]:
    """Yield a warning of estimated kernels: of hardly known ones always, of others where they may count."""
    rough = [use for each in kernels for use in each if use.cost.source == "estimated" and _may_count(use, each)]
    if rough:
        yield (
            f"not measured, and estimated at best to a factor of {' and '.join(_by_factor(rough))}; "
            "`perfmodel calibrate --scenario` measures them"
        )


def _by_factor(uses: Sequence[KernelUse]) -> Iterator[str]:
    """Yield each factor with the operators that are estimated to it: of those that a warning names, then of the rest.

    An operator whose kernels are estimated to several factors has the largest of them.
    """
    factors: dict[str, float] = {}
    for use in uses:
        name = _operator(use)
        factors[name] = max(factors.get(name, 0.0), factor_of_spread(use.cost.spread))
    longest_first = _longest_first(uses)
    named: dict[str, list[str]] = {}
    for name in longest_first[:NAMED]:
        named.setdefault(f"{factors[name]:.2g}", []).append(name)
    yield from (f"{factor} ({', '.join(names)})" for factor, names in named.items())
    rest = longest_first[NAMED:]
    if rest:
        yield f"up to {max(factors[name] for name in rest):.2g} ({len(rest)} more)"


def _may_count(use: KernelUse, kernels: Sequence[KernelUse]) -> bool:
    factor = factor_of_spread(use.cost.spread)
    return factor >= HARDLY_KNOWN or use.total_s * factor > WORTH_NAMING * sum(each.total_s for each in kernels)


def _named(uses: Sequence[KernelUse]) -> str:
    """Return the names of the kernels' operators, those first that may take longest, and how many there are more."""
    names = _longest_first(uses)
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def _longest_first(uses: Sequence[KernelUse]) -> list[str]:
    longest_s: dict[str, float] = {}
    for use in uses:
        name = _operator(use)
        longest_s[name] = max(longest_s.get(name, 0.0), use.total_s * factor_of_spread(use.cost.spread))
    return sorted(longest_s, key=lambda name: -longest_s[name])


def _operator(use: KernelUse) -> str:
    return use.key.removeprefix("aten.").split("(")[0].removesuffix(".default")


def unsteady_warnings(steps_s: Sequence[float]) -> Iterator[str]:
    """Yield a warning where ranks were still drifting apart after the last simulated step.

    steps_s: of ranks that send each other messages; in the long run all take equally long.
    """
    shortest_s, longest_s = min(steps_s), max(steps_s)
    if longest_s > (1 + UNSTEADY) * shortest_s:
        yield (
            f"ranks were still drifting apart after all steps that were simulated ({format_seconds(shortest_s)} to "
            f"{format_seconds(longest_s)} a step); the longest is shown"
        )


def sharding_warnings(scenario: Scenario, program: Program) -> Iterator[str]:
    """Yield a warning where fully_shard was asked for groups of repeated blocks and none are known."""
    section = scenario.parallelism
    if section.strategy not in ("zero2", "zero3") or section.dp == 1 or blocks_of(program.trace):
        return
    if (section.fsdp or FsdpSection()).wrap == "blocks":
        remedy = (
            f"{scenario.model.family} has none"
            if scenario.model.target is None
            else "name them by model.blocks, or ask for one group by parallelism.fsdp.wrap: root"
        )
        yield (
            "no repeated blocks are known, so fully_shard gathers and reduces all parameters at once, as one group: "
            f"{remedy}"
        )


def retry_warnings(memories: Sequence[MemoryTimeline]) -> Iterator[str]:
    """Yield a warning of ranks whose allocator frees cached segments in every step.

    memories: of each rank.
    """
    retries = max((each.step_retries for each in memories if each.fits), default=0)
    if retries:
        yield (
            f"the device is full {retries} times a step: the allocator then waits for it and gives cached memory back, "
            "for which the step time has nothing"
        )


def _worst(shares: Sequence[dict[str, float]], source: str) -> int:
    """Return the first of the ranks that have most of this source, as rounded for the report."""
    return max(range(len(shares)), key=lambda at: round(shares[at][source], 2))


def _of_device_time(shares: Sequence[dict[str, float]], worst: int, source: str) -> str:
    of_rank = f" of rank {worst}" if len(shares) > 1 else ""
    return f"{format_share(shares[worst][source])} of the device time{of_rank}"


def communication_warnings(ranks: Sequence[Talk], profile: Profile, own: str) -> Iterator[str]:
    """Yield warnings of extrapolated collectives and messages, and of what their interconnects lack.

    Each is reported once, whatever ranks it is of; none where a step has no communication.

    own: name of the interconnect in use.
    """
    ran = [row for each in ranks for row in zip(each.program.collectives, each.costs, each.routes, strict=True)]
    yield from dict.fromkeys(_extrapolated(each, route) for each, cost, route in ran if cost.source == "extrapolated")
    made = dict.fromkeys(call for each in ranks for call in each.program.instructions.calls)
    calls = [call for call in made if call in host_calls.FSDP_CALLS | host_calls.DTENSOR_CALLS]
    if calls and profile.device.kind == "cuda" and not profile.launch.waiting_gap_s:
        yield (
            "the profile has no waiting_gap_s (kernels are taken to follow each other as closely while other streams "
            "wait): `perfmodel calibrate --only waiting` measures it"
        )
    messages = {route.name for each, _, route in ran if each.kind in MESSAGES}
    others = {route.name for each, _, route in ran if each.kind not in MESSAGES}
    for name, interconnect in {route.name: route.interconnect for _, _, route in ran}.items():
        missing = list(_missing(profile, interconnect, name == own, name in others))
        if name == own and interconnect.host and any(call not in interconnect.host for call in calls):
            missing.append(
                "no times of fully_shard's hooks (their calls are taken to cost no more than what they launch)"
            )
        if name in messages:
            missing += _missing_of_messages(interconnect, list(made) if name == own else [])
        if missing:
            yield (
                f"interconnect {name} has {', '.join(missing)}: `perfmodel calibrate --interconnect {name}` measures "
                "what is missing"
            )


def _extrapolated(collective: Collective, route: Route) -> str:
    """Return the warning of one extrapolated collective; messages are always between two ranks, so their size is."""
    kind, _, size_bytes, ranks, *_ = collective
    measure = f"`perfmodel calibrate --interconnect {route.name} --ranks {ranks} --scenario FILE` measures them"
    if kind not in MESSAGES:
        return f"{extrapolation(kind, ranks, route.interconnect)}: {measure}"
    most_bytes = route.interconnect.segments[f"{kind} {ranks}"][-1].most_bytes
    return (
        f"messages of {format_bytes(size_bytes)} are extrapolated from sizes of up to {format_bytes(most_bytes)} by "
        f"the end of their curve: {measure}"
    )


def _missing_of_messages(interconnect: Interconnect, calls: Iterable[str]) -> Iterator[str]:
    """Yield what an interconnect lacks that messages use.

    calls: host calls that are measured over this one. An interconnect without any host call times was named for that.
    """
    known = interconnect.host.keys() - {REFERENCE}
    lacking = [call for call in calls if known and host_calls.first_of(call) not in known]
    if any(call in host_calls.MESSAGE_CALLS for call in lacking):
        yield "no times of messages' calls (each is taken to cost no more than a kernel's launch)"
    if any(call in host_calls.PIPELINE_CALLS for call in lacking):
        yield "no times of the pipeline's own calls (each is taken to cost no more than a kernel's launch)"
    roles = [role for role in get_args(Role) if role not in interconnect.message_couplings]
    if roles:
        which = "" if len(roles) == len(get_args(Role)) else f" of {' and '.join(roles)}"
        yield f"no message_couplings{which} (messages are taken to slow kernels as collectives do)"
    if not interconnect.messages_ahead:
        yield "no messages_ahead (a message is taken to wait for its receiver, however small)"


def _missing(profile: Profile, interconnect: Interconnect, has_calls: bool, has_collectives: bool) -> Iterator[str]:
    """Yield what an interconnect lacks that a step on this device would use, with what is supposed instead.

    On a CPU neither kernels concurrent with collectives nor device memory are predicted.

    Parameters
    ----------
    profile : Profile
        Of the device.
    interconnect : Interconnect
        That collectives run over.
    has_calls : bool
        Whether the host cost of calls is measured over this interconnect.
    has_collectives : bool
        Whether anything else than messages, which have couplings of their own, runs over it.
    """
    if has_calls and not interconnect.host.keys() - {REFERENCE}:
        yield "no host call times (a call is taken to cost no more than a kernel's launch)"
    if profile.device.kind != "cuda":
        return
    if not interconnect.couplings and (has_collectives or not interconnect.message_couplings):
        yield "no couplings (kernels and collectives are taken not to slow each other)"
    if not interconnect.communicator_bytes:
        yield "no communicator_bytes (communicators are taken to need no memory)"
