"""The cost class of an operator: which kind of kernel runs it, and so which curve predicts it."""

from __future__ import annotations

from perfmodel.workload.ops import Operation, TensorSpec

CLASSES = (
    "gemm", "attention_forward", "attention_backward", "pointwise", "pointwise_transcendental", "row_forward",
    "row_backward", "column", "embedding_forward", "embedding_backward", "copy", "cat", "fill", "dropout",
    "convolution_forward", "convolution_backward", "pooling", "batch_norm", "reduction", "optimizer", "index", "other",
)  # fmt: skip

_GEMM = "mm addmm bmm baddbmm _addmm_activation addbmm mv addmv dot"
_POINTWISE = """
    add sub rsub mul div neg abs sign relu relu6 threshold threshold_backward hardtanh hardtanh_backward leaky_relu
    leaky_relu_backward hardswish hardswish_backward hardsigmoid hardsigmoid_backward clamp clamp_min clamp_max maximum
    minimum fmax fmin where masked_fill eq ne lt le gt ge isnan isinf isfinite logical_and logical_or logical_not
    logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor lerp addcmul addcdiv reciprocal sqrt rsqrt floor ceil
    round trunc frac remainder fmod square triu tril floor_divide
"""
_TRANSCENDENTAL = """
    exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh tanh_backward erf erfc erfinv sigmoid
    sigmoid_backward logit gelu gelu_backward silu silu_backward mish mish_backward elu elu_backward softplus
    softplus_backward log_sigmoid_forward log_sigmoid_backward pow logaddexp xlogy glu glu_backward
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
        as_strided_copy""",
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
    "reduction": """sum mean amax amin max min argmax argmin all any prod var std var_mean norm linalg_vector_norm
        cumsum logsumexp _local_scalar_dense topk sort equal count_nonzero""",
    "optimizer": "_amp_foreach_non_finite_check_and_unscale _amp_update_scale",
    "index": """index index_put _index_put_impl index_select index_add gather gather_backward scatter scatter_add
        masked_select nonzero _unsafe_index take_along_dim searchsorted bucketize one_hot embedding_renorm""",
}  # fmt: skip
_CLASS_OF = {name: kind for kind, names in _BY_NAME.items() for name in names.split()}

_EXACT_POWERS = (0.5, 1, 2, 3, -0.5, -1, -2)  # exponents CUDA computes by multiplication and square root
_DIM_REDUCTIONS = frozenset({"sum", "mean", "amax", "amin", "any", "all", "prod", "linalg_vector_norm"})


def classify(operation: Operation) -> str:
    """The cost class, one of :data:`CLASSES`; in-place operators belong with their out-of-place form.

    >>> x = TensorSpec.parse("float32[8,8]")
    >>> classify(Operation("aten.mm.default", (x, x))), classify(Operation("aten.relu_.default", (x,)))
    ('gemm', 'pointwise')
    >>> [classify(Operation("aten.sum.dim_IntList", (x, (dim,), True))) for dim in (0, 1)]
    ['column', 'reduction']
    """
    name = operation.base_name
    if "_attention" in name:
        return "attention_backward" if name.endswith("_backward") else "attention_forward"
    plain = name.rstrip("_") if not name.endswith("__") else name
    if plain in _DIM_REDUCTIONS and sums_columns(operation):
        return "column"
    if plain == "pow" and _exponent(operation) in _EXACT_POWERS:
        return "pointwise"
    if plain in _CLASS_OF:
        return _CLASS_OF[plain]
    if name.startswith(("_foreach_", "_fused_")):
        return "optimizer"
    return "other"


def _exponent(operation: Operation) -> object:
    return operation.inputs[1] if len(operation.inputs) > 1 else None


def reduced_dims(operation: Operation) -> tuple[int, ...]:
    """The dimensions a reduction sums over, counted from the front; all where none are named."""
    x = operation.inputs[0]
    rank = len(x.shape) if isinstance(x, TensorSpec) else 0
    named = operation.inputs[1] if len(operation.inputs) > 1 else None
    dims = (named,) if isinstance(named, int) and not isinstance(named, bool) else named
    if not isinstance(dims, tuple) or not dims:
        return tuple(range(rank))
    return tuple(dim % max(rank, 1) for dim in dims if isinstance(dim, int))


def sums_columns(operation: Operation) -> bool:
    """Whether the innermost dimension in memory survives the reduction: each thread then walks down a column."""
    x = operation.inputs[0] if operation.inputs else None
    if not isinstance(x, TensorSpec) or not x.shape:
        return False
    kept = [d for d in range(len(x.shape)) if d not in reduced_dims(operation) and x.shape[d] > 1]
    return any(x.stride[d] == 1 for d in kept)
