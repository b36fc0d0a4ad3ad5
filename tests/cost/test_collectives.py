"""What a collective costs: exact sizes, curves, and more ranks than were measured."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.cost.collectives import CURVE_SPREAD, collective_cost, extrapolation, largest_group, nodes_of
from perfmodel.cost.piecewise import fit_segments
from perfmodel.errors import PerfModelError
from perfmodel.hardware.interconnect import (
    COLLECTIVES,
    CollectiveRecord,
    CollectiveSegment,
    Interconnect,
    busbw_factor,
    collective_key,
)

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


def test_what_was_measured_for_scenarios_can_be_left_out() -> None:
    assert collective_cost("all_reduce", 4, "float32", 3 * MIB, WIRES).source == "exact"
    found = collective_cost("all_reduce", 4, "float32", 3 * MIB, WIRES, exact=False)
    assert (found.time_s, found.spread) == (2e-5 + 3 * MIB * 2e-10, CURVE_SPREAD)
    assert collective_cost("all_reduce", 4, "float32", MIB, WIRES, exact=False).source == "exact"


def test_beyond_the_largest_size_of_a_curve_is_extrapolated() -> None:
    sources = [collective_cost("all_reduce", 2, "float32", size, WIRES).source for size in (1, MIB, MIB + 4)]
    assert sources == ["curve", "curve", "extrapolated"]
    assert extrapolation("all_reduce", 2, WIRES) == (
        "collectives of 2 ranks are extrapolated from sizes of up to 1 MiB by the end of their curve"
    )


def test_what_more_ranks_are_extrapolated_from_is_said() -> None:
    assert extrapolation("all_reduce", 8, WIRES) == (
        "collectives of 8 ranks are extrapolated from those of 2 to 4 by ring formulas, as inside one node"
    )
    assert extrapolation("all_gather", 16, WIRES.model_copy(update={"nodes": 2})) == (
        "collectives of 16 ranks are extrapolated from those of 4 by ring and tree formulas, as over 8 nodes"
    )


def test_the_largest_group_counts_sizes_measured_for_scenarios_that_make_no_curve() -> None:
    exact = {
        collective_key("all_reduce", 8, "float32", MIB): record(1e-4, "scenario"),
        collective_key("all_reduce", 16, "float32", MIB): CollectiveRecord(error="out of memory"),
        collective_key("all_gather", 32, "float32", MIB): record(1e-4),
    }
    wires = WIRES.model_copy(update={"collectives": exact, "nodes": 2})
    assert largest_group("all_reduce", wires) == 8
    assert largest_group("broadcast", wires) is None
    assert [nodes_of(ranks, wires) for ranks in (4, 8, 16)] == [2, 2, 4]


@pytest.mark.parametrize(
    ("nodes", "ranks", "expected"), [(1, 64, 1), (2, 2, 2), (2, 4, 2), (2, 5, 3), (2, 16, 8), (4, 2, 2)]
)
def test_more_ranks_are_on_more_nodes_of_the_same_size(nodes: int, ranks: int, expected: int) -> None:
    assert nodes_of(ranks, WIRES.model_copy(update={"nodes": nodes})) == expected


@pytest.mark.parametrize("ranks", [4, 8])
def test_links_twice_as_fast_halve_all_but_the_latency(ranks: int) -> None:
    fast = WIRES.model_copy(update={"bandwidth_factor": 2.0})
    latency_s = collective_cost("all_reduce", ranks, "float32", 1, WIRES).time_s
    for size_bytes in (1, MIB // 3, MIB):
        now, then = (collective_cost("all_reduce", ranks, "float32", size_bytes, wires) for wires in (WIRES, fast))
        assert then.time_s == pytest.approx(latency_s + (now.time_s - latency_s) / 2)
        assert (then.spread, then.source) == (now.spread, now.source)


def test_a_size_in_a_rarer_dtype_is_exact_too() -> None:
    wires = Interconnect(backend="gloo", collectives={collective_key("broadcast", 2, "int64", 64): record(5e-5)})
    assert collective_cost("broadcast", 2, "float32", 64, wires).time_s == 5e-5


def test_more_ranks_are_carried_on_by_the_ring() -> None:
    """8 ranks after 4. all_reduce: alpha grew by 10 us in 4 steps from 2 to 4 ranks, so it does by 20 us in 8 more; 7
    chunks for 3, each half as large. all_gather of one group: 3 steps take 3 x 0.2 of what the launch does.
    """
    found = collective_cost("all_reduce", 8, "float32", MIB, WIRES)
    assert found.source == "extrapolated"
    assert found.time_s == pytest.approx(4e-5 + 2e-10 * (MIB / 2) * 7 / 3)
    gathered = collective_cost("all_gather", 8, "float32", MIB, WIRES)
    assert gathered.time_s == pytest.approx(3e-5 + 3e-5 * 0.6 / 1.6 * (7 / 3 - 1) + 1e-10 * (MIB / 2) * 7 / 3)
    assert found.spread > gathered.spread > CURVE_SPREAD


def test_the_further_the_less_sure() -> None:
    spreads = [collective_cost("all_reduce", ranks, "float32", MIB, WIRES).spread for ranks in (5, 8, 16, 64)]
    assert spreads == sorted(spreads)
    assert spreads[1] == pytest.approx((0.3**2 + CURVE_SPREAD**2) ** 0.5)


def test_fewer_ranks_come_from_the_next_larger_group() -> None:
    """3 ranks from 4: 4 steps lie between 2 and 6; 2 chunks for 3, each four thirds as large."""
    found = collective_cost("all_reduce", 3, "float32", MIB // 2, WIRES)
    assert found.time_s == pytest.approx(1.5e-5 + 2e-10 * (MIB / 2 * 4 / 3) * 2 / 3)


@pytest.mark.parametrize(("kind", "ranks"), [("broadcast", 2), ("send_recv", 2), ("exchange", 2)])
def test_a_pipeline_and_a_message_cost_many_ranks_what_they_cost_two(kind: str, ranks: int) -> None:
    wires = Interconnect(backend="nccl", segments={f"{kind} {ranks}": (segment(1e-5, 1e-10),)})
    assert collective_cost(kind, 16, "float32", 1024, wires).time_s == pytest.approx(1e-5 + 1024e-10)


def test_over_nodes_small_messages_go_by_a_tree_and_large_ones_round_a_ring() -> None:
    """16 ranks after 4 on 2 nodes. What alpha has more than inside a node, 10 us, grows by 8 / 4 with the depth of the
    tree, by 30 / 6 with the steps of the ring.
    """
    wires = WIRES.model_copy(update={"nodes": 2})
    small = collective_cost("all_reduce", 16, "float32", 1024, wires)
    assert small.time_s == pytest.approx(3e-5 + 4 / 3 * 2e-10 * 1024)
    large = collective_cost("all_reduce", 16, "float32", 1024 * MIB, wires)
    assert large.time_s == pytest.approx(6e-5 + 5 / 4 * 2e-10 * 1024 * MIB)
    assert large.spread > collective_cost("all_reduce", 16, "float32", MIB, WIRES).spread


H200_RING_GB_PER_S = {5: 364.4, 6: 365.1, 7: 365.7, 8: 365.6}  # busbw of 8 GiB without multicast; 363.3 with 4 GPUs


@pytest.mark.parametrize(("ranks", "busbw"), H200_RING_GB_PER_S.items())
def test_large_rings_of_published_h200s(ranks: int, busbw: float) -> None:
    """stas00/ml-engineering, network/README.md at 744d01e: nccl-tests, NCCL_NVLS_ENABLE=0."""
    wires = Interconnect(backend="nccl", segments={"all_reduce 4": (segment(0.0, 1.5 / 363.3e9),)})
    found = collective_cost("all_reduce", ranks, "float32", 8 * 2**30, wires)
    assert busbw_factor("all_reduce", ranks) * 8 * 2**30 / found.time_s / 1e9 == pytest.approx(busbw, rel=0.01)


# out of place, us, of 1 MiB to 1 GiB by factors of two: VIA-Research/vTrain, trace/a100, at f8dda84
A100_US = {
    4: [51.4, 55.74, 77.32, 116.8, 179.6, 284.2, 543.8, 998.6, 1929.0, 3720.0, 7259.4],
    6: [73.0, 74.61, 82.55, 126.7, 203.2, 304.0, 565.7, 1120.8, 2115.9, 4020.6, 7883.3],
    8: [92.79, 93.25, 95.8, 134.3, 232.4, 358.1, 579.9, 1162.0, 2162.3, 4191.5, 8193.0],
}


def test_published_a100s_lie_within_the_spread() -> None:
    """8 ranks from 4 and 6, and from 4 alone: all sizes but 1 in 11 within two spreads, half of them within 10 %."""
    points = {ranks: [(MIB << n, us * 1e-6) for n, us in enumerate(times)] for ranks, times in A100_US.items()}
    curves = {f"all_reduce {ranks}": fit_segments(points[ranks]) for ranks in (4, 6)}
    for known in (curves, {"all_reduce 4": curves["all_reduce 4"]}):
        wires = Interconnect(backend="nccl", segments=known)
        costs = [collective_cost("all_reduce", 8, "float32", size, wires) for size, _ in points[8]]
        errors = [cost.time_s / time_s - 1 for cost, (_, time_s) in zip(costs, points[8], strict=True)]
        assert sum(abs(error) > 2 * cost.spread for error, cost in zip(errors, costs, strict=True)) <= 1
        assert statistics.median(map(abs, errors)) < 0.1


lines_drawn = st.lists(st.tuples(st.floats(-1e-4, 1e-4), st.floats(1e-13, 1e-9)), min_size=1, max_size=3)


@given(
    drawn=lines_drawn,
    kind=st.sampled_from(COLLECTIVES),
    ranks=st.integers(2, 64),
    nodes=st.integers(1, 2),
    sizes=st.tuples(st.integers(1, 2**31), st.integers(1, 2**31)),
    slower=st.floats(1, 100),
)
def test_more_bytes_are_never_faster_and_more_bandwidth_never_slower(
    drawn: list[tuple[float, float]], kind: str, ranks: int, nodes: int, sizes: tuple[int, int], slower: float
) -> None:
    def wires(factor: float) -> Interconnect:
        found = tuple(
            CollectiveSegment(
                least_bytes=1024**level + 1,
                most_bytes=1024 ** (level + 1),
                alpha_s=alpha_s if level else abs(alpha_s),
                beta_s_per_byte=beta * factor,
            )
            for level, (alpha_s, beta) in enumerate(drawn)
        )
        return Interconnect(backend="nccl", nodes=nodes, segments={f"{kind} 4": found, f"{kind} 8": found})

    def time_s(size: int, factor: float) -> float:
        return collective_cost(kind, ranks, "float32", size, wires(factor)).time_s

    small, large = sorted(sizes)
    assert 0 <= time_s(small, 1.0) <= time_s(large, 1.0) * (1 + 1e-9)
    assert time_s(small, 1.0) <= time_s(small, slower) * (1 + 1e-9)


def test_one_rank_costs_nothing() -> None:
    assert collective_cost("all_reduce", 1, "float32", MIB, WIRES).time_s == 0.0


def test_a_message_each_way_has_a_curve_of_its_own() -> None:
    wires = Interconnect(
        backend="nccl",
        collectives={collective_key("exchange", 2, "bfloat16", 5000): record(7e-6, "scenario")},
        segments={"send_recv 2": (segment(1e-5, 1e-10),), "exchange 2": (segment(2e-5, 2e-10),)},
    )
    one_way, both_ways = (collective_cost(kind, 2, "float32", MIB, wires) for kind in ("send_recv", "exchange"))
    assert (one_way.time_s, both_ways.time_s) == pytest.approx((1e-5 + MIB * 1e-10, 2e-5 + MIB * 2e-10))
    assert (one_way.source, both_ways.source) == ("curve", "curve")
    assert collective_cost("exchange", 2, "bfloat16", 5000, wires)[:3] == (7e-6, 0.01, "exact")
    larger = collective_cost("exchange", 2, "float32", 4 * MIB, wires)
    assert (larger.time_s, larger.source) == (pytest.approx(2e-5 + 4 * MIB * 2e-10), "extrapolated")
    assert "from sizes of up to 1 MiB by the end of their curve" in extrapolation("exchange", 2, wires)


def test_a_profile_without_messages_says_so() -> None:
    with pytest.raises(PerfModelError, match=r"measured for exchange \(it has all_gather, all_reduce\)"):
        collective_cost("exchange", 2, "float32", MIB, WIRES)


def test_what_was_not_measured_is_one_sentence() -> None:
    with pytest.raises(PerfModelError, match=r"measured for broadcast \(it has all_gather, all_reduce\)"):
        collective_cost("broadcast", 4, "float32", MIB, WIRES)
