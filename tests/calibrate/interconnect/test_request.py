"""What becomes of the records that an interconnect's ranks measured; test_worker.py measures them."""

from __future__ import annotations

from perfmodel.cost.piecewise import fit_curves
from perfmodel.hardware.interconnect import CollectiveRecord


def test_curves_leave_out_scenarios_sizes_and_failures() -> None:
    records = {
        "all_reduce 2 float32 1024": CollectiveRecord(time_s=1.0),
        "all_reduce 2 float32 1000": CollectiveRecord(time_s=9.0, origin="scenario"),
        "all_reduce 2 float32 2048": CollectiveRecord(error="out of memory"),
    }
    ((only,),) = fit_curves(records).values()
    assert (only.points, only.alpha_s) == (1, 1.0)
