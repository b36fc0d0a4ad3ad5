"""How many times as long as an elementwise kernel operators take on a CPU: `python -m bench.cpu_times`.

Both move as many bytes, on one core. The table holds measured times against CPU_TIMES of
perfmodel/cost/kernels/estimates.py, which come from bench/results/cpu-times-xeon.json. `--output FILE` keeps every
sample; `--measured FILE` prints the table of such a file. Reports, judges nothing.
"""

from __future__ import annotations

import json
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from calibrate.kernels.operators import call, tensor
from perfmodel.cost.kernels.work import least_bytes
from perfmodel.trace.kernel_key import kernel_key
from perfmodel.trace.operation import Operation

SHAPES = ((512, 512), (2048, 2048))


def operations(*shape: int) -> dict[str, Operation]:
    """Name an operator as CPU_TIMES does, followed by the operator itself where that is a class of operators."""
    x = tensor("float32", *shape)
    indices, waves = x._replace(dtype="int64"), x._replace(dtype="complex64")
    some = tensor("float32", shape[0], 8)
    return {
        "scan cumsum": call("cumsum.default", x, 1, out=x),
        "scan cummax": call("cummax.default", x, 1, out=(x, indices)),
        "logcumsumexp": call("logcumsumexp.default", x, 1, out=x),
        "sort sort": call("sort.default", x, 1, out=(x, indices)),
        "sort kthvalue": call("kthvalue.default", x, 8, out=(tensor("float32", shape[0]),) * 2),
        "topk": call("topk.default", x, 8, out=(some, some._replace(dtype="int64"))),
        "fft": call("_fft_c2c.default", waves, (1,), 0, True, out=waves),
        "scatter_add": call("scatter_add.default", x, 1, indices, x, out=x),
    }


def elementwise(like: Operation) -> Operation:
    """An elementwise call that moves about as many bytes."""
    x = tensor("float32", max(int(least_bytes(like)) // 8, 1))
    return call("neg.default", x, out=x)


def measure() -> dict[str, Any]:
    """Samples of each call and of its elementwise one, in seconds, by name and shape."""
    import torch

    from calibrate.jobs import job
    from calibrate.kernels.bench import Bench
    from calibrate.timing.samples import CpuStopwatch

    torch.set_num_threads(1)
    bench, found = Bench("cpu", CpuStopwatch()), []
    for shape in SHAPES:
        for name, operation in operations(*shape).items():
            timed = [bench.time(job(each, "grid"))[1] for each in (operation, elementwise(operation))]
            samples_s, elementwise_s = (list(each.values_s) if each else [] for each in timed)
            key = kernel_key(operation)
            found.append({"name": name, "key": key, "samples_s": samples_s, "elementwise_s": elementwise_s})
    return {
        "format": 1, "device": f"one core of {_processor()}", "torch": torch.__version__,
        "date": datetime.now(UTC).date().isoformat(), "calls": found,
    }  # fmt: skip


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def table(measured: dict[str, Any]) -> list[str]:
    """One line a call: measured times as long, and what is supposed."""
    from statistics import median

    from perfmodel.cost.kernels.estimates import CPU_TIMES

    lines = [f"{measured['device']}, torch {measured['torch']}, {measured['date']}", "times as long, supposed"]
    for each in measured["calls"]:
        times = median(each["samples_s"]) / median(each["elementwise_s"])
        supposed = CPU_TIMES.get(each["name"].split()[0], 1.0)
        lines.append(f"{times:8.1f} {supposed:8.1f}  {each['key'].removeprefix('aten.')}")
    return lines


@click.command()
@click.option("--measured", type=click.Path(exists=True, path_type=Path), help="Print the table of such a file.")
@click.option("--output", type=click.Path(path_type=Path), help="Where to keep all samples.")
def main(measured: Path | None, output: Path | None) -> None:
    """Measure on this machine, or print what was measured."""
    content = measure() if measured is None else json.loads(measured.read_text())
    if output is not None:
        output.write_text(json.dumps(content, indent=1) + "\n")
    print("\n".join(table(content)))


if __name__ == "__main__":
    main()
