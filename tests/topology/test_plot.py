"""The picture of a topology: where boxes stand, what is written on links, what the legend says."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from perfmodel.errors import PerfModelError
from perfmodel.topology.graph import rates_of, topology
from perfmodel.topology.matrix import parse_matrix
from perfmodel.topology.plot import Place, plot_topology, positions, save_topology_plot
from perfmodel.topology.sources import described
from tests.places import TESTS

DATA = TESTS / "data" / "topology"


def eight() -> Any:
    return topology(parse_matrix((DATA / "hgx8-repaired.txt").read_text()), rates_of("H200"))


def legend(ax: Any) -> list[str]:
    return [text.get_text() for text in ax.get_legend().get_texts()]


def test_it_draws_on_the_axes_it_is_given() -> None:
    ax = Figure().subplots()
    assert plot_topology(described("1x2:pcie=25GB/s"), ax) is ax
    assert legend(ax) == ["PCIe: 25 GB/s (stated)"]
    assert plot_topology(described("1x1")).get_legend() is None


def test_a_switch_stands_over_what_hangs_on_it() -> None:
    places = positions(eight())
    assert [places[name].x for name in ("GPU0", "GPU4", "GPU5", "NIC0", "GPU6", "GPU7")] == [0, 4, 5, 6, 7, 8]
    assert places["PCIe0"] == Place(5, 6, 2)
    assert places["NVSwitch0"] == Place(0, 8, 0)
    assert (places["CPU0"].first, places["CPU0"].last, places["CPU1"].first) == (0, 3, 4)
    assert [places[name].y for name in ("GPU0", "Bridge0", "CPU0", "node0")] == [1, 3, 4, 5]


@pytest.mark.parametrize(
    "text", ["2x8:nvswitch,network=8x50GB/s", "2x4:pcie,network", "3x2:host,network=2x1GB/s", None]
)
def test_no_two_boxes_overlap(text: str | None) -> None:
    ax = plot_topology(eight() if text is None else described(text))
    boxes = [patch.get_window_extent() for patch in ax.patches if isinstance(patch, FancyBboxPatch)]
    assert len(boxes) > 8
    assert not [pair for pair in combinations(boxes, 2) if pair[0].overlaps(pair[1])]


def test_links_are_labelled_once_and_explained() -> None:
    ax = plot_topology(eight())
    texts = [text.get_text() for text in ax.texts]
    assert (texts.count("NV18\n450 GB/s"), texts.count("63 GB/s")) == (1, 1)
    assert legend(ax) == [
        "NVLink x 18: 450 GB/s (datasheet)", "PCIe: 63 GB/s (datasheet)", "PCIe: unknown",
        "inside the CPU: unknown", "between CPUs: unknown",
    ]  # fmt: skip
    dashed = [line for line in ax.lines if line.is_dashed()]
    assert len(dashed) == 1 + 8 + 2  # the NIC, inside the CPUs, between them
    assert len(ax.lines) == 8 + 10 + 8 + 2


def test_bonds_between_gpus_are_bows_that_say_how_many() -> None:
    ax = plot_topology(described("1x3:nvlink=4x25GB/s"))
    assert [text.get_text() for text in ax.texts].count("NV4") == 3
    assert legend(ax) == ["NVLink x 4: 100 GB/s (stated)"]
    lows = sorted(min(line.get_ydata()) for line in ax.lines)
    assert lows == pytest.approx([-0.8, -0.55, -0.55], abs=1e-3)
    assert ax.get_ylim()[0] < lows[0]


def test_of_many_machines_two_are_drawn() -> None:
    ax = plot_topology(described("5x2:nvswitch,network"))
    labels = [text.get_text() for text in ax.texts]
    assert (labels.count("NVSwitch"), labels.count("machine")) == (2, 2)
    assert "GPU3" in labels and "GPU4" not in labels
    assert ax.get_title() == "and 3 more machines like these"
    assert plot_topology(described("2x2:nvswitch,network")).get_title() == ""


@pytest.mark.parametrize(
    ("name", "begin"), [("a.png", b"\x89PNG\r\n"), ("a.PNG", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.pdf", b"%PDF")]
)
def test_file(tmp_path: Path, name: str, begin: bytes) -> None:
    path = save_topology_plot(eight(), tmp_path / name)
    assert path.read_bytes().startswith(begin)


@pytest.mark.parametrize("ending", [".xyz", ""])
def test_no_other_files(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"a{ending}"
    with pytest.raises(PerfModelError, match=f"a{ending}: a plot must end in .png, .svg, .pdf .got '{ending}'"):
        save_topology_plot(described("1x2:pcie"), path)
    assert not path.exists()


def test_hundreds_of_gpus_are_not_drawn(tmp_path: Path) -> None:
    with pytest.raises(PerfModelError, match=r"at most 64 GPUs can be drawn \(got 200\)"):
        save_topology_plot(described("1x200:pcie"), tmp_path / "many.png")
    assert list(tmp_path.iterdir()) == []


def test_gpus_joined_by_bonds_stand_in_ascending_order() -> None:
    places = positions(described("1x4:nvlink"))
    assert [places[f"GPU{number}"].x for number in range(4)] == [0, 1, 2, 3]
