"""The sentence that says what to change first."""

from __future__ import annotations

import pytest

from perfmodel.cost.kernels.kernel_cost import KernelCost
from perfmodel.prediction.bottleneck import bottleneck, slow_rank
from perfmodel.prediction.breakdown import RankFigures
from perfmodel.prediction.prediction import KernelUse

STEP_S = 1.0


def rank(busy_s: float, bubble_s: float = 0.0, host_busy_s: float = 0.1, exposed_s: float = 0.0) -> RankFigures:
    """Busy with products; the rest of the step waits for the host."""
    cost = KernelCost(busy_s, 0.0, "exact", "gemm", 0.0, 0.0, "fp32", 1, busy_s)
    parts = {"forward_s": busy_s, "exposed_communication_s": exposed_s, "bubble_s": bubble_s}
    left_s = STEP_S - sum(parts.values())
    return RankFigures((KernelUse("k", cost, 1, busy_s),), parts | {"host_bound_s": left_s}, busy_s, host_busy_s)


EVEN = [rank(0.2, 0.8), rank(0.2, 0.8)]
BUSY_FIRST = [rank(0.9, 0.1), rank(0.1, 0.9), rank(0.1, 0.9)]
SLOW_HOST = [rank(0.2, 0.0, 1.0), rank(0.1, 0.85, 0.1), rank(0.1, 0.85, 0.1)]


@pytest.mark.parametrize(
    ("ranks", "host_s", "wire_s", "sentence"),
    [
        ([rank(0.8)], 0.1, 0.0, "the device: gemm kernels take 80 % of the step"),
        ([rank(0.3, exposed_s=0.5)], 0.1, 0.5, "the interconnect: exposed communication takes 50 % of the step"),
        ([rank(0.3)], 0.9, 0.0, "the host: 90 % of the step follows it, the device waits 70 %"),
        ([rank(0.3)], 1.1, 0.0, "the host: 100 % of the step follows it, the device waits 70 %"),
        ([rank(0.8, 0.2), rank(0.6, 0.4)], 0.1, 0.0, "the device: gemm kernels take 70 % of the step over all ranks"),
        (EVEN, 0.1, 0.1, "the pipeline's bubbles: 80 % of the step over all ranks; more micro-batches would shorten them"),
        (EVEN, 0.1, 0.6, "the pipeline's bubbles: 80 % of the step over all ranks; messages are the cause: 60 % of the step follows them"),
        (BUSY_FIRST, 0.1, 0.0, "the pipeline's bubbles: 63 % of the step over all ranks; the other ranks wait for rank 0, whose gemm kernels take 90 % of the step"),
        (SLOW_HOST, 0.4, 0.0, "the pipeline's bubbles: 57 % of the step over all ranks; the other ranks wait for rank 0, whose host works 100 % of the step"),
        (SLOW_HOST, 0.9, 0.0, "the host of rank 0: 90 % of the step follows it, it works 100 %, and the other ranks wait for that rank"),
        ([rank(0.2, 0.5, 0.9), rank(0.2, 0.7, 0.9)], 0.9, 0.0, "the host: 90 % of the step follows it, devices wait 20 % for it and 60 % for other ranks"),
        ([rank(0.8, 0.19, 0.9), rank(0.8, 0.19, 0.9)], 0.9, 0.0, "the device: gemm kernels take 80 % of the step over all ranks"),
        ([rank(0.8, 0.17, 0.9), rank(0.8, 0.19, 0.9)], 0.9, 0.0, "the host: 90 % of the step follows it, devices wait 2 % for it and 18 % for other ranks"),
        ([rank(0.99)], 0.9, 0.0, "the device: gemm kernels take 99 % of the step"),
        ([RankFigures((), {}, 0.0, 0.0)], 0.9, 0.0, "nothing runs on the device"),
    ],
)  # fmt: skip
def test_what_takes_most_is_named(ranks: list[RankFigures], host_s: float, wire_s: float, sentence: str) -> None:
    assert bottleneck(STEP_S, ranks, host_s, wire_s) == sentence


def test_a_rank_is_slow_that_explains_most_of_the_waiting() -> None:
    """It has 0.4 more to do than the mean, and itself waits 0.3."""
    assert slow_rank(STEP_S, [rank(0.1), rank(0.7), rank(0.1)]) == 1
    assert slow_rank(STEP_S, [rank(0.3), rank(0.7), rank(0.3)]) is None
    assert slow_rank(STEP_S, [rank(0.88), rank(1.0), rank(0.88)]) is None
