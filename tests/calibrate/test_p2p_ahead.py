"""How many messages of a row go ahead, of a library that keeps them as NCCL does. The rows of messages need GPUs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from calibrate import p2p_ahead
from calibrate.p2p_ahead import LATE_S, ROW, RowBench
from perfmodel.units import KIB, MIB

CALL_S, PLACES = 4e-5, 8


class Device:
    """The sender's stream. A message takes whole places of those that the library has until its receiver comes."""

    def __init__(self, place_bytes):
        self.place_bytes = place_bytes

    def drain(self):
        self.now_s, self.taken = 0.0, 0

    def mark(self):
        return self.now_s

    def between_s(self, first, last):
        return last - first

    def send(self, message, group, group_dst):
        assert group_dst == 1
        self.taken += -(-message.nbytes // self.place_bytes)
        self.now_s += CALL_S
        if self.taken > PLACES:
            self.now_s = max(self.now_s, LATE_S)
        return SimpleNamespace(wait=lambda: None)


@pytest.fixture
def bench(monkeypatch):
    def make(place_bytes):
        device = Device(place_bytes)
        fake = SimpleNamespace(get_rank=lambda group: 0, isend=device.send, all_reduce=lambda value, group: None)
        monkeypatch.setattr(p2p_ahead, "dist", fake)
        zeros, tensor = p2p_ahead.torch.zeros, p2p_ahead.torch.tensor
        made = SimpleNamespace(
            zeros=lambda count, device: zeros(count, device="meta"), tensor=lambda values, device: tensor(values)
        )
        monkeypatch.setattr(p2p_ahead, "torch", made)
        return RowBench(None, device)

    return make


def test_small_messages_are_counted_and_large_ones_take_several_places(bench):
    found = bench(256 * KIB).messages_ahead()
    assert found == {256 * KIB: 8, 512 * KIB: 4, MIB: 2, 2 * MIB: 1, 4 * MIB: 0}


def test_with_more_room_than_any_row_all_go_ahead(bench):
    found = bench(1024 * MIB).messages_ahead()
    assert found[128 * MIB] == PLACES < ROW
    assert len(found) == len(p2p_ahead.SIZES)
