"""CUDA's autocast policy: each kind of operator under amp-bf16, and that CPU's own policy comes back."""

import pytest
import torch

from perfmodel.tracing import cuda_autocast
from perfmodel.tracing.cuda_autocast import CudaAutocastPolicy
from tests.tracing.examples import forward_of, texts

X, WEIGHT = "float32[2,16,64]", "float32[64,64]"
LOW_X, LOW_WEIGHT = "bfloat16[2,16,64]", "bfloat16[64,64]"
MATMUL = [
    f"t({LOW_WEIGHT}) -> bfloat16[64,64]{{1,64}}",
    f"view({LOW_X}) -> bfloat16[32,64]",
    "mm(bfloat16[32,64], bfloat16[64,64]{1,64}) -> bfloat16[32,64]",
    f"_unsafe_view(bfloat16[32,64]) -> {LOW_X}",
]


def test_weights_are_cast_once_and_before_inputs():
    casts = [f"_to_copy({WEIGHT}) -> {LOW_WEIGHT}", f"_to_copy({X}) -> {LOW_X}"]
    assert texts(forward_of("linear_twice", "amp-bf16")) == casts + MATMUL + MATMUL


def test_operators_only_cuda_casts_have_a_cache_too():
    names = [op.base_name for op in forward_of("matvec_twice", "amp-bf16")]
    assert names == [
        "select",
        "select",
        "_to_copy",
        "_to_copy",
        "mv",
        "select",
        "select",
        "_to_copy",
        "mv",
        "add",
        "_to_copy",
    ]


def test_nothing_is_cast_where_autocast_is_off():
    names = [op.base_name for op in forward_of("linear_outside_autocast", "amp-bf16")]
    assert names == ["t", "view", "mm", "_unsafe_view"]


@pytest.mark.parametrize(("precision", "names"), [("fp32", ["select", "mul"]), ("amp-bf16", ["mul", "select", "mul"])])
def test_models_see_whether_autocast_is_on(precision, names):
    assert [op.base_name for op in forward_of("scaled_where_autocast_is_on", precision)] == names


def test_the_default_dtype_is_float16():
    assert texts(forward_of("default_autocast_dtype"))[0] == f"_to_copy({WEIGHT}) -> float16[64,64]"


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("total", [f"sum({LOW_X}) -> float32[]"]),
        ("explicit_total", [f"sum({LOW_X}) -> bfloat16[]"]),
        ("norm", [f"linalg_vector_norm({LOW_X}) -> float32[]"]),
        ("power", [f"_to_copy({LOW_X}) -> {X}", f"pow({X}) -> {X}"]),
        ("promoted", [f"_to_copy({LOW_X}) -> {X}"] * 2 + [f"addcmul({X}, {X}, {X}) -> {X}"]),
        ("concatenated", [f"cat({LOW_X}, {X}) -> float32[4,16,64]"]),
        (
            "layer_norm",
            [f"_to_copy({LOW_X}) -> {X}", f"native_layer_norm({X}) -> {X}, float32[2,16,1], float32[2,16,1]"],
        ),
    ],
)
def test_each_kind_of_operator(function, expected):
    found = [text for text in texts(forward_of(function, "amp-bf16")) if text != f"_to_copy({X}) -> {LOW_X}"]
    assert found[: len(expected)] == expected


def test_every_operator_that_cuda_casts_is_in_a_table_or_goes_to_float32():
    listed = (
        cuda_autocast.LOWER_PRECISION
        | cuda_autocast.SET_DTYPE
        | set(cuda_autocast.APPEND_DTYPE)
        | cuda_autocast.PROMOTE
        | cuda_autocast.BANNED
    )
    assert listed <= cuda_autocast._registered("AutocastCUDA")


def test_binary_cross_entropy_is_refused_as_cuda_refuses_it():
    half = torch.full((2,), 0.5)
    refused = pytest.raises(RuntimeError, match="unsafe under autocast")
    with CudaAutocastPolicy().installed(), torch.autocast("cpu", torch.bfloat16), refused:
        torch.nn.functional.binary_cross_entropy(half, half)


def test_cpu_has_its_own_policy_back_afterwards():
    def dtypes():
        low = torch.ones(2, 2, dtype=torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16):
            return torch.cat([low, low.float()]).dtype, low.exp().dtype, (low.float() @ low.float()).dtype

    before = dtypes()
    with CudaAutocastPolicy().installed():
        within = dtypes()
    assert within == (torch.float32, torch.float32, torch.bfloat16)
    assert before == dtypes() == (torch.float32, torch.bfloat16, torch.bfloat16)
