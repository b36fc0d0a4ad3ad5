"""What copies of other streams and operators beside them cost each other."""

from __future__ import annotations

import numpy as np
import pytest

from perfmodel.cost.kernels.kernel_cost import KernelCost
from perfmodel.cost.kernels.roofline import MEMORY_EFFICIENCY
from perfmodel.cost.memory_contention import memory_sharing
from perfmodel.hardware.profile import Device
from perfmodel.trace.operation import Operation, TensorSpec

COPY = 0
OPERATIONS = [Operation(f"aten.op{number}.default") for number in range(4)]
DEVICE = Device(kind="cuda", name="G", memory_bytes=1, peak_memory_bytes_per_s=100 / MEMORY_EFFICIENCY)


def cost(time_s: float, moved_bytes: float) -> KernelCost:
    return KernelCost(time_s, 0.0, "exact", "copy", 0.0, moved_bytes, "fp32", 1, time_s)


def test_both_draw_on_the_bandwidth_that_copies_reach() -> None:
    # 100 bytes a second are to be had; the copy takes them all. Operators: 50, 200 (out of the cache), and none.
    costs = [cost(2.0, 200.0), cost(1.0, 50.0), cost(1.0, 200.0), cost(1.0, 0.0)]
    found = memory_sharing(OPERATIONS, costs, np.array([1, 2, 3]), np.array([1.0, 1.0, 1.0]), [COPY], DEVICE)
    assert list(found) == [COPY]
    assert found[COPY].compute_factor.tolist() == pytest.approx([1.5, 2.0, 1.0])
    assert found[COPY].communication_factor.tolist() == pytest.approx([1.5, 2.0, 1.0])
    assert np.isinf(found[COPY].tail_s).all()


def test_what_leaves_enough_for_the_other_slows_nothing() -> None:
    costs = [cost(2.0, 60.0), cost(1.0, 50.0), cost(1.0, 90.0)]
    found = memory_sharing(OPERATIONS, costs, np.array([1, 2]), np.array([1.0, 1.0]), [COPY], DEVICE)
    assert found[COPY].compute_factor.tolist() == pytest.approx([1.0, 1.2])


def test_what_an_operator_draws_goes_with_how_long_it_lasts_in_the_step() -> None:
    costs, tails = [cost(1.0, 100.0), cost(1.0, 50.0)], np.array([3.0, 4.0])
    found = memory_sharing(OPERATIONS, costs, np.array([1, 1]), np.array([2.0, 0.0]), [COPY], DEVICE, tails)
    assert found[COPY].compute_factor.tolist() == pytest.approx([1.25, 1.0])
    assert found[COPY].tail_s.tolist() == [3.0, 4.0]


@pytest.mark.parametrize("empty", [cost(0.0, 10.0), cost(1.0, 0.0)])
def test_a_copy_of_nothing_shares_nothing(empty: KernelCost) -> None:
    assert not memory_sharing(OPERATIONS, [empty, cost(1.0, 10.0)], np.array([1]), np.array([1.0]), [COPY], DEVICE)


def test_copies_between_host_and_device_take_no_multiprocessors() -> None:
    on_host, on_device = TensorSpec((8,), (1,), "float32", "cpu"), TensorSpec((8,), (1,), "float32")
    pinned = Operation("aten._to_copy.default", (on_host,), (("device", "cuda"), ("non_blocking", True)), (on_device,))
    costs = [cost(1.0, 100.0), cost(1.0, 50.0)]
    assert not memory_sharing([pinned, OPERATIONS[1]], costs, np.array([1]), np.array([1.0]), [COPY], DEVICE)


def test_without_a_peak_nothing_is_known() -> None:
    unknown = DEVICE.model_copy(update={"peak_memory_bytes_per_s": None})
    costs = [cost(1.0, 100.0), cost(1.0, 50.0)]
    assert memory_sharing(OPERATIONS, costs, np.array([1]), np.array([1.0]), [COPY], unknown) == {}
