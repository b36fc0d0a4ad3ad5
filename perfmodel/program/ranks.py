"""The programs of all ranks of a scenario: one for those that run alike."""

from __future__ import annotations

from dataclasses import dataclass

from perfmodel.errors import PerfModelError
from perfmodel.program.data_parallel import data_parallel_program
from perfmodel.program.program import Program
from perfmodel.program.zero1 import by_dtype, owned_by_rank, shard_of
from perfmodel.workload.ops import TensorSpec
from perfmodel.workload.optimizer_share import with_optimizer
from perfmodel.workload.scenario import Scenario
from perfmodel.workload.trace_file import Trace
from perfmodel.workload.trace_store import get_optimizer_trace, get_trace


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
        If a trace is not at hand and cannot be made, or zero1 is asked for parameters of several dtypes.
    """
    trace = get_trace(scenario, allow_import)
    section = scenario.parallelism
    if section.strategy != "zero1" or section.dp == 1:
        return (RankProgram(tuple(range(section.dp)), data_parallel_program(scenario, trace)),)
    alike: dict[tuple[TensorSpec, ...], tuple[tuple[int | None, ...], list[int]]] = {}
    for rank, (tensors, owners) in enumerate(_shares(scenario, trace)):
        alike.setdefault(tensors, (owners, []))[1].append(rank)
    found = []
    for tensors, (owners, ranks) in alike.items():
        share = with_optimizer(trace, get_optimizer_trace(scenario, tensors), owners)
        found.append(RankProgram(tuple(ranks), data_parallel_program(scenario, share)))
    return tuple(found)


def _shares(scenario: Scenario, trace: Trace) -> list[tuple[tuple[TensorSpec, ...], tuple[int | None, ...]]]:
    """What each rank's optimizer steps over, and which parameters these are: None for parts of a flat buffer."""
    tensors, ranks = [parameter.tensor for parameter in trace.parameters], scenario.parallelism.dp
    if scenario.parallelism.zero1_form == "reduce-scatter":
        shards = tuple(shard_of([tensors[index] for index in indices], ranks) for indices in by_dtype(trace))
        return [(shards, (None,) * len(shards))] * ranks
    _check_dtypes(trace)
    return [(tuple(tensors[index] for index in owned), owned) for owned in owned_by_rank(tensors, ranks)]


def _check_dtypes(trace: Trace) -> None:
    dtypes = sorted({parameter.tensor.dtype for parameter in trace.parameters})
    if len(dtypes) > 1:
        raise PerfModelError(
            f"parallelism.strategy must not be zero1 where parameters differ in dtype (got {', '.join(dtypes)}): "
            "torch's ZeroRedundancyOptimizer refuses them. Use ddp."
        )
