"""What operators ask the allocator for beyond their outputs, by rule, where no profile measured it.

A script lists one call's requests in order: +n allocates n bytes, -k frees the script's k-th allocation (from 1); what
is never freed are outputs. A measured script (``KernelRecord.memory_script``) is the same and is preferred; cuDNN's
convolution workspaces in particular are known only from it. Source of the rules: the operators' CUDA implementations in
pytorch/pytorch (aten/src/ATen/native/cuda, .../transformers/cuda, c10/cuda) and recorded steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from perfmodel.cost.kernels.torch_kernels import (
    CHUNK_ELEMENTS,
    EMBEDDING_ROWS_WITHOUT_SORT,
    THREADS_PER_MULTIPROCESSOR,
    reduction_split,
)
from perfmodel.trace.kernel_key import MATMULS
from perfmodel.trace.operation import Operation, TensorSpec
from perfmodel.units import DTYPE_BYTES

Script = tuple[int, ...]

CUDNN_ATTENTION_WORKSPACE_BYTES = 256
EMBEDDING_ROWS_PER_PARTIAL_SUM = 10
LARGEST_VECTOR, LEAST_VECTORIZED_VALUES = 4, 128  # elements that a thread of a reduction loads at once
COPYING_THREADS, BYTES_COPIED_BY_THREAD = 128, 16  # of a block that copies between one buffer and many tensors


def script_by_rule(operation: Operation, multiprocessors: int) -> Script:
    """The script of one call, or () where nothing but outputs is allocated, in order.

    multiprocessors: of the device; sums over many rows are split over them.
    """
    rule = _RULES.get(operation.base_name)
    if rule is None or not operation.outputs:
        return ()
    return rule(operation, multiprocessors)


def uses_cublas(operation: Operation) -> bool:
    """Whether the call runs on a cuBLAS handle, whose first use in a host thread takes a workspace."""
    return operation.base_name in MATMULS


def uses_cublaslt(operation: Operation) -> bool:
    """Whether the call is a GEMM with a bias epilogue, which has a workspace of its own."""
    if operation.base_name not in ("addmm", "_addmm_activation"):
        return False
    bias, _, weight = operation.input_tensors()[:3]
    return len(bias.shape) == 1 and bias.is_contiguous and bias.shape[0] == weight.shape[1] and min(weight.shape) > 1


def _in_order(*allocated: int, freed: tuple[int, ...]) -> Script:
    return (*allocated, *(-k for k in freed))


def _softmax_backward(operation: Operation, _: int) -> Script:
    (output,) = operation.outputs
    grad = operation.input_tensors()[0]
    return _in_order(output.bytes, output.numel * DTYPE_BYTES[grad.dtype], freed=(2,))


def _cumsum(operation: Operation, _: int) -> Script:
    source, output = operation.input_tensors()[0], operation.outputs[0]
    return _in_order(output.bytes, output.bytes, freed=(2,)) if source.dtype != output.dtype else ()


def _embedding(operation: Operation, _: int) -> Script:
    indices = operation.input_tensors()[1]
    return () if indices.is_contiguous else _in_order(indices.bytes, operation.outputs[0].bytes, freed=(1,))


def _embedding_backward(operation: Operation, _: int) -> Script:
    """Contiguous copies of what is not; over 3072 indices a sort and partial sums of at most ten rows each."""
    grad, indices = operation.input_tensors()[:2]
    output = operation.outputs[0]
    copies = [spec.bytes for spec in (indices, grad) if not spec.is_contiguous]
    rows = indices.numel
    before, after = list(copies), []
    if rows > EMBEDDING_ROWS_WITHOUT_SORT:
        segments = min(rows, output.shape[0])
        partial_sums = rows // EMBEDDING_ROWS_PER_PARTIAL_SUM + segments
        before += [8 * rows, 8 * rows]
        after = [8 * rows, 8, 8 * segments, 8 * segments, 8, 8 * partial_sums, 4 * partial_sums * output.shape[1]]
    if not before:
        return ()
    kept = len(before) + 1
    total = len(before) + 1 + len(after)
    return _in_order(*before, output.bytes, *after, freed=tuple(k for k in range(total, 0, -1) if k != kept))


def _dropout(operation: Operation, _: int) -> Script:
    """The mask comes first."""
    output, mask = operation.outputs[:2]
    return (mask.bytes, output.bytes)


def _cudnn_attention(operation: Operation, _: int) -> Script:
    """Seed and offset first, then output and log-sum-exp, then cuDNN's own workspace."""
    output, log_sum_exp = operation.outputs[:2]
    return _in_order(8, 8, output.bytes, log_sum_exp.bytes, CUDNN_ATTENTION_WORKSPACE_BYTES, freed=(5,))


def _cudnn_attention_backward(operation: Operation, _: int) -> Script:
    """A float32 dQ and row sums; with grouped heads dK and dV for every query head besides."""
    query_grad, key_grad, value_grad = operation.outputs[:3]
    rows = math.prod(query_grad.shape[:-1])
    workspace = 4 * query_grad.numel + 4 * rows + CUDNN_ATTENTION_WORKSPACE_BYTES
    if key_grad.shape[1] != query_grad.shape[1]:
        heads = query_grad.shape[1] // key_grad.shape[1]
        workspace += heads * (key_grad.bytes + value_grad.bytes)
    return _in_order(query_grad.bytes, key_grad.bytes, value_grad.bytes, workspace, freed=(4,))


def _efficient_attention_backward(operation: Operation, _: int) -> Script:
    """Row sums of grad x output in float32; float32 inputs also a workspace for dQ by blocks of 64 queries."""
    grads = [spec.bytes for spec in operation.outputs[:3]]
    query_grad = operation.outputs[0]
    batch, heads, queries, width = query_grad.shape
    row_bytes = 4 * batch * heads * queries
    sums = _in_order(*grads, 4 * query_grad.numel, row_bytes, row_bytes, freed=(5, 4))
    if query_grad.dtype != "float32":
        return (*sums, -6)
    return (*sums, batch * heads * -(-queries // 64) * (4 * 64 * width + 16), -6, -7)


def _flash_attention_backward(operation: Operation, _: int) -> Script:
    """Row sums and a float32 dQ, queries rounded to 128 and the head's width to 32 (64 above 128)."""
    query_grad, key_grad, value_grad = operation.outputs[:3]
    batch, heads, queries, width = query_grad.shape
    rounded_queries = -(-queries // 128) * 128
    step = 32 if width <= 128 else 64
    row_bytes = 4 * batch * heads * rounded_queries
    allocated = [query_grad.bytes, key_grad.bytes, value_grad.bytes, row_bytes, row_bytes * (-(-width // step) * step)]
    if key_grad.shape[1] != heads:
        groups = heads // key_grad.shape[1]
        allocated += [groups * key_grad.bytes, groups * value_grad.bytes]
    return _in_order(*allocated, freed=tuple(range(len(allocated), 3, -1)))


def _foreach_norm(operation: Operation, _: int) -> Script:
    """One float32 partial norm a chunk, for every tensor as many as the largest has."""
    tensors = operation.input_tensors()
    chunks = max((-(-tensor.numel // CHUNK_ELEMENTS) for tensor in tensors), default=0)
    return _in_order(4 * len(tensors) * chunks, freed=(1,)) if chunks else ()


def _split_copy(operation: Operation, multiprocessors: int) -> Script:
    """A table for its thread blocks, in int64: two addresses, a size and the blocks so far of each tensor's row, and
    whose row each block copies. Once twice the blocks that can be resident would be needed, each copies more.

    Source (and of the next): aten/src/ATen/native/cuda/TensorShape.cu, ``split_with_sizes_copy_out_cuda`` and
    ``get_chunk_cat_metadata``.
    """
    rows = operation.outputs[0].shape[0]
    row_bytes = [out.bytes // rows for out in operation.outputs]
    most_blocks = 2 * multiprocessors * (THREADS_PER_MULTIPROCESSOR // COPYING_THREADS)
    rounds = max(1, -(-_copying_blocks(row_bytes) * rows // most_blocks))
    rounds_in_row = -(-rounds // min(math.ceil(math.sqrt(rounds)), rows))
    blocks = _copying_blocks(row_bytes, rounds_in_row)
    return _in_order(8 * (4 * len(row_bytes) + 1 + blocks), freed=(1,))


def _chunk_cat(operation: Operation, _: int) -> Script:
    """A table likewise, where nothing is cast but bfloat16 to float32."""
    *tensors, out = operation.input_tensors()
    cast = (tensors[0].dtype, out.dtype)
    if tensors[0].dtype != out.dtype and cast != ("bfloat16", "float32"):
        return ()
    rows, element_bytes = out.shape[0], DTYPE_BYTES[out.dtype]
    row_bytes = [-(-tensor.shape[0] // rows) * math.prod(tensor.shape[1:]) * element_bytes for tensor in tensors]
    return _in_order(8 * (6 * len(tensors) + 2 + _copying_blocks(row_bytes)), freed=(1,))


def _copying_blocks(row_bytes: Sequence[int], rounds: int = 1) -> int:
    """Return the thread blocks that copy a row of each tensor. rounds: how often each thread copies."""
    return sum(-(-each // (COPYING_THREADS * BYTES_COPIED_BY_THREAD * rounds)) for each in row_bytes)


def _reduction(operation: Operation, multiprocessors: int) -> Script:
    output, source = operation.outputs[0], operation.input_tensors()[0]
    buffer_bytes, semaphore_bytes = reduction_buffers_bytes(source, _reduced(operation), multiprocessors)
    return _in_order(output.bytes, buffer_bytes, semaphore_bytes, freed=(3, 2)) if buffer_bytes else ()


def _reduced(operation: Operation) -> tuple[int, ...]:
    """Dimensions summed over: the list among the arguments, else all."""
    rank = len(operation.input_tensors()[0].shape)
    given = [argument for argument in operation.inputs[1:] if isinstance(argument, tuple)]
    given += [value for name, value in operation.keywords if name == "dim" and isinstance(value, tuple)]
    if given and given[0]:
        return tuple(int(dim) % rank for dim in given[0] if isinstance(dim, int))
    return tuple(range(rank))


def reduction_buffers_bytes(source: TensorSpec, reduced: tuple[int, ...], multiprocessors: int) -> tuple[int, int]:
    """Return the bytes of the buffer and of the semaphores through which thread blocks that share a sum add it up.

    Both are 0 where no two blocks share one.

    Parameters
    ----------
    source : TensorSpec
        What is summed.
    reduced : tuple of int
        Its dimensions that are summed over.
    multiprocessors : int
        Of the device, each with room for 2048 threads.

    Notes
    -----
    buffer = accumulator x results x blocks that share one x results of a row of threads; semaphores = 4 x blocks that
    make all results once. :func:`~perfmodel.cost.kernels.torch_kernels.reduction_split` has the blocks. Source:
    aten/src/ATen/native/cuda/Reduce.cuh.

    Examples
    --------
    >>> reduction_buffers_bytes(TensorSpec.parse("bfloat16[1024,1024]"), (0,), 132)
    (8388608, 32)
    >>> reduction_buffers_bytes(TensorSpec.parse("bfloat16[512,768]"), (0,), 132)
    (0, 0)
    """
    summed, kept = _coalesced(source, reduced)
    results, values = math.prod(n for n, _ in kept), math.prod(n for n, _ in summed)
    if not results or values <= 1:
        return 0, 0
    along = not kept or kept[0][1] >= summed[0][1]  # neighbouring elements belong to the same result
    if along:
        is_vectorized = summed[0][1] == 1 and values >= LEAST_VECTORIZED_VALUES and len(summed) == 1
        vector = LARGEST_VECTOR if is_vectorized else 1
    else:
        vector = _output_vector(summed, kept) if kept[0][1] == 1 else 1
    split = reduction_split(results, values, along, vector, multiprocessors)
    if split.groups == 1:
        return 0, 0
    accumulator = max(4, DTYPE_BYTES[source.dtype]) if source.dtype.startswith(("float", "bfloat")) else 8
    return accumulator * results * split.groups * split.row_results, 4 * split.blocks


def _coalesced(source: TensorSpec, reduced: tuple[int, ...]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(size, stride) of the summed and of the kept dimensions, innermost first, neighbours in memory joined."""
    groups: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
    dims = sorted(zip(source.stride, source.shape, range(len(source.shape)), strict=True))
    for stride, size, dim in dims:
        group = groups[dim not in reduced]
        if size == 1:
            continue
        if group and group[-1][0] * group[-1][1] == stride:
            group[-1] = (group[-1][0] * size, group[-1][1])
        else:
            group.append((size, stride))
    return groups


def _output_vector(summed: list[tuple[int, int]], kept: list[tuple[int, int]]) -> int:
    vector = LARGEST_VECTOR
    for number in [kept[0][0], *(stride for _, stride in summed + kept[1:])]:
        while number % vector:
            vector //= 2
    return vector


_RULES: dict[str, Callable[[Operation, int], Script]] = {
    "_softmax_backward_data": _softmax_backward,
    "cumsum": _cumsum,
    "embedding": _embedding,
    "embedding_dense_backward": _embedding_backward,
    "native_dropout": _dropout,
    "_scaled_dot_product_cudnn_attention": _cudnn_attention,
    "_scaled_dot_product_cudnn_attention_backward": _cudnn_attention_backward,
    "_scaled_dot_product_efficient_attention_backward": _efficient_attention_backward,
    "_scaled_dot_product_flash_attention_backward": _flash_attention_backward,
    "_chunk_cat": _chunk_cat,
    "_foreach_norm": _foreach_norm,
    "sum": _reduction,
    "mean": _reduction,
    "linalg_vector_norm": _reduction,
    "split_with_sizes_copy": _split_copy,
}
