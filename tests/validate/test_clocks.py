"""Times from mark to mark, and how they are put together into steps and phases."""

import pytest

from validate import clocks
from validate.clocks import HostClock, steps_of

STEP = [("zero_grad", -1), ("forward", 0), ("backward", 0), ("forward", 1), ("backward", 1), ("optimizer", -1)]


def test_micro_batches_add_up_within_their_step():
    intervals = [(*label, float(index)) for index, label in enumerate(STEP + STEP)]
    steps_s, phases_s = steps_of(intervals)
    assert steps_s == (0 + 1 + 2 + 3 + 4 + 5, 6 + 7 + 8 + 9 + 10 + 11)
    assert phases_s == {
        "zero_grad": (0, 6),
        "forward": (1 + 3, 7 + 9),
        "backward": (2 + 4, 8 + 10),
        "optimizer": (5, 11),
    }


def test_no_marks_are_no_steps():
    assert steps_of([]) == ((), {})


def test_a_phase_lasts_until_the_next_begins(monkeypatch):
    times_s = iter([10.0, 11.0, 13.0, 16.0, 20.0])
    monkeypatch.setattr(clocks.time, "perf_counter", lambda: next(times_s))
    clock = HostClock()
    for _ in range(2):
        for label in [("forward", 0), ("optimizer", -1), ("end", -1)]:
            clock.mark(*label)
    clock.stop()
    assert clock.intervals() == [("forward", 0, 1), ("optimizer", -1, 2), ("forward", 0, 3), ("optimizer", -1, 4)]


@pytest.mark.gpu
def test_cuda_events_time_the_device_not_the_host():
    import torch

    clock = clocks.CudaClock(2)
    data = torch.ones(4096, 4096, device="cuda")
    for label in (("forward", 0), ("backward", 0)):
        clock.mark(*label)
        for _ in range(10):
            data = data @ data
    clock.stop()
    intervals = clock.intervals()
    assert [label[:2] for label in intervals] == [("forward", 0), ("backward", 0)]
    assert all(seconds > 1e-3 for _, _, seconds in intervals)  # twenty products of 137 GFLOP each
