"""What a CPU is supposed to take, against the committed samples of one."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

from click.testing import CliRunner

from bench.cpu_times import SHAPES, main, operations
from perfmodel.cost.kernels.estimates import CPU_TIMES, FAR, NEAR
from perfmodel.trace.kernel_key import kernel_key

MEASURED = Path(__file__).parents[2] / "bench" / "results" / "cpu-times-xeon.json"


def test_calls_that_times_come_from_lie_within_the_factor() -> None:
    calls = json.loads(MEASURED.read_text())["calls"]
    assert [each["key"] for each in calls] == [kernel_key(op) for shape in SHAPES for op in operations(*shape).values()]
    names = {each["name"].split()[0] for each in calls}
    assert names >= CPU_TIMES.keys()
    for each in calls:
        name, times = each["name"].split()[0], median(each["samples_s"]) / median(each["elementwise_s"])
        factor = FAR if name in CPU_TIMES else NEAR
        assert 1 / factor < times / CPU_TIMES.get(name, 1.0) < factor, each["key"]


def test_the_table_is_printed_without_measuring() -> None:
    found = CliRunner().invoke(main, ["--measured", str(MEASURED)])
    assert found.exit_code == 0
    (line,) = (line for line in found.output.splitlines() if "topk.default(float32[512,512]" in line)
    assert line.split()[:2] == ["69.3", "30.0"]
