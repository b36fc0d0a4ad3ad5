"""How many messages of a row are sent eagerly by a library that buffers them as NCCL does. The real rows need GPUs."""

from __future__ import annotations

import pytest

from calibrate.interconnect.eager_sends import LATE_S, ROW, SIZES, EagerSends
from perfmodel.units import KIB, MIB

CALL_S = 4e-5


class Sender:
    """The sender and its stream. A message takes whole places of those that the library has until its receiver comes."""

    is_sender = True

    def __init__(self, place_bytes, places):
        self.place_bytes, self.places = place_bytes, places

    def drain(self):
        self.now_s, self.taken = 0.0, 0

    def mark(self):
        return self.now_s

    def between_s(self, first, last):
        return last - first

    def reported(self, count):
        return count

    def message(self, size_bytes):
        def send():
            self.taken += -(-size_bytes // self.place_bytes)
            self.now_s += CALL_S
            if self.taken > self.places:
                self.now_s = max(self.now_s, LATE_S)

        return send


def eager_by_size(place_bytes, places=8):
    sender = Sender(place_bytes, places)
    return EagerSends(sender, sender).by_size()


def test_small_messages_are_counted_and_large_ones_take_several_places():
    found = eager_by_size(256 * KIB)
    assert found == {256 * KIB: 8, 512 * KIB: 4, MIB: 2, 2 * MIB: 1, 4 * MIB: 0}


def test_in_places_larger_than_any_message_as_many_of_every_size_are_eager():
    assert eager_by_size(1024 * MIB) == dict.fromkeys(SIZES, 8)


@pytest.mark.parametrize(("places", "expected"), [(ROW - 1, ROW - 1), (ROW, ROW), (ROW + 1, ROW)])
def test_of_more_places_than_the_row_has_messages_all_of_the_row_are_seen(places, expected):
    assert eager_by_size(1024 * MIB, places) == dict.fromkeys(SIZES, expected)
