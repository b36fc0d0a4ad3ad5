"""How well operators that a profile did not measure are predicted: `python -m bench.reductions PROFILE.json`.

Run it on the machine of the profile. It times operators whose shapes are in no grid, as kernel keys are timed, and
holds the profile's curves against them: reductions to few values, losses, and kinds of operators that are only
estimated. Reports, judges nothing.

The constants of perfmodel/cost/kernels/dependent_steps.py come from the times of `tuned` on an H200, but for BARRIER_S,
which comes from six cumsums of the profile and enters some rows of `held_out`. All other lists were fixed before any of
them was timed; constants were still changed after predictions of `held_out`, not its times, had been seen.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch

from calibrate import calls
from calibrate.calls import call, full_reduction, reduction, tensor
from calibrate.cuda_timing import CudaSeparator, CudaStopwatch, CudaStream
from calibrate.jobs import job
from calibrate.measuring import Bench
from calibrate.timing import CpuStopwatch
from perfmodel.cost.kernels.costs import kernel_costs
from perfmodel.hardware.profile import Profile, find_profile, load_profile
from perfmodel.workload.ops import Operation, TensorSpec

F32, BF16 = "float32", "bfloat16"
REPEATS = 5


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


def tuned(scale: int) -> list[Operation]:
    """Operators of kinds that no grid has, from which the constants of their estimates come."""
    x, matrices = tensor(F32, 5120 // scale, 512), tensor(F32, 10 // min(scale, 4), 512, 512)
    indices = x._replace(dtype="int64")
    wide = x._replace(dtype="complex64")
    return [
        call("_linalg_svd.default", matrices, False, False, out=(matrices, tensor(F32, 10, 512), matrices)),
        call("linalg_inv_ex.default", matrices, out=(matrices, tensor("int32", 10))),
        call("sort.default", x, 0, out=(x, indices)),
        call("topk.default", x, 8, out=_top(x, 8)),
        call("cumsum.default", x, 0, out=x),
        call("gather.default", x, 1, indices, out=x),
        call("_fft_c2c.default", wide, (1,), 0, True, out=wide),
        calls.mm("float64", 512, 512, 512),
    ]


def held_out(scale: int) -> list[Operation]:
    """Others of the same kinds, from which nothing comes: other operators, dimensions, sizes and dtypes."""
    rows, wide, flat = tensor(F32, 8192 // scale, 2048), tensor(F32, 1024, 65_536 // scale), tensor(F32, 2**22 // scale)
    long, logits = tensor(BF16, 64 // min(scale, 8), 32_768), tensor(BF16, 64 // min(scale, 8), 50_257)
    routes, tall, square = tensor(F32, 16_384 // scale, 64), tensor(F32, 4096 // scale, 256), tensor(F32, 1024, 1024)
    small = tensor(F32, 256 // scale, 64, 64)
    waves = tensor("complex64", rows.shape[0], rows.shape[1] // 2 + 1)
    return [
        call("cumsum.default", rows, 1, out=rows),
        call("cumsum.default", wide, 0, out=wide),
        call("cummax.default", rows, 0, out=(rows, rows._replace(dtype="int64"))),
        call("logcumsumexp.default", flat, 0, out=flat),
        call("sort.default", rows, 1, out=(rows, rows._replace(dtype="int64"))),
        call("sort.default", long, 1, True, out=(long, long._replace(dtype="int64"))),
        call("topk.default", logits, 50, out=_top(logits, 50)),
        call("topk.default", routes, 2, out=_top(routes, 2)),
        call("linalg_qr.default", tall, out=(tall, tensor(F32, 256, 256))),
        call("linalg_lu_factor_ex.default", square, out=(square, tensor("int32", 1024), tensor("int32"))),
        call("linalg_inv_ex.default", small, out=(small, tensor("int32", small.shape[0]))),
        call("scatter_add.default", rows, 1, rows._replace(dtype="int64"), rows, out=rows),
        call("_fft_r2c.default", rows, (1,), 0, True, out=waves),
    ]


def _top(x: TensorSpec, k: int) -> tuple[TensorSpec, TensorSpec]:
    return tensor(x.dtype, x.shape[0], k), tensor("int64", x.shape[0], k)


def measured_s(operation: Operation, bench: Bench) -> float | None:
    """As a kernel key is timed; where that fails (a call that synchronises), from one synchronisation to the next."""
    record, _ = bench.time(job(operation, "grid"))
    if record.time_s is not None:
        return record.time_s
    if record.error is not None:
        return None
    run = bench.make(job(operation, "grid"))
    times_s = []
    for _ in range(REPEATS):
        _synchronize(bench.device)
        start_s = time.perf_counter()
        run()
        _synchronize(bench.device)
        times_s.append(time.perf_counter() - start_s)
    return statistics.median(times_s)


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def report(title: str, operations: list[Operation], profile: Profile, bench: Bench) -> None:
    print(f"{title}\n{'measured':>11} {'predicted':>11} {'error':>8}  {'source':13} operator")
    costs = kernel_costs(operations, profile, matmul_tf32=False, exact=False)
    errors = []
    for operation, cost in zip(operations, costs, strict=True):
        shapes = ", ".join(spec.text for spec in operation.input_tensors() if isinstance(spec, TensorSpec))
        what = f"{operation.name.removeprefix('aten.')}({shapes})"
        seconds = measured_s(operation, bench)
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
        report("kinds of operators that are estimated: the constants come from these", tuned(scale), profile, bench)
        report("kinds of operators that are estimated: held out", held_out(scale), profile, bench)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "h200-sxm-x4")
