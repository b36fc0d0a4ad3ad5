"""A calibration goes on from its profile and the raw samples beside it, or says what is wrong with them."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from calibrate.draft import Draft
from calibrate.jobs import Job
from calibrate.timing.samples import Samples
from perfmodel.errors import PerfModelError
from perfmodel.hardware.profile import Device, KernelRecord, Profile, save_profile
from perfmodel.trace.operation import Operation, TensorSpec, decode_operation, encode_operation

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


BEGAN = "2026-01-01T00:00:00+00:00"


def profile(measured_at: str) -> Profile:
    device = Device(kind="cpu", name="CPU", memory_bytes=2**30)
    return Profile(name="p", device=device, provenance={"measured_at": measured_at})


def written(folder: Path) -> Draft:
    """A profile and the samples of a kernel."""
    draft = Draft.new(folder / "p.json", profile(BEGAN))
    operation = decode_operation(ROW["operation"])
    draft.record(Job("mm", operation, False, "grid"), KernelRecord(time_s=1e-6), Samples((1e-6,), 4))
    draft.write()
    return draft


def test_samples_know_their_profile(tmp_path: Path) -> None:
    samples = written(tmp_path).samples_path
    assert json.loads(gzip.decompress(samples.read_bytes()))["profile"] == BEGAN
    assert list(Draft.load(tmp_path / "p.json").samples) == ["mm"]
    save_profile(profile("another time"), tmp_path / "p.json")
    before = samples.read_bytes()
    with pytest.raises(PerfModelError, match=rf"p\.samples\.json\.gz: must belong to .*{re.escape(BEGAN)}\)\. Move it"):
        Draft.load(tmp_path / "p.json")
    (tmp_path / "p.json").unlink()
    with pytest.raises(PerfModelError, match=r"p\.samples\.json\.gz: must belong to the profile"):
        Draft.new(tmp_path / "p.json", profile("another time"))
    assert samples.read_bytes() == before


def test_samples_of_an_older_version_are_those_of_the_profile_beside_them(tmp_path: Path) -> None:
    assert list(loaded(tmp_path, {"version": 1, "kernels": {"mm": ROW}}).samples) == ["mm"]
    (tmp_path / "p.json").unlink()
    with pytest.raises(PerfModelError, match="for a profile of an unknown time"):
        Draft.new(tmp_path / "p.json", profile(BEGAN))


def test_a_calibration_that_was_killed_before_its_first_kernel_begins_again(tmp_path: Path) -> None:
    Draft.new(tmp_path / "p.json", profile(BEGAN)).write()
    (tmp_path / "p.json").unlink()  # as where it was killed between its two files
    Draft.new(tmp_path / "p.json", profile("another time")).write()
    assert Draft.load(tmp_path / "p.json").measured_at == "another time"


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
        (
            {"version": 1, "kernels": {"mm": ROW | {"values_s": [-1.0, 1e-6]}}},
            "kernels.mm.values_s.0 must be greater",
        ),
        ({"version": 1, "kernels": {"mm": ROW | {"values_s": [1e300]}}}, "kernels.mm.values_s.0 must be less"),
        ({"version": 1, "kernels": {"mm": ROW | {"calls": 0}}}, "kernels.mm.values_s must be empty where calls are 0"),
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
