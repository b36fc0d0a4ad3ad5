"""How many messages of a row go ahead, of a library that keeps them as NCCL does. The rows of messages need GPUs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from calibrate.interconnect import eager_sends
from calibrate.interconnect.eager_sends import LATE_S, ROW, SIZES, RowBench
from perfmodel.units import KIB, MIB

CALL_S = 4e-5


class Device:
    """The sender's stream. A message takes whole places of those that the library has until its receiver comes."""

    def __init__(self, place_bytes, places):
        self.place_bytes, self.places = place_bytes, places

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
        if self.taken > self.places:
            self.now_s = max(self.now_s, LATE_S)
        return SimpleNamespace(wait=lambda: None)


@pytest.fixture
def bench(monkeypatch):
    def make(place_bytes, places=8):
        device = Device(place_bytes, places)
        fake = SimpleNamespace(get_rank=lambda group: 0, isend=device.send, all_reduce=lambda value, group: None)
        monkeypatch.setattr(eager_sends, "dist", fake)
        zeros, tensor = eager_sends.torch.zeros, eager_sends.torch.tensor
        made = SimpleNamespace(
            zeros=lambda count, device: zeros(count, device="meta"), tensor=lambda values, device: tensor(values)
        )
        monkeypatch.setattr(eager_sends, "torch", made)
        return RowBench(None, device)

    return make


def test_small_messages_are_counted_and_large_ones_take_several_places(bench):
    found = bench(256 * KIB).messages_ahead()
    assert found == {256 * KIB: 8, 512 * KIB: 4, MIB: 2, 2 * MIB: 1, 4 * MIB: 0}


def test_in_places_larger_than_any_message_as_many_go_ahead_of_every_size(bench):
    assert bench(1024 * MIB).messages_ahead() == dict.fromkeys(SIZES, 8)


@pytest.mark.parametrize(("places", "expected"), [(ROW - 1, ROW - 1), (ROW, ROW), (ROW + 1, ROW)])
def test_of_more_places_than_the_row_has_messages_all_of_the_row_are_seen(bench, places, expected):
    assert bench(1024 * MIB, places).messages_ahead() == dict.fromkeys(SIZES, expected)
