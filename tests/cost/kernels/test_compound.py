import pytest

from perfmodel.cost.kernels.compound import kernels_of
from perfmodel.trace.operation import Operation, TensorSpec

X = TensorSpec.parse("float32[64,32]")
ROWS = TensorSpec.parse("float32[64]")
VALUE = TensorSpec.parse("float32[]")


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        (Operation("aten.mse_loss.default", (X, X), (), (VALUE,)), ["sub", "mean"]),
        (Operation("aten.mse_loss.default", (X, X, 2), (), (VALUE,)), ["sub", "sum"]),
        (Operation("aten.mse_loss.default", (X, X, 0), (), (X,)), ["sub"]),
        (Operation("aten.huber_loss.default", (X, X), (("reduction", 2),), (VALUE,)), ["sub", "sum"]),
        (Operation("aten.logsumexp.default", (X, (1,)), (), (ROWS,)), ["amax", "sub", "exp", "sum", "log", "add"]),
        (Operation("aten.count_nonzero.default", (X,), (), (VALUE,)), ["ne", "sum"]),
        (Operation("aten.mm.default", (X, X), (), (X,)), ["mm"]),
        (Operation("aten.full.default", ((), 1.0), (), (VALUE,)), ["full"]),
    ],
)
def test_kernels_one_after_the_other(operation, expected):
    assert [each.base_name for each in kernels_of(operation)] == expected


def test_a_reduction_keeps_its_dimensions_and_its_result():
    reduced = kernels_of(Operation("aten.logsumexp.default", (X, (1,)), (), (ROWS,)))[0]
    assert (reduced.inputs, reduced.outputs) == ((X, (1,)), (ROWS,))
    whole = kernels_of(Operation("aten.mse_loss.default", (X, X), (), (VALUE,)))[-1]
    assert (whole.inputs, whole.outputs) == ((X,), (VALUE,))
