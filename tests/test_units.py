"""Numbers as people read them."""

from __future__ import annotations

import math

import pytest

from perfmodel.units import (
    DTYPE_BYTES,
    format_bytes,
    format_bytes_per_s,
    format_flops_per_s,
    format_seconds,
    format_share,
)


@pytest.mark.parametrize(
    ("value_s", "expected"),
    [
        (0.0, "0 ns"),
        (9e-13, "0 ns"),
        (1e-9, "1 ns"),
        (999.94e-9, "999.9 ns"),
        (999.99e-9, "1 us"),  # what is shown is not 1000 ns
        (0.99999, "1 s"),
        (12345.6, "1.235e+04 s"),
        (-0.002, "-2 ms"),
        (math.inf, "inf"),
    ],
)
def test_seconds(value_s: float, expected: str) -> None:
    assert format_seconds(value_s) == expected


@pytest.mark.parametrize(
    ("value_bytes", "expected"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1.5 * 2**20, "1.5 MiB"), (80 * 2**30, "80 GiB")],
)
def test_bytes_are_binary(value_bytes: float, expected: str) -> None:
    assert format_bytes(value_bytes) == expected


def test_rates_are_decimal() -> None:
    assert [format_bytes_per_s(value) for value in (1e3, 25e6, 450e9, 4.8e12)] == [
        "1000 B/s", "25 MB/s", "450 GB/s", "4.8 TB/s",
    ]  # fmt: skip
    assert [format_flops_per_s(value) for value in (5e8, 6.7e10, 9.9e14, 9.9e15, 1.98e16)] == [
        "5e+08 FLOP/s", "67 GFLOP/s", "990 TFLOP/s", "9900 TFLOP/s", "19.8 PFLOP/s",
    ]  # fmt: skip


def test_shares() -> None:
    assert (format_share(0.125), format_share(0.125, 1), format_share(1.5)) == ("12 %", "12.5 %", "150 %")


def test_a_dtype_has_as_many_bytes_as_its_name_says() -> None:
    for name, size in DTYPE_BYTES.items():
        bits = int("".join(filter(str.isdigit, name.partition("_")[0])) or 8)
        assert size == bits // 8, name
