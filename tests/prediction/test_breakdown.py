"""What a timeline amounts to, of five launches in microseconds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from perfmodel.prediction.breakdown import (
    RankFigures,
    breakdown,
    bubble_of_busy,
    busiest,
    communication_bytes,
    rank_figures,
    step_flops,
)
from perfmodel.program.program import Collective, Message
from perfmodel.simulate.timeline import Communication
from perfmodel.units import US
from tests.report.synthetic import COSTS, prediction, timeline


def test_parts_add_up_to_the_step() -> None:
    found = breakdown(timeline())
    assert found == pytest.approx(prediction().breakdown)
    busy = replace(timeline(), step_time_s=37 * US * (1 - 1e-12))
    assert breakdown(busy)["host_bound_s"] == 0.0


def test_figures_of_a_rank() -> None:
    found = rank_figures(timeline(), prediction().program, COSTS, matmul_tf32=False)
    assert [(use.key, use.count) for use in found.kernels] == [(use.key, use.count) for use in prediction().kernels]
    assert [use.total_s for use in found.kernels] == pytest.approx([30 * US, 5 * US, 2 * US])
    assert [found.busy_s, found.host_busy_s] == pytest.approx([37 * US, 16 * US])
    assert (found.load_s, found.is_held_by_host) == (found.busy_s, False)
    assert RankFigures((), {}, 1.0, 2.0).load_s == 2.0


def test_the_first_of_the_busiest_whatever_is_rounded() -> None:
    one = timeline()
    more = replace(one, end_s=one.end_s * (1 + 1e-14))
    longer = replace(one, end_s=one.end_s + 1 * US)
    assert busiest([one, more]) == busiest([more, one]) == 0
    assert busiest([one, more, longer, longer]) == 2


def test_bubbles_over_busy_time() -> None:
    """The compute stream idles from the 41st microsecond; a message is waited for from the 40th to the 50th."""
    waits = Communication(0, 1, 1, 0.0, 40 * US, 52 * US, waits_s=10 * US)
    found = replace(timeline(), communications=(waits,))
    assert bubble_of_busy(found) == pytest.approx(9 / 37)
    assert bubble_of_busy(timeline()) == 0.0


def test_arithmetic_of_the_model_is_thrice_that_of_forward() -> None:
    assert step_flops(timeline(), prediction().program) == 3 * 1024.0


def test_collectives_count_once_and_messages_each() -> None:
    """One all_reduce of 8 bytes twice; 4 bytes sent and received at once, and 4 more received alone."""
    collectives = (
        Collective("all_reduce", "float32", 8, 4),
        Collective("exchange", "float32", 4, 2, "pp", "both"),
        Collective("send_recv", "float32", 4, 2, "pp", "receive"),
    )
    sent, received = Message("F0 0", True, 1), Message("B0 0", False, 1)
    program = replace(prediction().program, collectives=collectives, exchanges=((sent, received), (received,)))
    ran = [(0, -1), (0, -1), (1, 0), (2, 1)]
    communications = tuple(Communication(number, 0, 1, 0.0, 0.0, 1.0, exchange=each) for number, each in ran)
    found = communication_bytes(replace(timeline(), communications=communications), program)
    assert found == {"dp": 16, "pp": 12}
