"""`perfmodel profile show`, whole."""

from __future__ import annotations

from perfmodel.hardware.curve_forms import LAYOUTS
from perfmodel.hardware.interconnect import TransferRecord
from perfmodel.hardware.power import Power, PowerKind
from perfmodel.hardware.profile import Cache, CurveRecord, Device, HostRecord, KernelRecord, Launch, Profile
from perfmodel.report.text.prediction import rendered
from perfmodel.report.text.profile import profile_report
from perfmodel.units import MIB

PROFILE = Profile(
    name="toy",
    gpus=4,
    provenance={"torch": "2.11", "stages_s": {"grid": 10.5}},
    device=Device(
        kind="cuda",
        name="Toy GPU",
        memory_bytes=2**30,
        peak_flops_per_s={"fp32": 67e12},
        peak_memory_bytes_per_s=4.8e12,
    ),
    launch=Launch(latency_s=5e-6, gap_s=1e-6, queue_depth=1024, synchronize_s=2e-5, waiting_gap_s=(0.0, 1e-6)),
    cache=Cache(capacity_bytes=31 * MIB, code_miss_s=2.5e-7),
    kernels={
        "a": KernelRecord(time_s=1.0, origin="grid"),
        "b": KernelRecord(time_s=1.0),
        "c": KernelRecord(error="out of memory"),
    },
    host={"d": HostRecord(time_s=1.0)},
    curves={
        "gemm": CurveRecord(
            form="gemm",
            parameters=dict.fromkeys(LAYOUTS["gemm"].parameters, 1.0),
            points=40,
            leave_one_out={"median": 0.031, "p90": 0.1, "worst": 0.5, "bias": -0.01},
        ),
        "copy": CurveRecord(form="rows", parameters=dict.fromkeys(LAYOUTS["rows"].parameters, 1.0)),
    },
    unstable=tuple(f"key {number}" for number in range(12)),
)
WHOLE = """\
toy: 4 x Toy GPU
memory                1 GiB
datasheet bandwidth   4.8 TB/s
datasheet fp32        67 TFLOP/s
launch                latency 5 us, gap 1 us, queue 1024, synchronise 20 us
waiting streams       longer gaps: 0 ns with 1, 1 us with 2
cache                 holds 31 MiB; a call whose code it does not hold takes 250 ns more
kernels               1 of the grid, 1 for scenarios, 1 that failed
host costs            1
torch                 2.11
stages_s.grid         10.5

fitted curves: error at each grid point when it is predicted from the others
curve  form  points  median     p90   worst    bias
copy   rows       0
gemm   gemm      40   3.1 %  10.0 %  50.0 %  -1.0 %

12 keys were measured unstable; `perfmodel calibrate --output PROFILE --only KEY` repeats one:
  key 0
  key 1
  key 2
  key 3
  key 4
  key 5
  key 6
  key 7
  key 8
  key 9
  and 2 more
"""


COPIED = """
copies: GB/s each way by size, ~ where read off a curve
copy        64 KiB  1 MiB  16 MiB  1 GiB  sizes
h2d pinned   ~5.79   33.9    48.6    ~50      5
p2p           ~390   ~390    ~390   ~390      1
"""


def test_whole() -> None:
    assert rendered(profile_report(PROFILE)) == WHOLE


def test_a_base_is_named() -> None:
    assert "base                  first, measured on another machine" in rendered(
        profile_report(PROFILE.model_copy(update={"base": "first"}))
    )


def test_what_work_draws() -> None:
    power = Power(kinds={"gemm_bf16": PowerKind(draw_w=1100.4, clock_share=0.72)})
    assert "power.gemm_bf16       1100 W at full clock; 72 % of its time follows the clock\n" in rendered(
        profile_report(PROFILE.model_copy(update={"power": power}))
    )


def test_copies_by_size() -> None:
    """Of 10 us and 50 GB/s; of one size, a bandwidth."""
    records = {f"h2d pinned {MIB << n}": TransferRecord(time_s=1e-5 + (MIB << n) / 50e9) for n in range(5)}
    records |= {
        f"p2p {512 * MIB}": TransferRecord(time_s=512 * MIB / 390e9),
        "d2h pinned 1024": TransferRecord(error="x"),
    }
    text = rendered(profile_report(PROFILE.model_copy(update={"transfers": records})))
    assert COPIED in text
    assert "d2h pinned" not in text


def test_a_name_wider_than_the_terminal_leaves_room_for_values() -> None:
    long = "scenarios." + "x" * 100
    text = rendered(profile_report(PROFILE.model_copy(update={"provenance": {long: "of another node"}})), width=80)
    rows = [(line[:37].strip(), line[37:].strip()) for line in text.splitlines()]
    assert ("memory", "1 GiB") in rows
    assert "of another node" in text
    whole = "".join(name for name, _ in rows)
    assert long in whole


def test_datasheet_only() -> None:
    bare = Profile(name="bare", device=Device(kind="cpu", name="CPU", memory_bytes=512))
    assert rendered(profile_report(bare)) == (
        "bare: 1 x CPU\n"
        "memory       512 B\n"
        "launch       latency 0 ns, gap 0 ns, queue 1024, synchronise 0 ns\n"
        "kernels      0 of the grid, 0 for scenarios, 0 that failed\n"
        "host costs   0\n"
        "\n"
        "no key was measured unstable\n"
    )
