"""What a collective costs: exact sizes, curves, and more ranks than were measured."""

from __future__ import annotations

import pytest

from perfmodel.cost.collectives import CURVE_SPREAD, busbw_factor, collective_cost
from perfmodel.errors import PerfModelError
from perfmodel.hardware.interconnect import CollectiveRecord, CollectiveSegment, Interconnect, collective_key

MIB = 2**20


def record(time_s: float, origin: str = "grid") -> CollectiveRecord:
    return CollectiveRecord.model_validate({"time_s": time_s, "spread": 0.01, "samples": 5, "origin": origin})


def segment(alpha_s: float, beta_s_per_byte: float) -> CollectiveSegment:
    return CollectiveSegment(least_bytes=1024, most_bytes=MIB, alpha_s=alpha_s, beta_s_per_byte=beta_s_per_byte)


WIRES = Interconnect(
    backend="nccl",
    collectives={
        collective_key("all_reduce", 4, "float32", MIB): record(1e-4),
        collective_key("all_reduce", 4, "float32", 3 * MIB): record(3e-4, "scenario"),
    },
    segments={
        "all_reduce 2": (segment(1e-5, 1e-10),),
        "all_reduce 4": (segment(2e-5, 2e-10),),
        "all_gather 4": (segment(3e-5, 1e-10),),
    },
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_measured_size_is_exact_in_any_dtype(dtype: str) -> None:
    found = collective_cost("all_reduce", 4, dtype, MIB, WIRES)
    assert (found.time_s, found.spread, found.source) == (1e-4, 0.01, "exact")
    assert found.algbw_bytes_per_s == pytest.approx(MIB / 1e-4)
    assert found.busbw_bytes_per_s == pytest.approx(1.5 * MIB / 1e-4)


def test_what_was_measured_for_scenarios_can_be_left_out() -> None:
    assert collective_cost("all_reduce", 4, "float32", 3 * MIB, WIRES).source == "exact"
    found = collective_cost("all_reduce", 4, "float32", 3 * MIB, WIRES, exact=False)
    assert (found.time_s, found.spread, found.source) == (2e-5 + 3 * MIB * 2e-10, CURVE_SPREAD, "curve")
    assert collective_cost("all_reduce", 4, "float32", MIB, WIRES, exact=False).source == "exact"


def test_more_ranks_are_carried_on_by_the_ring() -> None:
    """8 ranks after 4: 14 steps for 6, and 7/4 of the bytes for 6/4."""
    found = collective_cost("all_reduce", 8, "float32", MIB, WIRES)
    assert found.source == "extrapolated"
    assert found.time_s == pytest.approx(2e-5 * 14 / 6 + MIB * 2e-10 * (7 / 4) / (6 / 4))
    gathered = collective_cost("all_gather", 8, "float32", MIB, WIRES)
    assert gathered.time_s == pytest.approx(3e-5 * 7 / 3 + MIB * 1e-10 * (7 / 8) / (3 / 4))
    assert found.spread > gathered.spread > CURVE_SPREAD


def test_one_rank_costs_nothing() -> None:
    assert collective_cost("all_reduce", 1, "float32", MIB, WIRES).time_s == 0.0


def test_what_was_not_measured_is_one_sentence() -> None:
    with pytest.raises(PerfModelError, match=r"measured for broadcast \(it has all_gather, all_reduce\)"):
        collective_cost("broadcast", 4, "float32", MIB, WIRES)


@pytest.mark.parametrize(
    ("kind", "factor"),
    [
        ("all_reduce", 1.75),
        ("all_gather", 0.875),
        ("reduce_scatter", 0.875),
        ("all_to_all", 0.875),
        ("broadcast", 1.0),
        ("send_recv", 1.0),
    ],
)
def test_bus_bandwidth_is_that_of_nccl_tests(kind: str, factor: float) -> None:
    assert busbw_factor(kind, 8) == factor
