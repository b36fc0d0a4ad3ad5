"""The cost class of an operator: which kind of kernel runs it, and so which curve predicts it."""

from __future__ import annotations

import math

from perfmodel.trace.operation import Operation, TensorSpec

CLASSES = (
    "gemm", "attention_forward", "attention_backward", "pointwise", "pointwise_transcendental", "row_forward",
    "row_backward", "column", "embedding_forward", "embedding_backward", "copy", "cat", "fill", "dropout",
    "convolution_forward", "convolution_backward", "pooling", "batch_norm", "reduction", "full_reduction", "optimizer",
    "index", "scan", "sort", "fft", "linear_algebra", "other",
)  # fmt: skip

_GEMM = "mm addmm bmm baddbmm _addmm_activation addbmm mv addmv dot _scaled_mm _int_mm"
_POINTWISE = """
    add sub rsub mul div neg abs sign relu relu6 threshold threshold_backward hardtanh hardtanh_backward leaky_relu
    leaky_relu_backward hardswish hardswish_backward hardsigmoid hardsigmoid_backward clamp clamp_min clamp_max maximum
    minimum fmax fmin where masked_fill eq ne lt le gt ge isnan isinf isfinite logical_and logical_or logical_not
    logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor lerp addcmul addcdiv reciprocal sqrt rsqrt floor ceil
    round trunc frac remainder fmod square triu tril floor_divide nan_to_num sgn signbit copysign heaviside hardshrink
    softshrink isposinf isneginf clip bitwise_left_shift bitwise_right_shift mse_loss_backward smooth_l1_loss_backward
    huber_loss_backward _prelu_kernel _prelu_kernel_backward true_divide
"""
_TRANSCENDENTAL = """
    exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh tanh_backward erf erfc erfinv sigmoid
    sigmoid_backward logit gelu gelu_backward silu silu_backward mish mish_backward elu elu_backward softplus
    softplus_backward log_sigmoid_forward log_sigmoid_backward pow logaddexp logaddexp2 xlogy glu glu_backward atan2
    acosh asinh atanh angle hypot lgamma digamma logit_backward binary_cross_entropy_backward
"""
_BY_NAME = {
    "gemm": _GEMM,
    "pointwise": _POINTWISE,
    "pointwise_transcendental": _TRANSCENDENTAL,
    "row_forward": """_softmax _log_softmax _safe_softmax native_layer_norm _fused_rms_norm nll_loss_forward
        nll_loss2d_forward native_group_norm""",
    "row_backward": """_softmax_backward_data _log_softmax_backward_data native_layer_norm_backward
        _fused_rms_norm_backward nll_loss_backward nll_loss2d_backward native_group_norm_backward""",
    "embedding_forward": "embedding",
    "embedding_backward": "embedding_dense_backward embedding_backward",
    "copy": """_to_copy clone copy contiguous slice_backward select_backward roll flip repeat _foreach_copy
        as_strided_copy _local_scalar_dense""",
    "cat": "cat stack split_with_sizes_copy _chunk_cat constant_pad_nd",
    "fill": """fill zero zeros ones full empty zeros_like ones_like full_like empty_like new_zeros new_ones new_full
        new_empty arange eye scalar_tensor empty_strided new_empty_strided linspace""",
    "dropout": """native_dropout native_dropout_backward bernoulli _fused_dropout rand rand_like randn randn_like
        uniform normal randint random""",
    "convolution_forward": """convolution cudnn_convolution conv2d _convolution convolution_overrideable
        mkldnn_convolution""",
    "convolution_backward": "convolution_backward convolution_backward_overrideable",
    "pooling": """max_pool2d_with_indices max_pool2d_with_indices_backward avg_pool2d avg_pool2d_backward
        _adaptive_avg_pool2d _adaptive_avg_pool2d_backward adaptive_max_pool2d adaptive_max_pool2d_backward
        max_pool3d_with_indices upsample_nearest2d upsample_nearest2d_backward upsample_bilinear2d
        upsample_bilinear2d_backward""",
    "batch_norm": """native_batch_norm native_batch_norm_backward cudnn_batch_norm cudnn_batch_norm_backward
        _native_batch_norm_legit _native_batch_norm_legit_functional batch_norm_backward _batch_norm_with_update""",
    "reduction": """sum nansum mean amax amin aminmax max min argmax argmin all any prod var std var_mean std_mean norm
        linalg_vector_norm""",
    "full_reduction": """mse_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy
        binary_cross_entropy_with_logits logsumexp count_nonzero equal""",
    "optimizer": "_amp_foreach_non_finite_check_and_unscale _amp_update_scale",
    "index": """index index_put _index_put_impl index_select index_add gather gather_backward scatter scatter_add
        masked_select nonzero _unsafe_index take_along_dim searchsorted bucketize one_hot embedding_renorm""",
    "scan": "cumsum cumprod cummax cummin _cummax_helper _cummin_helper logcumsumexp",
    "sort": """sort topk kthvalue median nanmedian mode msort argsort unique_consecutive unique_dim _unique _unique2
        bincount histc""",
    "linear_algebra": """cholesky cholesky_inverse cholesky_solve triangular_solve geqrf orgqr ormqr lu_unpack lu_solve
        _lu_with_info inverse qr svd""",
}  # fmt: skip
_CLASS_OF = {name: kind for kind, names in _BY_NAME.items() for name in names.split()}
_BY_PREFIX = (
    ("_foreach_", "optimizer"), ("_fused_", "optimizer"), ("_fft_", "fft"), ("linalg_", "linear_algebra"),
    ("_linalg_", "linear_algebra"),
)  # fmt: skip

_EXACT_POWERS = (0.5, 1, 2, 3, -0.5, -1, -2)  # exponents CUDA computes by multiplication and square root
_ORDER_FIRST = frozenset({"norm", "linalg_vector_norm"})  # the order of the norm comes before the dimensions
# Of ATen/native/cuda/Reduce.cuh: a row of so many elements gives each of a block's 512 threads 16 values, and from
# there on the whole block shares it, as do several blocks one that is much longer.
SHARED_ROW = 512 * 16
NARROW_COLUMNS = 32 * 4  # of fewer columns, in vectors of 4, a row does not fill a warp


def classify(operation: Operation) -> str:
    """The cost class, one of :data:`CLASSES`; in-place operators belong with their out-of-place form.

    >>> x = TensorSpec.parse("float32[8,8]")
    >>> classify(Operation("aten.mm.default", (x, x))), classify(Operation("aten.relu_.default", (x,)))
    ('gemm', 'pointwise')
    >>> x = TensorSpec.parse("float32[256,256]")
    >>> [classify(Operation("aten.sum.dim_IntList", (x, dims, True))) for dims in ((0,), (1,), (0, 1))]
    ['column', 'reduction', 'full_reduction']
    """
    name = operation.base_name
    if "_attention" in name:
        return "attention_backward" if name.endswith("_backward") else "attention_forward"
    plain = name.rstrip("_") if not name.endswith("__") else name
    if plain == "pow" and _exponent(operation) in _EXACT_POWERS:
        return "pointwise"
    if plain in _CLASS_OF:
        return _reduction(operation) if _CLASS_OF[plain] == "reduction" else _CLASS_OF[plain]
    return next((kind for prefix, kind in _BY_PREFIX if name.startswith(prefix)), "other")


def _exponent(operation: Operation) -> object:
    return operation.inputs[1] if len(operation.inputs) > 1 else None


def _reduction(operation: Operation) -> str:
    """A reduction by how its threads share the work: along rows, down columns, or all of them on few results.

    Rows that a whole block or several share, and columns too few to fill a warp, are full reductions, and so is
    whatever leaves one value.
    """
    x = operation.inputs[0] if operation.inputs else None
    if not isinstance(x, TensorSpec):
        return "reduction"
    values = math.prod(x.shape[d] for d in reduced_dims(operation))
    results = x.numel // max(values, 1)
    if results <= 1:
        return "full_reduction"
    if sums_columns(operation):
        return "full_reduction" if results < NARROW_COLUMNS else "column"
    return "full_reduction" if values >= SHARED_ROW else "reduction"


def reduced_dims(operation: Operation) -> tuple[int, ...]:
    """The dimensions a reduction sums over, counted from the front; all where none are named."""
    x = operation.inputs[0]
    rank = len(x.shape) if isinstance(x, TensorSpec) else 0
    at = 2 if operation.base_name in _ORDER_FIRST else 1
    named = operation.inputs[at] if len(operation.inputs) > at else dict(operation.keywords).get("dim")
    dims = (named,) if isinstance(named, int) and not isinstance(named, bool) else named
    if not isinstance(dims, tuple) or isinstance(dims, TensorSpec) or not dims:
        return tuple(range(rank))
    return tuple(dim % max(rank, 1) for dim in dims if isinstance(dim, int))


def sums_columns(operation: Operation) -> bool:
    """Whether the innermost dimension in memory survives the reduction: each thread then walks down a column."""
    x = operation.inputs[0] if operation.inputs else None
    if not isinstance(x, TensorSpec) or not x.shape:
        return False
    kept = [d for d in range(len(x.shape)) if d not in reduced_dims(operation) and x.shape[d] > 1]
    return any(x.stride[d] == 1 for d in kept)
