"""Tensors that are passed twice: their text, their file form, and the keys they give."""

import re

import pytest

from perfmodel.trace.kernel_key import kernel_key
from perfmodel.trace.operation import Operation, TensorSpec, decode_operation, encode_operation

X, Y = TensorSpec.parse("float32[8,8]"), TensorSpec.parse("float32[8]")
MUL = "aten.mul.Tensor(float32[8,8], float32[8,8])"


def lists(count, same=()):
    tensors = (Y,) * count
    return Operation("aten._foreach_addcmul_.Scalar", (tensors, tensors, tensors, 0.5), same=same)


@pytest.mark.parametrize(
    ("operation", "key"),
    [
        (Operation("aten.mul.Tensor", (X, X)), MUL),
        (Operation("aten.mul.Tensor", (X, X), same=(0, 0)), f"{MUL} same=1:0"),
        (
            Operation("aten.add.Tensor", (X, X), (("alpha", 2), ("out", X)), same=(0, 1, 0)),
            "aten.add.Tensor(float32[8,8], float32[8,8], alpha=2, out=float32[8,8]) same=2:0",
        ),
        (
            lists(260, (*range(520), *range(260, 520))),
            "aten._foreach_addcmul_.Scalar([260 float32 2080 a32b1234], [260 float32 2080 a32b1234],"
            " [260 float32 2080 a32b1234], float) same=520:260x260",
        ),
    ],
)
def test_keys(operation, key):
    assert re.sub(r"\b[0-9a-f]{8}\]", "a32b1234]", kernel_key(operation)) == key


def test_tf32_comes_before():
    product = Operation("aten.mm.default", (X, X), same=(0, 0))
    assert kernel_key(product, matmul_tf32=True) == "aten.mm.default(float32[8,8], float32[8,8]) tf32 same=1:0"


def test_many_runs_are_a_digest():
    swapped = lists(10, tuple(range(10)) * 2 + tuple(range(9, -1, -1)))
    assert kernel_key(swapped).rsplit("same=", 1)[1].startswith("11 ")


def test_calls_that_repeat_a_tensor_are_other_calls():
    plain, square = Operation("aten.mul.Tensor", (X, X)), Operation("aten.mul.Tensor", (X, X), same=(0, 0))
    assert plain != square
    assert len({plain, square}) == 2
    assert (plain.distinct_inputs(), square.distinct_inputs()) == ([X, X], [X])


@pytest.mark.parametrize("same", [(), (0, 1, 2, 3, 4, 3, 2, 1, 0), (*range(6), 3, 4, 5), (0,) * 9])
def test_the_file_form_gives_them_back(same):
    operation = lists(3, same)
    assert decode_operation(encode_operation(operation)) == operation
