"""What a profile's interconnects may say, and what goes by names in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from perfmodel.errors import PerfModelError
from perfmodel.hardware.interconnect import Interconnect, busbw_factor, communicators_bytes
from perfmodel.hardware.profile import Device, Profile, load_profile, save_profile
from tests.refusals import refused


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A profile with an interconnect."""
    device = Device(kind="cuda", name="Toy GPU", memory_bytes=1)
    path = tmp_path / "toy.json"
    save_profile(Profile(name="toy", device=device, interconnects={"nvlink": Interconnect(backend="nccl")}), path)
    return path


def changed(path: Path, **keys: Any) -> Path:
    data = json.loads(path.read_text())
    data["interconnects"]["nvlink"] |= keys
    path.write_text(json.dumps(data))
    return path


@pytest.mark.parametrize("key", ["a", "0", "-1", "1.5", "", "٣"])
def test_communicators_are_of_a_number_of_ranks(path: Path, key: str) -> None:
    with pytest.raises(PerfModelError) as error:
        load_profile(changed(path, communicator_bytes={key: 1}))
    assert str(error.value).startswith(f"{path}: interconnects.nvlink.communicator_bytes.{key} must ")
    assert f"must be of a number of ranks or 'library' (got {key!r})" in str(error.value)


def test_communicators_take_no_less_than_nothing(path: Path) -> None:
    with refused("interconnects.nvlink.communicator_bytes.2", 0, -1):
        load_profile(changed(path, communicator_bytes={"2": -1}))
    found = load_profile(changed(path, communicator_bytes={"2": 0, "library": 5})).interconnects["nvlink"]
    assert communicators_bytes([(2, found)]) == 5


@pytest.mark.parametrize(
    ("factor", "is_allowed"), [(1e-300, False), (9e-4, False), (1e-3, True), (1e3, True), (1.1e3, False)]
)
def test_links_are_to_be_as_fast_as_links_can_be(path: Path, factor: float, is_allowed: bool) -> None:
    changed(path, bandwidth_factor=factor)
    if is_allowed:
        assert load_profile(path).interconnects["nvlink"].bandwidth_factor == factor
    else:
        with pytest.raises(PerfModelError, match=r"interconnects.nvlink.bandwidth_factor must be "):
            load_profile(path)


@pytest.mark.parametrize(
    ("kind", "factor"),
    [
        ("all_reduce", 1.75),
        ("all_gather", 0.875),
        ("reduce_scatter", 0.875),
        ("all_to_all", 0.875),
        ("broadcast", 1.0),
        ("send_recv", 1.0),
        ("exchange", 1.0),
    ],
)
def test_bus_bandwidth_is_that_of_nccl_tests(kind: str, factor: float) -> None:
    assert busbw_factor(kind, 8) == factor
