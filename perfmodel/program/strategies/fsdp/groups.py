"""Groups of parameters that fully_shard gathers together, the ranks that share them, and the storages they take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from perfmodel.program.builder import ProgramBuilder, vector
from perfmodel.program.program import Instruction, Members
from perfmodel.program.sharding import Dtypes, in_dtype, offloads, padded_shard_of, replicas_of, resharing_of
from perfmodel.scenario.scenario import FsdpSection, Scenario
from perfmodel.trace.operation import TensorSpec
from perfmodel.trace.trace import EventKind, StorageKind, Trace

ROOT = 0  # the module that all others are in


class Storages(NamedTuple):
    """Storages of a group.

    Attributes
    ----------
    cast : int
        The rank's shard, in the dtype in which it is sent.
    gathered : int
        The shards of all ranks.
    reduced : int
        Whole gradients.
    scattered : int
        The rank's shard of the gradients.
    gradient : int
        That shard in the dtype of the parameters.
    """

    cast: int
    gathered: int
    reduced: int
    scattered: int
    gradient: int


@dataclass(frozen=True)
class Group:
    """Parameters that are gathered together.

    Attributes
    ----------
    module : int
        Index of the block, or ROOT.
    parameters : tuple of int
        Indices.
    reshards : bool
        Whether the unsharded parameters are freed after forward.
    storages : Storages
    unsharded : tuple of int
        Storages of the whole parameters.
    resharded : tuple of int
        Storages of the larger shards that are kept between forward and backward, where fewer ranks share them.
    prefetched_in_forward, prefetched_in_backward : tuple of int
        Modules whose gathers begin as soon as this one is copied out. In backward, none stands for the one before.
    """

    module: int
    parameters: tuple[int, ...]
    reshards: bool
    storages: Storages
    unsharded: tuple[int, ...]
    resharded: tuple[int, ...]
    prefetched_in_forward: tuple[int, ...] = ()
    prefetched_in_backward: tuple[int, ...] = ()


@dataclass(frozen=True)
class Plan:
    """A plan of what fully_shard is asked to do.

    Attributes
    ----------
    groups : tuple of Group
        Blocks in the order of forward, then the root; they are wrapped in this order.
    dtypes : Dtypes
    replicas : Members, optional
        The ranks that hold the same shard, if several do.
    resharing : Members, optional
        The ranks that share parameters between forward and backward, if they are fewer than otherwise.
    offloads : bool
        Whether the host's memory holds the shards.
    """

    groups: tuple[Group, ...]
    dtypes: Dtypes
    replicas: Members | None = None
    resharing: Members | None = None
    offloads: bool = False


def plan_of(builder: ProgramBuilder, scenario: Scenario) -> Plan:
    """Return the plan that follows from the scenario's ``parallelism`` section."""
    groups = tuple(_groups(builder, scenario))
    section = scenario.parallelism
    return Plan(groups, Dtypes.of(scenario), replicas_of(section), resharing_of(section), offloads(section))


def blocks_of(trace: Trace) -> list[int]:
    """Return the repeated blocks (modules), in the order in which forward enters them.

    They are those that backward runs through, and the other children of their parents, which may be frozen.
    """
    events = trace.steady
    parents = [name.rpartition(".")[0] for name, _ in trace.modules]
    reached = set(events.a[events.kind == EventKind.BLOCK_ENTER].tolist()) - {ROOT}
    holders = {parents[module] for module in reached}
    entered = events.a[events.kind == EventKind.MODULE_ENTER].tolist()
    return [module for module in dict.fromkeys(entered) if module != ROOT and parents[module] in holders]


def _groups(builder: ProgramBuilder, scenario: Scenario) -> list[Group]:
    section, trace = scenario.parallelism.fsdp or FsdpSection(), builder.trace
    blocks = [] if section.wrap == "root" else blocks_of(trace)
    owner = {}
    for index, parameter in enumerate(trace.parameters):
        inside = [block for block in blocks if parameter.name.startswith(f"{trace.modules[block][0]}.")]
        owner[index] = inside[0] if inside else ROOT
    forward, backward = section.forward_prefetch or 0, section.backward_prefetch or 0
    groups = []
    for place, module in enumerate([*blocks, ROOT]):
        members = tuple(index for index, block in owner.items() if block == module)
        if members:
            is_root = module == ROOT
            group = Group(
                module,
                members,
                _reshards(scenario, is_root),
                Storages(*(builder.new_storage() for _ in Storages._fields)),
                unsharded=tuple(builder.new_storage() for _ in members),
                resharded=tuple(builder.new_storage() for _ in members),
                prefetched_in_forward=() if is_root else tuple(blocks[place + 1 : place + 1 + forward]),
                prefetched_in_backward=() if is_root else tuple(reversed(blocks[max(place - backward, 0) : place])),
            )
            groups.append(group)
    return groups


def _reshards(scenario: Scenario, is_root: bool) -> bool:
    """Return whether a group's unsharded parameters are freed after forward; torch keeps those of one rank."""
    section = scenario.parallelism.fsdp
    asked = None if section is None else section.reshard_after_forward
    if asked is None:
        return scenario.parallelism.strategy == "zero3" and not is_root
    return asked is True or asked > 1


def wrapping(builder: ProgramBuilder, plan: Plan) -> list[Instruction]:
    """Return what wrapping allocates and frees.

    Each group's shards are made while its parameters are still whole; they do not stay where the host keeps them.
    """
    rows: list[Instruction] = []
    kind = StorageKind.PARAMETER
    for group in plan.groups:
        parameters = [builder.trace.parameters[index] for index in group.parameters]
        for each in parameters:
            size_bytes = in_dtype(padded_shard_of(each.tensor, builder.ranks), plan.dtypes.kept).bytes
            storage = builder.new_storage()
            rows.append(Instruction(EventKind.ALLOC, storage, size_bytes, holds=kind))
            if plan.offloads:
                rows.append(Instruction(EventKind.FREE, storage, holds=kind))
        rows += [Instruction(EventKind.FREE, each.storage, holds=kind) for each in parameters]
    return rows


class Sizes:
    """Tensors of a trace's parameters as they are sent and held."""

    def __init__(self, trace: Trace, ranks: int) -> None:
        self._trace, self._ranks = trace, ranks

    def tensor(self, index: int) -> TensorSpec:
        return self._trace.parameters[index].tensor

    def unsharded(self, index: int) -> TensorSpec:
        """Return the padded whole of a parameter, which is a view of it."""
        shard = padded_shard_of(self.tensor(index), self._ranks)
        return vector(shard.numel * self._ranks, shard.dtype)

    def shard(self, index: int, ranks: int) -> TensorSpec:
        """Return the padded shard of a parameter that so many ranks share."""
        whole = self.unsharded(index)
        return vector(whole.numel // ranks, whole.dtype)

    def buffer(self, parameters: Sequence[int]) -> TensorSpec:
        """Return the buffer of all ranks' shards of these parameters."""
        elements = sum(self.unsharded(index).numel for index in parameters)
        return vector(elements, self.tensor(parameters[0]).dtype)
