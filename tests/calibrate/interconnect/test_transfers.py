"""Copies of every kind and size, within the time that is given, with a failure beside the others."""

import pytest
import torch

from calibrate.interconnect.transfers import LIMITS, Buffers, TransferBench, transfer_records, transfer_sizes
from perfmodel.hardware.interconnect import TransferRecord, transfer_key
from perfmodel.units import GIB, KIB, MIB

LATENCY_S, BYTES_PER_S = 1e-5, 50e9


class Copies:
    """Take what latency and bandwidth make them take, on a clock of their own."""

    def __init__(self):
        self.now_s = 0.0

    def prepare(self, size_bytes):
        def run(calls):
            seconds = LATENCY_S + size_bytes / BYTES_PER_S
            self.now_s += calls * seconds
            return seconds

        return run


def test_every_kind_and_size():
    copies = Copies()
    kinds = {"h2d pinned": copies.prepare, "p2p": copies.prepare}
    found = transfer_records(kinds, [KIB, MIB], 10.0, lambda: copies.now_s)
    assert list(found) == ["h2d pinned 1024", "p2p 1024", "h2d pinned 1048576", "p2p 1048576"]
    expected_s = {size: LATENCY_S + size / BYTES_PER_S for size in (KIB, MIB)}
    for size, time_s in expected_s.items():
        record = found[transfer_key("p2p", size)]
        assert record.time_s == pytest.approx(time_s)
        assert (record.spread, record.samples) == (0.0, LIMITS.fewest)


def test_none_is_begun_when_time_is_up():
    copies = Copies()
    found = transfer_records({"h2d pinned": copies.prepare}, transfer_sizes(GIB), 0.05, lambda: copies.now_s)
    assert list(found) == [transfer_key("h2d pinned", size) for size in transfer_sizes(GIB)[: len(found)]]
    assert 0 < len(found) < len(transfer_sizes(GIB))


def test_a_copy_that_fails_is_recorded_and_the_others_go_on():
    def refuse(size_bytes):
        raise RuntimeError("peer access is not supported\nmore")

    copies = Copies()
    found = transfer_records({"p2p": refuse, "d2h pinned": copies.prepare}, [KIB], 1.0, lambda: copies.now_s)
    assert found["p2p 1024"] == TransferRecord(error="peer access is not supported")
    assert found["d2h pinned 1024"].time_s == pytest.approx(LATENCY_S + KIB / BYTES_PER_S)


def test_sizes():
    assert (len(transfer_sizes()), transfer_sizes()[-1]) == (21, GIB)
    assert all(b == 2 * a for a, b in zip(transfer_sizes(), transfer_sizes()[1:], strict=False))


class Device:
    """A stream that notes how long it was held; the host is late in its first runs."""

    def __init__(self, late):
        self.late, self.held_s = late, []

    def drain(self):
        """Nothing waits."""

    def hold(self, seconds):
        self.held_s.append(seconds)

    def mark(self):
        return len(self.held_s)

    def passed(self, mark):
        return mark <= self.late

    def between_s(self, first, last):
        return 6.0 if first > self.late else 600.0


def test_copies_are_queued_while_the_device_is_held():
    device = Device(late=2)
    buffers = Buffers(*(torch.zeros(8, dtype=torch.uint8) for _ in range(6)))
    buffers.pinned[:4] = 7
    kinds = TransferBench(buffers, device).kinds()
    assert list(kinds) == ["h2d pinned", "d2h pinned", "both pinned", "h2d pageable", "d2h pageable", "p2p"]
    assert kinds["h2d pinned"](6)(3) == 2.0
    assert buffers.device.tolist() == [7, 7, 7, 7, 0, 0, 0, 0]
    assert len(device.held_s) == 3
    assert device.held_s[2] == 4 * device.held_s[0]
    assert kinds["p2p"](2)(1) == 6.0
    assert buffers.peer.tolist() == [7, 7, 0, 0, 0, 0, 0, 0]
