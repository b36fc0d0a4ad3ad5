"""The division of gradients around their reduction, where the collective adds and does not average.

Source: torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py (``_get_gradient_divide_factors``).
"""

from __future__ import annotations

from perfmodel.hardware import host_calls
from perfmodel.program.builder import ProgramBuilder
from perfmodel.program.program import Instruction
from perfmodel.trace.operation import Operation, TensorSpec

AVERAGED = ("float32", "bfloat16")


def divisors(dtype: str, ranks: int) -> tuple[float, float]:
    """Return what gradients are divided by before and after they are summed over ``ranks``.

    Both are near the root of ``ranks``, or half precision would run out of its range; both are 1 where the collective
    averages.

    >>> divisors("float16", 2), divisors("float16", 8), divisors("bfloat16", 8)
    ((2.0, 1.0), (4.0, 2.0), (1.0, 1.0))
    """
    if dtype in AVERAGED:
        return 1.0, 1.0
    before = 1
    while ranks % before == 0 and ranks / before > before:
        before *= 2
    return float(before), ranks / before


def divided(builder: ProgramBuilder, tensor: TensorSpec, divisor: float, stream: int) -> list[Instruction]:
    """Return the kernel that divides a tensor in place; nothing for a divisor of 1."""
    if divisor == 1:
        return []
    return [
        builder.launch(
            Operation("aten.div_.Tensor", (tensor, divisor), outputs=(tensor,)), host_calls.LAUNCH, stream=stream
        )
    ]
