"""How well reductions whose shapes a profile did not measure are predicted: `python -m bench.reductions PROFILE.json`.

Run it on the machine of the profile. It times operators whose shapes are in no grid, as kernel keys are timed, and
holds the profile's curves against them: reductions to few values, and losses. Reports, judges nothing. Operators of
kinds that are only estimated are in bench/estimates.py.
"""

from __future__ import annotations

import statistics
import sys

import torch

from calibrate.jobs import job
from calibrate.kernels.bench import Bench
from calibrate.kernels.operators import call, full_reduction, reduction, tensor
from calibrate.timing.cuda_stopwatch import CudaSeparator, CudaStopwatch, CudaStream
from calibrate.timing.samples import CpuStopwatch
from perfmodel.cost.kernels.lookup import kernel_costs
from perfmodel.hardware.profile import Profile, find_profile, load_profile
from perfmodel.trace.operation import Operation, TensorSpec

F32, BF16 = "float32", "bfloat16"


def reductions(scale: int) -> list[Operation]:
    """scale: 1 on a GPU; larger on a CPU, which gets that many times fewer elements."""
    images, tokens = tensor(F32, 256 // scale, 3, 224, 224), tensor(BF16, 64 // scale, 1024, 1024)
    return [
        full_reduction("mean.default", tensor(F32, 300 // scale, 42_000)),
        full_reduction("mean.default", tokens),
        full_reduction("max.default", tensor(BF16, 8192 // scale, 4096)),
        full_reduction("linalg_vector_norm.default", tensor(F32, 2560 // scale, 10_240), 2.0),
        full_reduction("sum.default", tensor(F32, 30_000)),
        full_reduction("argmax.default", tensor(F32, 5120 // scale, 2048)),
        full_reduction("var.correction", tensor(F32, 5120 // scale, 2048), correction=1),
        reduction("sum.dim_IntList", tensor(F32, 32, 128, 768), (0, 1, 2)),
        reduction("mean.dim", tensor(F32, 16, 3 * 512 // scale, 512), (1, 2)),
        reduction("sum.dim_IntList", tensor(F32, 200_000 // scale, 10), (0,)),
        reduction("sum.dim_IntList", tensor(BF16, 1024 // scale, 32_000), (1,)),
        call("mse_loss.default", images, images, out=tensor(F32)),
        call("binary_cross_entropy_with_logits.default", tokens, tokens, out=tensor(BF16)),
    ]


def report(title: str, operations: list[Operation], profile: Profile, bench: Bench) -> None:
    print(f"{title}\n{'measured':>11} {'predicted':>11} {'error':>8}  {'source':13} operator")
    costs = kernel_costs(operations, profile, matmul_tf32=False, exact=False)
    errors = []
    for operation, cost in zip(operations, costs, strict=True):
        shapes = ", ".join(spec.text for spec in operation.input_tensors() if isinstance(spec, TensorSpec))
        what = f"{operation.name.removeprefix('aten.')}({shapes})"
        seconds = bench.time(job(operation, "grid"))[0].time_s
        if seconds is None:
            print(f"{'failed':>11} {cost.time_s * 1e6:9.2f}us {'':8}  {cost.source:13} {what}")
            continue
        errors.append(cost.time_s / seconds - 1)
        print(
            f"{seconds * 1e6:9.2f}us {cost.time_s * 1e6:9.2f}us {errors[-1]:+8.1%}  {cost.source:13} {what}", flush=True
        )
    sizes = sorted(map(abs, errors))
    print(f"median {statistics.median(sizes):.1%}, worst {sizes[-1]:.1%}, of {len(sizes)}\n")


def main(name: str) -> None:
    profile = load_profile(find_profile(name))
    device = profile.device.kind
    if device == "cuda":
        stream = CudaStream()
        bench, scale = Bench(device, CudaStopwatch(stream, separator=CudaSeparator(stream))), 1
    else:
        torch.set_num_threads(1)
        bench, scale = Bench(device, CpuStopwatch()), 16
    with torch.no_grad():
        report("reductions to few values", reductions(scale), profile, bench)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "h200-sxm-x4")
