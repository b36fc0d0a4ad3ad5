"""Dispatcher kernels that make fake CPU tensors take the operators that CUDA tensors take.

They override composite operators under AutogradCPU and CPU, below autocast and above autograd, so casts and backward
follow by themselves. Overrides are global to the process: leave the context to take them back.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from perfmodel.errors import PerfModelError
from perfmodel.tracing.cuda_attention import scaled_dot_product_attention
from perfmodel.tracing.dispatcher import composite, dispatcher_overrides

aten = torch.ops.aten

# Samples that cuDNN's batch norm takes.
LARGEST_BATCH_TRAINING = 880801
LARGEST_BATCH_INFERENCE = 65535


def _dropout(input: Any, p: float, train: bool) -> Any:
    """Run the fused operator where something is dropped. In-place dropout is composite on CUDA too."""
    if train and 0 < p < 1 and input.numel() > 0:
        return aten.native_dropout.default(input, p, train)[0]
    return composite(aten.dropout.default, input, p, train)


def _softmax(input: Any, dim: int, dtype: torch.dtype | None = None) -> Any:
    if input.dtype == torch.float16 and dtype == torch.float32:
        return aten._softmax.default(input, dim, True)
    return composite(aten.softmax.int, input, dim, dtype)


def _log_softmax(input: Any, dim: int, dtype: torch.dtype | None = None) -> Any:
    if input.dtype == torch.float16 and dtype == torch.float32:
        return aten._log_softmax.default(input, dim, True)
    return composite(aten.log_softmax.int, input, dim, dtype)


def _batch_norm(
    input: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Any:
    """Run cuDNN where ATen's ``_select_batch_norm_backend`` chooses it; ATen's own runs bfloat16 and no weight."""
    fits = (
        cudnn_enabled
        and weight is not None
        and bias is not None
        and torch.bfloat16 not in (input.dtype, weight.dtype)
        and (input.dtype != torch.float16 or weight.dtype == torch.float32)
        and (training or running_mean is not None)
        and (running_mean is None) == (running_var is None)
        and input.dim() >= 3
        and input.shape[0] <= (LARGEST_BATCH_TRAINING if training else LARGEST_BATCH_INFERENCE)
        and input.numel() < 2**31 - 1
    )
    if not fits:
        return composite(
            aten._batch_norm_impl_index.default,
            input,
            weight,
            bias,
            running_mean,
            running_var,
            training,
            momentum,
            eps,
            cudnn_enabled,
        )
    memory_format = torch.contiguous_format
    if input.dim() == 4 and input.is_contiguous(memory_format=torch.channels_last):
        memory_format = torch.channels_last
    found = aten.cudnn_batch_norm.default(
        input.contiguous(memory_format=memory_format),
        weight.contiguous(),
        bias.contiguous(),
        None if running_mean is None else running_mean.contiguous(),
        None if running_var is None else running_var.contiguous(),
        training,
        momentum,
        eps,
    )
    return (*found, 1)


def _rms_norm(input: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    if weight is not None and weight.dtype != input.dtype:
        return composite(aten.rms_norm.default, input, normalized_shape, weight, eps)
    return aten._fused_rms_norm.default(input, normalized_shape, weight, eps)[0]


def _refuse_recurrent(*args: Any, **kwargs: Any) -> Any:
    raise PerfModelError(
        "model: LSTM, GRU and RNN layers cannot be traced as cuDNN runs them. Use a model without them."
    )


def _fused_rms_norm(*args: Any) -> Any:
    """Let autograd differentiate the fused operator by its mere presence, as where CUDA has a kernel for it."""
    return composite(aten._fused_rms_norm.default, *args)


KERNELS: dict[str, Callable[..., Any]] = {
    "scaled_dot_product_attention": scaled_dot_product_attention,
    "dropout": _dropout,
    "softmax.int": _softmax,
    "log_softmax.int": _log_softmax,
    "_batch_norm_impl_index": _batch_norm,
    **dict.fromkeys(("lstm.input", "gru.input", "rnn_tanh.input", "rnn_relu.input"), _refuse_recurrent),
}


def cuda_composites() -> AbstractContextManager[None]:
    """Install :data:`KERNELS`, and the fused RMSNorm where this torch has one."""
    overrides = [(name, key, kernel) for name, kernel in KERNELS.items() for key in ("AutogradCPU", "CPU")]
    if hasattr(aten, "_fused_rms_norm"):
        overrides += [("rms_norm", key, _rms_norm) for key in ("AutogradCPU", "CPU")]
        overrides.append(("_fused_rms_norm", "CPU", _fused_rms_norm))
    return dispatcher_overrides(overrides)
