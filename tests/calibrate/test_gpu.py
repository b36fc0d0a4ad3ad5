"""On a real GPU (`pytest -m gpu`): every operator is made, timed, counted; allocations are seen to the byte."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from calibrate import session
from calibrate.jobs import job
from calibrate.kernels.arguments import materialise
from calibrate.kernels.bench import Bench
from calibrate.kernels.profiled import observe
from calibrate.session import calibrate
from calibrate.timing.cuda_stopwatch import CudaStopwatch, CudaStream
from perfmodel.trace.operation import Operation
from tests.calibrate.kernels.operations import OPERATIONS, op, t

pytestmark = pytest.mark.gpu

SYNCHRONIZING = ("_local_scalar_dense",)


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench("cuda", CudaStopwatch(CudaStream()))


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.base_name)
def test_every_operator_is_timed(bench: Bench, operation: Operation) -> None:
    record, _ = bench.time(job(operation, "grid"))
    assert record.error is None
    assert (record.time_s is None) == (operation.base_name in SYNCHRONIZING)


def test_launches_and_allocations_are_seen() -> None:
    add = op("add.Tensor", t("float32[1000,1000]"), t("float32[1000,1000]"))
    cumsum = op("cumsum.default", t("bool[4,1000]"), -1)
    seen = observe([partial(materialise, add, "cuda"), partial(materialise, cumsum, "cuda")], lambda _: None)
    assert seen[0] is not None
    assert seen[1] is not None
    assert (seen[0].launches, seen[0].memory_script) == (1, (4_000_000,))
    assert 32_000 in seen[1].memory_script
    assert seen[0].busy_s > 0


def test_a_general_calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(session.BUDGET_S, "cuda", 110.0)  # a short grid; no other stage is left out
    profile = calibrate(tmp_path / "gpu.json", "cuda", progress=False)
    measured = [record for record in profile.kernels.values() if record.error is None]
    assert measured
    assert all(record.time_s and record.kernels is not None for record in measured)
    assert profile.launch.queue_depth > 100
    assert 0 < profile.launch.gap_s < 1e-5
    assert profile.memory.context_bytes > 0
    assert profile.power.kinds.keys() >= {"gemm_bf16", "gemm_fp32", "row", "pointwise", "optimizer"}
    assert profile.device.memory_bytes == torch.cuda.get_device_properties(0).total_memory
