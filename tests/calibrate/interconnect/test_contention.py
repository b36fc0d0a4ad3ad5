"""Loops side by side: how long each must run, and which part of it counts. The pairs themselves need GPUs."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from calibrate.fit.couplings import KIND_OF_KERNEL
from calibrate.interconnect import contention
from calibrate.interconnect.collectives import Wanted
from calibrate.interconnect.contention import (
    BESIDE,
    FED_S,
    MARKS,
    MOST_FED,
    MOST_LAUNCHES,
    ContentionBench,
    beside,
    beside_own,
    kernels,
    loops,
    overlapped_s,
)
from calibrate.interconnect.own_contention import OwnKernel
from calibrate.jobs import job
from calibrate.kernels.arguments import materialise
from perfmodel.trace.operation import Operation, TensorSpec
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


@pytest.mark.parametrize("launches", [1, 3, 20])
def test_loops_of_calls_with_several_launches_fit_the_queue(launches):
    timed, fed = loops(2e-5, 1e-3, launches, 1), loops(1e-3, 2e-5, 1, launches)
    assert timed.own == {1: 336, 3: 112, 20: 17}[launches]
    assert timed.own * launches <= MOST_LAUNCHES
    assert fed.held * launches <= MOST_LAUNCHES
    assert fed.other == {1: 1500, 3: 116, 20: 17}[launches]  # fed only where a launch lasts as long as FED_S


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
    )
    assert [each.size_bytes // MIB for each in beside(2, 5e-3)] == [4, 32, 32, 32]


def test_every_kernel_stands_for_a_kind_of_operator(monkeypatch):
    monkeypatch.setattr(torch, "randn", lambda *shape, **keys: torch.zeros(1))
    monkeypatch.setattr(torch, "empty", lambda *shape, **keys: torch.zeros(1))
    assert set(kernels("cpu")) == set(KIND_OF_KERNEL)


WIRE_S = {25 * MIB: 1e-4, 256 * MIB: 2e-3}  # of collectives on it


class Gpu:
    """Two streams on which calls end after what they take: ``slow`` times as long while the other stream is busy.

    Both loops are queued before either runs, so what a call takes is known when the whole queue is: marks are positions
    in it, and asking for the time between two runs it.
    """

    def __init__(self, slow=1.0, late=0):
        self.slow, self.late = slow, late
        self.queues, self.current, self.drains, self.emptied = {"main": [], "side": []}, "main", 0, 0

    def empty_cache(self):
        self.emptied += 1

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
        cuda = SimpleNamespace(current_stream=lambda: "main", stream=gpu.stream, empty_cache=gpu.empty_cache)
        monkeypatch.setattr(contention.torch, "cuda", cuda)
        monkeypatch.setattr(contention.dist, "all_reduce", lambda *arguments, **keys: None)
        monkeypatch.setattr(contention.dist, "get_world_size", lambda group: 2)
        monkeypatch.setattr(contention, "collective_call", lambda wanted, *_: gpu.call(WIRE_S[wanted.size_bytes]))
        found = object.__new__(ContentionBench)
        found.device = "cpu"
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
    found_s = bench(gpu)._beside(gpu.call(1e-3), gpu.call(1e-3), loops(1e-3, 1e-3), False)
    assert found_s == pytest.approx(2e-3)
    assert gpu.drains == 2 * 3


def test_a_loop_that_ends_too_soon_is_made_longer(bench):
    """30, 60 and 120 of a fiftieth of what was thought end before the timed one has run three times; 240 do not."""
    gpu = Gpu(2.0)
    counts = loops(1e-3, 1e-3)
    assert counts.other == 30
    assert bench(gpu)._beside(gpu.call(1e-3), gpu.call(2e-5), counts, True) == pytest.approx(2e-3)
    assert gpu.drains == 2 * 4
    assert bench(gpu)._beside(gpu.call(1e-3), gpu.call(5e-6), counts, True) is None


def test_a_pair_that_cannot_overlap_is_left_out(bench):
    gpu = Gpu()
    assert bench(gpu)._pair(gpu.call(1.0), gpu.call(1e-9), 1.0, 1.0) is None


def test_a_scenarios_kernel_is_measured_beside_a_long_and_a_short_collective():
    assert beside_own("all_gather", 2, 1e-4) == (
        Wanted("all_gather", 2, "float32", 256 * MIB),
        Wanted("all_gather", 2, "float32", 25 * MIB),
    )
    assert [each.size_bytes // MIB for each in beside_own("all_reduce", 2, 5e-3)] == [32, 4]


def product(rows, inner, inner_again=None):
    a, b, out = ((rows, inner), (inner_again or inner, 8), (rows, 8))
    a, b, out = (TensorSpec(shape, (shape[1], 1), "float32") for shape in (a, b, out))
    wanted = job(Operation("aten.mm.default", (a, b), (), (out,)), "scenario")
    return OwnKernel(wanted, "all_gather", 1, 0.5)


@pytest.fixture
def made(monkeypatch):
    """Operators run on the CPU and take 1 ms of the stand-in; what was made, in order."""
    names = []

    def make(gpu):
        def queued(operation, device):
            names.append(operation.inputs[0].text)
            real, queue = materialise(operation, device), gpu.call(1e-3)
            return lambda: (real(), queue())

        monkeypatch.setattr(contention, "materialise", queued)
        return names

    return make


def test_own_kernels_are_measured_one_after_the_other(bench, made):
    gpu = Gpu(1.5)
    names, notes = made(gpu), []
    wanted = [product(4, 6), product(5, 6)]
    found = bench(gpu).own_records(wanted, 100.0, notes.append)
    assert (names, notes, gpu.emptied) == (["float32[4,6]", "float32[5,6]"], [], 2)
    assert list(found) == [each.job.key for each in wanted]
    for pairs in found.values():
        assert list(pairs) == [f"all_gather 2 float32 {size * MIB}" for size in (256, 25)]
        for pair in pairs.values():
            assert pair.compute_factor == pytest.approx(1.5)
            assert pair.communication_factor == pytest.approx(1.5)
            assert pair.compute_s == pytest.approx(1e-3)
        assert [pair.communication_s for pair in pairs.values()] == pytest.approx([2e-3, 1e-4])


def test_a_kernel_that_fails_is_left_out_and_the_next_goes_on(bench, made):
    gpu, notes = Gpu(), []
    made(gpu)
    wrong, right = product(4, 6, 7), product(5, 6)
    found = bench(gpu).own_records([wrong, right], 100.0, notes.append)
    assert list(found) == [right.job.key]
    (note,) = notes
    assert note.startswith(f"{wrong.job.key} left out: ")
    assert gpu.emptied == 2


def test_a_kernel_that_fails_on_another_rank_is_left_out(bench, made):
    gpu, notes = Gpu(), []
    made(gpu)
    timed, kernel = bench(gpu), product(4, 6)
    timed._largest = lambda value: 1.0
    assert timed.own_records([kernel], 100.0, notes.append) == {}
    assert notes == [f"{kernel.job.key} left out: failed on another rank"]


def test_what_does_not_fit_in_the_budget_is_left_out(bench, made, monkeypatch):
    """Kernels of 4 s in 11 s: the third, which would begin after 8, would not end in time."""
    gpu, notes, now_s = Gpu(), [], [0.0]
    monkeypatch.setattr(contention, "time", SimpleNamespace(perf_counter=lambda: now_s[0]))
    names = made(gpu)
    timed = bench(gpu)
    pairs = timed._own_pairs

    def slowly(kernel, wires):
        now_s[0] += 4.0
        return pairs(kernel, wires)

    timed._own_pairs = slowly
    assert len(timed.own_records([product(rows, 6) for rows in (4, 5, 6, 7)], 11.0, notes.append)) == 2
    assert notes == ["2 of 4 kernels left out for time"]
    assert len(names) == 2


def test_nothing_is_measured_for_no_kernels(bench):
    gpu = Gpu()
    assert bench(gpu).own_records([], 25.0, pytest.fail) == {}
    assert gpu.drains == 0
