"""The general grid: which operator calls are measured once on a machine, for whatever workload may come.

Sizes are drawn from fixed seeds, so the grid of a device is always the same. The order deals the classes out evenly:
an interrupted run has something of every class. A GPU's grid is meant to take about two minutes, a CPU's one.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

from calibrate.kernels import grid_cpu, grid_cuda
from calibrate.kernels.sampling import Point
from perfmodel.hardware.profile import Device
from perfmodel.trace.kernel_key import kernel_key


def grid_operations(device: Device) -> list[Point]:
    """Return every call of the device's grid, with whether TF32 is allowed in it; no two share a kernel key.

    >>> from perfmodel.hardware.profile import Device
    >>> len(grid_operations(Device(kind="cuda", name="any", memory_bytes=1))) > 700
    True
    """
    return list(_distinct(_dealt(grid_classes(device))))


def grid_classes(device: Device) -> dict[str, list[Point]]:
    """Return the same by name of their class: ``row``, ``full-reductions``, ... (calls may be in two of them)."""
    return grid_cuda.classes() if device.kind == "cuda" else grid_cpu.classes()


def _dealt(classes: dict[str, list[Point]]) -> Iterator[Point]:
    """Round-robin in proportion to the classes' sizes, each class shuffled."""
    places = []
    for position, (name, points) in enumerate(classes.items()):
        shuffled = random.Random(name).sample(points, len(points))
        places += [((i + 0.5) / len(points), position, i, point) for i, point in enumerate(shuffled)]
    places.sort(key=lambda place: place[:3])
    for place in places:
        yield place[3]


def _distinct(points: Iterable[Point]) -> Iterator[Point]:
    seen = set()
    for operation, tf32 in points:
        key = kernel_key(operation, tf32)
        if key not in seen:
            seen.add(key)
            yield operation, tf32
