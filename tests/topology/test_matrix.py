"""Matrices as `nvidia-smi topo -m` prints them, and what is wrong with others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from perfmodel.errors import PerfModelError
from perfmodel.topology.matrix import REMEDY, nvidia_smi, parse_matrix, processors
from tests.places import TESTS

DATA = TESTS / "data" / "topology"
PAIR = """\
        GPU0    GPU1    NIC0    CPU Affinity    NUMA Affinity
GPU0     X      PHB     SYS     0-15,32-47      0
GPU1    PHB      X      SYS     N/A             N/A
NIC0    SYS     SYS      X

NIC Legend:

  NIC0: mlx5_0
"""


def read(name: str) -> str:
    return (DATA / name).read_text()


def refused(text: str) -> str:
    with pytest.raises(PerfModelError) as caught:
        parse_matrix(text, "topo.txt")
    return str(caught.value).removesuffix(f" {REMEDY}")


def test_four_gpus_with_an_underlined_header() -> None:
    text = read("h200-x4.txt")
    assert "\x1b[4m" in text
    matrix = parse_matrix(text)
    gpus = ("GPU0", "GPU1", "GPU2", "GPU3")
    assert (matrix.devices, matrix.gpus) == (gpus, gpus)
    assert matrix.codes == {(a, b): "NV18" for a in gpus for b in gpus if a != b}
    assert matrix.cpu_affinity == dict.fromkeys(gpus, "0-63")
    assert matrix.numa == dict.fromkeys(gpus, "0")
    assert matrix.nic_names == {}
    assert parse_matrix(text.replace("\x1b", "")) == matrix  # copied from a terminal
    assert parse_matrix("$ nvidia-smi topo -m\n" + text) == matrix


def test_eight_gpus_after_the_documented_repair() -> None:
    matrix = parse_matrix(read("hgx8-repaired.txt"))
    expected = yaml.safe_load(read("hgx8-expected.yaml"))
    gpus = tuple(f"GPU{number}" for number in range(8))
    assert (matrix.devices, matrix.gpus) == ((*gpus, "NIC0"), gpus)
    assert [matrix.codes[a, b] for a in gpus for b in gpus if a < b] == 28 * ["NV18"]
    assert {gpu: matrix.codes[gpu, "NIC0"] for gpu in gpus} == expected["gpu_nic0"]
    assert {gpu: matrix.codes["NIC0", gpu] for gpu in gpus} == expected["gpu_nic0"]
    assert {gpu: int(matrix.numa[gpu] or -1) for gpu in gpus} == expected["gpu_numa"]
    for numa in (0, 1):
        cpus = {matrix.cpu_affinity[gpu] for gpu in gpus if matrix.numa[gpu] == str(numa)}
        numbers = [[number for part in processors(each or "") for number in part] for each in cpus]
        assert numbers == [expected["cpu_affinity"][f"numa{numa}"]]
    assert matrix.nic_names == {"NIC0": expected["nic0"]}
    assert (matrix.cpu_affinity["NIC0"], matrix.numa["NIC0"]) == (None, None)


def test_the_verbatim_text_lost_cells() -> None:
    lines = read("hgx8-verbatim.txt").splitlines(keepends=True)
    assert refused("".join(lines)) == "topo.txt: row GPU0 must have 12 or 9 cells (got 11)."
    whole = read("hgx8-repaired.txt").splitlines(keepends=True)
    for number in range(1, 8):  # each by itself
        mixed = "".join([*whole[:number], lines[number], *whole[number + 1 :]])
        assert refused(mixed) == f"topo.txt: row GPU{number - 1} must have 12 or 9 cells (got 11)."
    mixed = "".join([*whole[:9], lines[9], *whole[10:]])  # the NIC's row has 12, but the wrong ones
    assert refused(mixed) == "topo.txt: row NIC0: CPU Affinity must be like 0-15,32 (got 'X')."


def test_affinities_blank_or_not_available() -> None:
    matrix = parse_matrix(PAIR)
    assert matrix.cpu_affinity == {"GPU0": "0-15,32-47", "GPU1": None, "NIC0": None}
    assert matrix.numa == {"GPU0": "0", "GPU1": None, "NIC0": None}
    assert matrix.codes["GPU0", "GPU1"] == "PHB"
    assert matrix.nic_names == {"NIC0": "mlx5_0"}
    assert parse_matrix("GPU0\tmlx5_0\nGPU0\tX\tPIX\nmlx5_0\tPIX\tX").gpus == ("GPU0",)  # an older driver


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("GPU0    GPU1    NIC0", "CARD0   CARD1   NIC0"), "row 1 must be that of GPU0, as in the header (got 'GPU1')."),
        (("GPU1    PHB ", "GPU1    NODE"), "row GPU0, column GPU1 must agree with row GPU1, column GPU0 (got PHB and NODE)."),
        (("GPU1    PHB ", "GPU1    SOC "), "row GPU1, column GPU0 must be X, NV and a number, or one of PIX, PXB, PHB, NODE, SYS (got 'SOC')."),
        (("GPU1    PHB ", "GPU1    NV0 "), "row GPU1, column GPU0 must be X, NV and a number"),
        (("GPU0     X ", "GPU0    PIX"), "row GPU0, column GPU0 must be X (got 'PIX')."),
        (("PHB     SYS     0-15", "X       SYS     0-15"), "row GPU0, column GPU1 must not be X (got 'X')."),
        (("0-15,32-47      0", "0-15,32-47       "), "row GPU0 must have 5 or 3 cells (got 4)."),
        (("0-15,32-47", "0-15;32-47"), "row GPU0: CPU Affinity must be like 0-15,32 (got '0-15;32-47')."),
        (("GPU1    PHB ", "GPU2    PHB "), "row 2 must be that of GPU1, as in the header (got 'GPU2')."),
        (("NIC0    SYS     SYS      X", ""), "row 3 must be that of NIC0, as in the header (got '')."),
        (("GPU0    GPU1    NIC0", "GPU0    GPU0    NIC0"), "the header must name each device once (got GPU0 GPU0 NIC0)."),
    ],
)  # fmt: skip
def test_refusals(change: tuple[str, str], sentence: str) -> None:
    text = PAIR.replace(*change, 1)
    assert text != PAIR
    assert refused(text).startswith(f"topo.txt: {sentence}")


def test_no_header() -> None:
    assert refused("nothing\n") == "topo.txt: must have a header that names GPU0 and the other devices (got none)."


def command(directory: Path, script: str) -> None:
    path = directory / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    command(tmp_path, 'echo "asked $*"')
    assert nvidia_smi("topo", "-m") == "asked topo -m\n"
    command(tmp_path, "echo 'no driver' >&2; exit 9")
    with pytest.raises(PerfModelError, match=r"^nvidia-smi topo -m: must succeed \(it said 'no driver'\)"):
        nvidia_smi("topo", "-m")
    command(tmp_path, "exec sleep 60")
    with pytest.raises(PerfModelError, match=r"must answer within 0.2 s"):
        nvidia_smi("topo", timeout_s=0.2)
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    with pytest.raises(PerfModelError, match=r"must be installed to read this machine"):
        nvidia_smi("topo", "-m")


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("GPU0" + " " * 400_000 + "x\n" + PAIR, "row GPU0 must have 2 cells"),  # took minutes
        (PAIR.replace("PHB", "NV" + "1" * 5000), "row GPU0, column GPU1 must be X, NV and a number"),
        (PAIR.replace("0-15", "0-" + "1" * 5000), "row GPU0: CPU Affinity must be like 0-15,32"),
        ("GPU" + "1" * 5000 + "\n" + PAIR, "row 1 must be that of GPU1"),
    ],
)
def test_long_lines_and_numbers_are_read_once(text: str, rule: str) -> None:
    with pytest.raises(PerfModelError) as raised:
        parse_matrix(text)
    assert rule in str(raised.value)
    assert len(str(raised.value)) < 300


def test_titles_may_stand_far_apart() -> None:
    wide = PAIR.replace("    CPU Affinity    NUMA Affinity", " " * 100 + "CPU Affinity \t  NUMA Affinity")
    assert parse_matrix(wide) == parse_matrix(PAIR)
