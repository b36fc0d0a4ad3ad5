"""ZeRO stage 1: every rank keeps the optimizer states of its share of the parameters, and steps over these alone.

    broadcast        torch's DistributedDataParallel with ZeroRedundancyOptimizer: whole parameters, assigned by size;
                     after its step each rank sends what it owns to all others, parameter by parameter
                     (``parameters_as_bucket_view``: in one piece)
    reduce-scatter   the paper's: gradients in one flat buffer, of which each rank reduces and steps over one shard, and
                     parameters in another, of which each gathers the others' shards

Sources: torch/distributed/optim/zero_redundancy_optimizer.py (``_partition_parameters``, ``_sync_params``,
``_build_param_buckets``); Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from perfmodel.hardware import host_calls
from perfmodel.program.builder import ProgramBuilder, vector, waits_in_a_row
from perfmodel.program.gradient_clipping import clip_flat_shards
from perfmodel.program.program import Instruction, Program
from perfmodel.program.sharding import flat_shard_of
from perfmodel.program.strategies.ddp import ddp
from perfmodel.scenario.scenario import Scenario
from perfmodel.trace.operation import Operation, TensorSpec
from perfmodel.trace.phases import OPTIMIZER, REDUCE, ZERO_GRAD
from perfmodel.trace.trace import EventKind, StorageKind, Trace, gradient_storages


def partition(sizes: Sequence[int], ranks: int) -> tuple[tuple[int, ...], ...]:
    """Return which parameters (indices) each rank owns, in the order in which it steps over them.

    The largest come first, each to the rank that has the fewest elements so far.

    >>> partition([4, 9, 4, 2], 2)
    ((1,), (0, 2, 3))
    """
    owned: list[list[int]] = [[] for _ in range(ranks)]
    elements = [0] * ranks
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        rank = elements.index(min(elements))
        owned[rank].append(index)
        elements[rank] += sizes[index]
    return tuple(map(tuple, owned))


def owned_by_rank(tensors: Sequence[TensorSpec], ranks: int) -> tuple[tuple[int, ...], ...]:
    """Return the :func:`partition` of a model's parameters, frozen ones included."""
    return partition([tensor.numel for tensor in tensors], ranks)


def zero1(builder: ProgramBuilder, scenario: Scenario) -> Program:
    """Return the program of strategy ``zero1``, see :mod:`perfmodel.program.strategies.data_parallel`."""
    if scenario.parallelism.zero1_form == "reduce-scatter":
        return _reduce_scatter(builder)
    return _broadcast(builder, scenario)


def _reduce_scatter(builder: ProgramBuilder) -> Program:
    """Return the paper's form, with one flat buffer a dtype.

    Gradients are freed once they are copied; a shard's gradient lives until it is cleared. Parameters become views of
    the flat buffer when the model is wrapped.
    """
    steady: list[Instruction] = []
    first: list[Instruction] = []
    gathers: list[Instruction] = []
    cleared: list[Instruction] = []
    setup: list[Instruction] = []
    trace = builder.trace
    for indices in by_dtype(trace):
        tensors = [trace.parameters[index].tensor for index in indices]
        shard = flat_shard_of(tensors, builder.ranks)
        whole = vector(shard.numel * builder.ranks, shard.dtype)
        padding = vector(whole.numel - sum(tensor.numel for tensor in tensors), shard.dtype)
        setup += _flat_parameters(builder, indices, whole, padding)
        flat, gradient = builder.new_storage(), builder.new_storage()
        views = tuple(vector(tensor.numel, tensor.dtype) for tensor in tensors)
        flatten = Operation("aten.cat.default", ((*views, padding),), outputs=(whole,))
        for rows, events in ((steady, trace.steady), (first, trace.first)):
            own = gradient_storages(trace, events)
            rows += [
                Instruction(EventKind.ALLOC, flat, whole.bytes),
                builder.launch(flatten, host_calls.FLATTEN),
                *(Instruction(EventKind.FREE, own[index]) for index in indices if index in own),
                Instruction(EventKind.ALLOC, gradient, shard.bytes),
                builder.blocking("reduce_scatter", whole),
                Instruction(EventKind.FREE, flat),
            ]
        cleared.append(Instruction(EventKind.FREE, gradient))
        gathers.append(builder.blocking("all_gather", whole))
    builder.add_phase(REDUCE, steady, first)
    clip_flat_shards(builder)
    start = builder.last(ZERO_GRAD)
    builder.insert(start, builder.program.runs[start].segment.stop, *cleared)
    end = builder.last(OPTIMIZER)
    builder.insert(end, builder.program.runs[end].segment.stop, *gathers)
    return replace(builder.finish(), setup=tuple(setup))


def by_dtype(trace: Trace) -> list[list[int]]:
    """Return the parameters that require a gradient (indices), grouped by dtype."""
    groups: dict[str, list[int]] = {}
    for index, parameter in enumerate(trace.parameters):
        if parameter.requires_grad:
            groups.setdefault(parameter.tensor.dtype, []).append(index)
    return list(groups.values())


def _flat_parameters(
    builder: ProgramBuilder, indices: Sequence[int], whole: TensorSpec, padding: TensorSpec
) -> list[Instruction]:
    held = [padding.bytes, whole.bytes] if padding.bytes else [whole.bytes]
    kind = StorageKind.PARAMETER
    return [
        *(Instruction(EventKind.ALLOC, builder.new_storage(), size_bytes, holds=kind) for size_bytes in held),
        *(Instruction(EventKind.FREE, builder.trace.parameters[index].storage, holds=kind) for index in indices),
    ]


def _broadcast(builder: ProgramBuilder, scenario: Scenario) -> Program:
    """Return torch's form: ddp, and after the optimizer's step broadcasts, all begun before the first is awaited.

    The trace's optimizer steps over what the rank owns (:mod:`perfmodel.program.ranks`). Where parameters are views of
    a rank's bucket they are copied there when the optimizer is made.
    """
    tensors = [parameter.tensor for parameter in builder.trace.parameters]
    owned = owned_by_rank(tensors, builder.ranks)
    first_call = host_calls.asynchronous("broadcast")
    as_view = bool(scenario.parallelism.parameters_as_bucket_view)
    rows: list[Instruction] = []
    marks: list[int] = []
    for indices in owned:
        for size_bytes in _sizes([tensors[index] for index in indices], as_view):
            call = host_calls.repeated(first_call) if marks else first_call
            more, mark = builder.asynchronous(tensors[0].dtype, size_bytes, call, "broadcast")
            rows += more
            marks.append(mark)
    run = builder.last(OPTIMIZER)
    builder.insert(run, builder.program.runs[run].segment.stop, *rows, *waits_in_a_row(marks))
    program = ddp(builder, scenario)
    return replace(program, setup=(*program.setup, *_views(builder, owned))) if as_view else program


def _sizes(tensors: Sequence[TensorSpec], as_view: bool) -> list[int]:
    """Return the bytes of a rank's broadcasts; a rank that owns nothing has a bucket of one float32."""
    sizes = [tensor.bytes for tensor in tensors]
    return [sum(sizes) or 4] if as_view else sizes


def _views(builder: ProgramBuilder, owned: Sequence[Sequence[int]]) -> list[Instruction]:
    """Return the allocation of each rank's bucket, and the frees of the parameters that it replaces, in turn."""
    rows = []
    for indices in owned:
        parameters = [builder.trace.parameters[index] for index in indices]
        size_bytes = sum(parameter.tensor.bytes for parameter in parameters) or 4
        rows.append(Instruction(EventKind.ALLOC, builder.new_storage(), size_bytes, holds=StorageKind.PARAMETER))
        rows += [
            Instruction(EventKind.FREE, parameter.storage, holds=StorageKind.PARAMETER) for parameter in parameters
        ]
    return rows
