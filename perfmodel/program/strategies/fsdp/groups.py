"""What fully_shard gathers together, among which ranks, and what it holds of that."""

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
    """Of a group. cast: the part in the dtype it is sent in. gathered: all parts. reduced: whole gradients. scattered:
    the part of these. gradient: that in the dtype of the parameters.
    """

    cast: int
    gathered: int
    reduced: int
    scattered: int
    gradient: int


@dataclass(frozen=True)
class Group:
    """Parameters (indices) that are gathered together. module: index of the block, or ROOT. reshards: whether they are
    given up after forward. unsharded: storages of the whole parameters; parts: of what is kept of them after forward.
    ahead, behind: modules that are gathered as soon as this one is copied out, in forward and in backward; nothing
    behind: the one before.
    """

    module: int
    parameters: tuple[int, ...]
    reshards: bool
    storages: Storages
    unsharded: tuple[int, ...]
    parts: tuple[int, ...]
    ahead: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()


@dataclass(frozen=True)
class Plan:
    """What fully_shard was told. groups: blocks in the order of forward, and the root last, in which order they are
    wrapped. replicas: the ranks that hold the same shard, if several do. resharing: those that share parameters between
    forward and backward, if fewer than otherwise. offloads: whether the host's memory holds the parts.
    """

    groups: tuple[Group, ...]
    dtypes: Dtypes
    replicas: Members | None = None
    resharing: Members | None = None
    offloads: bool = False


def plan_of(builder: ProgramBuilder, scenario: Scenario) -> Plan:
    """By the scenario's section."""
    groups = tuple(_groups(builder, scenario))
    section = scenario.parallelism
    return Plan(groups, Dtypes.of(scenario), replicas_of(section), resharing_of(section), offloads(section))


def blocks_of(trace: Trace) -> list[int]:
    """The repeated blocks (modules), in the order in which forward enters them: those that backward runs through, and
    the other children of the modules that these are in, which may be frozen.
    """
    events = trace.steady
    parents = [name.rpartition(".")[0] for name, _ in trace.modules]
    reached = set(events.a[events.kind == EventKind.BLOCK_ENTER].tolist()) - {ROOT}
    around = {parents[module] for module in reached}
    entered = events.a[events.kind == EventKind.MODULE_ENTER].tolist()
    return [module for module in dict.fromkeys(entered) if module != ROOT and parents[module] in around]


def _groups(builder: ProgramBuilder, scenario: Scenario) -> list[Group]:
    section, trace = scenario.parallelism.fsdp or FsdpSection(), builder.trace
    blocks = [] if section.wrap == "root" else blocks_of(trace)
    owner = {}
    for index, parameter in enumerate(trace.parameters):
        inside = [block for block in blocks if parameter.name.startswith(f"{trace.modules[block][0]}.")]
        owner[index] = inside[0] if inside else ROOT
    ahead, back = section.forward_prefetch or 0, section.backward_prefetch or 0
    found = []
    for place, module in enumerate([*blocks, ROOT]):
        members = tuple(index for index, block in owner.items() if block == module)
        if members:
            is_root = module == ROOT
            group = Group(
                module,
                members,
                _gives_up(scenario, is_root),
                Storages(*(builder.new_storage() for _ in Storages._fields)),
                unsharded=tuple(builder.new_storage() for _ in members),
                parts=tuple(builder.new_storage() for _ in members),
                ahead=() if is_root else tuple(blocks[place + 1 : place + 1 + ahead]),
                behind=() if is_root else tuple(reversed(blocks[max(place - back, 0) : place])),
            )
            found.append(group)
    return found


def _gives_up(scenario: Scenario, is_root: bool) -> bool:
    """After forward. A group of one rank keeps everything, as torch says."""
    section = scenario.parallelism.fsdp
    asked = None if section is None else section.reshard_after_forward
    if asked is None:
        return scenario.parallelism.strategy == "zero3" and not is_root
    return asked is True or asked > 1


def wrapping(builder: ProgramBuilder, plan: Plan) -> list[Instruction]:
    """Each group's parts are made while its parameters are still whole, and do not stay where the host keeps them."""
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
        """With the padding: parameters are views of this."""
        shard = padded_shard_of(self.tensor(index), self._ranks)
        return vector(shard.numel * self._ranks, shard.dtype)

    def part(self, index: int, ranks: int) -> TensorSpec:
        """That of one of so many ranks."""
        whole = self.unsharded(index)
        return vector(whole.numel // ranks, whole.dtype)

    def buffer(self, parameters: Sequence[int]) -> TensorSpec:
        """All parts of these."""
        elements = sum(self.unsharded(index).numel for index in parameters)
        return vector(elements, self.tensor(parameters[0]).dtype)
