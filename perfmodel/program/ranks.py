"""The programs of all ranks of a scenario: one for those that run alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from perfmodel.errors import PerfModelError
from perfmodel.program.data_parallel import data_parallel_program
from perfmodel.program.program import Program
from perfmodel.program.shards import Dtypes, flat_shard_of, in_dtype, shard_of
from perfmodel.program.zero1 import by_dtype, owned_by_rank
from perfmodel.workload.ops import TensorSpec
from perfmodel.workload.optimizer_share import with_optimizer
from perfmodel.workload.scenario import Scenario
from perfmodel.workload.trace_file import Trace
from perfmodel.workload.trace_store import get_optimizer_trace, get_trace

SHARDED = ("zero1", "zero2", "zero3")


@dataclass(frozen=True)
class RankProgram:
    """What these ranks run."""

    ranks: tuple[int, ...]
    program: Program


def rank_programs(scenario: Scenario, allow_import: bool = False) -> tuple[RankProgram, ...]:
    """Of every rank, each in one of them; ranks whose optimizers step over equal tensors are alike.

    Raises
    ------
    PerfModelError
        If a trace is not at hand and cannot be made, or ranks cannot share the parameters so.
    """
    trace = _as_kept(get_trace(_as_computed(scenario), allow_import), scenario)
    shares = optimizer_shares(scenario, trace)
    if not shares:
        return (RankProgram(tuple(range(scenario.parallelism.dp)), data_parallel_program(scenario, trace)),)
    alike: dict[tuple[TensorSpec, ...], tuple[tuple[int | None, ...], list[int]]] = {}
    for rank, (tensors, owners) in enumerate(shares):
        alike.setdefault(tensors, (owners, []))[1].append(rank)
    found = []
    for tensors, (owners, ranks) in alike.items():
        share = with_optimizer(trace, get_optimizer_trace(scenario, tensors), owners)
        found.append(RankProgram(tuple(ranks), data_parallel_program(scenario, share)))
    return tuple(found)


def _as_computed(scenario: Scenario) -> Scenario:
    """With forward and backward in the dtype that fully_shard's policy asks for."""
    if Dtypes.of(scenario).kept is None:
        return scenario
    return scenario.model_copy(update={"precision": "bf16"})


def _as_kept(trace: Trace, scenario: Scenario) -> Trace:
    """The model as it is built, in the dtype in which its parameters are kept."""
    kept = Dtypes.of(scenario).kept
    if kept is None:
        return trace
    sizes = {each.storage: in_dtype(each.tensor, kept).bytes for each in trace.parameters}
    return replace(
        trace, persistent=tuple(replace(each, bytes=sizes.get(each.id, each.bytes)) for each in trace.persistent)
    )


class Share(NamedTuple):
    """What a rank's optimizer steps over. owners: which parameters these are, None for parts of parameters."""

    tensors: tuple[TensorSpec, ...]
    owners: tuple[int | None, ...]


def optimizer_shares(scenario: Scenario, trace: Trace) -> list[Share]:
    """Of each rank; empty where all step over the parameters themselves. Frozen parameters are in no share.

    Raises
    ------
    PerfModelError
        If zero1 is asked for parameters of several dtypes, or a rank is left with nothing.
    """
    strategy, ranks = scenario.parallelism.strategy, scenario.parallelism.dp
    if strategy not in SHARDED or ranks == 1:
        return []
    tensors = [parameter.tensor for parameter in trace.parameters]
    trained = [index for index, parameter in enumerate(trace.parameters) if parameter.requires_grad]
    if strategy != "zero1":
        kept = [in_dtype(tensors[index], Dtypes.of(scenario).kept) for index in trained]
        shares = [_parts([shard_of(tensor, ranks, rank) for tensor in kept]) for rank in range(ranks)]
    elif scenario.parallelism.zero1_form == "reduce-scatter":
        shares = [_parts([flat_shard_of([tensors[i] for i in group], ranks) for group in by_dtype(trace)])] * ranks
    else:
        _check_dtypes(trace)
        dealt = [[index for index in owned if index in trained] for owned in owned_by_rank(tensors, ranks)]
        shares = [Share(tuple(tensors[index] for index in owned), tuple(owned)) for owned in dealt]
    if not all(share.tensors for share in shares):
        raise PerfModelError(
            f"parallelism.dp must leave every rank a part of the parameters with strategy {strategy} (got {ranks}, "
            "which is too many for this model). Use fewer."
        )
    return shares


def _parts(parts: Sequence[TensorSpec]) -> Share:
    """Those of which the rank has no row cost nothing."""
    held = tuple(part for part in parts if part.numel)
    return Share(held, (None,) * len(held))


def _check_dtypes(trace: Trace) -> None:
    dtypes = sorted({parameter.tensor.dtype for parameter in trace.parameters})
    if len(dtypes) > 1:
        raise PerfModelError(
            f"parallelism.strategy must not be zero1 where parameters differ in dtype (got {', '.join(dtypes)}): "
            "torch's ZeroRedundancyOptimizer refuses them. Use ddp."
        )
