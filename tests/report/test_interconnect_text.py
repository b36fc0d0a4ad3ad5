"""What is said about a wiring, whole."""

from __future__ import annotations

from perfmodel.hardware.interconnect import CollectiveRecord, CollectiveSegment, Coupling, Interconnect
from perfmodel.report.interconnect_text import interconnect_report
from perfmodel.report.text import rendered

KIB = 1024
WIRES = Interconnect(
    backend="nccl",
    nodes=2,
    collectives={
        **{f"all_reduce 4 float32 {KIB << n}": CollectiveRecord(time_s=1e-5 + (KIB << n) * 1e-8) for n in range(2)},
        "broadcast 4 float32 1024": CollectiveRecord(error="out of memory"),
    },
    segments={
        "all_reduce 4": (
            CollectiveSegment(
                least_bytes=KIB,
                most_bytes=8 * KIB,
                alpha_s=1e-5,
                beta_s_per_byte=1e-8,
                alpha_error_s=5e-7,
                beta_error_s_per_byte=5e-10,
                points=4,
            ),
        ),
        "broadcast 4": (CollectiveSegment(least_bytes=1, most_bytes=2, alpha_s=1, beta_s_per_byte=0),),
    },
    couplings={
        "gemm_fp32": Coupling(
            compute_factor=1.2, communication_factor=3, tail_share=0.7, fitted_error=0.05, held_out_error=0.06
        ),
        "row": Coupling(compute_factor=1, communication_factor=1, tail_share=1, fitted_error=0.01, held_out_error=0.02),
        "copy": Coupling(compute_factor=1, communication_factor=1, tail_share=1, fitted_error=0.03),
    },
)
WHOLE = """
two-nodes: nccl, 2 nodes, 2 collectives measured
all_reduce           sizes   alpha, us       GB/s  points  median  worst
4 ranks     1 KiB to 8 KiB  10.0 ± 0.5  0.1 ± 0.0       4
beside collectives  slowed  slow them   tail  fitted  held out
copy                x 1.00     x 1.00  100 %   3.0 %
gemm fp32           x 1.20     x 3.00   70 %   5.0 %     6.0 %
row                 x 1.00     x 1.00  100 %   1.0 %     2.0 %
mean                                           3.0 %     4.0 %
"""


def test_whole() -> None:
    assert rendered(interconnect_report("two-nodes", WIRES)) == WHOLE
