"""What is said about a wiring, whole."""

from __future__ import annotations

from perfmodel.hardware.interconnect import CollectiveRecord, CollectiveSegment, Coupling, Interconnect
from perfmodel.report.text.interconnect import interconnect_report
from perfmodel.report.text.prediction import rendered

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
during collectives  slowed  slow them   tail  fitted  held out
copy                x 1.00     x 1.00  100 %   3.0 %
gemm fp32           x 1.20     x 3.00   70 %   5.0 %     6.0 %
row                 x 1.00     x 1.00  100 %   1.0 %     2.0 %
mean                                           3.0 %     4.0 %
"""


MESSAGES = """during a send  slowed  slow them   tail  fitted  held out
row            x 1.25     x 1.50  100 %   2.0 %
mean                                      2.0 %
during a receive that waits  slowed  slow them   tail  fitted  held out
gemm bf16                    x 1.12     x 1.00  100 %   0.0 %
row                          x 1.06     x 1.00  100 %   0.0 %
mean                                                    0.0 %
own kernels during collectives: 2, slowed x 1.00 to x 1.40
own kernels during a receive that waits: 1, slowed x 1.10 to x 1.10
eager sends: 8 messages, 64 MiB
"""


def slowed(compute: float, communication: float = 1.0, fitted: float = 0.0) -> Coupling:
    return Coupling(
        compute_factor=compute, communication_factor=communication, tail_share=1, fitted_error=fitted, pairs=1
    )


def test_messages_and_own_kernels() -> None:
    told = {
        "message_couplings": {
            "wait": {"row": slowed(1.06), "gemm_bf16": slowed(1.12)},
            "send": {"row": slowed(1.25, 1.5, 0.02)},
        },
        "own_couplings": {"first": slowed(1.4, 2.0), "second": slowed(1.0)},
        "own_message_couplings": {"wait": {"first": slowed(1.1)}},
        "messages_ahead": {4 * KIB * KIB: 8, 16 * KIB * KIB: 4, 128 * KIB * KIB: 0},
    }
    assert rendered(interconnect_report("two-nodes", WIRES.model_copy(update=told))) == WHOLE + MESSAGES


def test_wires_that_keep_no_message() -> None:
    none = WIRES.model_copy(update={"messages_ahead": {KIB: 0}})
    assert rendered(interconnect_report("two-nodes", none)) == WHOLE + "eager sends: no message\n"


def test_whole() -> None:
    assert rendered(interconnect_report("two-nodes", WIRES)) == WHOLE
