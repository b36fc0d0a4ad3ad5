"""Kernels on one of two ranks beside a message: whose times count, and what the records say. The pairs need GPUs."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from calibrate.interconnect import contention, p2p_contention
from calibrate.interconnect.collectives import Wanted
from calibrate.interconnect.own_contention import WAIT, OwnKernel
from calibrate.interconnect.p2p_contention import MessageContention, messages
from calibrate.jobs import Job
from perfmodel.units import MIB
from tests.calibrate.interconnect.test_contention import Gpu, Side

KERNEL_S = 1e-3
WIRE_S = {25 * MIB: 1e-4, 64 * MIB: 2e-3, 4 * MIB: 1.5e-4}


class Timed(Gpu):
    """Its hold keeps the current stream busy; on the main one it begins a new queue."""

    def hold(self, seconds):
        if self.current == "main":
            super().hold(seconds)
        else:
            self.call(seconds)()


@pytest.fixture
def bench(monkeypatch):
    """On the second of two ranks, the first being told of by its own values."""

    def make(gpu, rank=1):
        cuda = SimpleNamespace(current_stream=lambda: "main", stream=gpu.stream)
        monkeypatch.setattr(contention.torch, "cuda", cuda)
        monkeypatch.setattr(contention.dist, "all_reduce", lambda *arguments, **keys: None)
        monkeypatch.setattr(contention.dist, "get_world_size", lambda group: 2)
        monkeypatch.setattr(p2p_contention.dist, "get_rank", lambda group: rank)
        monkeypatch.setattr(contention, "collective_call", lambda wanted, *_: gpu.call(WIRE_S[wanted.size_bytes]))
        monkeypatch.setattr(p2p_contention, "kernels", lambda device: {"layer_norm": gpu.call(KERNEL_S)})
        found = object.__new__(MessageContention)
        found.device = "cpu"
        found.group, found._stream, found._side, found._flag = None, gpu, Side(), None
        return found

    return make


def test_messages_beside_kernels_on_a_fast_and_a_slow_wire():
    long, short = messages(1e-4)
    assert long == Wanted("send_recv", 2, "float32", 64 * MIB)
    assert short.size_bytes == 4 * MIB
    assert [each.size_bytes for each in messages(5e-3)] == [8 * MIB, MIB]


def test_records_say_on_which_side_the_kernel_ran(bench):
    """All agree with this rank, whichever it is; receives that wait for it are held by it in vain, so do not count."""
    timed = bench(Timed(1.5))
    timed._agreed = lambda values_s, operator=None: [*values_s[:-1], 1.0] if len(values_s) > 1 else values_s
    timed._of_one = lambda rank, turn, kernel, compute_s: (rank, compute_s)
    found = timed.message_records(100.0)
    assert {key: rank for key, (rank, _) in found.items()} == {
        "layer_norm send 2 float32 67108864": 0,
        "layer_norm receive 2 float32 67108864": 1,
        "layer_norm wait 2 float32 67108864": 1,
        "layer_norm send 2 float32 4194304": 0,
        "layer_norm receive 2 float32 4194304": 1,
    }
    assert found["layer_norm receive 2 float32 4194304"][1] == pytest.approx(KERNEL_S)
    assert found["layer_norm send 2 float32 4194304"][1] == 0.0  # what the other rank would have told


def turn(role, gpu):
    wire = contention.Wire("send_recv 2 float32 67108864", gpu.call(WIRE_S[64 * MIB]), WIRE_S[64 * MIB])
    return p2p_contention._Turn("layer_norm", role, wire)


def test_the_rank_that_computes_tells_how_both_are_slowed(bench):
    gpu = Timed(1.5)
    timed = bench(gpu)
    timed._agreed = lambda values_s, operator=None: values_s
    record = timed._of_one(1, turn("receive", gpu), gpu.call(KERNEL_S), KERNEL_S)
    assert record.compute_factor == pytest.approx(1.5)
    assert record.communication_factor == pytest.approx(1.5)
    assert (record.compute_s, record.communication_s, record.samples) == (KERNEL_S, 2e-3, 2)
    assert timed.is_computing


def test_the_other_rank_has_no_kernels_and_no_say(bench):
    """What it measures of its empty loops is left out of the sums; the one that computes gives 1.5 ms and 3 ms."""
    gpu, shared = Timed(), []
    timed = bench(gpu, rank=0)

    def agreed(values_s, operator=None):
        if operator is not None:  # whether any rank was late, or found too little
            return values_s
        assert values_s == [0.0, 0.0]
        shared.append(1.5e-3 if len(shared) < 2 else 3e-3)
        return [shared[-1], 1.0]

    timed._agreed = agreed
    kernel_calls = []
    record = timed._of_one(1, turn("receive", gpu), lambda: kernel_calls.append(1), KERNEL_S)
    assert kernel_calls == []
    assert (record.compute_factor, record.communication_factor) == pytest.approx((1.5, 1.5))


def test_a_receive_waits_until_its_senders_device_goes_on(bench):
    """The receive lasts until the sender comes, and slows the kernel all the while."""
    gpu = Timed(1.25)
    timed = bench(gpu)
    timed._agreed = lambda values_s, operator=None: values_s
    late = turn("wait", gpu)
    late = late._replace(wire=late.wire._replace(call=gpu.call(0.03)))
    record = timed._of_one(1, late, gpu.call(KERNEL_S), KERNEL_S)
    assert record.compute_factor == pytest.approx(1.25)
    assert (record.communication_factor, record.communication_s) == (1.0, 2e-3)


def test_the_late_sender_is_held_longer_than_the_loop_lasts(bench):
    gpu, held = Timed(), []
    timed = bench(gpu, rank=0)
    timed._agreed = lambda values_s, operator=None: values_s if operator is not None else [1.1e-3, 1.0]
    plain = gpu.hold

    def hold(seconds):
        if gpu.current == "side":
            held.append(seconds)
        plain(seconds)

    gpu.hold = hold
    record = timed._of_one(1, turn("wait", gpu), gpu.call(KERNEL_S), KERNEL_S)
    assert held == pytest.approx([contention.BESIDE * contention.LOOP_S] * 2)
    assert record.compute_factor == pytest.approx(1.1)


def test_nothing_is_begun_when_time_is_up(bench):
    timed = bench(Timed())
    timed._agreed = lambda values_s, operator=None: values_s
    assert timed.message_records(0.0) == {}


def test_a_scenarios_own_kernels_are_measured_where_a_receive_waits(bench, monkeypatch):
    """On the rank that receives alone, beside a message of the long size."""
    gpu = Timed(1.25)
    timed = bench(gpu)
    timed._agreed = lambda values_s, operator=None: [*values_s[:-1], 1.0] if len(values_s) > 1 else values_s
    monkeypatch.setattr(contention.torch, "cuda", SimpleNamespace(**vars(contention.torch.cuda), empty_cache=lambda: 0))
    monkeypatch.setattr(contention, "tf32", lambda device, is_used: nullcontext())
    monkeypatch.setattr(contention, "materialise", lambda operation, device: gpu.call(KERNEL_S))
    monkeypatch.setitem(WIRE_S, 64 * MIB, 0.03)
    kernel = OwnKernel(Job("aten.mm.default(...)", None, False, "scenario"), WAIT, 1, 0.5)
    found = timed.own_waiting([kernel], 100.0, print)
    (pair,) = found["aten.mm.default(...)"].items()
    assert pair[0] == "wait 2 float32 67108864"
    assert pair[1].compute_factor == pytest.approx(1.25)
    assert timed.is_computing  # again, for what follows
