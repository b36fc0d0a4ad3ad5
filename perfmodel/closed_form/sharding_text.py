"""Words of the formulas of :mod:`perfmodel.closed_form.sharding`."""

from __future__ import annotations

from perfmodel.closed_form.formula_text import FormulaText

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
) -> tuple[FormulaText, FormulaText, FormulaText]:
    """Return the three formulas of one form of data parallelism: bytes sent, sizes of collectives, and states kept.

    Parameters
    ----------
    form : str
        Prefix of the formulas' names.
    title : str
        What users call the form.
    moves, keeps : str
        What a step communicates, and what a rank keeps between steps.
    source : str
        Where the form comes from.
    moves_if, keeps_if : tuple of str
        Further assumptions of either.
    """
    return (
        FormulaText(
            name=f"{form}_sent_bytes",
            gives=f"what a rank of {title} sends in a step",
            unit="bytes",
            derivation=f"{moves}; to gather, reduce-scatter, or broadcast a shard each, a ring of n ranks passes on "
            "(n - 1) / n "
            "of the whole, to all-reduce twice that",
            assumptions=(*_SENT, *moves_if),
            source=f"{_SHARDING}; {_RINGS}; {source}",
        ),
        FormulaText(
            name=f"{form}_communication_bytes",
            gives=f"sizes of the collectives of a step of {title}, as nccl-tests counts them",
            unit="bytes",
            derivation=f"{moves}; whole tensors, however many ranks share them",
            assumptions=(*_COUNTED, *moves_if),
            source=f"{_SHARDING}; {source}",
        ),
        FormulaText(
            name=f"{form}_state_bytes",
            gives=f"parameters, gradients and optimizer states that a rank of {title} keeps",
            unit="bytes",
            derivation=keeps,
            assumptions=(*_KEPT, *keeps_if),
            source=f"{_SHARDING}; {source}",
        ),
    )


_ZERO = "Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models"
_FULLY_SHARD = f"torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py; {_ZERO}"
_ONCE = "with several micro-batches gradients are reduced in the last"
_DDP_IF = (_ONCE, "every parameter has a gradient; buffers are not broadcast")
_RESHARDED = "parameters are freed after every backward: set_reshard_after_backward is left alone"
_DTYPES = "W and W_r in the dtype that parameters are gathered in, G in the one that gradients are reduced in"
_SHARDED_DTYPES = "W, G and K in the dtype of the shards: a mixed precision policy does not change it"
_ROOT_STAYS = "reshard_after_forward is left at its default: blocks are freed after forward, the root is not"
_BUCKETS = "DDP's buckets, G more unless gradient_as_bucket_view, are not counted"

SHARDING = (
    *_sharded(
        form="ddp",
        title="DistributedDataParallel",
        moves="an all-reduce of all gradients",
        keeps="every rank keeps all",
        source="torch/csrc/distributed/c10d/reducer.cpp",
        moves_if=_DDP_IF,
        keeps_if=(_BUCKETS,),
    ),
    *_sharded(
        form="zero1_broadcast",
        title="DistributedDataParallel with ZeroRedundancyOptimizer",
        moves="an all-reduce of all gradients, and each rank broadcasts the parameters that it owns",
        keeps="every rank keeps parameters and gradients, and the optimizer states of what it owns",
        source=f"torch/distributed/optim/zero_redundancy_optimizer.py; {_ZERO}",
        moves_if=(*_DDP_IF, "ranks own equal shares: else this is the mean over them"),
        keeps_if=(
            _BUCKETS,
            "parameters are sharded whole: K / N is the mean over ranks, and the least that the fullest can have",
        ),
    ),
    *_sharded(
        form="zero1_reduce_scatter",
        title="ZeRO stage 1 with a reduce-scatter",
        moves="gradients are reduce-scattered, and parameters gathered once each rank has stepped over its shard",
        keeps="every rank keeps all parameters, and a share of the gradients, once reduced, and of optimizer states",
        source=_ZERO,
        moves_if=(_ONCE,),
    ),
    *_sharded(
        form="zero2",
        title="fully_shard with reshard_after_forward=False",
        moves="parameters are gathered once a micro-batch, for forward, and gradients reduce-scattered",
        keeps="every rank keeps a share of each, as of zero3; the paper's stage 2 keeps all parameters: W + (G + K) "
        "/ N",
        source=_FULLY_SHARD,
        moves_if=(_ONCE, _RESHARDED, _DTYPES),
        keeps_if=(_SHARDED_DTYPES,),
    ),
    *_sharded(
        form="zero3",
        title="fully_shard",
        moves="parameters of blocks are gathered twice a micro-batch, for forward and for backward, those of the "
        "root once; "
        "gradients are reduce-scattered",
        keeps="every rank keeps a share of each",
        source=_FULLY_SHARD,
        moves_if=(_ONCE, _ROOT_STAYS, _RESHARDED, _DTYPES),
        keeps_if=(_SHARDED_DTYPES,),
    ),
    *_sharded(
        form="hsdp",
        title="fully_shard over replicas (HSDP)",
        moves="as zero3 among the N / R ranks that share a replica; then each shard of the gradients, G R / N, is "
        "all-reduced among the replicas",
        keeps="every rank keeps a share of each, one of N / R",
        source=_FULLY_SHARD,
        moves_if=(_ONCE, _ROOT_STAYS, _RESHARDED, _DTYPES, "R divides N"),
        keeps_if=(_SHARDED_DTYPES, "R divides N"),
    ),
)
