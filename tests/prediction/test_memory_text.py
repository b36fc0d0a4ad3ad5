"""How much a step needs that does not fit, in words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from perfmodel.prediction.memory_text import shortage_text
from perfmodel.simulate.memory.walk import MemoryTimeline, simulate_memory
from tests.report.synthetic import MIB, prediction, profile

LEAST = "needs at least 20 MiB: 10 MiB more than the device's 10 MiB"


def stopped() -> MemoryTimeline:
    """A step that needs 20 MiB, on a device of 10 MiB."""
    device = profile().device.model_copy(update={"memory_bytes": 10 * MIB})
    return simulate_memory(prediction().program, profile().model_copy(update={"device": device}))


def test_the_least_is_said_with_its_rank() -> None:
    assert shortage_text(stopped(), 10 * MIB) == LEAST
    assert shortage_text(stopped(), 10 * MIB, 3) == LEAST.replace("20 MiB", "20 MiB on rank 3")


@pytest.mark.parametrize(
    ("spared_mib", "said"),
    [(4, ""), (5, "; 25 MiB without allocator retries"), (8, "; 28 MiB without allocator retries")],
)
def test_what_spares_retries_is_said_where_it_is_more(spared_mib: int, said: str) -> None:
    memory = stopped()
    assert memory.unlimited is not None
    reserved_bytes = (20 + spared_mib) * MIB - memory.outside_bytes
    first = memory.unlimited.first.model_copy(update={"peak_reserved_bytes": reserved_bytes})
    unlimited = replace(memory.unlimited, first=first)
    assert shortage_text(replace(memory, unlimited=unlimited), 10 * MIB) == LEAST + said
