"""The least work an operator call can do: FLOPs, bytes between memory and the chip, and the unit that does the FLOPs.

Two counts of FLOPs are kept apart. :func:`physical_flops` is what the hardware must do (a causal attention skips half
of its scores): rooflines and achieved rates use it. :func:`model_flops` is the field's convention for MFU, that of
torch's own counter: GEMMs, convolutions and attention only, causal attention not discounted.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from perfmodel.cost.kernels.classify import classify
from perfmodel.trace.kernel_key import uses_tf32
from perfmodel.trace.operation import Argument, Operation, TensorSpec
from perfmodel.units import DTYPE_BYTES

_KIND_OF_DTYPE = {
    "float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp32", "complex64": "fp32",
    "complex128": "fp32", "int8": "bf16", "float8_e4m3fn": "bf16", "float8_e5m2": "bf16",
}  # fmt: skip
_TENSOR_UNIT_CLASSES = frozenset(
    {"gemm", "attention_forward", "attention_backward", "convolution_forward", "convolution_backward"}
)
# Per element, by class: what a straightforward formula needs.
_FLOPS_PER_ELEMENT = {
    "pointwise": 1, "pointwise_transcendental": 10, "row_forward": 5, "row_backward": 8, "column": 1, "reduction": 1,
    "full_reduction": 1, "dropout": 2, "pooling": 4, "batch_norm": 5, "optimizer": 1, "embedding_backward": 1,
}  # fmt: skip
_FUSED_FLOPS_PER_ELEMENT = 16
# Distances between rows, for each pair of rows and each of their elements: subtract, take the power, add up. Backward
# also divides, multiplies by the gradient and takes the sign, in 10 operations: a guess, no measurement.
_FLOPS_PER_DIFFERENCE = {
    "_cdist_forward": 3, "_pdist_forward": 3, "_cdist_backward": 10, "_pdist_backward": 10, "_euclidean_dist": 2,
}  # fmt: skip
_FACTORS_FIRST = frozenset({"_scaled_mm", "_int_mm"})  # GEMMs whose scales and biases follow the two factors
CACHED_OPERATIONS = 4096
_WRITTEN_LISTS = {
    "_fused_adamw_": (0, 2, 3),
    "_fused_adam_": (0, 2, 3),
    "_fused_sgd_": (0, 2),
    "_fused_adagrad_": (0, 2),
}
_WRITE_ONLY = frozenset(
    [
        "fill",
        "zero",
        "zeros",
        "ones",
        "full",
        "zeros_like",
        "ones_like",
        "full_like",
        "new_zeros",
        "new_ones",
        "new_full",
        "arange",
    ]
)
_ROW_READERS = frozenset({"embedding", "index_select", "gather", "index"})
# Which of their tensors these read; the others they only ask the shape of, or overwrite.
_READ = {
    "copy": (-1,),
    "nll_loss_backward": (2,),
    "max_pool2d_with_indices_backward": (0, -1),
    "_adaptive_avg_pool2d_backward": (0,),
}
_NOTHING = frozenset({"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"})


def arithmetic_kind(operation: Operation, matmul_tf32: bool = False, convolution_tf32: bool = True) -> str:
    """fp32, tf32, bf16 or fp16. Everything but GEMMs, convolutions and attention runs on the fp32 units."""
    if classify(operation) not in _TENSOR_UNIT_CLASSES:
        return "fp32"
    if uses_tf32(operation, matmul_tf32, convolution_tf32):
        return "tf32"
    dtype = next((spec.dtype for spec in operation.input_tensors() if spec.dtype in _KIND_OF_DTYPE), "float32")
    return _KIND_OF_DTYPE[dtype]


def model_flops(operation: Operation) -> float:
    """FLOPs as MFU counts them: 2 m n k of GEMMs and convolutions (twice that backward), attention 4 B H Sq Sk D
    forward and 10 backward, causal or not; nothing else. A product of complex numbers has 8 m n k, which torch's own
    counter takes for 2 m n k.

    >>> a, b = TensorSpec.parse("float32[2,3]"), TensorSpec.parse("float32[3,5]")
    >>> model_flops(Operation("aten.mm.default", (a, b), (), (TensorSpec.parse("float32[2,5]"),)))
    60.0
    """
    kind = classify(operation)
    if kind == "gemm":
        batch, m, n, k = gemm_sizes(operation)
        return 2.0 * batch * m * n * k
    if kind == "convolution_forward":
        return _convolution_flops(_tensor(operation, 1), operation.outputs[0])
    if kind == "convolution_backward":
        forward = _convolution_flops(_tensor(operation, 2), _tensor(operation, 0))
        mask = operation.inputs[-1]
        wanted = sum(wants is True for wants in mask[:2]) if isinstance(mask, tuple) else 2
        return wanted * forward
    if kind in ("attention_forward", "attention_backward"):
        shape = attention_shape(operation)
        per_score = 4 if kind == "attention_forward" else 10
        return float(per_score * shape.batch * shape.heads * shape.queries * shape.keys * shape.head_size)
    return 0.0


def physical_flops(operation: Operation) -> float:
    """FLOPs the hardware must do: :func:`model_flops`, half of a causal attention skipped, and all other operators."""
    kind = classify(operation)
    if kind.startswith("attention"):
        shape = attention_shape(operation)
        kept = (1 + 1 / max(shape.keys, 1)) / 2 if shape.causal else 1.0
        return model_flops(operation) * kept
    if kind in _TENSOR_UNIT_CLASSES:
        return model_flops(operation)
    if operation.base_name.startswith("_fused_adam"):
        return float(_FUSED_FLOPS_PER_ELEMENT * _elements(operation.inputs[0]))
    if operation.base_name in _FLOPS_PER_DIFFERENCE:
        pairs, length = row_pairs(operation)
        return float(_FLOPS_PER_DIFFERENCE[operation.base_name] * pairs * length)
    return float(_FLOPS_PER_ELEMENT.get(kind, 0) * elements(operation))


def gemm_sizes(operation: Operation) -> tuple[int, int, int, int]:
    """(batch, m, n, k) of a product [batch, m, k] x [batch, k, n].

    A product of complex numbers counts as that of real ones with the same arithmetic, [m, 2k] x [2k, 2n].

    >>> a, b = TensorSpec.parse("complex64[2,3]"), TensorSpec.parse("complex64[3,5]")
    >>> gemm_sizes(Operation("aten.mm.default", (a, b), (), (TensorSpec.parse("complex64[2,5]"),)))
    (1, 2, 10, 6)
    """
    a, b = gemm_operands(operation)
    reals = 2 if a.dtype.startswith("complex") else 1
    if len(a.shape) == 3:
        return a.shape[0], a.shape[1], reals * b.shape[2], reals * a.shape[2]
    if len(b.shape) == 1:
        return 1, (a.shape[0] if len(a.shape) == 2 else 1), reals, reals * a.shape[-1]
    return 1, a.shape[0], reals * b.shape[1], reals * a.shape[1]


def gemm_operands(operation: Operation) -> tuple[TensorSpec, TensorSpec]:
    """The two factors; a bias before them, and scales after them, are left out."""
    tensors = [argument for argument in operation.inputs if isinstance(argument, TensorSpec)]
    if operation.base_name in _FACTORS_FIRST:
        return tensors[0], tensors[1]
    return tensors[-2], tensors[-1]


def row_pairs(operation: Operation) -> tuple[int, int]:
    """Return how many pairs of rows a distance operator compares, and how long the rows are.

    >>> x, y = TensorSpec.parse("float32[2,10,3]"), TensorSpec.parse("float32[2,20,3]")
    >>> row_pairs(Operation("aten._cdist_forward.default", (x, y, 1.0, None)))
    (400, 3)
    """
    tensors = operation.input_tensors()
    first, *others = tensors[1:] if operation.base_name.endswith("_backward") else tensors  # a gradient comes first
    length = first.shape[-1]
    if operation.base_name.startswith("_pdist"):
        return first.shape[0] * (first.shape[0] - 1) // 2, length
    return math.prod(first.shape[:-1]) * others[0].shape[-2], length


def _convolution_flops(weight: TensorSpec, output: TensorSpec) -> float:
    return 2.0 * output.numel * math.prod(weight.shape[1:])


class AttentionShape:
    """The sizes that attention's cost depends on: batch, heads, kv_heads, queries, keys, head_size, causal, dropout."""

    __slots__ = ("batch", "causal", "dropout", "head_size", "heads", "keys", "kv_heads", "queries")

    def __init__(self, query: TensorSpec, key: TensorSpec, causal: bool, dropout: float) -> None:
        self.batch, self.heads, self.queries, self.head_size = query.shape
        self.kv_heads, self.keys = key.shape[1], key.shape[2]
        self.causal, self.dropout = causal, dropout


# position of dropout_p and is_causal among the positional arguments, forward and backward
_FLAGS = {
    "_scaled_dot_product_cudnn_attention": (5, 6), "_scaled_dot_product_cudnn_attention_backward": (13, 14),
    "_scaled_dot_product_flash_attention": (3, 4), "_scaled_dot_product_flash_attention_backward": (10, 11),
    "_scaled_dot_product_efficient_attention": (5, 6), "_scaled_dot_product_efficient_attention_backward": (9, 11),
    "_scaled_dot_product_flash_attention_for_cpu": (3, 4),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (6, 7),
}  # fmt: skip


def attention_shape(operation: Operation) -> AttentionShape:
    """Sizes and switches of a fused attention call, whatever its backend."""
    name = operation.base_name
    first = 1 if name.endswith("_backward") else 0
    dropout_at, causal_at = _FLAGS.get(name, (99, 99))
    inputs = operation.inputs
    dropout = inputs[dropout_at] if len(inputs) > dropout_at else 0.0
    causal = inputs[causal_at] if len(inputs) > causal_at else False
    probability = float(dropout) if isinstance(dropout, (int, float)) else 0.0
    return AttentionShape(_tensor(operation, first), _tensor(operation, first + 1), causal is True, probability)


def elements(operation: Operation) -> int:
    """Elements iterated over: those of the largest tensor touched, of the whole first list, of a look-up's result."""
    first = operation.inputs[0] if operation.inputs else None
    if is_list(first):
        return _elements(first)
    if operation.base_name in _ROW_READERS and operation.outputs:
        return operation.outputs[0].numel
    if operation.base_name == "nll_loss_forward":
        return operation.input_tensors()[1].numel
    return max((spec.numel for spec in (*operation.input_tensors(), *operation.outputs)), default=0)


def is_list(argument: Argument) -> bool:
    """Whether an argument is a list of tensors (the description of one tensor is a tuple too)."""
    if not isinstance(argument, tuple) or isinstance(argument, TensorSpec):
        return False
    return any(isinstance(item, TensorSpec) for item in argument)


def tensors_of(argument: Argument) -> list[TensorSpec]:
    """The tensors of a list argument, or the one tensor that it is."""
    items = argument if isinstance(argument, tuple) and not isinstance(argument, TensorSpec) else (argument,)
    return [item for item in items if isinstance(item, TensorSpec)]


def _elements(argument: Argument) -> int:
    return sum(spec.numel for spec in tensors_of(argument))


@lru_cache(maxsize=CACHED_OPERATIONS)
def least_bytes(operation: Operation) -> float:
    """Bytes that must cross between memory and the chip: every distinct element read once and written once.

    An in-place operand counts twice; broadcast dimensions once; what is not read (the old content of a fill, most rows
    of an embedding's table) not at all. A tensor passed twice is read once.
    """
    name = operation.base_name.removesuffix("_")
    read = 0 if name in _WRITE_ONLY or name in _NOTHING else _read_bytes(operation, name)
    return float(read + written_bytes(operation))


@lru_cache(maxsize=CACHED_OPERATIONS)
def written_bytes(operation: Operation) -> float:
    """The part of :func:`least_bytes` that is written: outputs, and the lists an in-place operator changes."""
    if operation.base_name.removesuffix("_") in _NOTHING:
        return 0.0
    returned = sum(spec.touched_bytes for spec in operation.outputs)
    changes = operation.base_name.endswith("_") and not operation.outputs
    if not changes or not operation.inputs or not is_list(operation.inputs[0]):
        return float(returned)
    changed = _WRITTEN_LISTS.get(operation.base_name, (0,))
    return float(sum(_bytes_of(operation.inputs[i]) for i in changed if i < len(operation.inputs)))


def footprint_bytes(operation: Operation) -> float:
    """Bytes of the distinct memory a call touches: an in-place operand counts once."""
    name = operation.base_name
    in_place = name.endswith("_") and name.removesuffix("_") not in (*_WRITE_ONLY, "copy", "_foreach_copy")
    return least_bytes(operation) - (written_bytes(operation) if in_place else 0.0)


def _read_bytes(operation: Operation, plain: str) -> int:
    tensors = [spec for spec in operation.input_tensors() if spec.device != "cpu"]
    if plain == "embedding":
        return tensors[1].touched_bytes + operation.outputs[0].bytes
    if plain in _ROW_READERS:
        return sum(spec.touched_bytes for spec in tensors[1:]) + sum(spec.bytes for spec in operation.outputs)
    if plain == "nll_loss_forward":
        return tensors[1].touched_bytes + tensors[0].shape[0] * DTYPE_BYTES[tensors[0].dtype]
    if plain in _READ:
        return sum(tensors[position].touched_bytes for position in _READ[plain])
    if plain == "_foreach_copy":
        return _bytes_of(operation.inputs[1])
    return sum(spec.touched_bytes for spec in _without_results(operation).distinct_inputs() if spec.device != "cpu")


def _without_results(operation: Operation) -> Operation:
    """Without the tensors that it is given to write into."""
    kept = tuple((name, value) for name, value in operation.keywords if name != "out")
    return operation if kept == operation.keywords else replace(operation, keywords=kept, same=())


def _bytes_of(argument: Argument) -> int:
    return sum(spec.touched_bytes for spec in tensors_of(argument) if spec.device != "cpu")


def _tensor(operation: Operation, position: int) -> TensorSpec:
    found = operation.inputs[position]
    assert isinstance(found, TensorSpec)
    return found
