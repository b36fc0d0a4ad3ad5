"""Kernels on one of two ranks beside a message: whose times count, and what the records say. The pairs need GPUs."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from calibrate.interconnect import contention
from calibrate.interconnect.collectives import Wanted
from calibrate.interconnect.concurrent_loops import LONGER, LOOP_S
from calibrate.interconnect.contention import TimedCollective
from calibrate.interconnect.own_contention import WAIT, OwnKernel
from calibrate.interconnect.p2p_contention import REPEATS, MessageContention, MessagePair, messages
from calibrate.jobs import Job
from perfmodel.units import MIB
from tests.calibrate.interconnect.gpu import Gpu, Ranks, timer

KERNEL_S = 1e-3
COLLECTIVES_S = {25 * MIB: 1e-4, 64 * MIB: 2e-3, 4 * MIB: 1.5e-4}


class OnlyThisRank(Ranks):
    """Averages are this rank's own, also where the kernels run on the other."""

    def summed(self, values):
        return [*values[:-1], 1.0] if len(values) > 1 else values


def bench_on(gpu, ranks, kind=MessageContention):
    return kind(timer(gpu, ranks, REPEATS), "cpu", lambda operation, device: gpu.call(KERNEL_S))


def test_messages_on_a_fast_and_a_slow_interconnect():
    long, short = messages(1e-4)
    assert long == Wanted("send_recv", 2, "float32", 64 * MIB)
    assert short.size_bytes == 4 * MIB
    assert [each.size_bytes for each in messages(5e-3)] == [8 * MIB, MIB]


def test_records_say_on_which_side_the_kernel_ran():
    """Receives that wait for this rank are held by it in vain, so they do not count."""

    class Noting(MessageContention):
        def measured_on(self, rank, pair, kernel, compute_s):
            return rank, compute_s

    gpu = Gpu(1.5)
    timed = bench_on(gpu, OnlyThisRank(gpu, COLLECTIVES_S, rank=1), Noting)
    found = timed.message_records(100.0, {"layer_norm": gpu.call(KERNEL_S)})
    assert {key: rank for key, (rank, _) in found.items()} == {
        "layer_norm send 2 float32 67108864": 0,
        "layer_norm receive 2 float32 67108864": 1,
        "layer_norm wait 2 float32 67108864": 1,
        "layer_norm send 2 float32 4194304": 0,
        "layer_norm receive 2 float32 4194304": 1,
    }
    assert found["layer_norm receive 2 float32 4194304"][1] == pytest.approx(KERNEL_S)
    assert found["layer_norm send 2 float32 4194304"][1] == 0.0  # what the other rank would have reported


def pair(role, gpu, message_s=COLLECTIVES_S[64 * MIB]):
    message = TimedCollective("send_recv 2 float32 67108864", gpu.call(message_s), COLLECTIVES_S[64 * MIB])
    return MessagePair("layer_norm", role, message)


def test_the_rank_that_computes_says_how_both_are_slowed():
    gpu = Gpu(1.5)
    timed = bench_on(gpu, Ranks(gpu, rank=1))
    record = timed.measured_on(1, pair("receive", gpu), gpu.call(KERNEL_S), KERNEL_S)
    assert record.compute_factor == pytest.approx(1.5)
    assert record.communication_factor == pytest.approx(1.5)
    assert (record.compute_s, record.communication_s, record.samples) == (KERNEL_S, 2e-3, 2)
    assert timed.timer.is_computing


def test_the_other_rank_has_no_kernels_and_no_say():
    """What it measures of its empty loops is left out of the sums; the one that computes gives 1.5 ms and 3 ms."""

    class WithOther(Ranks):
        shared_s = ()

        def summed(self, values):
            assert values == [0.0, 0.0]
            self.shared_s = (*self.shared_s, 1.5e-3 if len(self.shared_s) < 2 else 3e-3)
            return [self.shared_s[-1], 1.0]

    gpu, kernel_calls = Gpu(), []
    timed = bench_on(gpu, WithOther(gpu, rank=0))
    record = timed.measured_on(1, pair("receive", gpu), lambda: kernel_calls.append(1), KERNEL_S)
    assert kernel_calls == []
    assert (record.compute_factor, record.communication_factor) == pytest.approx((1.5, 1.5))


def test_a_receive_waits_until_its_senders_device_goes_on():
    """The receive lasts until the sender comes, and slows the kernel all the while."""
    gpu = Gpu(1.25)
    timed = bench_on(gpu, Ranks(gpu, rank=1))
    record = timed.measured_on(1, pair("wait", gpu, message_s=0.03), gpu.call(KERNEL_S), KERNEL_S)
    assert record.compute_factor == pytest.approx(1.25)
    assert (record.communication_factor, record.communication_s) == (1.0, 2e-3)


def test_the_late_sender_is_held_longer_than_the_loop_lasts():
    class WithOther(Ranks):
        def summed(self, values):
            return [1.1e-3, 1.0]

    gpu = Gpu()
    timed = bench_on(gpu, WithOther(gpu, rank=0))
    record = timed.measured_on(1, pair("wait", gpu), gpu.call(KERNEL_S), KERNEL_S)
    assert gpu.held_aside_s == pytest.approx([LONGER * LOOP_S] * 2)
    assert record.compute_factor == pytest.approx(1.1)


def test_nothing_is_begun_when_time_is_up():
    gpu = Gpu()
    timed = bench_on(gpu, Ranks(gpu, COLLECTIVES_S, rank=1))
    assert timed.message_records(0.0, {"layer_norm": gpu.call(KERNEL_S)}) == {}


def test_a_scenarios_own_kernels_are_measured_where_a_receive_waits(monkeypatch):
    """On the rank that receives alone, beside a message of the long size."""
    gpu = Gpu(1.25)
    timed = bench_on(gpu, OnlyThisRank(gpu, COLLECTIVES_S | {64 * MIB: 0.03}, rank=1))
    monkeypatch.setattr(contention, "tf32", lambda device, is_used: nullcontext())
    kernel = OwnKernel(Job("aten.mm.default(...)", None, False, "scenario"), WAIT, 1, 0.5)
    found = timed.own_waiting([kernel], 100.0, print)
    ((key, record),) = found["aten.mm.default(...)"].items()
    assert key == "wait 2 float32 67108864"
    assert record.compute_factor == pytest.approx(1.25)
    assert timed.timer.is_computing  # again, for what follows
