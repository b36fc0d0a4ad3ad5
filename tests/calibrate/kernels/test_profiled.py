from __future__ import annotations

from calibrate.kernels.memory_scripts import CLOSING_BYTES, OPENING_BYTES, scripts
from calibrate.kernels.profiled import Interval, assign


def test_work_belongs_to_the_label_it_starts_in() -> None:
    intervals = [
        Interval("making arguments", True, 5, 90),
        Interval("perfmodel call 0", False, 100, 100),
        Interval("perfmodel call 0", True, 120, 70),  # the label's own shadow on the device
        Interval("gemm", True, 130, 40),
        Interval("Memset (Device)", True, 180, 3),
        Interval("Context Sync", True, 185, 10),
        Interval("aten::mm", False, 110, 5),
        Interval("perfmodel call 1", False, 300, 50),
        Interval("late", True, 200, 1),
    ]
    assert assign(intervals, 3) == [(2, 43e-9), (0, 0.0), (0, 0.0)]


def alloc(address: int, size: int) -> dict[str, object]:
    return {"action": "alloc", "addr": address, "size": size}


def free(address: int) -> dict[str, object]:
    return {"action": "free_requested", "addr": address, "size": 0}


def marked(*events: dict[str, object]) -> list[dict[str, object]]:
    opening = [alloc(900 + i, size) for i, size in enumerate(OPENING_BYTES)]
    closing = [alloc(910 + i, size) for i, size in enumerate(CLOSING_BYTES)]
    return [*opening, *events, *closing, *(free(address) for address in (900, 901, 910, 911))]


def test_scripts_of_two_calls() -> None:
    history = [
        alloc(1, 4096),
        *marked(
            alloc(2, 64), {"action": "segment_alloc", "addr": 3, "size": 2**21}, alloc(3, 128), free(2), alloc(2, 32)
        ),
        free(1),
        *marked(),
        *marked(free(1), alloc(5, 8), free(5), {"action": "free_completed", "addr": 5, "size": 8}),
    ]
    assert scripts(history) == [(64, 128, -1, 32), (), (8, -1)]


def test_a_history_that_ends_early_gives_what_is_whole() -> None:
    assert scripts([*marked(alloc(1, 16)), *marked(alloc(1, 24))[:3]]) == [(16,)]
