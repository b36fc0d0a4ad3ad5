import pytest

from calibrate.kernels import operators
from calibrate.kernels.operators import tensor
from perfmodel.cost.kernels.features import FORMS, features_of, memory_path
from perfmodel.hardware.profile import Device
from perfmodel.trace.operation import Operation, TensorSpec
from tests.cost.kernels.recorded import STEPS, recorded_operations

H200 = Device(kind="cuda", name="H200", memory_bytes=141 << 30, multiprocessors=132, l2_bytes=60 << 20)
X = tensor("float32", 4, 128, 768)


def _labels(operation, tf32=False):
    features = features_of(operation, H200, tf32)
    return features.curve, features.labels


def test_a_fused_step_does_not_count_its_step_counters():
    features = features_of(operators.fused_adamw([tensor("float32", 10)] * 37), H200, False)
    assert features.numbers["launches"] == 2  # 36 tensors a launch of four lists


def test_memory_paths():
    assert memory_path(operators.binary("add.Tensor", X, X)) == "vectorised"
    assert memory_path(operators.unary("mul.Tensor", X, 0.5)) == "vectorised"
    assert memory_path(operators.binary("mul.Tensor", X, tensor("float32"))) == "vectorised"
    assert memory_path(operators.binary("add.Tensor", X, X._replace(dtype="bfloat16"))) == "cast"
    assert memory_path(operators.binary("mul.Tensor", X, tensor("float32", 768))) == "broadcast"
    assert memory_path(operators.binary("mul.Tensor", X, X._replace(stride=(128, 1, 0)))) == "broadcast"
    assert memory_path(operators.binary("add.Tensor", X, X._replace(stride=(98304, 1, 128)))) == "permuted"


def test_copies_of_lists_have_the_dtypes_of_source_and_target():
    lists = ((tensor("bfloat16", 8), tensor("bfloat16", 4)), (tensor("float32", 8), tensor("float32", 4)))
    found = features_of(Operation("aten._foreach_copy_.default", lists), H200, False)
    assert (found.labels["path"], found.numbers["bytes"]) == ("same layout 4 2", 12 * (4 + 2))


@pytest.mark.parametrize(
    ("operation", "tf32", "expected"),
    [
        (operators.mm("bfloat16", 512, 768, 768, "NT"), False, ("gemm 16-bit", "NT", "16", "plain", "bf16")),
        (operators.mm("float16", 768, 50257, 512, "TN"), False, ("gemm 16-bit", "TN", "2 TN", "plain", "fp16")),
        (operators.mm("bfloat16", 30522, 768, 512, "TN"), False, ("gemm 16-bit", "TN", "4 TN", "plain", "bf16")),
        (operators.addmm("float32", 8, 16, 32), True, ("gemm tf32", "NT", "16", "bias", "tf32")),
        (operators.bmm("float32", 48, 128, 64, 128, "TN"), False, ("gemm fp32", "TN", "16", "batched", "fp32")),
    ],
)
def test_gemm_labels(operation, tf32, expected):
    curve, labels = _labels(operation, tf32)
    assert (curve, *(labels[name] for name in ("layout", "alignment", "operator", "precision"))) == expected


def test_row_lengths():
    def rows(operation):
        numbers = features_of(operation, H200, False).numbers
        return numbers["rows"], numbers["length"]

    for operation in (*operators.layer_norm("float32", 4, 128, 768), *operators.rms_norm("bfloat16", 4, 128, 768)):
        assert rows(operation) == (512, 768)
    read_one, read_all = operators.nll_loss("float32", 512, 30522)
    assert rows(read_one) == (512, 1)
    for operation in (*operators.softmax("float32", (512, 30522), log=True), read_all):
        assert rows(operation) == (512, 30522)
    assert rows(operators.softmax("float32", (4, 12, 128, 64))[0]) == (4 * 12 * 128, 64)
    assert rows(operators.reduction("mean.dim", X, (-1,))) == (512, 768)
    assert rows(operators.reduction("sum.dim_IntList", X, (0, 1))) == (512, 768)


def test_convolution_is_three_products():
    forward, backward = operators.convolution("bfloat16", 4, 64, 56, 128, kernel=3, stride=2, last=True, bias=False)
    one = features_of(forward, H200, False).numbers
    assert [one[f"forward_{size}"] for size in "mnk"] == [4 * 28 * 28, 128, 64 * 9]
    two = features_of(backward, H200, False).numbers
    assert [two[f"input_{size}"] for size in "mnk"] == [4 * 56 * 56, 64, 128 * 9 / 4]
    assert [two[f"weight_{size}"] for size in "mnk"] == [128, 64 * 9, 4 * 28 * 28]
    assert two["forward_m"] == 0


@pytest.mark.parametrize("path", STEPS, ids=lambda path: path.name)
def test_every_recorded_operator_has_a_curve(path):
    for operation in recorded_operations(path):
        if operation.base_name.startswith(("_foreach_", "_fused_")) or operation.base_name in (
            "cat",
            "convolution_backward",
        ):
            continue  # the recordings flatten lists
        assert features_of(operation, H200, False).form in FORMS


def test_what_touches_nothing_has_no_curve():
    arange = Operation("aten.arange.default", (128,), (), (tensor("int64", 128),))
    assert features_of(arange, H200, False).curve == "fill"
    assert features_of(Operation("aten.arange.default", (128,)), H200, False) is None


@pytest.mark.parametrize(
    ("name", "inputs", "expected"),
    [
        ("mean.default", (), "sum"),
        ("amin.default", ((0, 1),), "max"),
        ("max.default", (), "max"),
        ("max.dim", (1,), "argmax"),
        ("std.correction", ((0, 1),), "var"),
        ("norm.Scalar", (), "linalg_vector_norm"),
    ],
)
def test_reductions_that_do_the_same_are_one_kind(name, inputs, expected):
    x = TensorSpec.parse("float32[4,8192]")
    features = features_of(Operation(f"aten.{name}", (x, *inputs)), H200, False)
    assert (features.curve, features.labels["operator"]) == ("full_reduction", expected)


@pytest.mark.parametrize(
    ("name", "dtype", "on_cpu", "on_gpu"),
    [
        ("mean.default", "float32", "sum", "sum"),
        ("mean.default", "bfloat16", "mean of a cast", "sum"),
        ("sum.default", "bfloat16", "sum", "sum"),
        ("amax.default", "float32", "sum", "max"),
        ("any.default", "float32", "argmax", "max"),
        ("std.correction", "float32", "var", "var"),
    ],
)
def test_loops_of_a_cpu_are_other_kinds_of_reductions(name, dtype, on_cpu, on_gpu):
    operation = Operation(f"aten.{name}", (tensor(dtype, 2**20),), (), (tensor(dtype),))
    cpu = Device(kind="cpu", name="CPU", memory_bytes=2**34)
    assert [features_of(operation, device, False).labels["operator"] for device in (cpu, H200)] == [on_cpu, on_gpu]


def test_features_of_a_full_reduction():
    """One row, by all blocks that are resident; and four rows, each by a quarter of them."""
    x = TensorSpec.parse("float32[4,4194304]")
    whole, rows = (features_of(Operation("aten.sum.dim_IntList", (x, dims)), H200, False) for dims in ((0, 1), (1,)))
    assert [whole.numbers[name] for name in ("rows", "length", "values", "groups")] == [1, 2**24, 63, 528]
    assert [rows.numbers[name] for name in ("rows", "length", "values", "groups")] == [4, 2**22, 63, 132]
    assert whole.labels["path"] == "rows 4"
    assert features_of(Operation("aten.sum.dim_IntList", (x, (0, 1))), H200, False).form == "full_reduction"
