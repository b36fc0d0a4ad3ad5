"""Sums of gradients: in place where nobody else holds the first, as the engine does it without modes."""

from tests.tracing.examples import trace_target
from tests.tracing.recordings import operations_of


def sums(function):
    trace = trace_target("Example", {"function": function})
    operations = [op.name for _, op in operations_of(trace, trace.steady, "backward")]
    return [name for name in operations if name.startswith("aten.add")]


def test_a_gradient_with_one_owner_is_summed_in_place():
    assert sums("sums_in_backward") == ["aten.add_.Tensor"]


def test_a_gradient_that_another_node_still_needs_is_not():
    of_y, of_weight = sums("sums_shared_in_backward")
    assert (of_y, of_weight) == ("aten.add.Tensor", "aten.add_.Tensor")
