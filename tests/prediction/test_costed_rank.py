"""What a launch takes in its step: closed forms on a step whose bytes are told."""

from __future__ import annotations

import pytest

from perfmodel.cost.kernels.kernel_cost import KernelCost
from perfmodel.hardware.profile import Cache, Device, Profile
from perfmodel.prediction.costed_rank import _durations_s
from perfmodel.program.program import Program
from perfmodel.trace.operation import Operation
from perfmodel.trace.trace import EventKind, Storage, StorageKind
from tests.builders import program_of

CAPACITY = 1000.0
WARM_S, COLD_S, MISS_S = 10e-6, 30e-6, 1e-6


def step(*touched: tuple[int, int]) -> Program:
    """A forward of calls: (operator, bytes) of each; every operator touches a storage of its own."""
    events = [(EventKind.OP, operation, -1, {operation: size}) for operation, size in touched]
    operations = (Operation("aten.add.Tensor"), Operation("aten._foreach_mul_.Scalar"))
    storages = tuple(Storage(number, 4096, StorageKind.PARAMETER) for number in range(2))
    return program_of(("forward", 0, events), operations=operations, persistent=storages)


def profile(**cache: float) -> Profile:
    device = Device(kind="cuda", name="G", memory_bytes=2**36)
    return Profile(name="g", device=device, cache=Cache(capacity_bytes=CAPACITY, **cache))


@pytest.mark.parametrize(
    ("touched", "data", "code"),
    [
        ([(0, 100), (0, 100)], [1, 1], [1, 1]),
        # The first: 1,100 bytes passed. The second finds 0.4 of its bytes after 500, 0.9 of them after itself.
        ([(0, 500), (1, 1100)], [0.4, 0.4 / 0.9], [0.9, 1]),
        ([(0, 500), (1, 2000)], [0, 0], [0, 1]),
    ],
)
@pytest.mark.parametrize("kernels", [1, 120])
def test_a_call_fetches_data_and_code_that_have_left_the_cache(
    touched: list[tuple[int, int]], data: list[float], code: list[float], kernels: int
) -> None:
    """However many kernels it launches: they are of one code."""
    costs = [KernelCost(WARM_S, 0.0, "exact", "pointwise", 0.0, 0.0, "fp32", kernels, COLD_S)] * 2
    program = step(*touched)
    launches = program.instructions.launches
    without_s = [COLD_S - (COLD_S - WARM_S) * share for share in data]
    assert _durations_s(program, launches, costs, profile()) == pytest.approx(without_s)
    with_s = [time_s + MISS_S * (1 - share) for time_s, share in zip(without_s, code, strict=True)]
    assert _durations_s(program, launches, costs, profile(code_miss_s=MISS_S)) == pytest.approx(with_s)
