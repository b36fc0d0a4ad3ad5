"""Overlap of communication and computation: intervals by hand, and traces in the form torch.profiler writes."""

import gzip
import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.hardware.measurement import RankCommunication
from validate.overlap import RankTrace, common, communication_of, load_rank_trace, since_last_arrival, union

STRETCHES = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)).map(lambda pair: (pair[0], sum(pair))))


def cells(intervals):
    """The unit stretches that intervals of whole numbers cover."""
    return {cell for start, end in intervals for cell in range(start, end)}


@given(STRETCHES, STRETCHES)
def test_unions_and_what_they_share(first, second):
    merged = union(first)
    assert cells(merged) == cells(first)
    assert all(before[1] < after[0] for before, after in pairwise(merged))
    assert common(merged, union(second)) == len(cells(first) & cells(second))


def test_a_step_by_hand():
    """Two steps, of which the first is left out; rank 1's clock is 100 s ahead and it comes 1 s later."""
    first = RankTrace(((0, 1), (2, 3), (10, 14), (15, 16)), ((8, 12), (15.5, 20)))
    late = RankTrace(((101, 101), (102, 103), (111, 114), (115, 116)), ((100, 111),))
    assert communication_of([first, late], steps=2, skipped=1) == (
        RankCommunication(
            communication_s=5,
            exposed_s=2.5,
            overlap_ratio=0.5,
            since_last_arrival_s=4,
            exposed_since_last_arrival_s=2.5,
            exposed_beyond_pauses_s=2.5,
        ),
        RankCommunication(
            communication_s=4,
            exposed_s=4,
            overlap_ratio=0,
            since_last_arrival_s=4,
            exposed_since_last_arrival_s=4,
            exposed_beyond_pauses_s=4,
        ),
    )


def test_pauses_between_kernels_expose_nothing():
    kernels = ((0.0, 1.0), (1.00002, 2.0), (2.5, 3.0))  # 20 us, and half a second
    trace = RankTrace(((0.5, 4.0),), kernels)
    (found,) = communication_of([trace], steps=1, skipped=0)
    assert found.exposed_since_last_arrival_s == pytest.approx(1.50002)
    assert found.exposed_beyond_pauses_s == pytest.approx(1.5)


def test_medians_over_steps():
    trace = RankTrace(tuple((10 * step, 10 * step + length) for step, length in enumerate((9, 1, 5, 2))), ())
    (found,) = communication_of([trace], steps=4, skipped=1)
    assert (found.communication_s, found.exposed_s, found.overlap_ratio) == (2, 2, 0)


def test_other_collectives_on_another_rank_leave_arrivals_out():
    assert since_last_arrival([((0, 1),), ((0, 1), (2, 3))]) is None
    one, two = RankTrace(((0, 1), (2, 3)), ()), RankTrace(((0, 1), (2, 3), (4, 5), (6, 7)), ())
    found = communication_of([one, two], steps=2, skipped=0)
    assert [each.since_last_arrival_s for each in found] == [None, None]
    assert [each.communication_s for each in found] == [1, 2]


@pytest.mark.parametrize("collectives", [(), ((0, 1), (2, 3), (4, 5))])
def test_no_whole_number_of_collectives_a_step_gives_nothing(collectives):
    assert communication_of([RankTrace(collectives, ())], steps=2, skipped=0) == ()


def slices(*rows):
    return [
        {"ph": "X", "cat": category, "name": name, "ts": ts, "dur": duration} for category, name, ts, duration in rows
    ]


def test_kernels_of_a_trace_are_told_apart(tmp_path):
    events = slices(
        ("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 2e6, 3e6),
        ("kernel", "ampere_sgemm_128x64_tn", 0, 1e6),
        ("kernel", "vectorized_elementwise_kernel", 5e5, 2e6),
        ("gpu_memcpy", "Memcpy DtoD", 6e6, 1e6),
        ("cpu_op", "aten::mm", 0, 9e6),
        ("cpu_op", "gloo:all_reduce", 0, 9e6),
    )
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": [{"ph": "M", "name": "x"}, *events]}).encode()))
    assert load_rank_trace(path) == RankTrace(((2.0, 5.0),), ((0.0, 2.5),))


def test_without_kernels_it_is_a_cpu_s(tmp_path):
    events = slices(
        ("cpu_op", "aten::mm", 0, 1e6),
        ("cpu_op", "c10d::allreduce_", 0, 9e6),
        ("user_annotation", "gloo:all_reduce", 2e6, 1e6),
    )
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    assert load_rank_trace(path) == RankTrace(((2.0, 3.0),), ((0.0, 1.0),))
