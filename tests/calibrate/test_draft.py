"""A calibration goes on from its profile and the raw samples beside it, or says what is wrong with them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from calibrate.draft import Draft
from perfmodel.errors import PerfModelError
from perfmodel.hardware.profile import Device, Profile, save_profile
from perfmodel.workload.ops import Operation, TensorSpec, encode_operation

TENSOR = TensorSpec((8, 8), (8, 1), "float32")
ROW: dict[str, Any] = {
    "operation": encode_operation(Operation("aten.mm.default", (TENSOR, TENSOR), (), (TENSOR,))),
    "tf32": False,
    "origin": "grid",
    "calls": 4,
    "values_s": [1e-6, 2e-6],
}


def loaded(folder: Path, content: object) -> Draft:
    save_profile(Profile(name="p", device=Device(kind="cpu", name="CPU", memory_bytes=2**30)), folder / "p.json")
    (folder / "p.samples.json.gz").write_bytes(gzip.compress(json.dumps(content).encode()))
    return Draft.load(folder / "p.json")


def test_samples_are_read_with_their_jobs(tmp_path: Path) -> None:
    draft = loaded(tmp_path, {"version": 1, "kernels": {"mm": ROW, "failed": ROW | {"calls": 0, "values_s": []}}})
    assert draft.samples["mm"].values_s == (1e-6, 2e-6)
    assert list(draft.jobs) == ["mm", "failed"]
    assert list(draft.samples) == ["mm"]
    assert draft.jobs["mm"].operation.outputs == (TENSOR,)


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        ({"version": 1}, "kernels must be given"),
        ({"version": 1, "kernels": []}, "kernels must be a"),
        ({"version": 1, "kernels": {"mm": []}}, "kernels.mm must be a mapping"),
        ({"version": 1, "kernels": {"mm": ROW | {"values_s": ["x"]}}}, "kernels.mm.values_s.0 must be a number"),
        (
            {"version": 1, "kernels": {"mm": ROW | {"values_s": [float("nan")]}}},
            "kernels.mm.values_s.0 must be a finite",
        ),
        ({"version": 1, "kernels": {"mm": ROW | {"values_s": 3}}}, "kernels.mm.values_s must be a list"),
        ({"version": 1, "kernels": {"mm": ROW | {"calls": -1}}}, "kernels.mm.calls must be greater"),
        ({"version": 1, "kernels": {"mm": ROW | {"origin": "moon"}}}, "kernels.mm.origin must be"),
        ({"version": 1, "kernels": {"mm": ROW | {"operation": []}}}, "kernels.mm.operation must"),
        (
            {"version": 1, "kernels": {"mm": ROW | {"operation": [3, [], {}, [], True, []]}}},
            "kernels.mm must hold an op",
        ),
        ({"version": 1, "kernels": {"mm": ROW | {"operation": ["a.b", 3, 3, 3, 3, 3]}}}, "kernels.mm must hold an op"),
    ],
)
def test_damaged_samples_are_one_sentence(tmp_path: Path, content: object, rule: str) -> None:
    with pytest.raises(PerfModelError) as raised:
        loaded(tmp_path, content)
    assert str(raised.value).startswith(f"{tmp_path / 'p.samples.json.gz'}: {rule}")
