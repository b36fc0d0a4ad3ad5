"""Values of the vendors' datasheets: dense peak arithmetic and memory bandwidth, by device name.

Sources: NVIDIA's datasheets of V100 (2020), A100 (2022), H100 (2023), H200 (2024), HGX B200 (2025, an eighth of the
board), L4 (2023) and the Ada architecture paper (RTX 4090, float32 accumulation). Where a datasheet quotes sparse
rates, half is given here. No number here is measured.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Datasheet(NamedTuple):
    """Peaks of one device.

    Attributes
    ----------
    peak_flops_per_s
        Dense peaks by arithmetic kind.
    peak_memory_bytes_per_s
        Bandwidth of the device memory.
    """

    peak_flops_per_s: dict[str, float]
    peak_memory_bytes_per_s: float


def _tera(fp32: float, tf32: float | None, bf16: float | None, fp16: float) -> dict[str, float]:
    given = {"fp32": fp32, "tf32": tf32, "bf16": bf16, "fp16": fp16}
    return {kind: rate * 1e12 for kind, rate in given.items() if rate is not None}


_A100 = _tera(19.5, 156, 312, 312)
_HOPPER_SXM = _tera(67, 494.5, 989.5, 989.5)

# Words that must all stand in the device's name; the first row that fits is taken.
DATASHEETS: list[tuple[tuple[str, ...], Datasheet]] = [
    (("V100",), Datasheet(_tera(15.7, None, None, 125), 0.9e12)),
    (("A100", "PCIE", "80GB"), Datasheet(_A100, 1.935e12)),
    (("A100", "80GB"), Datasheet(_A100, 2.039e12)),
    (("A100",), Datasheet(_A100, 1.555e12)),
    (("H100", "PCIE"), Datasheet(_tera(51, 378, 756, 756), 2.0e12)),
    (("H100",), Datasheet(_HOPPER_SXM, 3.35e12)),
    (("H200",), Datasheet(_HOPPER_SXM, 4.8e12)),
    (("B200",), Datasheet(_tera(75, 1125, 2250, 2250), 7.7e12)),
    (("L4",), Datasheet(_tera(30.3, 60, 121, 121), 0.3e12)),
    (("RTX", "4090"), Datasheet(_tera(82.6, 82.6, 165.2, 165.2), 1.008e12)),
]


def find_datasheet(device_name: str) -> Datasheet | None:
    """The datasheet of a device by the name its driver gives, or None where there is none here.

    >>> find_datasheet("NVIDIA A100-SXM4-80GB").peak_memory_bytes_per_s
    2039000000000.0
    >>> find_datasheet("NVIDIA L40") is None
    True
    """
    words = set(re.split(r"[^A-Z0-9]+", device_name.upper()))
    for wanted, sheet in DATASHEETS:
        if words.issuperset(wanted):
            return sheet
    return None
