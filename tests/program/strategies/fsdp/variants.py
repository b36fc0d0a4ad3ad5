"""Variants of fully_shard that its programs are held against torch in: fields of ``recorded_fsdp.Variant``."""

from __future__ import annotations

from typing import Any

import torch

VARIANTS: list[dict[str, Any]] = [
    {},
    {"reshard_after_forward": False},
    {"reshard_after_forward": True},
    {"wrap_blocks": False},
    {"wrap_blocks": False, "reshard_after_forward": True},
    {"ranks": 2},
    {"ranks": 5, "rank": 4},  # has no row of most parameters
    {"blocks": 1},
    {"micro_batches": 2},
    {"micro_batches": 2, "reshard_after_forward": False},
    {"micro_batches": 2, "reshard_after_forward": True},
    {"micro_batches": 3},
    {"checkpoint": "inside"},
    {"checkpoint": "inside", "reshard_after_forward": False},
    {"tied": True, "micro_batches": 2},
    {"param_dtype": torch.bfloat16},
    {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16, "reshard_after_forward": False},
    {"param_dtype": torch.bfloat16, "micro_batches": 2},
    {"reduce_dtype": torch.bfloat16},
    {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32, "micro_batches": 2},
    {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32, "micro_batches": 3, "reshard_after_forward": False},
    {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32, "micro_batches": 2, "tied": True},
    {"reduce_dtype": torch.bfloat16, "micro_batches": 3, "ranks": 2},
    {"param_dtype": torch.float16},
    {"param_dtype": torch.float16, "reduce_dtype": torch.float32, "micro_batches": 2},
    {"param_dtype": torch.float16, "ranks": 2, "micro_batches": 2},
    {"reduce_dtype": torch.float16, "ranks": 5},
    {"reduce_dtype": torch.float16, "micro_batches": 2},
]
REPLICATED: list[dict[str, Any]] = [
    {"replicas": 2},
    {"replicas": 2, "rank": 3},
    {"replicas": 2, "ranks": 8, "rank": 5},
    {"replicas": 4, "ranks": 8, "reshard_after_forward": False},
    {"replicas": 2, "wrap_blocks": False},
    {"replicas": 2, "micro_batches": 2},
    {"replicas": 2, "param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    {"replicas": 2, "param_dtype": torch.bfloat16},  # cast after the all-reduce
    {"replicas": 2, "param_dtype": torch.bfloat16, "micro_batches": 2},
    {"replicas": 2, "param_dtype": torch.bfloat16, "reduce_dtype": torch.float32, "micro_batches": 2},
    {"replicas": 2, "param_dtype": torch.float16},
    {"replicas": 2, "reduce_dtype": torch.bfloat16, "frozen": ("embedding",)},
    {"replicas": 2, "ranks": 8, "reduce_dtype": torch.float16},  # divided for all eight ranks
]
RESHARDED: list[dict[str, Any]] = [
    {"reshard_after_forward": 2},
    {"reshard_after_forward": 1},  # as False
    {"reshard_after_forward": 4},  # as True
    {"reshard_after_forward": 3, "ranks": 6, "rank": 5, "micro_batches": 2},
    {"reshard_after_forward": 2, "replicas": 2, "ranks": 8},
    {"reshard_after_forward": 2, "wrap_blocks": False},
    {"reshard_after_forward": 2, "param_dtype": torch.bfloat16},
    {"reshard_after_forward": 2, "checkpoint": "inside"},
]
PREFETCHED: list[dict[str, Any]] = [
    {"forward_prefetch": 1},
    {"forward_prefetch": 2},
    {"forward_prefetch": 2, "blocks": 5, "micro_batches": 2, "param_dtype": torch.bfloat16},
    {"forward_prefetch": 1, "reshard_after_forward": False},
    {"backward_prefetch": 1},
    {"backward_prefetch": 2},
    {"backward_prefetch": 2, "blocks": 5, "micro_batches": 2},
    {"backward_prefetch": 2, "forward_prefetch": 2, "checkpoint": "inside"},
    {"backward_prefetch": 2, "reshard_after_forward": 2, "blocks": 5},
    {"backward_prefetch": 3, "frozen": ("embedding", "blocks.0", "blocks.1")},  # of which two are never awaited
    {"backward_prefetch": 1, "forward_prefetch": 1, "replicas": 2},
]
# Inputs that take no gradient leave a group's turn to the end of backward; parameters that take none are not reduced.
FROZEN: list[dict[str, Any]] = [
    {"frozen": ("embedding",), "micro_batches": 2},
    {"frozen": ("embedding", "blocks.0.up")},
    {"frozen": ("embedding", "blocks.0.up"), "micro_batches": 3, "reduce_dtype": torch.bfloat16},
    {"frozen": ("embedding", "blocks.0"), "micro_batches": 2},  # which is gathered for a backward that does not come
    {"frozen": ("embedding", "blocks.0"), "reshard_after_forward": False},
    {"frozen": ("blocks.1",)},
    {"frozen": ("head", "embedding")},
]


# The optimizer runs on the CPU then.
OFFLOADED: list[dict[str, Any]] = [
    {"offload": True},
    {"offload": True, "reshard_after_forward": False},
    {"offload": True, "reshard_after_forward": True, "wrap_blocks": False},
    {"offload": True, "ranks": 5, "rank": 4},  # has no row of most parameters
    {"offload": True, "micro_batches": 2},
    {"offload": True, "param_dtype": torch.bfloat16},
    {"offload": True, "param_dtype": torch.bfloat16, "reduce_dtype": torch.float32, "micro_batches": 3},
    {"offload": True, "param_dtype": torch.float16, "ranks": 2},
    {"offload": True, "reduce_dtype": torch.float16},  # divided before it is copied
    {"offload": True, "replicas": 2},
    {"offload": True, "replicas": 2, "ranks": 8, "rank": 5, "param_dtype": torch.bfloat16},
    {"offload": True, "replicas": 2, "param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    {"offload": True, "reshard_after_forward": 2},
    # whose shards are not cast a second time
    {"offload": True, "reshard_after_forward": 2, "param_dtype": torch.bfloat16},
    {"offload": True, "forward_prefetch": 2, "backward_prefetch": 2, "blocks": 5},
    {"offload": True, "checkpoint": "inside", "tied": True},
    {"offload": True, "frozen": ("embedding", "blocks.0.up"), "micro_batches": 2},
    {"offload": True, "frozen": ("embedding", "blocks.0")},
    {"offload": True, "backward_prefetch": 3, "frozen": ("embedding", "blocks.0", "blocks.1")},
]


ALL = [*VARIANTS, *REPLICATED, *RESHARDED, *PREFETCHED, *FROZEN]


# The gradients are clipped, or scaled and clipped.
CLIPPED: list[dict[str, Any]] = [
    {},
    {"reshard_after_forward": False},
    {"ranks": 5, "rank": 4},  # has no row of most parameters, but a norm of each
    {"ranks": 2, "micro_batches": 2},
    {"tied": True},
    {"param_dtype": torch.bfloat16},
    {"replicas": 2, "rank": 3},  # among the ranks that share a copy
    {"frozen": ("embedding", "blocks.0.up")},
]
SCALED: list[dict[str, Any]] = [
    {},
    {"fused": True},
    {"ranks": 5, "rank": 4},
    {"ranks": 2, "frozen": ("embedding",)},
    {"replicas": 2},
]


def recorded_variants() -> list[dict[str, Any]]:
    """Return the variants of which tests/data holds what torch issues."""
    clipped = [fields | {"clip": True} for fields in CLIPPED]
    scaled = [fields | {"scaled": True, "clip": clip} for fields in SCALED for clip in (False, True)]
    return [*ALL, *OFFLOADED, *clipped, *scaled]
