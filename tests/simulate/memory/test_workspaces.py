"""Scripts by rule against what the allocator recorded on an H200 (132 multiprocessors)."""

from __future__ import annotations

import pytest

from perfmodel.simulate.memory.workspaces import reduction_buffers_bytes, script_by_rule, uses_cublas, uses_cublaslt
from perfmodel.trace.operation import Operation, TensorSpec, contiguous_stride

T = TensorSpec.parse


def heads_last(shape: tuple[int, ...], dtype: str) -> TensorSpec:
    """[batch, heads, tokens, width] over memory laid out [batch, tokens, heads, width]."""
    _, heads, tokens, width = shape
    return TensorSpec(shape, (tokens * heads * width, width, heads * width, 1), dtype)


def attention_backward(name: str, dtype: str, query: tuple[int, ...], key: tuple[int, ...]) -> Operation:
    q, k = heads_last(query, dtype), heads_last(key, dtype)
    return Operation(f"aten.{name}.default", (q, q, k, k), (), (q, k, k))


def split_copy(dtype: str, ranks: int, *columns: int) -> Operation:
    """Of each rank's row into a tensor of so many columns."""
    whole, parts = T(f"{dtype}[{ranks},{sum(columns)}]"), tuple(T(f"{dtype}[{ranks},{each}]") for each in columns)
    return Operation("aten.split_with_sizes_copy.out", (whole, columns, 1), (("out", parts),), parts)


def chunk_cat(dtype: str, ranks: int, *gradients: str) -> Operation:
    """Into a row a rank, of rows rounded up."""
    tensors = tuple(map(T, gradients))
    columns = sum(-(-each.shape[0] // ranks) * each.numel // each.shape[0] for each in tensors)
    out = T(f"{dtype}[{ranks},{columns}]")
    return Operation("aten._chunk_cat.out", (tensors, 0, ranks), (("out", out),), (out,))


BLOCK = ("[64]", "[64,64]", "[64,64]", "[64,64]", "[64,64]", "[64]", "[256,64]", "[64,256]")

RECORDED = {
    "softmax backward multiplies into a temporary": (
        Operation(
            "aten._softmax_backward_data.default",
            (T("float32[4,12,128,128]"), T("float32[4,12,128,128]"), -1, "torch.float32"),
            (),
            (T("float32[4,12,128,128]"),),
        ),
        (3145728, 3145728, -2),
    ),
    "cumsum of bool counts in int64": (
        Operation("aten.cumsum.default", (T("bool[2,512]"), 1), (), (T("int64[2,512]"),)),
        (8192, 8192, -2),
    ),
    "cumsum of int64 needs nothing": (
        Operation("aten.cumsum.default", (T("int64[2,512]"), 1), (), (T("int64[2,512]"),)),
        (),
    ),
    "embedding of expanded indices copies them first": (
        Operation(
            "aten.embedding.default", (T("float32[2,768]"), T("int64[4,128]{0,1}")), (), (T("float32[4,128,768]"),)
        ),
        (4096, 1572864, -1),
    ),
    "embedding of plain indices needs nothing": (
        Operation("aten.embedding.default", (T("float32[2,768]"), T("int64[4,128]")), (), (T("float32[4,128,768]"),)),
        (),
    ),
    "its backward likewise": (
        Operation(
            "aten.embedding_dense_backward.default",
            (T("float32[4,128,768]"), T("int64[4,128]{0,1}"), 2, -1, False),
            (),
            (T("float32[2,768]"),),
        ),
        (4096, 6144, -1),
    ),
    "dropout makes its mask first": (
        Operation("aten.native_dropout.default", (T("bfloat16[8]"), 0.1, True), (), (T("bfloat16[8]"), T("bool[8]"))),
        (8, 16),
    ),
    "cuDNN attention": (
        Operation(
            "aten._scaled_dot_product_cudnn_attention.default",
            (heads_last((2, 16, 512, 64), "bfloat16"),),
            (),
            (heads_last((2, 16, 512, 64), "bfloat16"), T("float32[2,16,512,1]"), T("int64[]"), T("int64[]")),
        ),
        (8, 8, 2097152, 65536, 256, -5),
    ),
    "cuDNN attention backward": (
        attention_backward(
            "_scaled_dot_product_cudnn_attention_backward", "bfloat16", (2, 12, 256, 64), (2, 12, 256, 64)
        ),
        (786432, 786432, 786432, 1597696, -4),
    ),
    "cuDNN attention backward with grouped heads": (
        attention_backward(
            "_scaled_dot_product_cudnn_attention_backward", "bfloat16", (2, 16, 512, 64), (2, 4, 512, 64)
        ),
        (2097152, 524288, 524288, 8454400, -4),
    ),
    "memory-efficient attention backward": (
        attention_backward(
            "_scaled_dot_product_efficient_attention_backward", "float32", (2, 12, 256, 64), (2, 12, 256, 64)
        ),
        (1572864, 1572864, 1572864, 1572864, 24576, 24576, -5, -4, 1574400, -6, -7),
    ),
    "column sum over 1024 rows": (
        Operation("aten.sum.dim_IntList", (T("bfloat16[2,512,1024]"), (0, 1), True), (), (T("bfloat16[1,1,1024]"),)),
        (2048, 8388608, 32, -3, -2),
    ),
    "copy out of what is gathered": (split_copy("float32", 2, 16384, 2048, 32, 16384), (688, -1)),
    "copy out of a block": (split_copy("float32", 2, 32, 2048, 2048, 2048, 2048, 32, 8192, 8192), (664, -1)),
    "copy out in bfloat16": (split_copy("bfloat16", 2, 32, 2048, 2048, 2048, 2048, 32, 8192, 8192), (472, -1)),
    "gradients joined": (chunk_cat("float32", 2, *(f"float32{shape}" for shape in BLOCK)), (800, -1)),
    "gradients joined and cast": (chunk_cat("float32", 2, *(f"bfloat16{shape}" for shape in BLOCK)), (800, -1)),
    "column sum over 512 rows": (
        Operation("aten.sum.dim_IntList", (T("bfloat16[512,768]"), (0,), True), (), (T("bfloat16[1,768]"),)),
        (),
    ),
}


@pytest.mark.parametrize("case", RECORDED)
def test_recorded_script(case: str) -> None:
    operation, script = RECORDED[case]
    assert script_by_rule(operation, 132) == script


def test_flash_attention_backward_rounds_queries_and_width() -> None:
    """Row sums 2 x 4 x 256 floats; float32 dQ with width 96; grouped dK and dV for all four heads."""
    operation = attention_backward(
        "_scaled_dot_product_flash_attention_backward", "bfloat16", (2, 4, 200, 80), (2, 2, 200, 80)
    )
    row_bytes = 4 * 2 * 4 * 256
    query_bytes, key_bytes = 2 * 2 * 4 * 200 * 80, 2 * 2 * 2 * 200 * 80
    assert script_by_rule(operation, 132) == (
        query_bytes, key_bytes, key_bytes, row_bytes, 96 * row_bytes, 2 * key_bytes, 2 * key_bytes, -7, -6, -5, -4,
    )  # fmt: skip


def test_embedding_backward_of_many_tokens_sorts() -> None:
    operation = Operation(
        "aten.embedding_dense_backward.default",
        (T("float32[8,1024,64]"), T("int64[8,1024]"), 50257, -1, False),
        (),
        (T("float32[50257,64]"),),
    )
    script = script_by_rule(operation, 132)
    partial_sums = 819 + 8192
    assert script[:10] == (
        65536, 65536, 4 * 50257 * 64, 65536, 8, 65536, 65536, 8, 8 * partial_sums, 4 * partial_sums * 64,
    )  # fmt: skip
    assert sorted(-step for step in script[10:]) == [1, 2, 4, 5, 6, 7, 8, 9, 10]


def test_large_copies_loop() -> None:
    """4 rows of 2**28 bytes would take 125 times 132 x 16 x 2 blocks of 2 KiB: a block does 4 rows, of each 32 times."""
    script = script_by_rule(split_copy("float32", 4, 2**26, 2**10), 132)
    assert script == (8 * (4 * 2 + 1 + 2**28 // (2048 * 32) + 1), -1)


def test_joined_gradients_are_padded_and_never_loop() -> None:
    """7 rows over 4 ranks are 2 each."""
    script = script_by_rule(chunk_cat("float32", 4, "float32[7,1024]", "float32[4,1048576]"), 132)
    assert script == (8 * (6 * 2 + 2 + 4 + 2048), -1)


def test_gradients_joined_with_another_cast_need_no_table() -> None:
    assert script_by_rule(chunk_cat("bfloat16", 2, "float32[64,64]"), 132) == ()
    assert script_by_rule(chunk_cat("float32", 2, "float16[64,64]"), 132) == ()


def test_gradient_norms_of_a_list_share_one_buffer() -> None:
    tensors = (T("float32[200000]"), T("float32[10]"), T("float32[10]"))
    operation = Operation("aten._foreach_norm.Scalar", (tensors, 2.0), (), (T("float32[]"),) * 3)
    assert script_by_rule(operation, 132) == (4 * 3 * 4, -1)


def test_full_sum_splits_over_blocks_of_threads() -> None:
    """512 threads sum 256 values or more each: one partial sum a block, at most what fills the device."""
    assert reduction_buffers_bytes(T("float32[8388608]"), (0,), 132) == (4 * 132 * 4, 4)
    assert reduction_buffers_bytes(T("float32[1000]"), (0,), 132) == (0, 0)


def test_row_sums_need_no_buffer() -> None:
    assert reduction_buffers_bytes(T("float32[8192,768]"), (1,), 132) == (0, 0)


def test_layout_not_shape_decides_the_reduction() -> None:
    """Summing the rows of a transposed matrix is summing columns."""
    shape = (1024, 1024)
    plain = TensorSpec(shape, contiguous_stride(shape), "bfloat16")
    transposed = TensorSpec(shape, (1, 1024), "bfloat16")
    assert reduction_buffers_bytes(transposed, (1,), 132) == reduction_buffers_bytes(plain, (0,), 132) == (8388608, 32)


def test_which_products_take_workspaces() -> None:
    product = Operation("aten.mm.default", (T("float32[8,8]"), T("float32[8,8]")), (), (T("float32[8,8]"),))
    with_bias = Operation(
        "aten.addmm.default", (T("float32[8]"), T("float32[8,8]"), T("float32[8,8]")), (), (T("float32[8,8]"),)
    )
    with_matrix = Operation(
        "aten.addmm.default", (T("float32[8,8]"), T("float32[8,8]"), T("float32[8,8]")), (), (T("float32[8,8]"),)
    )
    pointwise = Operation("aten.add.Tensor", (T("float32[8]"), T("float32[8]")), (), (T("float32[8]"),))
    assert [uses_cublas(op) for op in (product, with_bias, with_matrix, pointwise)] == [True, True, True, False]
    assert [uses_cublaslt(op) for op in (product, with_bias, with_matrix, pointwise)] == [False, True, False, False]
