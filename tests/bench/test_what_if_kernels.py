"""What was published of products and of memory, against the scaling; the bounds are those of docs/what-if.md."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
import yaml

from bench.what_if import kernels

ROWS = yaml.safe_load(kernels.PUBLISHED.read_text(encoding="utf-8"))["rows"]
PRINTED = Path(__file__).parents[2] / "bench" / "results" / "what-if-kernels.txt"


def test_products_gain_about_as_much_from_a100_to_h200_as_their_peaks_promise() -> None:
    cases = list(kernels.products_on_a100(ROWS))
    assert statistics.median(abs(case.error) for case in cases) < 0.06
    assert all(case.is_inside for case in cases) and len(cases) == 8
    assert max(case.before_s / case.measured_s for case in cases) > 3


def test_products_do_not_follow_memory_alone_but_for_a_narrow_one() -> None:
    cases = list(kernels.products_in_fp8(ROWS))
    assert [case.name for case in cases if case.is_scaled] == ["802816, 192, 768"]
    assert max(abs(case.error) for case in cases if not case.is_scaled) < 0.07


def test_streams_follow_memory() -> None:
    cases = list(kernels.streams(ROWS))
    assert len(cases) == 15 and all(case.is_inside for case in cases)
    assert max(abs(case.error) for case in cases) < 0.11


def test_rates_of_both_gpus_become_times_of_the_same_gemm() -> None:
    row = {"dtype": "bfloat16", "b": "1", "m": "4096", "n": "2048", "k": "1024"}
    rates = {"h100_flops_per_s": "6e14", "b200_flops_per_s": "1e15"}
    (large,) = kernels.products_on_b200([row | rates], "bfloat16")
    assert large.name == "1, 4096, 2048, 1024"
    assert large.before_s == pytest.approx(2 * 4096 * 2048 * 1024 / 600e12)
    assert large.measured_s == pytest.approx(0.6 * large.before_s)
    assert large.scaled_s < large.measured_s  # more of it is scaled than follows
    assert large.is_inside
    assert not list(kernels.products_on_b200([row | rates], "float32"))


def test_what_is_printed_is_what_was_committed(capsys: pytest.CaptureFixture[str]) -> None:
    kernels.main()
    assert capsys.readouterr().out == PRINTED.read_text(encoding="utf-8")


def test_what_the_documentation_quotes_was_printed() -> None:
    lines = PRINTED.read_text(encoding="utf-8").splitlines()
    documented = (PRINTED.parents[2] / "docs" / "what-if.md").read_text(encoding="utf-8")
    rows = [line.split("|") for line in documented.splitlines() if line.startswith(("| 8 in", "| 375 in", "| 46 of"))]
    assert len(rows) == 4
    for row in rows:
        error, bias, inside = (cell.strip().replace(" %", "%") for cell in row[5:8])
        places = [at for at, line in enumerate(lines) if f"median error {error}," in line]
        assert any(f"bias {bias}" in lines[at] and f"changed {inside} are" in lines[at + 2] for at in places)
    formerly = [line for line in lines if "if it were 0.2" in line]
    for inside in (84, 216):
        assert f"{inside} " in documented
        assert any(f"would hold {inside} " in line for line in formerly)
