"""The programs of all ranks of a scenario: one for each group of ranks that run the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from perfmodel.errors import PerfModelError
from perfmodel.program.pipeline.programs import pipeline_programs
from perfmodel.program.program import Program
from perfmodel.program.sharding import Dtypes, flat_shard_of, in_dtype, offloads, shard_of, sharing_of
from perfmodel.program.size import within_limits
from perfmodel.program.strategies.data_parallel import data_parallel_program
from perfmodel.program.strategies.zero1 import by_dtype, owned_by_rank
from perfmodel.scenario.scenario import SHARDED, Scenario
from perfmodel.trace.operation import TensorSpec
from perfmodel.trace.optimizer_share import OptimizerShare, optimizer_on_host, with_optimizer
from perfmodel.trace.store import get_optimizer_trace, get_trace
from perfmodel.trace.trace import Trace


@dataclass(frozen=True)
class RankProgram:
    """The ranks that run one program, and the program."""

    ranks: tuple[int, ...]
    program: Program


def rank_programs(scenario: Scenario, allow_import: bool = False, batches_all: bool = False) -> tuple[RankProgram, ...]:
    """Return the programs of all ranks; ranks whose programs are identical share one.

    Those are ranks whose optimizers step over equal tensors, and in several pipelines ranks that have the same stages.

    Parameters
    ----------
    scenario : Scenario
    allow_import : bool
        Whether the scenario's own model may be imported if its trace is not at hand.
    batches_all : bool
        How messages of a pipeline are posted, see :mod:`perfmodel.program.pipeline.programs`.

    Raises
    ------
    PerfModelError
        If a trace is not at hand and cannot be made, or ranks cannot share the parameters so.
    """
    if scenario.parallelism.pp is not None:
        programs = pipeline_programs(scenario, batches_all)
        replicas = [range(rank, scenario.parallelism.ranks, len(programs)) for rank in range(len(programs))]
        return tuple(RankProgram(tuple(ranks), program) for ranks, program in zip(replicas, programs, strict=True))
    trace = _as_kept(get_trace(as_computed(scenario), allow_import), scenario)
    shares = optimizer_shares(scenario, trace)
    if not shares:
        (program,) = within_limits([data_parallel_program(scenario, trace)])
        return (RankProgram(tuple(range(scenario.parallelism.dp)), program),)
    stepping = (with_optimizer(trace, _optimizer_of(each, scenario, trace), each.owners) for each in shares)
    programs = within_limits(data_parallel_program(scenario, each) for each in stepping)
    return tuple(RankProgram(share.ranks, program) for share, program in zip(shares, programs, strict=True))


def _optimizer_of(share: Share, scenario: Scenario, trace: Trace) -> Trace:
    if not offloads(scenario.parallelism):
        return get_optimizer_trace(scenario, share.tensors, share.before_step)
    dtypes = sorted({tensor.dtype for tensor in share.tensors} - {"float32"})
    if dtypes:
        raise PerfModelError(
            f"parallelism.fsdp.offload must be left out where parameters are not kept in float32 (got "
            f"{', '.join(dtypes)}): what a CPU's optimizer takes is measured in that. Compute in another dtype with "
            "fsdp.mixed_precision."
        )
    return optimizer_on_host(trace, dict(zip(share.indices, share.tensors, strict=True)))


def as_computed(scenario: Scenario) -> Scenario:
    """Return the scenario whose trace is run.

    Its forward and backward are in the dtype of fully_shard's policy. Where a gradient scaler cannot know that the
    optimizer is fused, since ZeroRedundancyOptimizer wraps it, its optimizer is not fused.
    """
    if scenario.parallelism.strategy == "zero1" and scenario.optimizer.implementation == "fused":
        if scenario.precision == "amp-fp16":
            optimizer = scenario.optimizer.model_copy(update={"implementation": "foreach"})
            return scenario.model_copy(update={"optimizer": optimizer})
        return scenario
    section = scenario.parallelism.fsdp
    if section is None or section.mixed_precision is None or Dtypes.of(scenario).kept is None:
        return scenario
    return scenario.model_copy(update={"precision": section.mixed_precision.param})


def _as_kept(trace: Trace, scenario: Scenario) -> Trace:
    """Return the trace with the model as it is built: in the dtype in which its parameters are kept."""
    kept = Dtypes.of(scenario).kept
    if kept is None:
        return trace
    sizes = {each.storage: in_dtype(each.tensor, kept).bytes for each in trace.parameters}
    return replace(
        trace, persistent=tuple(replace(each, bytes=sizes.get(each.id, each.bytes)) for each in trace.persistent)
    )


class Share(NamedTuple):
    """The tensors that the optimizers of some ranks step over.

    Attributes
    ----------
    ranks : tuple of int
    tensors : tuple of TensorSpec
    owners : tuple of int or None
        For each tensor the parameter that it is; None for a shard.
    before_step : OptimizerShare, optional
        What precedes the step, where it is not that of whole parameters.
    indices : tuple of int
        For each tensor the parameter that it is a shard of; empty where a shard spans several.
    """

    ranks: tuple[int, ...]
    tensors: tuple[TensorSpec, ...]
    owners: tuple[int | None, ...]
    before_step: OptimizerShare | None = None
    indices: tuple[int, ...] = ()


def optimizer_shares(scenario: Scenario, trace: Trace) -> list[Share]:
    """Return the distinct shares, in the order of their first ranks.

    There are none where all ranks step over the parameters themselves. Frozen parameters are in no share.

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
        shares = list(_sharded(kept, scenario, trained))
    elif scenario.parallelism.zero1_form == "reduce-scatter":
        shards = [flat_shard_of([tensors[i] for i in group], ranks) for group in by_dtype(trace)]
        shares = [_share(range(ranks), shards, scenario)]
    else:
        _check_dtypes(trace)
        shares = _owned(tensors, trained, ranks)
    if not shares or not all(share.tensors for share in shares):
        raise PerfModelError(
            f"parallelism.dp must leave every rank a share of the parameters with strategy {strategy} (got {ranks}, "
            "which is too many for this model). Use fewer."
        )
    return shares


def _sharded(tensors: Sequence[TensorSpec], scenario: Scenario, indices: Sequence[int]) -> Iterator[Share]:
    """Yield the shares of ranks that shard each tensor by rows.

    All ranks that have any row have equally many, the last of them excepted.
    """
    sharing, ranks = sharing_of(scenario.parallelism).ranks, scenario.parallelism.dp
    borders = {0, sharing}
    for tensor in tensors:
        rows = max(tensor.shape[0] if tensor.shape else 1, 1)
        whole, rest = divmod(rows, -(-rows // sharing))
        borders |= {whole, whole + bool(rest)}
    for first, stop in pairwise(sorted(borders)):
        places = range(first, stop)
        equal = tuple(copy + place for copy in range(0, ranks, sharing) for place in places)
        yield _share(equal, [shard_of(tensor, sharing, first) for tensor in tensors], scenario, indices)


def _owned(tensors: Sequence[TensorSpec], trained: Sequence[int], ranks: int) -> list[Share]:
    """Return the shares of ranks that own whole parameters; none where there are more ranks than parameters."""
    if ranks > len(tensors):
        return []
    by_tensors: dict[tuple[TensorSpec, ...], tuple[list[int], tuple[int, ...]]] = {}
    is_trained = set(trained)
    for rank, owned in enumerate(owned_by_rank(tensors, ranks)):
        own = tuple(index for index in owned if index in is_trained)
        by_tensors.setdefault(tuple(tensors[index] for index in own), ([], own))[0].append(rank)
    return [Share(tuple(of_ranks), own_tensors, own) for own_tensors, (of_ranks, own) in by_tensors.items()]


def _share(
    ranks: Iterable[int], shards: Sequence[TensorSpec], scenario: Scenario, indices: Sequence[int] = ()
) -> Share:
    """Return the share of ranks that hold these shards.

    An empty shard costs nothing except an entry in the stacked gradient norms. ``indices`` are the shards' parameters.
    """
    held = tuple(shard for shard in shards if shard.numel)
    are_dtensors, are_scaled = scenario.parallelism.strategy != "zero1", scenario.precision == "amp-fp16"
    before = None
    if scenario.optimizer.max_grad_norm is not None or are_scaled:
        before = OptimizerShare(are_dtensors, len(shards) - len(held) if are_dtensors else 0, are_scaled)
    of_held = tuple(index for index, shard in zip(indices, shards, strict=False) if shard.numel)
    return Share(tuple(ranks), held, (None,) * len(held), before, of_held)


def _check_dtypes(trace: Trace) -> None:
    dtypes = sorted({parameter.tensor.dtype for parameter in trace.parameters})
    if len(dtypes) > 1:
        raise PerfModelError(
            f"parallelism.strategy must not be zero1 where parameters differ in dtype (got {', '.join(dtypes)}): "
            "torch's ZeroRedundancyOptimizer refuses them. Use ddp."
        )
