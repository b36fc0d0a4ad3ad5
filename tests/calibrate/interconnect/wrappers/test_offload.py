"""What an optimizer on the host takes, told apart from steps over few, many and large parameters."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from calibrate.host.reference import HostReference
from calibrate.interconnect.wrappers.fsdp import COUNTS
from calibrate.interconnect.wrappers.offload import LARGE_MIB, _records, offload_records, optimizer_records
from perfmodel.hardware import host_calls


def test_parameters_and_their_size_are_told_apart() -> None:
    small_s = [[3e-4 + 2e-5 * count] * 9 for count in COUNTS]
    found = _records("cpu optimizer", small_s, [3e-4 + 3 * 2e-5 + 3 * LARGE_MIB * 5e-4] * 5, 3)
    assert {name: each.time_s for name, each in found.items()} == pytest.approx(
        {"cpu optimizer": 3e-4, "cpu optimizer parameter": 2e-5, "cpu optimizer MiB": 5e-4}
    )
    assert (found["cpu optimizer MiB"].samples, found["cpu optimizer"].samples) == (5, 9 * len(COUNTS))


def test_every_optimizer_steps_over_parts_in_host_memory() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        found = optimizer_records(init_device_mesh("cpu", (1,)), HostReference("cpu", None), large=1)
    finally:
        dist.destroy_process_group()
    assert found.keys() == host_calls.HOST_OPTIMIZER_CALLS
    large_s, small_s = (found[f"cpu optimizer adamw foreach{of}"].time_s for of in (" MiB", " parameter"))
    assert large_s > small_s > 0


def test_a_cpu_has_nothing_to_offload() -> None:
    assert offload_records("cpu", HostReference("cpu", None)) == {}
