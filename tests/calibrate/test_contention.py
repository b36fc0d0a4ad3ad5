"""Loops side by side: how long each must run, and which part of it counts. The pairs themselves need GPUs."""

import contextlib
from types import SimpleNamespace

import pytest

from calibrate import contention
from calibrate.collectives import Wanted
from calibrate.contention import (
    BESIDE,
    FED_S,
    MARKS,
    MOST_FED,
    MOST_LAUNCHES,
    ContentionBench,
    beside,
    kernels,
    loops,
    overlapped_s,
)
from calibrate.coupling import KIND_OF_KERNEL
from perfmodel.units import MIB

SECONDS = [5e-6, 25e-6, 116e-6, 9e-4, 2.7e-3, 8e-3, 0.06]


@pytest.mark.parametrize("own_s", SECONDS)
@pytest.mark.parametrize("other_s", SECONDS)
def test_the_other_loop_lasts_longer_where_the_queue_allows_it(own_s, other_s):
    counts = loops(own_s, other_s)
    assert 3 <= counts.own <= MOST_LAUNCHES
    assert counts.own % counts.stride == 0
    assert counts.own // counts.stride <= 2 * MARKS
    assert counts.held <= min(counts.other, MOST_LAUNCHES)
    assert counts.other <= (MOST_FED if other_s >= FED_S else MOST_LAUNCHES)
    if counts.own > 3:
        assert counts.other * other_s >= 0.99 * BESIDE * counts.own * own_s


def test_only_what_ran_side_by_side_counts():
    """Two seconds a call while the other runs, to 20; half a second after."""
    marks_s = [2.0 * index for index in range(11)] + [20.0 + 0.5 * index for index in range(1, 9)]
    assert overlapped_s(marks_s, 1, 20.0) == 2.0
    assert overlapped_s(marks_s, 4, 20.0) == 0.5
    assert overlapped_s(marks_s, 1, 100.0) < 1.5


def test_the_beginning_does_not_count():
    assert overlapped_s([0.0, 9.0, 10.0, 11.0, 12.0], 1, 50.0) == 1.0


def test_too_little_overlap_is_nothing():
    assert overlapped_s([0.0, 1.0, 2.0, 3.0], 1, 2.5) is None
    assert overlapped_s([0.0, 1.0, 2.0, 3.0], 1, 3.0) == 1.0


def test_collectives_beside_kernels_on_a_fast_and_a_slow_wire():
    assert beside(4, 1e-4) == (
        Wanted("all_reduce", 4, "float32", 25 * MIB),
        Wanted("all_reduce", 4, "float32", 256 * MIB),
        Wanted("all_gather", 4, "float32", 256 * MIB),
        Wanted("reduce_scatter", 4, "float32", 256 * MIB),
        Wanted("send_recv", 2, "float32", 64 * MIB),
    )
    assert [each.size_bytes // MIB for each in beside(2, 5e-3)] == [4, 32, 32, 32, 8]
    assert "send_recv" not in [each.kind for each in beside(3, 1e-4)]


def test_every_kernel_stands_for_a_kind_of_operator(monkeypatch):
    import torch

    monkeypatch.setattr(torch, "randn", lambda *shape, **keys: torch.zeros(1))
    monkeypatch.setattr(torch, "empty", lambda *shape, **keys: torch.zeros(1))
    assert set(kernels("cpu")) == set(KIND_OF_KERNEL)


class Gpu:
    """Two streams on which calls end after what they take: ``slow`` times as long while the other stream is busy.

    Both loops are queued before either runs, so what a call takes is known when the whole queue is: marks are positions
    in it, and asking for the time between two runs it.
    """

    def __init__(self, slow=1.0, late=0):
        self.slow, self.late = slow, late
        self.queues, self.current, self.drains = {"main": [], "side": []}, "main", 0

    def hold(self, seconds):
        self.queues = {"main": [], "side": []}

    def drain(self):
        self.drains += 1

    def mark(self):
        return self.current, len(self.queues[self.current])

    def passed(self, mark):
        self.late -= 1
        return self.late >= 0

    def between_s(self, first, last):
        ends = self.run()
        return ends[last[0]][last[1]] - ends[first[0]][first[1]]

    def run(self):
        ends = {name: [0.0] for name in self.queues}
        left = {name: list(queue) for name, queue in self.queues.items()}
        now_s = 0.0
        while any(left.values()):
            busy = [name for name in left if left[name]]
            slow = self.slow if len(busy) == 2 else 1.0
            step_s = min(left[name][0] for name in busy)
            now_s += step_s * slow
            for name in busy:
                left[name][0] -= step_s
                if left[name][0] < 1e-12:
                    left[name].pop(0)
                    ends[name].append(now_s)
        return ends

    def call(self, seconds):
        return lambda: self.queues[self.current].append(seconds)

    @contextlib.contextmanager
    def stream(self, name):
        before, self.current = self.current, name
        yield
        self.current = before


@pytest.fixture
def bench(monkeypatch):
    """On one rank, whose average and largest are its own."""

    def make(gpu):
        cuda = SimpleNamespace(current_stream=lambda: "main", stream=gpu.stream)
        monkeypatch.setattr(contention.torch, "cuda", cuda)
        monkeypatch.setattr(contention.dist, "all_reduce", lambda *arguments, **keys: None)
        found = object.__new__(ContentionBench)
        found.group, found._stream, found._side, found._flag = None, gpu, Side(), None
        found._agreed = lambda values_s, operator=None: values_s
        return found

    return make


class Side(str):
    """A stream by its name."""

    __slots__ = ()

    def __new__(cls):
        return super().__new__(cls, "side")

    def wait_event(self, event):
        """Both begin when the device goes on."""


@pytest.mark.parametrize("slow", [1.0, 1.5])
@pytest.mark.parametrize(("compute_s", "communication_s"), [(1e-3, 1e-3), (2.7e-3, 4e-4), (1e-4, 3e-3)])
def test_a_pair_is_slowed_by_what_slows_it(bench, slow, compute_s, communication_s):
    gpu = Gpu(slow)
    timed = bench(gpu)
    kernel, call = gpu.call(compute_s), gpu.call(communication_s)
    assert timed._alone_s(kernel) == pytest.approx(compute_s)
    record = timed._pair(kernel, call, compute_s, communication_s)
    assert record.compute_factor == pytest.approx(slow)
    assert record.communication_factor == pytest.approx(slow)
    assert (record.compute_s, record.communication_s, record.samples) == (compute_s, communication_s, 3)


def test_loops_that_were_not_queued_in_time_are_run_again(bench):
    gpu = Gpu(2.0, late=2)
    assert bench(gpu)._beside(gpu.call(1e-3), gpu.call(1e-3), 1e-3, 1e-3, False) == pytest.approx(2e-3)
    assert gpu.drains == 2 * 3


def test_a_loop_that_ends_too_soon_is_made_longer(bench):
    """30, 60 and 120 of a fiftieth of what was thought end before the timed one has run three times; 240 do not."""
    gpu = Gpu(2.0)
    assert loops(1e-3, 1e-3).other == 30
    assert bench(gpu)._beside(gpu.call(1e-3), gpu.call(2e-5), 1e-3, 1e-3, True) == pytest.approx(2e-3)
    assert gpu.drains == 2 * 4
    assert bench(gpu)._beside(gpu.call(1e-3), gpu.call(5e-6), 1e-3, 1e-3, True) is None


def test_a_pair_that_cannot_overlap_is_left_out(bench):
    gpu = Gpu()
    assert bench(gpu)._pair(gpu.call(1.0), gpu.call(1e-9), 1.0, 1.0) is None
