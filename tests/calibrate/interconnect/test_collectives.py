"""Sizes as nccl-tests counts them, samples of which the host was not in time, and what several passes say together."""

import math
from types import SimpleNamespace

import pytest
import torch

from calibrate.interconnect import collectives
from calibrate.interconnect.collectives import ATTEMPTS, REPEATS, CollectiveBench, Wanted, collective_call, record_of
from calibrate.interconnect.sizes import grid, ladder, message_grid
from calibrate.interconnect.sweeps import LONGEST_S, Sweeps
from perfmodel.hardware.interconnect import COLLECTIVES, MESSAGES, CollectiveRecord
from perfmodel.units import GIB, KIB, MIB


class Library:
    """In place of torch.distributed: notes the tensors it is given."""

    ReduceOp = SimpleNamespace(MAX="max")

    def __init__(self, rank=0):
        self.rank, self.seen = rank, []

    def __getattr__(self, name):
        def note(*arguments, **keys):
            tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
            self.seen.append((name, *(each.numel() * each.element_size() for each in tensors)))

        return note

    def get_rank(self, group=None):
        return self.rank

    def get_global_rank(self, group, rank):
        return rank


@pytest.mark.parametrize(
    ("kind", "rank", "expected"),
    [
        ("all_reduce", 0, ("all_reduce", 4096)),
        ("broadcast", 0, ("broadcast", 4096)),
        ("all_gather", 0, ("all_gather_into_tensor", 4096, 1024)),
        ("reduce_scatter", 0, ("reduce_scatter_tensor", 1024, 4096)),
        ("all_to_all", 0, ("all_to_all_single", 4096, 4096)),
        ("send_recv", 0, ("send", 4096)),
        ("send_recv", 1, ("recv", 4096)),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sizes_are_those_of_nccl_tests(monkeypatch, kind, rank, expected, dtype):
    library = Library(rank)
    monkeypatch.setattr(collectives, "dist", library)
    collective_call(Wanted(kind, 4, dtype, 4096), None, "cpu")()
    assert library.seen == [expected]


@pytest.mark.parametrize("rank", [0, 1])
def test_an_exchange_is_one_batch_of_a_message_each_way(monkeypatch, rank):
    batches, waited = [], []

    def batch_isend_irecv(batch):
        batches.append(batch)
        return [SimpleNamespace(wait=lambda: waited.append(True))]

    library = Library(rank)
    library.isend, library.irecv, library.batch_isend_irecv = "isend", "irecv", batch_isend_irecv
    library.P2POp = lambda operation, tensor, group, group_peer: (operation, tensor, group_peer)
    monkeypatch.setattr(collectives, "dist", library)
    call = collective_call(Wanted("exchange", 2, "bfloat16", 4096), None, "cpu")
    call()
    ((sent, received),) = batches
    assert (sent[0], sent[2], received[0], received[2]) == ("isend", 1 - rank, "irecv", 1 - rank)
    assert sent[1].nbytes == received[1].nbytes == 4096
    assert sent[1].data_ptr() != received[1].data_ptr()
    assert waited == [True]


class Device:
    """A stream on which a collective takes ``call_s``, and whose host is late in the runs listed."""

    def __init__(self, call_s, late=()):
        self.call_s, self.late = call_s, late
        self.held_s, self.calls, self.runs = [], 0, -1

    def hold(self, seconds):
        self.held_s.append(seconds)
        self.runs += 1

    def mark(self):
        return self.calls

    def passed(self, mark):
        return self.runs in self.late

    def between_s(self, first, last):
        slow = 100.0 if self.runs in self.late else 1.0
        return (last - first) * self.call_s * slow

    def drain(self):
        """Nothing waits."""

    def call(self):
        self.calls += 1


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.setattr(collectives, "dist", Library())
    return lambda device: CollectiveBench(None, "cpu", device)


def test_a_sample_for_which_the_host_was_late_is_taken_again(bench):
    device = Device(1e-5, late=(2, 4))
    assert bench(device).samples_s(device.call) == pytest.approx([1e-5] * REPEATS)
    assert device.runs + 1 == 1 + REPEATS + 2
    assert device.held_s[-1] > device.held_s[1]
    assert device.calls == 1 + 1 + 20 * (REPEATS + 2)


def test_where_the_host_always_is_late_there_are_samples_all_the_same(bench):
    device = Device(1e-5, late=range(100))
    found = bench(device).samples_s(device.call)
    assert found == pytest.approx([1e-3] * REPEATS)
    assert device.runs + 1 == ATTEMPTS * (1 + REPEATS)


def test_what_the_library_refuses_is_an_error_and_not_the_end(monkeypatch, bench):
    def refuse(*arguments, **keys):
        raise RuntimeError("Invalid scalar type\nmore")

    library = Library()
    library.all_gather_into_tensor = refuse
    monkeypatch.setattr(collectives, "dist", library)
    found = CollectiveBench(None, "cpu", Device(1e-5)).measure(Wanted("all_gather", 2, "float32", 1024))
    assert found == ([], "RuntimeError: Invalid scalar type")


def test_running_out_of_memory_is_told_in_short(monkeypatch, bench):
    def full(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")

    monkeypatch.setattr(collectives, "_random", full)
    assert bench(Device(1.0)).measure(Wanted("all_reduce", 2, "float32", 1024)) == ([], "out of memory")


def test_what_fails_on_another_rank_is_not_tried_on_this_one(monkeypatch, bench):
    device = Device(1.0)
    alone = bench(device)
    monkeypatch.setattr(alone, "agree", lambda value: 1.0)
    found = alone.measure(Wanted("all_reduce", 2, "float32", 1024))
    assert (found, device.runs) == (([], "failed on another rank"), -1)


def test_of_three_passes_the_middle_one_counts():
    found = record_of([[1.0, 1.0, 1.1], [1.8, 1.8, 1.8], [1.02, 1.02, 1.02]])
    assert (found.time_s, found.samples) == (1.02, 9)
    two = record_of([[2.0], [4.0]], "scenario")
    assert two == CollectiveRecord(time_s=3.0, spread=math.sqrt(2) / 3.0, samples=2, origin="scenario")


def test_ladders():
    assert ladder(GIB)[0] == KIB
    assert ladder(GIB)[-1] == GIB
    assert [size for size in ladder(MIB) if size > MIB // 4] == [
        MIB * 3 // 8,
        MIB // 2,
        MIB * 3 // 4,
        MIB,
        MIB * 3 // 2,
    ]
    assert list(grid(2, KIB)) == [(kind, KIB) for kind in COLLECTIVES if kind not in MESSAGES]
    assert list(grid(3, KIB)) == [("all_reduce", KIB), ("broadcast", KIB)]
    assert ("all_gather", 3 * MIB // 2) not in list(grid(4, GIB))
    sizes = [size for _, size in grid(4, GIB)]
    assert sizes == sorted(sizes)


def test_messages_have_a_ladder_of_their_own():
    rows = list(message_grid(GIB))
    assert rows == [(kind, KIB << power) for power in range(19) for kind in MESSAGES]
    assert rows[-1] == ("exchange", 256 * MIB)
    assert list(message_grid(KIB)) == [("send_recv", KIB), ("exchange", KIB)]


class Bench:
    """Answers every question about a collective from a table of passes, and moves its clock on."""

    def __init__(self, passes):
        self.passes = {size: list(values) for size, values in passes.items()}
        self.now_s, self.asked = 0.0, []

    def agree(self, value):
        return value

    def measure(self, wanted):
        self.asked.append(wanted.size_bytes)
        self.now_s += 1.0
        value = self.passes[wanted.size_bytes].pop(0)
        return ([], value) if isinstance(value, str) else ([value], None)


def sweeps(passes, origins=None):
    bench = Bench(passes)
    wanted = {Wanted("all_reduce", 2, "float32", size): (origins or {}).get(size, "grid") for size in passes}
    return bench, Sweeps(bench, wanted, lambda: bench.now_s)


def test_passes_that_differ_are_settled_by_a_third():
    bench, swept = sweeps({1024: [1e-3, 1e-3], 2048: [1.8e-3, 1e-3, 1.01e-3]})
    times = {}
    for only_disputed in (False, False, True):
        times |= {key: record.time_s for key, record in swept.run(100.0, only_disputed)}
    assert bench.asked == [1024, 2048, 1024, 2048, 2048]
    assert times == {"all_reduce 2 float32 1024": 1e-3, "all_reduce 2 float32 2048": 1.01e-3}


def test_sizes_that_would_take_too_long_are_left_out_unless_a_scenario_wants_them():
    bench, swept = sweeps({1024: [0.3], 2048: [0.6], 4096: [1.2]}, {4096: "scenario"})
    assert LONGEST_S < 2 * 0.3
    found = dict(swept.run(100.0))
    assert bench.asked == [1024, 4096]
    assert found["all_reduce 2 float32 4096"] == CollectiveRecord(time_s=1.2, samples=1, origin="scenario")


def test_no_size_is_begun_that_would_not_end_in_time():
    bench, swept = sweeps({1024: [1e-3], 2048: [0.1], 4096: [0.2]})
    assert list(dict(swept.run(2.5))) == ["all_reduce 2 float32 1024", "all_reduce 2 float32 2048"]
    assert bench.asked == [1024, 2048]


def test_a_failure_is_recorded_once_and_does_not_undo_a_success():
    bench, swept = sweeps({1024: ["refused"], 2048: [1e-3, "lost"]})
    assert dict(swept.run(100.0)) == {
        "all_reduce 2 float32 1024": CollectiveRecord(error="refused"),
        "all_reduce 2 float32 2048": CollectiveRecord(time_s=1e-3, samples=1),
    }
    assert dict(swept.run(100.0)) == {}
    assert bench.asked == [1024, 2048, 2048]
