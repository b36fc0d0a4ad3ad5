"""Colours that stand together are told apart, also by readers with a colour deficiency."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from perfmodel.cost.kernels.classify import CLASSES
from perfmodel.report.plots import palette

# How a colour appears at full deficiency, of linear RGB. Source: Machado, Oliveira, Fernandes 2009, table 1.
SEEN_AS = {
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
TO_XYZ = [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
WHITE = [0.95047, 1.0, 1.08883]
LEAST_DIFFERENCE = 10.0  # of CIE 1976: several times what can just be told apart
TOGETHER = {
    "kernels": palette.KERNEL_FAMILIES,
    "kernels and communication": {**palette.KERNEL_FAMILIES, "communication": palette.COMMUNICATION},
    "phases": palette.PHASES | {"before": palette.OUTSIDE},
    "parts of the step": palette.BREAKDOWN,
    "messages": {"communication": palette.COMMUNICATION, "waiting": palette.WAITING_FOR_RANK, "host": palette.HOST},
    "storage": palette.STORAGE,
    "sides": palette.SIDES,
    "layouts": palette.LAYOUTS,
    "links": palette.LINKS,
    "series": dict(enumerate(palette.SERIES)),
}


def lab(colour: str, seen_as: object) -> np.ndarray:
    """CIE L*a*b* of a colour as it is seen."""
    encoded = np.array(to_rgb(colour))
    linear = np.where(encoded <= 0.04045, encoded / 12.92, ((encoded + 0.055) / 1.055) ** 2.4)
    xyz = np.array(TO_XYZ) @ np.clip(np.array(seen_as) @ linear, 0, 1) / np.array(WHITE)
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("sight", SEEN_AS)
@pytest.mark.parametrize("colours", TOGETHER.values(), ids=TOGETHER.keys())
def test_colours_that_stand_together_differ(colours: Mapping[object, str], sight: str) -> None:
    seen = {name: lab(colour, SEEN_AS[sight]) for name, colour in colours.items()}
    near = [
        (a, b, round(float(np.linalg.norm(seen[a] - seen[b])), 1))
        for a, b in combinations(seen, 2)
        if np.linalg.norm(seen[a] - seen[b]) < LEAST_DIFFERENCE
    ]
    assert near == []


def test_a_colour_that_means_the_same_is_the_same() -> None:
    assert palette.PHASES["optimizer"] == palette.BREAKDOWN["optimizer_s"] == palette.kernel_colour("optimizer")
    assert palette.PHASES["forward"] == palette.BREAKDOWN["forward_s"]
    assert palette.PHASES["backward"] == palette.BREAKDOWN["backward_s"]


def test_every_class_of_kernels_has_a_family() -> None:
    assert set(palette.FAMILY_OF_CLASS) == set(CLASSES)
    assert set(palette.FAMILY_OF_CLASS.values()) == set(palette.KERNEL_FAMILIES)


def test_pictures_take_their_colours_from_here() -> None:
    folder = Path(palette.__file__).parent
    modules = [path for path in folder.glob("*.py") if "matplotlib" in path.read_text() and path.name != "palette.py"]
    assert len(modules) > 5
    assert [path.name for path in modules if re.search(r"#[0-9A-Fa-f]{6}", path.read_text())] == []
