"""The only place where numbers change unit: SI inside, people's units at the edge.

GB = 1e9 bytes, GiB = 2**30 bytes. Names carry their unit: ``_s``, ``_bytes``, ``_bytes_per_s``, ``_flops`` (a count),
``_flops_per_s`` (a rate).
"""

from __future__ import annotations

import math

MB, GB, TB = 1e6, 1e9, 1e12
KIB, MIB, GIB = 1024, 1024**2, 1024**3
US, MS = 1e-6, 1e-3
LEAST_S = 1e-12  # that is shown

DTYPE_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16,
    "uint16": 2, "uint32": 4, "uint64": 8,
}  # fmt: skip


def _scaled(value: float, steps: list[tuple[float, str]]) -> str:
    if not math.isfinite(value):
        return str(value)
    rounded = float(f"{value:.4g}")
    scale, unit = next((step for step in steps if abs(rounded) >= step[0]), steps[-1])
    return f"{value / scale:.4g} {unit}"


def format_seconds(value_s: float) -> str:
    """Seconds with four significant digits and a fitting prefix; what rounding leaves of nothing is nothing.

    >>> format_seconds(0.02543), format_seconds(3.2e-6), format_seconds(1e-17)
    ('25.43 ms', '3.2 us', '0 ns')
    """
    return _scaled(0.0 if abs(value_s) < LEAST_S else value_s, [(1, "s"), (MS, "ms"), (US, "us"), (1e-9, "ns")])


def format_bytes(value_bytes: float) -> str:
    """Bytes in binary units.

    >>> format_bytes(3 * 2**30), format_bytes(512)
    ('3 GiB', '512 B')
    """
    return _scaled(value_bytes, [(GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"), (1, "B")])


def format_bytes_per_s(value_bytes_per_s: float) -> str:
    """Rates in decimal units, as the field quotes them.

    >>> format_bytes_per_s(4.8e12)
    '4.8 TB/s'
    """
    return _scaled(value_bytes_per_s, [(TB, "TB/s"), (GB, "GB/s"), (MB, "MB/s"), (1, "B/s")])


def format_flops_per_s(value_flops_per_s: float) -> str:
    """Arithmetic rates.

    >>> format_flops_per_s(9.9e14)
    '990 TFLOP/s'
    """
    return _scaled(
        value_flops_per_s,
        [(1e15, "PFLOP/s")] if value_flops_per_s >= 1e16 else [(1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1, "FLOP/s")],
    )


def format_share(share: float, decimals: int = 0) -> str:
    """A part of a whole in per cent.

    >>> format_share(0.864)
    '86 %'
    """
    return f"{100 * share:.{decimals}f} %"
