"""Pairs of kernels and collectives, and which of them are measured, on a device that is simulated."""

import pytest
import torch

from calibrate.fit.couplings import KIND_OF_KERNEL
from calibrate.interconnect.collectives import Wanted
from calibrate.interconnect.contention import ContentionBench, general_collectives, kernels, own_collectives
from calibrate.interconnect.own_contention import OwnKernel
from calibrate.jobs import job
from calibrate.kernels.arguments import materialise
from perfmodel.trace.operation import Operation, TensorSpec
from perfmodel.units import MIB
from tests.calibrate.interconnect.gpu import Gpu, Ranks, timer

COLLECTIVES_S = {25 * MIB: 1e-4, 256 * MIB: 2e-3}


def queued_on(gpu, names=None):
    """Operators run on the CPU and take 1 ms of the simulated device; names: what was made, in order."""

    def make(operation, device):
        if names is not None:
            names.append(operation.inputs[0].text)
        real, queue = materialise(operation, device), gpu.call(1e-3)
        return lambda: (real(), queue())

    return make


def bench_on(gpu, names=None):
    return ContentionBench(timer(gpu, Ranks(gpu, COLLECTIVES_S)), "cpu", queued_on(gpu, names))


def test_collectives_on_a_fast_and_a_slow_interconnect():
    assert general_collectives(4, 1e-4) == (
        Wanted("all_reduce", 4, "float32", 25 * MIB),
        Wanted("all_reduce", 4, "float32", 256 * MIB),
        Wanted("all_gather", 4, "float32", 256 * MIB),
        Wanted("reduce_scatter", 4, "float32", 256 * MIB),
    )
    assert [each.size_bytes // MIB for each in general_collectives(2, 5e-3)] == [4, 32, 32, 32]


def test_every_kernel_stands_for_a_kind_of_operator(monkeypatch):
    monkeypatch.setattr(torch, "randn", lambda *shape, **keys: torch.zeros(1))
    monkeypatch.setattr(torch, "empty", lambda *shape, **keys: torch.zeros(1))
    assert set(kernels("cpu")) == set(KIND_OF_KERNEL)


@pytest.mark.parametrize("slow", [1.0, 1.5])
@pytest.mark.parametrize(("compute_s", "communication_s"), [(1e-3, 1e-3), (2.7e-3, 4e-4), (1e-4, 3e-3)])
def test_a_pair_is_slowed_by_what_slows_it(slow, compute_s, communication_s):
    gpu = Gpu(slow)
    timed = bench_on(gpu)
    kernel, call = gpu.call(compute_s), gpu.call(communication_s)
    assert timed.timer.alone_s(kernel) == pytest.approx(compute_s)
    record = timed.pair(kernel, call, compute_s, communication_s)
    assert record.compute_factor == pytest.approx(slow)
    assert record.communication_factor == pytest.approx(slow)
    assert (record.compute_s, record.communication_s, record.samples) == (compute_s, communication_s, 3)


def test_a_pair_that_cannot_overlap_is_left_out():
    gpu = Gpu()
    assert bench_on(gpu).pair(gpu.call(1.0), gpu.call(1e-9), 1.0, 1.0) is None


def test_a_scenarios_kernel_is_measured_beside_a_long_and_a_short_collective():
    assert own_collectives("all_gather", 2, 1e-4) == (
        Wanted("all_gather", 2, "float32", 256 * MIB),
        Wanted("all_gather", 2, "float32", 25 * MIB),
    )
    assert [each.size_bytes // MIB for each in own_collectives("all_reduce", 2, 5e-3)] == [32, 4]


def product(rows, inner, inner_again=None):
    a, b, out = ((rows, inner), (inner_again or inner, 8), (rows, 8))
    a, b, out = (TensorSpec(shape, (shape[1], 1), "float32") for shape in (a, b, out))
    wanted = job(Operation("aten.mm.default", (a, b), (), (out,)), "scenario")
    return OwnKernel(wanted, "all_gather", 1, 0.5)


def test_own_kernels_are_measured_one_after_the_other():
    gpu = Gpu(1.5)
    names, notes = [], []
    wanted = [product(4, 6), product(5, 6)]
    found = bench_on(gpu, names).own_records(wanted, 100.0, notes.append)
    assert (names, notes, gpu.emptied) == (["float32[4,6]", "float32[5,6]"], [], 2)
    assert list(found) == [each.job.key for each in wanted]
    for pairs in found.values():
        assert list(pairs) == [f"all_gather 2 float32 {size * MIB}" for size in (256, 25)]
        for pair in pairs.values():
            assert pair.compute_factor == pytest.approx(1.5)
            assert pair.communication_factor == pytest.approx(1.5)
            assert pair.compute_s == pytest.approx(1e-3)
        assert [pair.communication_s for pair in pairs.values()] == pytest.approx([2e-3, 1e-4])


def test_a_kernel_that_fails_is_left_out_and_the_next_goes_on():
    gpu, notes = Gpu(), []
    wrong, right = product(4, 6, 7), product(5, 6)
    found = bench_on(gpu).own_records([wrong, right], 100.0, notes.append)
    assert list(found) == [right.job.key]
    (note,) = notes
    assert note.startswith(f"{wrong.job.key} left out: ")
    assert gpu.emptied == 2


def test_a_kernel_that_fails_on_another_rank_is_left_out():
    gpu, notes = Gpu(), []
    kernel = product(4, 6)

    class OtherFails(Ranks):
        def reduced(self, values, largest=False):
            return [1.0] if largest else values

    timed = ContentionBench(timer(gpu, OtherFails(gpu, COLLECTIVES_S)), "cpu", queued_on(gpu))
    assert timed.own_records([kernel], 100.0, notes.append) == {}
    assert notes == [f"{kernel.job.key} left out: failed on another rank"]


def test_what_does_not_fit_in_the_budget_is_left_out():
    """Kernels of 4 s in 11 s: the third, which would begin after 8, would not end in time."""
    gpu, notes, now_s, names = Gpu(), [], [0.0], []

    def slowly(operation, device):
        now_s[0] += 4.0
        return queued_on(gpu, names)(operation, device)

    timed = ContentionBench(timer(gpu, Ranks(gpu, COLLECTIVES_S)), "cpu", slowly, lambda: now_s[0])
    assert len(timed.own_records([product(rows, 6) for rows in (4, 5, 6, 7)], 11.0, notes.append)) == 2
    assert notes == ["2 of 4 kernels left out for time"]
    assert len(names) == 2


def test_nothing_is_measured_for_no_kernels():
    gpu = Gpu()
    assert bench_on(gpu).own_records([], 25.0, pytest.fail) == {}
    assert gpu.drains == 0
