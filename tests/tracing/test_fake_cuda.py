"""Devices as model code sees them, moves between host and device, and values that the host reads."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from perfmodel.errors import PerfModelError
from perfmodel.trace.trace import EventKind
from tests.refusals import refused
from tests.tracing.examples import forward_of, texts, trace_target

X = "float32[2,16,64]"


def launches(function):
    """(name, whether it launches) of the operators before the closing product with the weight's row."""
    return [(op.base_name, op.runs_on_device) for op in forward_of(function)][:-2]


def syncs(function):
    trace = trace_target("Example", {"function": function})
    steady = trace.steady
    return [trace.operations[a].base_name for a in steady.a[steady.kind == EventKind.SYNC]]


@pytest.mark.parametrize("function", ["cuda_answers", "made_on_host", "made_on_device", "moved_to_host"])
def test_devices_are_answered_as_on_cuda(function):
    assert forward_of(function)  # each asserts by itself


def test_what_is_made_without_a_device_lives_on_the_host():
    assert texts(forward_of("made_on_host"))[:2] == [
        "zeros() -> float32[3]@cpu",
        "lift_fresh(float32[]@cpu) -> float32[]@cpu",
    ]
    assert launches("made_on_host") == [("zeros", False), ("lift_fresh", False)]


def test_what_is_made_on_the_device_launches():
    assert launches("made_on_device") == [("zeros", True), ("arange", True)]
    assert syncs("made_on_device") == []


def test_moves_to_the_device_copy_and_wait():
    assert texts(forward_of("moved_to_device"))[:3] == [
        "arange() -> int64[64]@cpu",
        "_to_copy(int64[64]@cpu) -> int64[64]",
        f"mul({X}, int64[64]) -> {X}",
    ]
    assert syncs("moved_to_device") == ["_to_copy", "_to_copy"]
    assert syncs("moved_without_waiting") == []


def test_moves_to_where_a_tensor_is_do_nothing():
    assert launches("already_there") == []


def test_numbers_put_on_the_device_are_copied_there():
    assert texts(forward_of("tensor_of_numbers"))[0] == "lift_fresh(float32[]) -> float32[]"
    assert launches("tensor_of_numbers")[0] == ("lift_fresh", True)
    assert syncs("tensor_of_numbers") == ["lift_fresh"]


def test_moves_to_the_host_wait():
    assert texts(forward_of("moved_to_host"))[2] == "_to_copy(float32[]) -> float32[]@cpu"
    assert syncs("moved_to_host") == ["_to_copy"]


def test_values_that_do_not_depend_on_data_can_be_read():
    names = [name for name, _ in launches("reads_counts")]
    assert names == ["arange", "eq", "any", "_local_scalar_dense", "sum", "gt", "_local_scalar_dense"]
    assert syncs("reads_counts") == ["_local_scalar_dense"] * 2


def test_values_that_depend_on_data_are_refused_by_name_of_the_module():
    with refused("Example", "values"):
        forward_of("reads_data")


def test_shapes_that_depend_on_data_are_refused_by_name_of_the_module():
    with refused("Example", "shape"):
        forward_of("selects_by_data")


def test_fake_tensors_are_cpu_tensors_again_afterwards():
    forward_of("cuda_answers")
    with FakeTensorMode():
        fake = torch.zeros(2)
    assert isinstance(fake, FakeTensor)
    assert fake.device.type == "cpu"
    assert not fake.is_cuda


def test_errors_of_the_model_leave_torch_as_it_was():
    with pytest.raises(PerfModelError):
        forward_of("reads_data")
    assert not torch.overrides._get_current_function_mode_stack()
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert not torch.is_autocast_enabled("cuda")
