"""Keys of kernels, letter by letter: profiles store measurements under them."""

from __future__ import annotations

import hashlib

import pytest

from perfmodel.trace.kernel_key import kernel_key, optimizer_prefix, uses_tf32
from perfmodel.trace.operation import Operation, TensorSpec

A = TensorSpec.parse("float32[8,4]")
B = TensorSpec.parse("float32[4,8]{1,4}")
HALF = TensorSpec.parse("bfloat16[8,4]")


def test_layouts_and_scalars_are_in_the_key() -> None:
    assert kernel_key(Operation("aten.mm.default", (A, B))) == "aten.mm.default(float32[8,4], float32[4,8]{1,4})"
    scaled = Operation("aten.mul.Scalar", (A, 0.5), (("alpha", 2),))
    assert kernel_key(scaled) == "aten.mul.Scalar(float32[8,4], 0.5, alpha=2)"


@pytest.mark.parametrize(
    ("name", "inputs", "matmul", "convolution", "expected"),
    [
        ("aten.mm.default", (A, B), True, False, True),
        ("aten.mm.default", (A, B), False, True, False),
        ("aten.mm.default", (HALF, HALF), True, True, False),
        ("aten.convolution.default", (A, B), False, True, True),
        ("aten.convolution.default", (A, B), True, False, False),
        ("aten.add.Tensor", (A, A), True, True, False),
    ],
)
def test_tf32_is_of_float32_gemms_and_convolutions_each_by_its_switch(
    name: str, inputs: tuple[TensorSpec, ...], matmul: bool, convolution: bool, expected: bool
) -> None:
    operation = Operation(name, inputs)
    assert uses_tf32(operation, matmul, convolution) is expected
    assert kernel_key(operation, matmul, convolution).endswith(" tf32") is expected


def test_long_lists_are_their_count_elements_and_digest() -> None:
    """Of five tensors or more; what a scalar of a list operator is chooses no kernel."""
    few, many = (Operation("aten._foreach_mul_.Scalar", ((A,) * count, 0.5)) for count in (4, 5))
    assert kernel_key(few) == f"aten._foreach_mul_.Scalar([{', '.join(['float32[8,4]'] * 4)}], float)"
    digest = hashlib.sha256(" ".join(["float32[8,4]"] * 5).encode()).hexdigest()[:8]
    assert kernel_key(many) == f"aten._foreach_mul_.Scalar([5 float32 160 {digest}], float)"


def test_an_argument_that_is_another_is_in_the_key() -> None:
    assert kernel_key(Operation("aten.mul.Tensor", (A, A), same=(0, 0))).endswith(" same=1:0")


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({}, "optimizer adamw foreach"),
        ({"name": "sgd", "momentum": 0.9, "implementation": "fused"}, "optimizer sgd-momentum fused"),
        ({"name": "sgd", "momentum": 0.0}, "optimizer sgd foreach"),
    ],
)
def test_prefix_of_an_optimizers_host_keys(section: dict[str, object], expected: str) -> None:
    assert optimizer_prefix({"optimizer": section}) == expected
