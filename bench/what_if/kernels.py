"""How far off single kernels are that are scaled to another datasheet: `python -m bench.what_if.kernels`.

Times that were published for one GPU are taken as measured, scaled as `--set` scales them to the peaks of another, and
compared with what was published, or what a profile says, of the same work there. It reports, and judges nothing.

- fp16 GEMMs of an A100 are scaled to the H200's datasheet and held against times of the H200's profile;
- FP8 GEMMs of an H100 are scaled to the H200, whose peak FLOP/s are the same;
- streams through memory are scaled between these three GPUs;
- 375 GEMMs in bf16 and 375 in float32 (in TF32, by their rates) are scaled from an H100 to a B200.

bench/what_if/published has the rates, with their sources. Times are scaled by a formula that stood before any of this
was compared. SCALED_SPREAD was chosen by the GEMMs of the B200, when all other figures had been seen too, so none of
the counts of kernels within their interval is a blind test. bench/results/what-if-kernels.txt is what this printed.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from bench.what_if.__main__ import PROFILE, summary
from calibrate.kernels import operators
from calibrate.kernels.operators import tensor
from perfmodel.cost.kernels.lookup import kernel_costs
from perfmodel.cost.kernels.scaling import SCALED_SPREAD, scaling_spread
from perfmodel.cost.kernels.work import least_bytes, model_flops
from perfmodel.hardware.datasheets import Datasheet, find_datasheet
from perfmodel.hardware.profile import Device, KernelRecord, Profile, find_profile, load_profile
from perfmodel.hardware.rescaling import rescaled
from perfmodel.prediction.uncertainty import NORMAL_90
from perfmodel.trace.kernel_key import kernel_key
from perfmodel.trace.operation import Operation

PUBLISHED = Path(__file__).parent / "published" / "azure-node-microbench.yaml"
RATES = PUBLISHED.with_name("xla-gemm-rates.csv")
STREAMED = operators.binary("add.Tensor", *[tensor("float32", 1 << 28)] * 2)  # stands for each of BabelStream's kernels
FP8_FLOPS_PER_S = 1979e12  # dense; NVIDIA's datasheets of the H100 SXM (2023) and the H200 SXM (2024)
MULTIPROCESSORS = {"A100 80GB": 108, "H100": 132}
L2_BYTES = {"A100 80GB": 40 << 20, "H100": 50 << 20}
FORMER_SPREAD = 0.2  # what SCALED_SPREAD was, of how much a time is scaled, before this was compared
EDGES_S = (0.0, 20e-6, 50e-6, 1e-2)  # of times on the H100, by which its GEMMs are summarised


class Scaled(NamedTuple):
    """One kernel: its time on the first GPU, scaled to the second with its standard deviation, and measured there."""

    name: str
    before_s: float
    scaled_s: float
    deviation_s: float
    measured_s: float

    @property
    def error(self) -> float:
        return self.scaled_s / self.measured_s - 1

    @property
    def is_scaled(self) -> bool:
        return self.deviation_s > 0

    @property
    def is_inside(self) -> bool:
        return abs(self.measured_s - self.scaled_s) <= NORMAL_90 * self.deviation_s

    def is_inside_share(self, share: float) -> bool:
        """Whether it would be, were the deviation that share of how much the time is scaled, not its roofline."""
        deviation_s = share * abs(math.log(self.scaled_s / self.before_s)) * self.scaled_s
        return abs(self.measured_s - self.scaled_s) <= NORMAL_90 * deviation_s


def peaks_of(gpu: str, in_fp8: bool) -> Datasheet:
    datasheet = find_datasheet(gpu)
    assert datasheet is not None
    return datasheet._replace(peak_flops_per_s={"fp8": FP8_FLOPS_PER_S}) if in_fp8 else datasheet


def scaled(
    name: str, operation: Operation, before_s: float, first: str, second: str, measured_s: float, in_fp8: bool = False
) -> Scaled:
    """Scale a time as `--set` of the second GPU's peaks, and of nothing else, does on a profile of the first."""
    was, is_now = (peaks_of(gpu, in_fp8)._asdict() for gpu in (first, second))
    size = {"multiprocessors": MULTIPROCESSORS[first], "l2_bytes": L2_BYTES[first], "memory_bytes": 80 << 30}
    device = Device(kind="cuda", name=first, **size, **was)
    record = KernelRecord(time_s=before_s, kernels=1)
    known = Profile(name=first, device=device, kernels={kernel_key(operation, True): record})
    asked = rescaled(known, known.model_copy(update={"device": device.model_copy(update=is_now)}))
    (cost,) = kernel_costs([operation], asked, matmul_tf32=True)
    return Scaled(name, before_s, cost.time_s, cost.time_s * scaling_spread(cost, cost.time_s), measured_s)


def products_on_a100(rows: Sequence[dict[str, Any]]) -> Iterator[Scaled]:
    """Products in fp16, scaled to the H200's datasheet, against the curves of the H200's profile."""
    h200 = load_profile(find_profile(PROFILE))
    for m, n, k, teraflops_per_s in rows[0]["gemm_tflops_m_n_k"]:
        operation = operators.mm("float16", n, m, k)
        (there,) = kernel_costs([operation], h200, matmul_tf32=False)
        before_s = model_flops(operation) / (1e12 * teraflops_per_s)
        yield scaled(f"{m}, {n}, {k}", operation, before_s, "A100 80GB", "H200", there.time_s)


def products_in_fp8(rows: Sequence[dict[str, Any]]) -> Iterator[Scaled]:
    for (m, n, k, was), (*_, is_now) in zip(*(row["gemm_tflops_m_n_k"] for row in rows[1:]), strict=True):
        operation = operators.mm("float8_e4m3fn", n, m, k)
        before_s, measured_s = (model_flops(operation) / (1e12 * rate) for rate in (was, is_now))
        yield scaled(f"{m}, {n}, {k}", operation, before_s, "H100", "H200", measured_s, in_fp8=True)


def streams(rows: Sequence[dict[str, Any]]) -> Iterator[Scaled]:
    gpus = {name: row["hbm_tb_s"] for name, row in zip(("A100 80GB", "H100", "H200"), rows, strict=True)}
    for first, second in (("A100 80GB", "H100"), ("H100", "H200"), ("A100 80GB", "H200")):
        for name in gpus[first]:
            before_s, measured_s = (least_bytes(STREAMED) / (1e12 * gpus[gpu][name]) for gpu in (first, second))
            yield scaled(f"{name}, {first} to {second}", STREAMED, before_s, first, second, measured_s)


def read_rates() -> list[dict[str, str]]:
    """Return the rows of :data:`RATES`."""
    lines = RATES.read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def products_on_b200(rows: Sequence[dict[str, str]], dtype: str) -> Iterator[Scaled]:
    for row in rows:
        if row["dtype"] == dtype:
            b, m, n, k = (int(row[each]) for each in "bmnk")
            operation = operators.mm(dtype, m, n, k) if b == 1 else operators.bmm(dtype, b, m, n, k)
            flops = model_flops(operation)
            before_s, measured_s = (flops / float(row[f"{gpu}_flops_per_s"]) for gpu in ("h100", "b200"))
            yield scaled(f"{b}, {m}, {n}, {k}", operation, before_s, "H100", "B200", measured_s)


def summaries(kind: str, cases: Sequence[Scaled]) -> Iterator[str]:
    faster = sorted(case.before_s / case.measured_s for case in cases)
    least, most = faster[len(faster) // 20], faster[-1 - len(faster) // 20]
    scaled_ones = [case for case in cases if case.is_scaled]
    inside = sum(case.is_inside for case in scaled_ones)
    otherwise = [sum(case.is_inside_share(share) for case in scaled_ones) for share in (FORMER_SPREAD, SCALED_SPREAD)]
    yield summary(kind, [case.error for case in cases])
    yield f"  measured {statistics.median(faster):.2f} times as fast in the median (90 %: {least:.2f} to {most:.2f})"
    yield f"  of {len(scaled_ones)} whose times changed {inside} are within the 90 % interval of scaling"
    yield (
        f"  (it would hold {otherwise[0]} if it were {FORMER_SPREAD} of the logarithm of how much they were scaled, "
        f"{otherwise[1]} if {SCALED_SPREAD})"
    )


def listed(title: str, cases: Sequence[Scaled]) -> Iterator[str]:
    yield f"{title}: us on the first GPU, scaled, on the second, and error (* beyond the interval of scaling)"
    for case in cases:
        times_us = " ".join(f"{1e6 * each:10.2f}" for each in (case.before_s, case.scaled_s, case.measured_s))
        yield f"{case.name:28} {times_us} {case.error:+7.1%}{' *' if case.is_scaled and not case.is_inside else ''}"
    yield from summaries("in all", cases)
    yield ""


def main() -> None:
    rows = yaml.safe_load(PUBLISHED.read_text(encoding="utf-8"))["rows"]
    for title, found in (
        ("fp16 products m, n, k, A100 to H200", products_on_a100(rows)),
        ("FP8 products m, n, k, H100 to H200", products_in_fp8(rows)),
        ("streams through memory", streams(rows)),
    ):
        print("\n".join(listed(title, list(found))))
    for dtype in ("bfloat16", "float32"):
        cases = list(products_on_b200(read_rates(), dtype))
        print("\n".join(summaries(f"{dtype} products, H100 to B200", cases)))
        for least_s, most_s in pairwise(EDGES_S):
            some = [case for case in cases if least_s <= case.before_s < most_s]
            print("\n".join(summaries(f"of them took {1e6 * least_s:.0f} to {1e6 * most_s:.0f} us", some)))
        print()


if __name__ == "__main__":
    main()
