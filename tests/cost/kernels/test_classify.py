from collections import Counter

import pytest

from perfmodel.cost.kernels.classify import CLASSES, classify
from perfmodel.workload.ops import Operation, TensorSpec
from tests.cost.kernels.recorded import STEPS, recorded_operations

MATRIX = TensorSpec.parse("float32[64,32]")
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
        ("aten.sum.dim_IntList", (MATRIX, (0,), True), "column"),
        ("aten.sum.dim_IntList", (MATRIX, (-1,), True), "reduction"),
        ("aten.sum.default", (MATRIX,), "reduction"),
        ("aten.mean.dim", (IMAGE, (2, 3), True), "column"),
        ("aten._scaled_dot_product_flash_attention.default", (IMAGE, IMAGE, IMAGE), "attention_forward"),
        ("aten._scaled_dot_product_flash_attention_backward.default", (IMAGE,) * 5, "attention_backward"),
        ("aten._foreach_copy_.default", ((MATRIX,), (MATRIX,)), "copy"),
        ("aten._foreach_norm.Scalar", ((MATRIX,), 2.0), "optimizer"),
        ("aten._fused_adamw_.default", ((MATRIX,),), "optimizer"),
        ("aten.zero_.default", (MATRIX,), "fill"),
        ("aten.cholesky.default", (MATRIX,), "other"),
    ],
)
def test_class(name, inputs, expected):
    assert classify(Operation(name, inputs)) == expected
    assert expected in CLASSES
