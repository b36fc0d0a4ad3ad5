"""What is said of each formula: what it gives, how it follows, under which assumptions; sympy knows the rest."""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """A :class:`~perfmodel.closed_form.formulas.Formula` without what sympy knows."""

    name: str
    gives: str
    unit: str
    derivation: str
    assumptions: tuple[str, ...]
    source: str


_LINEAR = "an all-reduce of S bytes takes alpha + S / B"
_PIPELINE = (
    _LINEAR,
    "equal buckets, reduced one after another, each as soon as its gradients are ready",
    "n is continuous: try the whole numbers on both sides; it cannot exceed the number of parameters",
    "computing and reducing do not slow each other, and the host keeps up",
    "copies into and out of buckets are not counted (4 G / M in all)",
)
_MATCHED = (*_PIPELINE, "T_b = G / B: computing a bucket's gradients takes as long as sending them")
_AFTER = (_LINEAR, "nothing else runs while gradients are reduced")
_OURS = "derived in perfmodel/closed_form/data_parallel.py"
_REDUCER = f"{_OURS}; order of reductions: torch/csrc/distributed/c10d/reducer.cpp"

_DATA_PARALLEL = (
    Row(
        "ddp_overhead_s",
        "what DDP adds to a step whose backward takes as long as sending its gradients",
        "s",
        "ddp_exposed_communication_bound_s with T_b = G / B: the last bucket, and the cost of every call",
        _MATCHED,
        _REDUCER,
    ),
    Row(
        "ddp_overhead_best_bucket_bytes",
        "bucket size at which ddp_overhead_s is least",
        "bytes",
        "G / n where d ddp_overhead_s / dn = 0; the second derivative, 2 G / (B n^3), is positive",
        _MATCHED,
        _OURS,
    ),
    Row(
        "ddp_overhead_best_buckets",
        "number of buckets at which ddp_overhead_s is least",
        "1",
        "d ddp_overhead_s / dn = 0",
        _MATCHED,
        _OURS,
    ),
    Row(
        "ddp_bucket_end_s",
        "when the last reduction would end were they busy without pause from bucket i on",
        "s",
        "bucket i is ready at i T_b / n; n - i + 1 reductions of alpha + G / (n B) follow",
        _PIPELINE,
        _REDUCER,
    ),
    Row(
        "ddp_exposed_s",
        "communication that backward does not hide",
        "s",
        "the largest ddp_bucket_end_s over i, less T_b; it is linear in i, so i = 1 or i = n",
        _PIPELINE,
        _REDUCER,
    ),
    Row(
        "ddp_exposed_by_bucket_bytes_s",
        "ddp_exposed_s as a function of the size of a bucket",
        "s",
        "ddp_exposed_s with n = G / b",
        _PIPELINE,
        _OURS,
    ),
    Row(
        "ddp_exposed_communication_bound_s",
        "ddp_exposed_s where reductions never wait for gradients",
        "s",
        "ddp_bucket_end_s of i = 1, less T_b; holds where n >= ddp_boundary_buckets",
        _PIPELINE,
        _OURS,
    ),
    Row(
        "ddp_exposed_compute_bound_s",
        "ddp_exposed_s where reductions always wait for gradients: the last bucket",
        "s",
        "ddp_bucket_end_s of i = n, less T_b; holds where n <= ddp_boundary_buckets",
        _PIPELINE,
        _OURS,
    ),
    Row(
        "ddp_boundary_buckets",
        "buckets up to which a step is compute-bound, and past which it is communication-bound",
        "1",
        "alpha + G / (n B) = T_b / n; below 1 the step is communication-bound with any number",
        _PIPELINE,
        _OURS,
    ),
    Row(
        "ddp_best_buckets",
        "number of buckets at which ddp_exposed_s is least",
        "1",
        "compute-bound it falls with n; communication-bound it falls up to sqrt(T_b / alpha), then rises: the "
        "later of the boundary and that, and at least 1",
        _PIPELINE,
        _OURS,
    ),
    Row(
        "ddp_best_bucket_bytes",
        "bucket size at which ddp_exposed_s is least",
        "bytes",
        "G / ddp_best_buckets",
        _PIPELINE,
        _OURS,
    ),
    Row(
        "ddp_best_bucket_bytes_communication_bound",
        "bucket size that exposes least where T_b - G / B <= sqrt(alpha T_b): more calls against an earlier start",
        "bytes",
        "G / n where d ddp_exposed_communication_bound_s / dn = 0, at n = sqrt(T_b / alpha)",
        _PIPELINE,
        _OURS,
    ),
    Row(
        "ddp_best_bucket_bytes_compute_bound",
        "bucket size that exposes least where T_b - G / B >= sqrt(alpha T_b): the least the interconnect keeps up with",
        "bytes",
        "G / ddp_boundary_buckets",
        (*_PIPELINE, "T_b > G / B"),
        _OURS,
    ),
    Row(
        "ddp_least_exposed_communication_bound_s",
        "ddp_exposed_s with buckets of ddp_best_bucket_bytes_communication_bound",
        "s",
        "ddp_exposed_communication_bound_s at n = sqrt(T_b / alpha)",
        _PIPELINE,
        _OURS,
    ),
    Row(
        "ddp_least_exposed_compute_bound_s",
        "ddp_exposed_s with buckets of ddp_best_bucket_bytes_compute_bound",
        "s",
        "ddp_exposed_compute_bound_s at n = ddp_boundary_buckets",
        (*_PIPELINE, "T_b > G / B"),
        _OURS,
    ),
    Row(
        "naive_overhead_s",
        "what an all-reduce of each gradient after backward adds to a step",
        "s",
        "P calls and all bytes, one after another",
        _AFTER,
        _OURS,
    ),
    Row(
        "flat_overhead_s",
        "what one all-reduce of the flattened gradients after backward adds to a step",
        "s",
        "one call and all bytes; gradients are read and written into the buffer and again out of it",
        (*_AFTER, "copies run at the memory's bandwidth"),
        _OURS,
    ),
    Row(
        "overlap_exposed_s",
        "what an all-reduce a parameter, as soon as its gradient is ready, adds to a step",
        "s",
        "ddp_exposed_s with n = P",
        (*_PIPELINE, "parameters of equal size"),
        _OURS,
    ),
)

_SHARDING = "derived in perfmodel/closed_form/sharding.py"
_RINGS = "rings: NCCL, src/device/all_reduce.h, all_gather.h, reduce_scatter.h and broadcast.h"
_SENT = ("every collective is a ring over equal chunks; trees and multicast send other amounts", "nothing is padded")
_COUNTED = ("nothing is padded",)
_KEPT = (
    "equal shares, and nothing is padded or rounded to the allocator's blocks",
    "between steps: gradients live until the next step clears them, and none is None",
    "what more lives at the peak is not counted: gathered parameters, gradients yet to be reduced, activations",
)


def _sharded(
    form: str,
    title: str,
    moves: str,
    keeps: str,
    source: str,
    moves_if: tuple[str, ...] = (),
    keeps_if: tuple[str, ...] = (),
) -> tuple[Row, Row, Row]:
    """Of one form: what a rank sends, how collectives' sizes add up, what it keeps."""
    return (
        Row(
            f"{form}_sent_bytes",
            f"what a rank of {title} sends in a step",
            "bytes",
            f"{moves}; to gather, reduce-scatter, or broadcast a shard each, a ring of n ranks passes on (n - 1) / n "
            "of the whole, to all-reduce twice that",
            (*_SENT, *moves_if),
            f"{_SHARDING}; {_RINGS}; {source}",
        ),
        Row(
            f"{form}_communication_bytes",
            f"sizes of the collectives of a step of {title}, as nccl-tests counts them",
            "bytes",
            f"{moves}; whole tensors, however many ranks share them",
            (*_COUNTED, *moves_if),
            f"{_SHARDING}; {source}",
        ),
        Row(
            f"{form}_state_bytes",
            f"parameters, gradients and optimizer states that a rank of {title} keeps",
            "bytes",
            keeps,
            (*_KEPT, *keeps_if),
            f"{_SHARDING}; {source}",
        ),
    )


_ZERO = "Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models"
_FULLY_SHARD = f"torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py; {_ZERO}"
_ONCE = "with several micro-batches gradients are reduced in the last"
_DDP_IF = (_ONCE, "every parameter has a gradient; buffers are not broadcast")
_RESHARDED = "parameters are given up after every backward: set_reshard_after_backward is left alone"
_DTYPES = "W and W_r in the dtype that parameters are gathered in, G in the one that gradients are reduced in"
_SHARDED_DTYPES = "W, G and K in the dtype of the shards: a mixed precision policy does not change it"
_ROOT_STAYS = "reshard_after_forward is left at its default: blocks are given up after forward, the root is not"
_BUCKETS = "DDP's buckets, G more unless gradient_as_bucket_view, are not counted"

_SHARDED = (
    *_sharded(
        "ddp",
        "DistributedDataParallel",
        "an all-reduce of all gradients",
        "every rank keeps all",
        "torch/csrc/distributed/c10d/reducer.cpp",
        moves_if=_DDP_IF,
        keeps_if=(_BUCKETS,),
    ),
    *_sharded(
        "zero1_broadcast",
        "DistributedDataParallel with ZeroRedundancyOptimizer",
        "an all-reduce of all gradients, and each rank broadcasts the parameters that it owns",
        "every rank keeps parameters and gradients, and the optimizer states of what it owns",
        f"torch/distributed/optim/zero_redundancy_optimizer.py; {_ZERO}",
        moves_if=(*_DDP_IF, "ranks own equal shares: else this is the mean over them"),
        keeps_if=(
            _BUCKETS,
            "parameters are sharded whole: K / N is the mean over ranks, and the least that the fullest can have",
        ),
    ),
    *_sharded(
        "zero1_reduce_scatter",
        "ZeRO stage 1 with a reduce-scatter",
        "gradients are reduce-scattered, and parameters gathered once each rank has stepped over its shard",
        "every rank keeps all parameters, and a share of the gradients, once reduced, and of optimizer states",
        _ZERO,
        moves_if=(_ONCE,),
    ),
    *_sharded(
        "zero2",
        "fully_shard with reshard_after_forward=False",
        "parameters are gathered once a micro-batch, for forward, and gradients reduce-scattered",
        "every rank keeps a share of each, as of zero3; the paper's stage 2 keeps all parameters: W + (G + K) / N",
        _FULLY_SHARD,
        moves_if=(_ONCE, _RESHARDED, _DTYPES),
        keeps_if=(_SHARDED_DTYPES,),
    ),
    *_sharded(
        "zero3",
        "fully_shard",
        "parameters of blocks are gathered twice a micro-batch, for forward and for backward, those of the root once; "
        "gradients are reduce-scattered",
        "every rank keeps a share of each",
        _FULLY_SHARD,
        moves_if=(_ONCE, _ROOT_STAYS, _RESHARDED, _DTYPES),
        keeps_if=(_SHARDED_DTYPES,),
    ),
    *_sharded(
        "hsdp",
        "fully_shard over replicas (HSDP)",
        "as zero3 among the N / R ranks that share a replica; then each shard of the gradients, G R / N, is "
        "all-reduced among the replicas",
        "every rank keeps a share of each, one of N / R",
        _FULLY_SHARD,
        moves_if=(_ONCE, _ROOT_STAYS, _RESHARDED, _DTYPES, "R divides N"),
        keeps_if=(_SHARDED_DTYPES, "R divides N"),
    ),
)

_CUT = "derived in perfmodel/closed_form/pipeline.py"
_TORCH = "orders of torch/distributed/pipelining/schedules.py, executed"
_FREE = "messages take no time, and delay none of another pair of ranks: with more than two, torch 2.12 or later"
_EQUAL = (_FREE, "equal stages, and the host keeps up")
_PARTS = (*_EQUAL, "a backward takes T_I + T_W, at once or apart")


def _bubble(name: str, title: str, a_hop: str, assumptions: tuple[str, ...], source: str) -> Row:
    return Row(
        f"pipeline_{name}fraction",
        f"share of a step of {title} in which a rank computes nothing",
        "1",
        f"(p - 1) h over that and a rank's work: one more rank adds h = {a_hop}",
        assumptions,
        f"{_CUT}; {_TORCH}; {source}",
    )


def _in_flight(name: str, title: str, derivation: str, assumptions: tuple[str, ...] = ()) -> Row:
    return Row(
        f"pipeline_{name}_in_flight_micro_batches",
        f"most micro-batches that a rank of {title} holds activations of, counted in each of its stages",
        "1",
        derivation,
        ("until all of the backward is over", *assumptions),
        f"{_CUT}; {_TORCH}",
    )


_WHOLE = "a forward there and a backward back"
_PIPELINED = (
    _bubble(
        "bubble_", "GPipe or 1F1B", _WHOLE, (*_EQUAL, "1F1B: m >= p"), "arXiv 1811.06965 (GPipe), 2006.09503 (1F1B)"
    ),
    _bubble(
        "interleaved_bubble_",
        "interleaved 1F1B or looped breadth first",
        _WHOLE,
        (*_EQUAL, "m >= p, or v = 1"),
        "arXiv 2104.04473 (interleaved), 2211.05953 (breadth first)",
    ),
    _bubble(
        "zero_bubble_",
        "interleaved zero bubble (v = 1: ZB-H1)",
        "max(T_F, T_I, T_F + T_I - T_W), what gradients of weights do not fill",
        (*_PARTS, "m >= p"),
        "arXiv 2401.10241",
    ),
    _bubble(
        "zbv_bubble_",
        "the V of zero bubble",
        "T_F, a forward there",
        (*_PARTS, "T_F = T_I = T_W", "m >= 2 p - 1"),
        "arXiv 2401.10241",
    ),
    _bubble(
        "dualpipev_bubble_",
        "DualPipeV",
        "2 T_F + max(0, T_I - T_W)",
        (*_PARTS, "T_F >= T_I", "m >= 2 p", "the pairs of a forward and a backward do not overlap, as in torch"),
        "arXiv 2412.19437; github.com/deepseek-ai/DualPipe",
    ),
    _in_flight("gpipe", "GPipe (v = 1) or looped breadth first", "every forward precedes the first backward"),
    _in_flight("1f1b", "1F1B", "p - s + 1 forwards precede the first backward, then one precedes each", ("m >= p",)),
    _in_flight(
        "interleaved",
        "interleaved 1F1B",
        "(v - 1) p + 2 (p - s) forwards precede the first pair of a forward and a backward",
        ("p divides m, and m >= 2 p",),
    ),
    _in_flight(
        "zero_bubble",
        "interleaved zero bubble or, v = 2, of its V",
        "rank s runs (v - 1) p + p - s + 1 forwards before the first backward, and leaves s - 1 weights for later",
        ("p divides m; of the V m >= 2 p",),
    ),
    Row(
        "pipeline_equal_stages_s",
        "step of GPipe or 1F1B",
        "s",
        "the first micro-batch passes p stages, and m - 1 follow it",
        (*_EQUAL, "1F1B: m >= p"),
        f"{_CUT}; {_TORCH}",
    ),
    Row(
        "pipeline_step_s",
        "step of GPipe or 1F1B whose micro-batches each cost something more",
        "s",
        "pipeline_equal_stages_s with t = T / m + a",
        (*_EQUAL, "1F1B: m >= p", "a smaller micro-batch computes as efficiently: what it loses is in a"),
        _CUT,
    ),
    Row(
        "pipeline_best_micro_batches",
        "number of micro-batches at which pipeline_step_s is least: less bubble against more cost",
        "1",
        "d pipeline_step_s / dm = 0",
        (*_EQUAL, "m is continuous: try the whole numbers on both sides; 1F1B: m >= p"),
        _CUT,
    ),
    Row(
        "pipeline_least_step_s",
        "pipeline_step_s with pipeline_best_micro_batches",
        "s",
        "pipeline_step_s at m = sqrt(T (p - 1) / a)",
        (*_EQUAL, "m is continuous"),
        _CUT,
    ),
)

ROWS = (*_DATA_PARALLEL, *_SHARDED, *_PIPELINED)
