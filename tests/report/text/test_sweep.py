"""The table of a sweep, whole."""

from __future__ import annotations

from dataclasses import replace

from perfmodel.prediction.sweep_result import Configuration, SweepResult, value_text
from perfmodel.report.text.sweep import sweep_text
from tests.report.sweeps import GIB, RESULT, outcome


def test_whole() -> None:
    lines = sweep_text(RESULT).splitlines()
    assert lines[:2] == ["toy on gpu: 4 configurations", "with precision=bf16"]
    assert lines[3].split() == ["parallelism.", "batch.", "exposed", "memory", "device", "memory"]
    cells = [line.split("  ") for line in lines[4:8]]
    assert [[cell.strip() for cell in row if cell.strip()] for row in cells] == [
        ["rank", "bucket_cap_mb", "size", "samples/s", "of best", "step time", "90 % interval", "communication", "allocated", "in use"],
        ["1", "25", "16", "1,600", "100.0 %", "10 ms", "9 ms to 11 ms", "1 ms", "1.5 GiB", "3 GiB"],
        ["1", "null", "16", "1,538", "96.2 %", "10.4 ms", "9.36 ms to 11.44 ms", "1.5 ms", "1.5 GiB", "3 GiB"],
        ["3", "25", "8", "1,000", "62.5 %", "8 ms", "7.2 ms to 8.8 ms", "0 ns", "1.5 GiB", "3 GiB"],
    ]  # fmt: skip
    assert lines[8:] == [
        "",
        "2 configurations share rank 1: their 90 % intervals overlap that of the first of them, so which is faster is not known",
        "",
        "without a rank:",
        "  parallelism.bucket_cap_mb null, batch.size 8: the wire must hold. Mend it.",
        "",
        "fastest as predicted, but tied: parallelism.bucket_cap_mb 25, batch.size 16; its bottleneck is the wire",
    ]


def test_columns_that_say_nothing_are_left_out() -> None:
    only = Configuration({"batch.size": 8}, 1, outcome(0.01, 8, in_use=None))
    text = sweep_text(SweepResult("toy", "cpu", {"batch.size": (8,)}, (), (only,)))
    assert (
        text
        == """\
toy on cpu: 1 configuration

      batch.
rank    size  samples/s  of best  step time  90 % interval
   1       8        800  100.0 %      10 ms  9 ms to 11 ms

best: batch.size 8; its bottleneck is the wire
"""
    )


def test_pipelines_have_a_column_of_bubbles_and_gpus_that_follow_one_of_their_own() -> None:
    def with_gpus(gpus: int, bubble_share: float | None) -> Configuration:
        found = replace(outcome(0.01 / gpus, 8, in_use=None), gpus=gpus, bubble_share=bubble_share)
        return Configuration({"parallelism.pp.stages": gpus}, 1, found)

    both = (with_gpus(4, 0.25), with_gpus(2, None))
    result = SweepResult("toy", "gpu", {"parallelism.pp.stages": (2, 4)}, (), both)
    table = sweep_text(result).split("\n\n")[1]
    heads = "rank stages GPUs samples/s of best step time 90 % interval bubble"
    assert " ".join(table.splitlines()[2].split()) == heads
    assert [line.split()[:3] for line in table.splitlines()[3:]] == [["1", "4", "4"], ["1", "2", "2"]]
    assert [line.endswith("25.0 %") for line in table.splitlines()[3:]] == [True, False]
    varied = replace(result, vary={"hardware.gpus": (2, 4)})
    assert "GPUs" not in sweep_text(varied)


def test_nothing_ranked() -> None:
    only = Configuration({"batch.size": 8}, None, outcome(0.01, 8), "does not fit")
    text = sweep_text(SweepResult("toy", "gpu", {"batch.size": (8,)}, (), (only,)))
    assert text == "toy on gpu: 1 configuration\n\nwithout a rank:\n  batch.size 8: does not fit\n"


def test_where_none_fits_the_nearest_is_named() -> None:
    def too_large(size: int, needed_gib: int) -> Configuration:
        found = replace(outcome(0.01, size, in_use=None), fits=False, needed_bytes=needed_gib * GIB)
        return Configuration({"batch.size": size}, None, found, "does not fit")

    result = SweepResult("toy", "gpu", {"batch.size": (8, 4)}, (), (too_large(8, 12), too_large(4, 9)))
    assert sweep_text(result).splitlines()[-1] == "none fits; nearest to it: batch.size 4, which needs 1 GiB more"


def test_both_ends_of_a_long_value() -> None:
    long = value_text({"first": list(range(50))})
    assert long == '{"first": [0, 1, 2, 3,…, 45, 46, 47, 48, 49]}'
    assert [value_text(value) for value in (25, 0.5, True, None, "a")] == ["25", "0.5", "true", "null", "a"]


def test_assumptions_and_warnings_are_told_once() -> None:
    noted = ((), ("wires are extrapolated", "3 % from curves"))
    notes = [(("links 2 x as fast as measured",), ("kernels are unstable", "wires are extrapolated")), noted, noted]
    ranked = [
        replace(each, outcome=replace(each.outcome, assumptions=assumed, warnings=warned))
        for each, (assumed, warned) in zip(RESULT.ranked, notes, strict=True)
        if each.outcome is not None
    ]
    lines = sweep_text(replace(RESULT, configurations=(*ranked, *RESULT.unranked))).splitlines()
    first = lines.index("without a rank:") - 5
    assert lines[first - 1 : first + 5] == [
        "",
        "assuming links 2 x as fast as measured (parallelism.bucket_cap_mb 25, batch.size 16)",
        "warning: kernels are unstable (parallelism.bucket_cap_mb 25, batch.size 16)",
        "warning: wires are extrapolated",
        "warning: 3 % from curves (2 of 3 configurations)",
        "",
    ]
