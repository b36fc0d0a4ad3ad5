"""Scaled dot-product attention as CUDA dispatches it: which backend runs, and how its wrapper calls it.

The choice is that of ``ATen/native/transformers/cuda/sdp_utils.cpp`` on compute capability 9.0 with cuDNN over 9.15:
cuDNN first, then flash, memory-efficient and the composite of GEMMs and softmax.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from perfmodel.tracing.dispatcher import composite

PRIORITY = ("cudnn", "flash", "efficient")
CUDNN_LARGEST_HEAD = 256
FLASH_LARGEST_HEAD = 256
MASK_ALIGNMENT = 16  # elements, of the last dimension of a mask for the memory-efficient kernel
HEAD_ALIGNMENT = 8  # elements, of the last dimension for the flash kernel

_LOWER_PRECISION = (torch.float16, torch.bfloat16)
aten = torch.ops.aten


def choose_backend(query: Any, key: Any, value: Any, mask: Any, is_causal: bool, enable_gqa: bool) -> str:
    """Return ``cudnn``, ``flash``, ``efficient`` or ``math``: the first in CUDA's order that takes these tensors."""
    usable = {
        "cudnn": torch.backends.cuda.cudnn_sdp_enabled() and _cudnn_takes(query, key, value, enable_gqa),
        "flash": torch.backends.cuda.flash_sdp_enabled()
        and mask is None
        and _flash_takes(query, key, value, is_causal, enable_gqa),
        "efficient": torch.backends.cuda.mem_efficient_sdp_enabled()
        and _efficient_takes(query, key, value, enable_gqa),
    }
    if not (query.dim() == key.dim() == value.dim() == 4 and query.dtype == key.dtype == value.dtype):
        return "math"
    if 0 in query.shape or 0 in key.shape:
        return "math"
    return next((name for name in PRIORITY if usable[name]), "math")


def _heads_fit(query: Any, key: Any, value: Any, enable_gqa: bool) -> bool:
    if not query.shape[0] == key.shape[0] == value.shape[0] or key.shape[1] != value.shape[1]:
        return False
    return query.shape[1] == key.shape[1] or (enable_gqa and query.shape[1] % key.shape[1] == 0)


def _last_strides_are_one(*tensors: Any) -> bool:
    return all(tensor.stride(-1) == 1 or tensor.shape[-1] == 1 for tensor in tensors)


def _cudnn_takes(query: Any, key: Any, value: Any, enable_gqa: bool) -> bool:
    head_dims = (query.shape[-1], value.shape[-1])
    return (
        query.dtype in _LOWER_PRECISION
        and _heads_fit(query, key, value, enable_gqa)
        and _last_strides_are_one(query, key, value)
        and all(size <= CUDNN_LARGEST_HEAD and size % 8 == 0 for size in head_dims)
        and key.shape[-2] != 1
    )


def _flash_takes(query: Any, key: Any, value: Any, is_causal: bool, enable_gqa: bool) -> bool:
    return (
        query.dtype in _LOWER_PRECISION
        and _heads_fit(query, key, value, enable_gqa)
        and _last_strides_are_one(query, key, value)
        and query.shape[-1] == key.shape[-1] == value.shape[-1] <= FLASH_LARGEST_HEAD
        and not (is_causal and query.shape[-2] != key.shape[-2])
    )


def _efficient_takes(query: Any, key: Any, value: Any, enable_gqa: bool) -> bool:
    alignment = 8 if query.dtype in _LOWER_PRECISION else 4
    return (
        query.dtype in (*_LOWER_PRECISION, torch.float32)
        and not (enable_gqa and query.shape[1] != key.shape[1])
        and _heads_fit(query, key, value, False)
        and all(tensor.stride(-1) == 1 for tensor in (query, key, value))
        and query.shape[-1] == key.shape[-1]
        and query.shape[-1] % alignment == 0
        and value.shape[-1] % alignment == 0
    )


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Pick a backend and call its aten operator: the dispatcher kernel that stands in for CUDA's."""
    backend = choose_backend(query, key, value, attn_mask, is_causal, enable_gqa)
    mask = attn_mask
    if mask is not None and mask.dtype == torch.bool and backend != "cudnn":
        mask = _as_additive(mask, query.dtype)
    wants_logsumexp = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    if backend == "cudnn":
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.where(mask, 0.0, -math.inf).to(query.dtype)
        return aten._scaled_dot_product_cudnn_attention.default(
            query, key, value, mask, wants_logsumexp, dropout_p, is_causal, False, scale=scale
        )[0]
    if backend == "flash":
        return _flash(query, key, value, dropout_p, is_causal, scale)
    if backend == "efficient":
        if mask is not None:
            mask = _padded_mask(mask, query, key)
        return aten._scaled_dot_product_efficient_attention.default(
            query, key, value, mask, wants_logsumexp, dropout_p, is_causal, scale=scale
        )[0]
    return composite(
        aten._scaled_dot_product_attention_math.default,
        query,
        key,
        value,
        mask,
        dropout_p,
        is_causal,
        None,
        scale=scale,
        enable_gqa=enable_gqa,
    )[0]


def _as_additive(mask: Any, dtype: torch.dtype) -> Any:
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), -math.inf)


def _flash(query: Any, key: Any, value: Any, dropout_p: float, is_causal: bool, scale: float | None) -> Any:
    head_dim = query.shape[-1]
    missing = -head_dim % HEAD_ALIGNMENT
    if missing:
        query, key, value = (torch.nn.functional.pad(tensor, (0, missing)) for tensor in (query, key, value))
    scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
    output = aten._scaled_dot_product_flash_attention.default(
        query, key, value, dropout_p, is_causal, False, scale=scale
    )[0]
    return aten.slice.Tensor(output, -1, 0, head_dim) if missing else output


def _padded_mask(mask: Any, query: Any, key: Any) -> Any:
    """Return the mask expanded to batch and heads, in a padded copy where rows are not aligned."""
    shape = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    missing = -mask.shape[-1] % MASK_ALIGNMENT
    if missing:
        mask = torch.nn.functional.pad(mask, (0, missing))[..., : shape[-1]]
    return mask.expand(shape)
