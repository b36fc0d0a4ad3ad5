"""Operator calls spelt exactly as a trace spells them, so that a grid point and a workload's call share a kernel key.

Positional arguments as the dispatcher passes them (trailing defaults dropped), keyword arguments sorted by name, dtypes
and formats as text. Dimensions: B batch, H heads, S sequence, D head size; m, n, k as in a GEMM [m, k] x [k, n].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from perfmodel.trace.operation import Argument, Operation, TensorSpec, contiguous_stride

Shape = tuple[int, ...]


def tensor(dtype: str, *shape: int, stride: Shape | None = None, device: str = "cuda") -> TensorSpec:
    """Return a tensor on the device, row-major unless ``stride`` (elements) says otherwise."""
    return TensorSpec(shape, contiguous_stride(shape) if stride is None else stride, dtype, device)


def channels_last(dtype: str, *shape: int) -> TensorSpec:
    """Return a [batch, channels, height, width] tensor whose channels are innermost."""
    _, channels, height, width = shape
    return TensorSpec(shape, (channels * height * width, 1, width * channels, channels), dtype)


def image(dtype: str, shape: Shape, last: bool) -> TensorSpec:
    """Return a 4-dimensional tensor, channels last or contiguous."""
    return channels_last(dtype, *shape) if last else tensor(dtype, *shape)


def call(name: str, *inputs: Argument, out: TensorSpec | Sequence[TensorSpec] = (), **keywords: Argument) -> Operation:
    """``aten.<name>`` with these arguments."""
    outputs = (out,) if isinstance(out, TensorSpec) else tuple(out)
    return Operation(f"aten.{name}", tuple(inputs), tuple(sorted(keywords.items())), outputs)


def square(operation: Operation) -> Operation:
    """Return the same call with one tensor (or list) for its last two of three: ``addcmul_(x, gradient, gradient)``."""
    count = len(operation.input_tensors()) // 3
    first, second = range(count), range(count, 2 * count)
    return replace(operation, same=(*first, *second, *second))


def _operands(dtype: str, lead: Shape, m: int, n: int, k: int, layout: str) -> tuple[TensorSpec, TensorSpec]:
    transposed_a, transposed_b = layout[0] == "T", layout[1] == "T"
    outer_a, outer_b = ((m * k,), (k * n,)) if lead else ((), ())
    a = tensor(dtype, *lead, m, k, stride=(*outer_a, 1, m)) if transposed_a else tensor(dtype, *lead, m, k)
    b = tensor(dtype, *lead, k, n, stride=(*outer_b, 1, k)) if transposed_b else tensor(dtype, *lead, k, n)
    return a, b


def mm(dtype: str, m: int, n: int, k: int, layout: str = "NN") -> Operation:
    """[m, k] x [k, n]; layout NN, NT (second factor transposed: Linear forward) or TN (weight gradient).

    >>> mm("float32", 8, 16, 4, "NT").inputs[1].text
    'float32[4,16]{1,4}'
    """
    a, b = _operands(dtype, (), m, n, k, layout)
    return call("mm.default", a, b, out=tensor(dtype, m, n))


def addmm(dtype: str, m: int, n: int, k: int, layout: str = "NT") -> Operation:
    """Return the same with a bias row of n added."""
    a, b = _operands(dtype, (), m, n, k, layout)
    return call("addmm.default", tensor(dtype, n), a, b, out=tensor(dtype, m, n))


def bmm(dtype: str, batch: int, m: int, n: int, k: int, layout: str = "NN") -> Operation:
    """Return ``batch`` GEMMs at once."""
    a, b = _operands(dtype, (batch,), m, n, k, layout)
    return call("bmm.default", a, b, out=tensor(dtype, batch, m, n))


def _heads(dtype: str, batch: int, heads: int, sequence: int, size: int) -> TensorSpec:
    return tensor(dtype, batch, heads, sequence, size, stride=(sequence * heads * size, size, heads * size, 1))


def _trailing(dropout: float, causal: bool) -> tuple[Argument, ...]:
    if causal:
        return dropout, True
    return (dropout,) if dropout else ()


def attention(
    backend: str,
    dtype: str,
    batch: int,
    heads: int,
    kv_heads: int,
    sequence: int,
    size: int,
    causal: bool,
    dropout: float = 0.0,
) -> tuple[Operation, Operation]:
    """Return forward and backward of self-attention by cudnn, flash or efficient; heads are a view of [B, S, H D]."""
    query, key = _heads(dtype, batch, heads, sequence, size), _heads(dtype, batch, kv_heads, sequence, size)
    scale = size**-0.5
    grads = (query, key, key)
    name = f"_scaled_dot_product_{backend}_attention"
    if backend == "cudnn":
        lse, seed = tensor("float32", batch, heads, sequence, 1), tensor("int64")
        forward = call(
            f"{name}.default",
            query,
            key,
            key,
            None,
            True,
            *_trailing(dropout, causal),
            out=(query, lse, seed, seed),
            scale=scale,
        )
        backward = call(
            f"{name}_backward.default", query, query, key, key, query, lse, seed, seed, None, None, None,
            sequence, sequence, dropout, causal, out=grads, scale=scale,
        )  # fmt: skip
        return forward, backward
    lse = tensor("float32", batch, heads, sequence if backend == "flash" else 32 * -(-sequence // 32))
    if backend == "flash":
        state, unused = tensor("uint64", 2), tensor("uint64")
        outputs = (query, lse, state, unused, tensor(dtype, 0))
        forward = call(f"{name}.default", query, key, key, *_trailing(dropout, causal), out=outputs, scale=scale)
        backward = call(
            f"{name}_backward.default", query, query, key, key, query, lse, None, None,
            sequence, sequence, dropout, causal, state, unused, out=grads, scale=scale,
        )  # fmt: skip
        return forward, backward
    seed = tensor("int64", device="cpu")
    forward = call(
        f"{name}.default",
        query,
        key,
        key,
        None,
        True,
        *_trailing(dropout, causal),
        out=(query, lse, seed, seed),
        scale=scale,
    )
    backward = call(
        f"{name}_backward.default", query, query, key, key, None, query, lse, seed, seed, dropout,
        (True, True, True, False), *((True,) if causal else ()), out=grads, scale=scale,
    )  # fmt: skip
    return forward, backward


def unary(name: str, x: TensorSpec, *scalars: Argument, **keywords: Argument) -> Operation:
    """Return a call that takes one tensor and gives one of the same (dense) layout; also in-place operators."""
    return call(name, x, *scalars, out=x, **keywords)


def binary(name: str, x: TensorSpec, y: TensorSpec, *scalars: Argument, out: TensorSpec | None = None) -> Operation:
    """Two tensors in, one like ``x`` out unless ``out`` is given."""
    return call(name, x, y, *scalars, out=x if out is None else out)


def layer_norm(dtype: str, batch: int, sequence: int, width: int) -> tuple[Operation, Operation]:
    """Return forward and backward over the last dimension, weight and bias of the same dtype."""
    x, weight, row = tensor(dtype, batch, sequence, width), tensor(dtype, width), tensor("float32", batch, sequence, 1)
    forward = call("native_layer_norm.default", x, (width,), weight, weight, 1e-05, out=(x, row, row))
    backward = call(
        "native_layer_norm_backward.default",
        x,
        x,
        (width,),
        row,
        row,
        weight,
        weight,
        (True, True, True),
        out=(x, weight, weight),
    )
    return forward, backward


def rms_norm(dtype: str, batch: int, sequence: int, width: int) -> tuple[Operation, Operation]:
    """Return forward and backward of the fused RMS norm over the last dimension."""
    x, weight, row = tensor(dtype, batch, sequence, width), tensor(dtype, width), tensor("float32", batch, sequence, 1)
    forward = call("_fused_rms_norm.default", x, (width,), weight, 1e-06, out=(x, row))
    backward = call("_fused_rms_norm_backward.default", x, x, (width,), row, weight, (True, True), out=(x, weight))
    return forward, backward


def softmax(dtype: str, shape: Shape, log: bool = False) -> tuple[Operation, Operation]:
    """Return forward and backward over the last dimension: of attention scores, or (``log``) of a cross-entropy's
    logits.
    """
    x, dim = tensor(dtype, *shape), 1 if log else -1
    name = "_log_softmax" if log else "_softmax"
    forward = call(f"{name}.default", x, dim, False, out=x)
    return forward, call(f"{name}_backward_data.default", x, x, dim, f"torch.{dtype}", out=x)


def nll_loss(dtype: str, rows: int, classes: int) -> tuple[Operation, Operation]:
    """Return forward and backward of the mean negative log-likelihood."""
    x, target, scalar = tensor(dtype, rows, classes), tensor("int64", rows), tensor(dtype)
    forward = call("nll_loss_forward.default", x, target, None, 1, -100, out=(scalar, scalar))
    backward = call("nll_loss_backward.default", scalar, x, target, None, 1, -100, scalar, out=x)
    return forward, backward


def reduction(name: str, x: TensorSpec, dims: Shape) -> Operation:
    """``sum.dim_IntList`` or ``mean.dim`` over ``dims``, which stay as size 1."""
    kept = [1 if i in dims or i - len(x.shape) in dims else n for i, n in enumerate(x.shape)]
    return call(name, x, dims, True, out=tensor(x.dtype, *kept))


def full_reduction(name: str, x: TensorSpec, *scalars: Argument, **keywords: Argument) -> Operation:
    """Return a reduction of all of ``x`` to one value: ``sum.default``, ``linalg_vector_norm.default``,
    ``var.correction``.
    """
    dtype = "int64" if name.startswith("arg") else x.dtype
    return call(name, x, *scalars, out=tensor(dtype), **keywords)


def embedding(dtype: str, vocabulary: int, width: int, batch: int, sequence: int) -> tuple[Operation, Operation]:
    """Gather of rows, and the sorted scatter-add of their gradients."""
    table, indices = tensor(dtype, vocabulary, width), tensor("int64", batch, sequence)
    rows = tensor(dtype, batch, sequence, width)
    forward = call("embedding.default", table, indices, out=rows)
    return forward, call("embedding_dense_backward.default", rows, indices, vocabulary, -1, False, out=table)


def cast(x: TensorSpec, dtype: str) -> Operation:
    """``_to_copy`` to another dtype, layout kept."""
    return call("_to_copy.default", x, out=x._replace(dtype=dtype), dtype=f"torch.{dtype}")


def contiguous(x: TensorSpec) -> Operation:
    """``clone`` into row-major order."""
    return call("clone.default", x, out=tensor(x.dtype, *x.shape), memory_format="torch.contiguous_format")


def cat(tensors: Sequence[TensorSpec], dim: int) -> Operation:
    """Concatenation along ``dim``, equal in the other dimensions."""
    shape = list(tensors[0].shape)
    shape[dim] = sum(each.shape[dim] for each in tensors)
    return call("cat.default", tuple(tensors), dim, out=tensor(tensors[0].dtype, *shape))


def dropout(x: TensorSpec, p: float = 0.1) -> tuple[Operation, Operation]:
    """Fused dropout with its mask, and its backward."""
    mask = x._replace(dtype="bool")
    forward = call("native_dropout.default", x, p, True, out=(x, mask))
    return forward, call("native_dropout_backward.default", x, mask, 1.0 / (1.0 - p), out=x)


def convolution(
    dtype: str, batch: int, channels: int, size: int, out_channels: int, kernel: int, stride: int,
    last: bool, bias: bool, first: bool = False,
) -> tuple[Operation, Operation]:  # fmt: skip
    """Square convolution with padding kernel // 2, forward and backward; ``first``: no gradient of the input."""
    pad = kernel // 2
    out_size = (size + 2 * pad - kernel) // stride + 1
    x = image(dtype, (batch, channels, size, size), last)
    weight = image(dtype, (out_channels, channels, kernel, kernel), last)
    y = image(dtype, (batch, out_channels, out_size, out_size), last)
    shift = tensor(dtype, out_channels) if bias else None
    geometry = ((stride, stride), (pad, pad), (1, 1), False, (0, 0), 1)
    forward = call("convolution.default", x, weight, shift, *geometry, out=y)
    grads = [*([] if first else [x]), weight, *([] if shift is None else [shift])]
    backward = call(
        "convolution_backward.default",
        y,
        x,
        weight,
        (out_channels if bias else 0,),
        *geometry,
        (not first, True, bias),
        out=grads,
    )
    return forward, backward


def max_pool(
    dtype: str, batch: int, channels: int, size: int, kernel: int, stride: int, last: bool
) -> tuple[Operation, Operation]:
    """Square maximum pooling (padding 1 for odd kernels), forward and backward."""
    pad = kernel // 2 if kernel % 2 else 0
    out_size = (size + 2 * pad - kernel) // stride + 1
    x = image(dtype, (batch, channels, size, size), last)
    y = image(dtype, (batch, channels, out_size, out_size), last)
    chosen = y._replace(dtype="int64")
    window = ((kernel, kernel), (stride, stride))
    forward = call("max_pool2d_with_indices.default", x, *window, *(((pad, pad),) if pad else ()), out=(y, chosen))
    backward = call("max_pool2d_with_indices_backward.default", y, x, *window, (pad, pad), (1, 1), False, chosen, out=x)
    return forward, backward


def average_pool(dtype: str, batch: int, channels: int, size: int, out_size: int) -> tuple[Operation, Operation]:
    """Adaptive average pooling, forward and backward."""
    x, y = tensor(dtype, batch, channels, size, size), tensor(dtype, batch, channels, out_size, out_size)
    forward = call("_adaptive_avg_pool2d.default", x, (out_size, out_size), out=y)
    return forward, call("_adaptive_avg_pool2d_backward.default", y, x, out=x)


def batch_norm(
    dtype: str, batch: int, channels: int, size: int, last: bool, cudnn: bool
) -> tuple[Operation, Operation]:
    """Training batch norm with float32 parameters, native or by cuDNN, forward and backward."""
    x, channel = image(dtype, (batch, channels, size, size), last), tensor("float32", channels)
    settings = (True, 0.1, 1e-05)
    if cudnn:
        reserve = tensor("uint8", 0)
        forward = call("cudnn_batch_norm.default", x, *[channel] * 4, *settings, out=(x, channel, channel, reserve))
        backward = call(
            "cudnn_batch_norm_backward.default", x, x, *[channel] * 5, 1e-05, reserve, out=(x, channel, channel)
        )
        return forward, backward
    forward = call("native_batch_norm.default", x, *[channel] * 4, *settings, out=(x, channel, channel))
    backward = call(
        "native_batch_norm_backward.default",
        x,
        x,
        *[channel] * 5,
        True,
        1e-05,
        (True, True, True),
        out=(x, channel, channel),
    )
    return forward, backward


def foreach_adamw(tensors: Sequence[TensorSpec]) -> list[Operation]:
    """Return the eight list operators of AdamW's foreach step on the device."""
    operands, numbers = tuple(tensors), tuple(0.5 for _ in tensors)
    return [
        call("_foreach_mul_.Scalar", operands, 0.999),
        call("_foreach_lerp_.Scalar", operands, operands, 0.1),
        square(call("_foreach_addcmul_.Scalar", operands, operands, operands, 0.001)),
        call("_foreach_sqrt.default", operands, out=operands),
        call("_foreach_div_.ScalarList", operands, numbers),
        call("_foreach_add_.Scalar", operands, 1e-08),
        call("_foreach_addcdiv_.ScalarList", operands, operands, operands, numbers),
    ]


def foreach_sgd(tensors: Sequence[TensorSpec]) -> list[Operation]:
    """List operators of SGD with momentum and of gradient clipping that AdamW has not."""
    operands = tuple(tensors)
    scalars = tuple(tensor(each.dtype) for each in operands)
    return [
        call("_foreach_add_.List", operands, operands, alpha=-0.01),
        call("_foreach_norm.Scalar", operands, 2.0, out=scalars),
        call("_foreach_mul_.Tensor", operands, tensor("float32")),
    ]


def fused_adamw(tensors: Sequence[TensorSpec]) -> Operation:
    """Return one fused AdamW step: parameters, gradients, both moments, step counters on the device."""
    operands = tuple(tensors)
    steps = tuple(tensor("float32") for _ in operands)
    return call(
        "_fused_adamw_.default", operands, operands, operands, operands, (), steps,
        lr=0.001, beta1=0.9, beta2=0.999, weight_decay=0.01, eps=1e-08, amsgrad=False, maximize=False,
    )  # fmt: skip


def fused_sgd(tensors: Sequence[TensorSpec]) -> Operation:
    """Return one fused SGD step with momentum."""
    operands = tuple(tensors)
    return call(
        "_fused_sgd_.default", operands, operands, operands,
        weight_decay=0.0, momentum=0.9, lr=0.1, dampening=0.0, nesterov=False, maximize=False, is_first_step=False,
    )  # fmt: skip
