import pytest

from calibrate.kernels import operators
from calibrate.kernels.operators import channels_last, tensor
from perfmodel.cost.kernels.work import (
    arithmetic_kind,
    attention_shape,
    elements,
    footprint_bytes,
    gemm_sizes,
    least_bytes,
    model_flops,
    physical_flops,
    written_bytes,
)
from perfmodel.trace.operation import Operation, TensorSpec

X = tensor("float32", 4, 128, 768)
X_BYTES = 4 * 128 * 768 * 4


def test_gemm_sizes_and_flops():
    assert gemm_sizes(operators.mm("float32", 3, 5, 7, "TN")) == (1, 3, 5, 7)
    assert gemm_sizes(operators.addmm("float32", 3, 5, 7)) == (1, 3, 5, 7)
    assert gemm_sizes(operators.bmm("float32", 2, 3, 5, 7)) == (2, 3, 5, 7)
    assert model_flops(operators.bmm("float32", 2, 3, 5, 7)) == 2 * 2 * 3 * 5 * 7
    vector = Operation("aten.mv.default", (tensor("float32", 3, 7), tensor("float32", 7)), (), (tensor("float32", 3),))
    assert model_flops(vector) == 2 * 3 * 7


def test_complex_products_have_four_times_the_arithmetic():
    for dtype in ("complex64", "complex128"):
        assert (
            model_flops(operators.mm(dtype, 3, 5, 7)) == physical_flops(operators.mm(dtype, 3, 5, 7)) == 8 * 3 * 5 * 7
        )
        assert model_flops(operators.addmm(dtype, 3, 5, 7)) == 8 * 3 * 5 * 7
        assert model_flops(operators.bmm(dtype, 2, 3, 5, 7)) == 8 * 2 * 3 * 5 * 7
        x, y = tensor(dtype, 3, 7), tensor(dtype, 7)
        assert model_flops(Operation("aten.mv.default", (x, y), (), (tensor(dtype, 3),))) == 8 * 3 * 7
        assert arithmetic_kind(operators.mm(dtype, 3, 5, 7)) == "fp32"


def test_products_of_8_bits_have_their_factors_first():
    a, b, scale = tensor("float8_e4m3fn", 32, 64), tensor("float8_e4m3fn", 64, 16), tensor("float32", 32, 1)
    scaled = Operation("aten._scaled_mm.default", (a, b, scale, scale), (), (tensor("bfloat16", 32, 16),))
    assert model_flops(scaled) == 2 * 32 * 16 * 64
    assert arithmetic_kind(scaled) == "bf16"


@pytest.mark.parametrize(
    ("name", "inputs", "flops"),
    [
        ("_cdist_forward", (tensor("float32", 2, 10, 4), tensor("float32", 2, 20, 4), 1.0, None), 3 * 2 * 10 * 20 * 4),
        ("_pdist_forward", (tensor("float32", 10, 4), 2.0), 3 * 45 * 4),
        ("_pdist_backward", (tensor("float32", 45), tensor("float32", 10, 4), 2.0, tensor("float32", 45)), 10 * 45 * 4),
        ("_euclidean_dist", (tensor("float32", 10, 4), tensor("float32", 20, 4)), 2 * 10 * 20 * 4),
    ],
)
def test_distances_compute_for_each_pair_of_rows(name, inputs, flops):
    assert physical_flops(Operation(f"aten.{name}.default", inputs)) == flops
    assert model_flops(Operation(f"aten.{name}.default", inputs)) == 0


def test_convolution_flops():
    forward, backward = operators.convolution("float32", 2, 3, 8, 16, kernel=3, stride=2, last=False, bias=True)
    one = 2 * (2 * 16 * 4 * 4) * 3 * 3 * 3
    assert model_flops(forward) == one
    assert model_flops(backward) == 2 * one
    _, first = operators.convolution("float32", 2, 3, 8, 16, kernel=3, stride=2, last=False, bias=True, first=True)
    assert model_flops(first) == one


@pytest.mark.parametrize("backend", ["cudnn", "flash", "efficient"])
def test_causal_attention_does_half_the_work_but_counts_whole_for_mfu(backend):
    dtype = "float32" if backend == "efficient" else "bfloat16"
    forward, backward = operators.attention(backend, dtype, 2, 12, 12, 256, 64, causal=True)
    scores = 2 * 12 * 256 * 256 * 64
    assert model_flops(forward) == 4 * scores
    assert model_flops(backward) == 10 * scores
    assert physical_flops(forward) == pytest.approx(4 * scores * (1 + 1 / 256) / 2)
    whole, _ = operators.attention(backend, dtype, 2, 12, 12, 256, 64, causal=False, dropout=0.1)
    assert physical_flops(whole) == 4 * scores
    assert (attention_shape(whole).causal, attention_shape(whole).dropout) == (False, 0.1)


@pytest.mark.parametrize("backend", ["cudnn", "flash", "efficient"])
def test_attention_backward_knows_its_switches(backend):
    for causal in (True, False):
        for dropout in (0.0, 0.1):
            _, backward = operators.attention(backend, "bfloat16", 2, 16, 4, 512, 64, causal, dropout)
            shape = attention_shape(backward)
            assert (shape.causal, shape.dropout, shape.heads, shape.kv_heads) == (causal, dropout, 16, 4)


def test_arithmetic():
    assert arithmetic_kind(operators.mm("float32", 8, 8, 8)) == "fp32"
    assert arithmetic_kind(operators.mm("float32", 8, 8, 8), matmul_tf32=True) == "tf32"
    assert arithmetic_kind(operators.mm("bfloat16", 8, 8, 8), matmul_tf32=True) == "bf16"
    assert arithmetic_kind(operators.convolution("float32", 1, 8, 8, 8, 3, 1, False, False)[0]) == "tf32"
    assert arithmetic_kind(operators.convolution("float16", 1, 8, 8, 8, 3, 1, False, False)[1]) == "fp16"
    assert arithmetic_kind(operators.unary("neg.default", tensor("bfloat16", 8))) == "fp32"


SPLIT = (tensor("float32", 4, 7), tensor("float32", 4, 3))
JOINED = tensor("float32", 4, 7)


def _into(name, *inputs, out):
    outputs = (out,) if isinstance(out, TensorSpec) else out
    return Operation(f"aten.{name}", inputs, (("out", out),), outputs)


def _list_step(name):
    parts = (tensor("float32", 10), tensor("float32", 30))
    found = {
        op.name.removeprefix("aten."): op
        for op in [*operators.foreach_adamw(parts), *operators.foreach_sgd(parts), operators.fused_adamw(parts)]
    }
    return found[name]


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        (operators.mm("bfloat16", 2, 3, 5), 2 * (2 * 5 + 5 * 3 + 2 * 3)),
        (operators.binary("add.Tensor", X, X), 3 * X_BYTES),
        (operators.binary("add_.Tensor", X, X), 3 * X_BYTES),
        (operators.binary("mul.Tensor", X, tensor("float32", 768)), 2 * X_BYTES + 768 * 4),
        (operators.binary("mul.Tensor", X._replace(stride=(128, 1, 0)), X, out=X), 2 * X_BYTES + 4 * 128 * 4),
        (operators.unary("relu_.default", X), 2 * X_BYTES),
        (operators.unary("zero_.default", X), X_BYTES),
        (operators.binary("copy_.default", X, X), 2 * X_BYTES),
        (operators.cast(X, "bfloat16"), 1.5 * X_BYTES),
        (operators.dropout(X)[0], 2.25 * X_BYTES),
        (operators.embedding("float32", 50257, 768, 4, 128)[0], 2 * X_BYTES + 4 * 128 * 8),
        (operators.embedding("float32", 1000, 768, 4, 128)[1], X_BYTES + 4 * 128 * 8 + 1000 * 768 * 4),
        (operators.nll_loss("float32", 512, 1000)[0], 512 * 8 + 512 * 4 + 8),
        (operators.nll_loss("float32", 512, 1000)[1], 512 * 8 + 512 * 1000 * 4),
        (operators.call("empty.memory_format", (8,), out=X), 0),
        (_into("mul.out", X, X, out=X), 3 * X_BYTES),
        (_into("split_with_sizes_copy.out", tensor("float32", 4, 10), (7, 3), 1, out=SPLIT), 2 * 160),
        (_into("_chunk_cat.out", (tensor("bfloat16", 7, 3), tensor("bfloat16", 2)), 0, 4, out=JOINED), 46 + 4 * 7 * 4),
        (_list_step("_foreach_mul_.Scalar"), 2 * 160),
        (_list_step("_foreach_addcdiv_.ScalarList"), 4 * 160),
        (_list_step("_foreach_sqrt.default"), 2 * 160),
        (_list_step("_foreach_norm.Scalar"), 160 + 2 * 4),
        (_list_step("_fused_adamw_.default"), 7 * 160 + 2 * 4),
    ],
    ids=lambda value: value.base_name if isinstance(value, Operation) else "",
)
def test_least_bytes(operation, expected):
    assert least_bytes(operation) == expected


def test_max_pool_backward_does_not_read_the_input():
    _, backward = operators.max_pool("bfloat16", 2, 8, 16, 2, 2, last=True)
    y, x = 2 * 8 * 8 * 8, 2 * 8 * 16 * 16
    assert least_bytes(backward) == y * 2 + y * 8 + x * 2


def test_elements():
    assert elements(operators.unary("neg.default", channels_last("float32", 2, 3, 4, 5))) == 120
    assert elements(_list_step("_foreach_lerp_.Scalar")) == 40
    assert elements(operators.fused_adamw([tensor("float32", 7)])) == 7
    assert elements(operators.embedding("float32", 50257, 768, 4, 128)[0]) == 4 * 128 * 768
    assert elements(operators.nll_loss("float32", 512, 1000)[0]) == 512
    assert physical_flops(operators.fused_adamw([tensor("float32", 10)])) == 160


@pytest.mark.parametrize(
    ("operation", "written", "footprint"),
    [
        (operators.binary("add.Tensor", X, X), X_BYTES, 3 * X_BYTES),
        (operators.binary("add_.Tensor", X, X), X_BYTES, 2 * X_BYTES),
        (operators.unary("zero_.default", X), X_BYTES, X_BYTES),
        (_into("split_with_sizes_copy.out", tensor("float32", 4, 10), (7, 3), 1, out=SPLIT), 160, 320),
        (operators.binary("copy_.default", X, X), X_BYTES, 2 * X_BYTES),
        (_list_step("_foreach_addcdiv_.ScalarList"), 160, 3 * 160),
        (_list_step("_foreach_sqrt.default"), 160, 2 * 160),
        (_list_step("_fused_adamw_.default"), 3 * 160, 4 * 160 + 2 * 4),
    ],
    ids=lambda value: value.base_name if isinstance(value, Operation) else "",
)
def test_written_bytes_and_footprint(operation, written, footprint):
    assert (written_bytes(operation), footprint_bytes(operation)) == (written, footprint)
