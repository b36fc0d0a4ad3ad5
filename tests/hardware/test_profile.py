from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from perfmodel.errors import PerfModelError
from perfmodel.hardware import profile as profiles
from perfmodel.hardware.interconnect import Interconnect
from perfmodel.hardware.profile import (
    Device,
    HostRecord,
    KernelRecord,
    Profile,
    find_profile,
    load_profile,
    save_profile,
)
from tests.refusals import refused

WIRES = {"nvlink": Interconnect(backend="nccl")}


@pytest.fixture
def catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A catalog with one profile, ``first``."""
    folder = tmp_path / "catalog"
    folder.mkdir()
    monkeypatch.setattr(profiles, "CATALOG", folder)
    save_profile(first(), folder / "first.json")
    return folder


def first() -> Profile:
    return Profile(
        name="first",
        device=Device(kind="cuda", name="G", memory_bytes=1),
        gpus=1,
        kernels={"k": KernelRecord(time_s=1e-3)},
        host={"reference": HostRecord(time_s=2e-3)},
    )


def written(path: Path, **data: Any) -> Path:
    path.write_text(json.dumps({"version": 1, "name": path.stem} | data))
    return path


def test_what_a_file_leaves_out_is_its_bases(catalog: Path, tmp_path: Path) -> None:
    host = {"reference": {"time_s": 3e-3}}
    found = load_profile(written(tmp_path / "second.json", base="first", gpus=4, host=host))
    assert found == first().model_copy(
        update={"name": "second", "base": "first", "gpus": 4, "host": {"reference": HostRecord(time_s=3e-3)}}
    )


def test_what_the_base_has_and_this_one_lacks_stays_away(catalog: Path, tmp_path: Path) -> None:
    wired = first().model_copy(update={"interconnects": WIRES, "interconnect": "nvlink", "topology": "matrix"})
    save_profile(wired, catalog / "wired.json")
    bare = first().model_copy(update={"name": "bare", "base": "wired", "gpus": 2})
    save_profile(bare, tmp_path / "bare.json")
    assert load_profile(tmp_path / "bare.json") == bare


def test_only_sections_that_differ_from_the_base_are_written(catalog: Path, tmp_path: Path) -> None:
    path = tmp_path / "second.json"
    second = first().model_copy(update={"name": "second", "base": "first", "interconnects": WIRES})
    save_profile(second, path)
    assert set(json.loads(path.read_text())) == {"version", "name", "base", "interconnects"}
    assert load_profile(path) == second


def test_kernels_join_those_of_the_base(catalog: Path, tmp_path: Path) -> None:
    path = tmp_path / "second.json"
    more = {"l": KernelRecord(time_s=2e-3)}
    save_profile(
        first().model_copy(update={"name": "second", "base": "first", "kernels": first().kernels | more}), path
    )
    assert list(json.loads(path.read_text())["kernels"]) == ["l"]
    assert load_profile(path).kernels == first().kernels | more

    other = {"k": KernelRecord(time_s=3e-3)}
    save_profile(first().model_copy(update={"name": "second", "base": "first", "kernels": other}), path)
    assert load_profile(path).kernels == other


@pytest.mark.parametrize(
    ("name", "base", "sentence"),
    [
        ("second", "frist", r"base must be a profile of the catalog \(got 'frist'\)\. Did you mean 'first'\?"),
        ("second", "chained", r"base must be another profile, without a base \(got 'chained'\)"),
        ("chained", "chained", r"base must be another profile, without a base \(got 'chained'\)"),
    ],
)
def test_bases_are_of_the_catalog_and_have_none(catalog: Path, name: str, base: str, sentence: str) -> None:
    written(catalog / "chained.json", base="first")
    with pytest.raises(PerfModelError, match=sentence):
        load_profile(written(catalog / f"{name}.json", base=base))
    with pytest.raises(PerfModelError, match=sentence):
        save_profile(first().model_copy(update={"base": base}), catalog / f"{name}.json")


def test_a_file_may_be_called_like_its_base(catalog: Path, tmp_path: Path) -> None:
    save_profile(first().model_copy(update={"base": "first", "gpus": 2}), tmp_path / "first.json")
    assert load_profile(tmp_path / "first.json").gpus == 2


@pytest.mark.parametrize(("name", "command"), [("cpu.json", "calibrate --device cpu"), ("gpu.json", "calibrate")])
def test_a_profile_that_is_missing_or_damaged_is_measured_by_a_command(name: str, command: str, tmp_path: Path) -> None:
    for content, how in ((None, "Measure it"), ("{", "Measure it again")):
        if content is not None:
            (tmp_path / name).write_text(content)
        with pytest.raises(PerfModelError) as found:
            load_profile(tmp_path / name)
        assert str(found.value).endswith(f"{how} with `perfmodel {command}`.")


def test_a_file_in_the_folder_is_named_where_its_ending_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with refused("hardware.profile", "gpu", "h200-sxm-x4"):
        find_profile("gpu")
    with refused("NAME", "cpu", "perfmodel calibrate --device cpu"):
        find_profile("cpu", key="NAME")
    (tmp_path / "cpu.json").touch()
    with pytest.raises(PerfModelError, match=r"\(got 'cpu'\)\. Did you mean the file 'cpu\.json'\?"):
        find_profile("cpu")
