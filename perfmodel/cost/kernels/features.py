"""What the curves know of an operator call: which curve it belongs to, its numbers and its labels."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from perfmodel.cost.kernels.classify import classify, reduced_dims, sums_columns
from perfmodel.cost.kernels.forms import Form
from perfmodel.cost.kernels.matrix_forms import ATTENTION, CONVOLUTION, GEMM
from perfmodel.cost.kernels.memory_forms import COLUMNS, FULL_REDUCTIONS, LISTS, PLACED, POINTWISE, ROWS, SCATTER
from perfmodel.cost.kernels.torch_kernels import (
    CHUNK_ELEMENTS,
    REDUCTION_THREADS,
    THREADS_PER_MULTIPROCESSOR,
    optimizer_launches,
    reduction_split,
    row_kernel,
)
from perfmodel.cost.kernels.work import (
    arithmetic_kind,
    attention_shape,
    elements,
    footprint_bytes,
    gemm_operands,
    gemm_sizes,
    least_bytes,
    physical_flops,
    tensors_of,
    written_bytes,
)
from perfmodel.hardware.profile import Device
from perfmodel.trace.operation import Operation, TensorSpec
from perfmodel.units import DTYPE_BYTES

_FORMS = (POINTWISE, PLACED, ROWS, COLUMNS, FULL_REDUCTIONS, SCATTER, LISTS, GEMM, CONVOLUTION, ATTENTION)
FORMS: dict[str, Form] = {form.name: form for form in _FORMS}
ALIGNMENT_BYTES = 16
ATTENTION_TILES = {"efficient": 64}  # queries a block takes; 128 with the others
VECTOR, LEAST_VECTORISED = 4, 128  # elements that a reduction's thread loads at once, and of how many at least
BLOCKS_PER_MULTIPROCESSOR = THREADS_PER_MULTIPROCESSOR // REDUCTION_THREADS
_ALIKE = {
    "mean": "sum", "nansum": "sum", "prod": "sum", "amax": "max", "amin": "max", "min": "max", "aminmax": "argmax",
    "any": "max", "all": "max", "argmin": "argmax", "std": "var", "var_mean": "var", "std_mean": "var",
    "norm": "linalg_vector_norm",
}  # fmt: skip
# A CPU's vectorised loops take 0.05 ns an element, max and norm twice as long, and what has none 0.9 ns.
_ALIKE_ON_CPU = {"amax": "sum", "amin": "sum", "any": "argmax", "all": "argmax", "logsumexp": "var"}
LEAST_CHANNELS = 8  # below it channels are padded


@dataclass(frozen=True)
class Features:
    """A call in the numbers and labels of its curve.

    curve: its name in a profile. form: name of its form. numbers, labels: see :class:`.forms.Calls`.
    """

    curve: str
    form: str
    numbers: dict[str, float]
    labels: dict[str, str]


Told = tuple[str, str, dict[str, float], dict[str, str]]  # curve, form, numbers, labels


class Where(NamedTuple):
    """The arithmetic unit that a call runs on, the number of multiprocessors, and whether the device is a CPU."""

    arithmetic: str
    multiprocessors: int
    is_cpu: bool = False


Extract = Callable[[Operation, Where], Told]


def features_of(operation: Operation, device: Device, tf32: bool) -> Features | None:
    """The curve that predicts ``operation`` and what it is told; None where no curve covers the class."""
    kind = classify(operation)
    extract = _EXTRACTORS.get(kind)
    if extract is None or not (operation.input_tensors() or operation.outputs):
        return None
    where = Where(arithmetic_kind(operation, tf32), device.multiprocessors, device.kind == "cpu")
    curve, form, numbers, labels = extract(operation, where)
    labels.setdefault("operator", operation.base_name)
    labels.setdefault("access", memory_path(operation))
    common = {
        "bytes": max(least_bytes(operation), 1.0),
        "written_bytes": written_bytes(operation),
        "footprint_bytes": max(footprint_bytes(operation), 1.0),
        "elements": max(float(elements(operation)), 1.0),
        "flops": physical_flops(operation),
        "multiprocessors": float(device.multiprocessors),
        "cache_bytes": float(max(device.l2_bytes, 2**20)),
    }
    return Features(curve, form, common | numbers, labels)


def _item_bytes(operation: Operation) -> int:
    specs = [*operation.input_tensors(), *operation.outputs]
    return DTYPE_BYTES[next((spec for spec in specs if spec.numel > 1), specs[0]).dtype]


def memory_path(operation: Operation) -> str:
    """Return how a pointwise kernel reads: vectorised (equal operands), cast (dtypes differ), broadcast or permuted."""
    specs = [spec for spec in (*operation.input_tensors(), *operation.outputs) if spec.shape]
    if not specs:
        return "vectorised"
    last = specs[-1]
    if any(spec.shape != last.shape or spec.stride != last.stride for spec in specs):
        permuted = any(0 not in spec.stride and not spec.is_contiguous for spec in specs)
        return "permuted" if permuted else "broadcast"
    floating = {spec.dtype for spec in specs if spec.dtype != "bool"}
    return "cast" if len(floating) > 1 else "vectorised"


def _pointwise(operation: Operation, _: Where) -> Told:
    access = "masked" if operation.base_name == "masked_fill" else memory_path(operation)  # which copies first
    return "pointwise", "pointwise", {}, {"path": f"{access} {_item_bytes(operation)}", "access": access}


def _transcendental(operation: Operation, _: Where) -> Told:
    name = operation.base_name.rstrip("_")
    return "pointwise", "pointwise", {}, {"path": f"{name} {_item_bytes(operation)}"}


def _copy(operation: Operation, _: Where) -> Told:
    source = operation.input_tensors()[-1]
    target = operation.outputs[0] if operation.outputs else tensors_of(operation.inputs[0])[-1]
    sizes = f"{DTYPE_BYTES[source.dtype]} {DTYPE_BYTES[target.dtype]}"
    if source.shape == target.shape and source.stride == target.stride:
        return "copy", "pointwise", {}, {"path": f"same layout {sizes}", "access": f"same layout {sizes}"}
    run = "runs" if _innermost(source) == _innermost(target) else "transposed"
    return "copy", "pointwise", {}, {"path": f"{run} {sizes}", "access": f"{run} {sizes}"}


def _innermost(spec: TensorSpec) -> int:
    """The dimension that is contiguous in memory (the last such of more than one element), -1 if there is none."""
    return max(
        (d for d, (n, s) in enumerate(zip(spec.shape, spec.stride, strict=True)) if s == 1 and n > 1), default=-1
    )


def _simple(curve: str) -> Extract:
    def extract(operation: Operation, _: Where) -> Told:
        name = operation.base_name.rstrip("_")
        return curve, "pointwise", {}, {"path": f"{name} {_item_bytes(operation)}", "access": name}

    return extract


def _cat(operation: Operation, _: Where) -> Told:
    whole = all(spec.is_contiguous for spec in operation.input_tensors())
    access = "contiguous" if whole else "strided"
    return "cat", "pointwise", {}, {"path": f"{access} {_item_bytes(operation)}", "access": access}


def _pooling(operation: Operation, _: Where) -> Told:
    x = max(operation.input_tensors(), key=lambda spec: spec.numel)
    window = next((v for v in operation.inputs if isinstance(v, tuple) and not isinstance(v, TensorSpec)), ())
    kernel = f"{operation.base_name} {_image_order(x)}"
    path = f"{kernel} {'x'.join(map(str, window))} {_item_bytes(operation)}"
    channels = float(x.shape[1]) if len(x.shape) > 1 else 1.0
    return "pooling", "placed", {"length": channels}, {"path": path, "access": kernel}


def _batch_norm(operation: Operation, _: Where) -> Told:
    """A channel is a row: with channels outermost one block, or a few, do one."""
    x = max(operation.input_tensors(), key=lambda spec: spec.numel)
    channels = float(x.shape[1]) if len(x.shape) > 1 else 1.0
    kernel = f"{operation.base_name} {_image_order(x)}"
    numbers = {"rows": channels, "length": max(x.numel / channels, 1.0)}
    return "batch_norm", "rows", numbers, {"path": f"{kernel} {_item_bytes(operation)}", "kernel": kernel}


def _image_order(x: TensorSpec) -> str:
    return "last" if len(x.shape) == 4 and x.stride[1] == 1 and x.shape[1] > 1 else "contiguous"


def _rows(operation: Operation, _: Where) -> Told:
    kind, name = classify(operation), operation.base_name
    x = max(operation.input_tensors(), key=lambda spec: spec.numel)
    if kind == "reduction":
        length = math.prod(x.shape[d] for d in reduced_dims(operation)) if x.shape else 1
        curve = "reduction"
    else:
        length = _row_length(operation, x)
        curve = f"{kind} {name}"
    rows = elements(operation) / max(length, 1)
    numbers = {"rows": max(rows, 1.0), "length": float(max(length, 1))}
    kernel = row_kernel(operation.base_name, length, _item_bytes(operation))
    return curve, "rows", numbers, {"path": f"{kernel} {_item_bytes(operation)}", "kernel": kernel}


def _row_length(operation: Operation, x: TensorSpec) -> int:
    """Elements of one row: the normalised shape of a norm, the softmax dimension, the classes of a loss."""
    name = operation.base_name
    if "layer_norm" in name or "rms_norm" in name:
        shape = next(
            (value for value in operation.inputs if isinstance(value, tuple) and not isinstance(value, TensorSpec)), ()
        )
        return math.prod(n for n in shape if isinstance(n, int)) or 1
    if name == "nll_loss_forward":
        return 1  # it reads one element of each row
    if "softmax" in name:
        dim = operation.inputs[2] if "backward" in name else operation.inputs[1]
        return x.shape[dim] if isinstance(dim, int) and x.shape else 1
    return x.shape[-1] if x.shape else 1


def _columns(operation: Operation, where: Where) -> Told:
    x = operation.input_tensors()[0]
    rows = max(math.prod(x.shape[d] for d in reduced_dims(operation)), 1)
    length = max(x.numel // rows, 1)
    split = reduction_split(length, rows, False, VECTOR if length % VECTOR == 0 else 1, where.multiprocessors)
    numbers = {
        "rows": float(rows), "length": float(length), "values": float(split.values), "groups": float(split.groups),
    }  # fmt: skip
    return "column", "columns", numbers, {"path": f"{_item_bytes(operation)}"}


def _full_reduction(operation: Operation, where: Where) -> Told:
    """values: of one thread, in all the turns that the blocks take on the multiprocessors."""
    x = operation.input_tensors()[0]
    length = max(math.prod(x.shape[d] for d in reduced_dims(operation)), 1)
    results = max(x.numel // length, 1)
    along = results == 1 or not sums_columns(operation)
    dense = _innermost(x) >= 0
    vector = math.gcd(VECTOR, results) if not along else VECTOR if length >= LEAST_VECTORISED and dense else 1
    split = reduction_split(results, length, along, vector, where.multiprocessors)
    turns = max(1.0, split.blocks * split.groups / (where.multiprocessors * BLOCKS_PER_MULTIPROCESSOR))
    numbers = {
        "rows": float(results), "length": float(length), "values": split.values * turns, "groups": float(split.groups),
    }  # fmt: skip
    direction, item_bytes = "rows" if along else "columns", _item_bytes(operation)
    if where.is_cpu:
        combining = _combining_on_cpu(operation, item_bytes)
        return "full_reduction", "full_reduction", numbers, {"path": f"{direction} {combining}", "operator": combining}
    labels = {"path": f"{direction} {item_bytes}", "operator": _combining(operation)}
    return "full_reduction", "full_reduction", numbers, labels


def _combining_on_cpu(operation: Operation, item_bytes: int) -> str:
    """Return :func:`_combining` for loops on a CPU; a mean of 2-byte elements first makes a float32 copy."""
    name = operation.base_name
    if name == "mean" and item_bytes < DTYPE_BYTES["float32"]:
        return "mean of a cast"
    return _ALIKE_ON_CPU.get(name) or _combining(operation)


def _combining(operation: Operation) -> str:
    """Return what a reduction does with two values, by one name for operators that do the same."""
    name, keeps_index = operation.base_name, operation.name.endswith(".dim")
    if name in ("max", "min") and keeps_index:
        return "argmax"
    return _ALIKE.get(name, name)


def _scatter(operation: Operation, _: Where) -> Told:
    indices = operation.input_tensors()[1]
    table = operation.outputs[0]
    numbers = {
        "table_bytes": float(table.bytes), "tokens": float(max(indices.numel, 1)), "length": float(table.shape[1]),
    }  # fmt: skip
    return "embedding_backward", "scatter", numbers, {"path": f"{_item_bytes(operation)}"}


def _lists(operation: Operation, where: Where) -> Told:
    launches = optimizer_launches(operation)
    whole = sum(math.ceil(count / CHUNK_ELEMENTS / where.multiprocessors) for _, count in launches)
    elements_in_all = max(sum(count for _, count in launches), 1)
    numbers = {
        "launches": float(max(len(launches), 1)),
        "chunks": float(max(sum(blocks for blocks, _ in launches), 1)),
        "padding": whole * where.multiprocessors * CHUNK_ELEMENTS / elements_in_all,
    }
    curve = "optimizer fused" if operation.base_name.startswith("_fused_") else "optimizer foreach"
    return curve, "lists", numbers, {"path": f"{operation.base_name} {_item_bytes(operation)}"}


def _gemm(operation: Operation, where: Where) -> Told:
    batch, m, n, k = gemm_sizes(operation)
    a, b = gemm_operands(operation)
    bias = "bias" if operation.base_name in ("addmm", "_addmm_activation", "baddbmm") else "plain"
    layout, alignment = _order(a) + _order(b), _alignment(a, b, *operation.outputs)
    labels = {
        "layout": layout,
        "alignment": f"{alignment} {layout}" if alignment < ALIGNMENT_BYTES else str(alignment),
        "operator": "batched" if len(a.shape) == 3 else bias,
        "precision": where.arithmetic,
    }
    sizes = {"batch": float(batch), "m": float(m), "n": float(n), "k": float(k)}
    sizes["tensor_cores"] = float(where.arithmetic != "fp32")
    return f"gemm {_unit(where.arithmetic)}", "gemm", sizes, labels


def _unit(arithmetic: str) -> str:
    """bf16 and fp16 run on the same units by the same kernels: one curve has both."""
    return "16-bit" if arithmetic in ("bf16", "fp16") else arithmetic


def _order(factor: TensorSpec) -> str:
    """T if the factor's last dimension but one is the contiguous one."""
    if len(factor.shape) < 2:
        return "N"
    transposed = factor.stride[-2] == 1 and factor.shape[-1] > 1 and factor.stride[-1] != 1
    return "T" if transposed else "N"


def _alignment(*specs: TensorSpec) -> int:
    """The largest power of two, up to 16, that divides the bytes between rows of all factors: fast loads need 16."""
    steps = [max(spec.stride[-2:]) * DTYPE_BYTES[spec.dtype] for spec in specs if len(spec.shape) > 1]
    return math.gcd(ALIGNMENT_BYTES, *steps)


def _attention(operation: Operation, where: Where) -> Told:
    shape = attention_shape(operation)
    backend = (
        operation.base_name.removeprefix("_scaled_dot_product_").removesuffix("_backward").removesuffix("_attention")
    )
    per_score = 10 if operation.base_name.endswith("_backward") else 4
    numbers = {
        "sequences": float(shape.batch * shape.heads),
        "queries": float(shape.queries),
        "keys": float(shape.keys),
        "head_size": float(shape.head_size),
        "causal": float(shape.causal),
        "flops_per_score": float(per_score * shape.head_size),
        "tile": float(ATTENTION_TILES.get(backend, 128)),
    }
    labels = {
        "dropout": "dropout" if shape.dropout else "none",
        "causal": "causal" if shape.causal else "full",
        "precision": where.arithmetic,
    }
    return f"{classify(operation)} {backend} {_unit(where.arithmetic)}", "attention", numbers, labels


def _convolution(operation: Operation, where: Where) -> Told:
    backward = operation.base_name.startswith("convolution_backward")
    tensors = [argument for argument in operation.inputs if isinstance(argument, TensorSpec)]
    x, weight = (tensors[1], tensors[2]) if backward else (tensors[0], tensors[1])
    y = tensors[0] if backward else operation.outputs[0]
    rows, channels, out_channels = y.numel / y.shape[1], weight.shape[1], weight.shape[0]
    window = math.prod(weight.shape[2:])
    mask = operation.inputs[-1] if backward else ()
    wants_input, wants_weight = (bool(mask[0]), bool(mask[1])) if isinstance(mask, tuple) and mask else (False, False)
    x_rows = x.numel / x.shape[1]
    depth = channels * window
    numbers = {
        "rows": rows, "channels": float(channels), "out_channels": float(out_channels), "window": float(window),
        **_product("forward", not backward, rows, out_channels, depth),
        **_product("input", backward and wants_input, x_rows, channels, out_channels * window * rows / x_rows),
        **_product("weight", backward and wants_weight, out_channels, depth, rows),
    }  # fmt: skip
    shape = "stem" if channels < LEAST_CHANNELS else "1x1" if window == 1 else "window"
    strided = " strided" if x_rows > 1.5 * rows else ""
    labels = {"layout": _image_order(x), "layer": shape + strided, "precision": where.arithmetic}
    return f"{classify(operation)} {_unit(where.arithmetic)}", "convolution", numbers, labels


def _product(name: str, wanted: bool, m: float, n: float, k: float) -> dict[str, float]:
    sizes = (m, n, k) if wanted else (0.0, 0.0, 0.0)
    return {f"{name}_{letter}": float(size) for letter, size in zip("mnk", sizes, strict=True)}


_EXTRACTORS: dict[str, Extract] = {
    "gemm": _gemm,
    "attention_forward": _attention,
    "attention_backward": _attention,
    "pointwise": _pointwise,
    "pointwise_transcendental": _transcendental,
    "row_forward": _rows,
    "row_backward": _rows,
    "reduction": _rows,
    "column": _columns,
    "full_reduction": _full_reduction,
    "embedding_forward": _simple("embedding_forward"),
    "embedding_backward": _scatter,
    "copy": _copy,
    "cat": _cat,
    "fill": _simple("fill"),
    "dropout": _simple("dropout"),
    "convolution_forward": _convolution,
    "convolution_backward": _convolution,
    "pooling": _pooling,
    "batch_norm": _batch_norm,
    "optimizer": _lists,
    "index": _pointwise,
    "scan": _pointwise,
    "sort": _pointwise,
    "fft": _pointwise,
    "other": _pointwise,
}
