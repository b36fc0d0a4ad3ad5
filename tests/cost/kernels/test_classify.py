from collections import Counter

import pytest

from perfmodel.cost.kernels.classify import CLASSES, classify
from perfmodel.trace.operation import Operation, TensorSpec
from tests.cost.kernels.recorded import STEPS, recorded_operations

MATRIX = TensorSpec.parse("float32[64,32]")
WIDE = TensorSpec.parse("float32[64,256]")
LONG = TensorSpec.parse("float32[4,8192]")
LAST = TensorSpec.parse("float32[2,256,4,4]{4096,1,1024,256}")
IMAGE = TensorSpec.parse("float32[2,8,4,4]{128,1,32,8}")


@pytest.mark.parametrize("path", STEPS, ids=lambda path: path.name)
def test_every_recorded_device_operator_has_a_class(path):
    unknown = {op.name for op in recorded_operations(path) if classify(op) == "other"}
    assert unknown == set()


def test_classes_of_one_recorded_step():
    path = next(path for path in STEPS if path.name.startswith("resnet50"))
    assert Counter(classify(op) for op in recorded_operations(path)) == {
        "copy": 114,
        "convolution_forward": 53,
        "convolution_backward": 53,
        "pointwise": 184,
        "batch_norm": 106,
        "pooling": 2,
        "column": 2,
        "gemm": 3,
        "row_forward": 2,
        "row_backward": 2,
        "fill": 2,
        "optimizer": 1,
    }


@pytest.mark.parametrize(
    ("name", "inputs", "expected"),
    [
        ("aten.bmm.default", (MATRIX, MATRIX), "gemm"),
        ("aten._addmm_activation.default", (MATRIX, MATRIX, MATRIX), "gemm"),
        ("aten.relu_.default", (MATRIX,), "pointwise"),
        ("aten.pow.Tensor_Scalar", (MATRIX, 2), "pointwise"),
        ("aten.pow.Tensor_Scalar", (MATRIX, 1.7), "pointwise_transcendental"),
        ("aten.gelu_backward.default", (MATRIX, MATRIX), "pointwise_transcendental"),
        ("aten.sum.dim_IntList", (WIDE, (0,), True), "column"),
        ("aten.sum.dim_IntList", (MATRIX, (0,), True), "full_reduction"),  # fewer columns than lanes of a warp
        ("aten.sum.dim_IntList", (MATRIX, (-1,), True), "reduction"),
        ("aten.sum.dim_IntList", (MATRIX, (0, 1), True), "full_reduction"),
        ("aten.sum.default", (MATRIX,), "full_reduction"),
        ("aten.max.dim", (WIDE, 1), "reduction"),
        ("aten.max.dim", (WIDE, 0), "column"),
        ("aten.argmax.default", (MATRIX, None), "full_reduction"),
        ("aten.var.correction", (LONG, (1,)), "full_reduction"),  # rows that several blocks share
        ("aten.linalg_vector_norm.default", (MATRIX, 2.0), "full_reduction"),
        ("aten.linalg_vector_norm.default", (MATRIX, 2, (1,)), "reduction"),  # the order comes first
        ("aten.mean.dim", (IMAGE, (2, 3), True), "full_reduction"),
        ("aten.mean.dim", (LAST, (2, 3), True), "column"),
        ("aten.sort.default", (MATRIX,), "sort"),
        ("aten.cumsum.default", (MATRIX, 0), "scan"),
        ("aten._fft_r2c.default", (MATRIX, (0,), 0, True), "fft"),
        ("aten._linalg_svd.default", (MATRIX,), "linear_algebra"),
        ("aten._scaled_dot_product_flash_attention.default", (IMAGE, IMAGE, IMAGE), "attention_forward"),
        ("aten._scaled_dot_product_flash_attention_backward.default", (IMAGE,) * 5, "attention_backward"),
        ("aten._foreach_copy_.default", ((MATRIX,), (MATRIX,)), "copy"),
        ("aten._foreach_norm.Scalar", ((MATRIX,), 2.0), "optimizer"),
        ("aten._fused_adamw_.default", ((MATRIX,),), "optimizer"),
        ("aten.zero_.default", (MATRIX,), "fill"),
        ("aten._unique2.default", (MATRIX,), "sort"),
        ("aten.cholesky.default", (MATRIX,), "linear_algebra"),
        ("aten.nonesuch.default", (MATRIX,), "other"),
    ],
)
def test_class(name, inputs, expected):
    assert classify(Operation(name, inputs)) == expected
    assert expected in CLASSES
