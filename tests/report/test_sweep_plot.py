"""The pictures of a sweep: what stands on the Axes, and that every file is a PNG."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from perfmodel.report.sweep_plot import plot_sweep_memory, plot_sweep_throughput, plot_sweep_time, save_sweep_plots
from perfmodel.sweep import Configuration, SweepResult
from tests.report.test_sweep_text import GIB, RESULT, outcome

PNG = b"\x89PNG\r\n\x1a\n"
CAPS = SweepResult(
    "toy",
    "gpu",
    {"bucket": (1, 25, 5)},
    (),
    (
        Configuration({"bucket": 25}, 1, outcome(0.010, 8)),
        Configuration({"bucket": 1}, 2, outcome(0.020, 8, in_use=7 * GIB)),
        Configuration({"bucket": 5}, None, replace(outcome(0.030, 8, in_use=None), fits=False), "does not fit"),
    ),
)


def test_every_function_draws_on_the_axes_it_is_given() -> None:
    for draw in (plot_sweep_time, plot_sweep_throughput, plot_sweep_memory):
        ax = Figure().subplots()
        assert draw(RESULT, ax) is ax


def test_numbers_are_a_line_in_ascending_order_with_crosses_for_the_rest() -> None:
    ax = plot_sweep_time(CAPS)
    line, *_, cross = ax.lines
    assert (line.get_xdata().tolist(), line.get_ydata().tolist()) == ([1, 25], pytest.approx([20.0, 10.0]))
    assert (cross.get_marker(), list(cross.get_xdata())) == ("x", [5])
    assert [label.get_text() for label in ax.get_xticklabels()] == ["1", "5", "25"]
    assert (ax.get_xscale(), ax.get_xlabel(), ax.get_ylabel()) == ("log", "bucket", "step time, ms")
    assert ax.get_title() == "step time and its 90 % interval\ncross: does not fit, or not predicted"
    assert ax.get_legend() is None


def test_throughput_and_its_interval() -> None:
    ax = plot_sweep_throughput(CAPS)
    assert ax.lines[0].get_ydata().tolist() == pytest.approx([400.0, 800.0])
    (band,) = ax.collections[:1]
    heights = band.get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == pytest.approx((400 / 1.1, 800 / 0.9))


def test_names_are_bars_one_colour_for_each_combination_of_the_rest() -> None:
    vary = {"precision": ("fp32", "bf16"), "mode": ("train", "forward")}
    steps_s = {("fp32", "train"): 0.04, ("bf16", "train"): 0.03, ("fp32", "forward"): 0.02, ("bf16", "forward"): 0.01}
    found = tuple(
        Configuration({"precision": precision, "mode": mode}, 1, outcome(step_s, 8))
        for (precision, mode), step_s in steps_s.items()
    )
    ax = plot_sweep_time(SweepResult("toy", "gpu", vary, (), found))
    assert [bar.get_height() for bar in ax.patches] == pytest.approx([40.0, 30.0, 20.0, 10.0])
    assert [bar.get_x() + bar.get_width() / 2 for bar in ax.patches] == pytest.approx([-0.2, 0.8, 0.2, 1.2])
    assert [label.get_text() for label in ax.get_xticklabels()] == ["fp32", "bf16"]
    legend = ax.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["mode train", "mode forward"]


def test_the_limit_of_memory_is_drawn_where_it_matters() -> None:
    ax = plot_sweep_memory(CAPS)
    assert ax.get_title().startswith("peak memory in use; the device has 8 GiB\n")
    assert any(list(line.get_ydata()) == [8, 8] for line in ax.lines)
    assert ax.get_ylim() == (0, pytest.approx(8.8))
    small = replace(
        CAPS, configurations=(Configuration({"bucket": 25}, 1, outcome(0.01, 8, in_use=GIB)),), vary={"bucket": (25,)}
    )
    assert plot_sweep_memory(small).get_ylim() == (0, pytest.approx(1.1))


def test_files(tmp_path: Path) -> None:
    saved = save_sweep_plots(RESULT, tmp_path)
    assert [path.name for path in saved] == ["time.png", "memory.png"]
    assert all(path.read_bytes().startswith(PNG) for path in saved)
    on_cpu = replace(
        CAPS, vary={"bucket": (25,)}, configurations=(Configuration({"bucket": 25}, 1, outcome(0.01, 8, in_use=None)),)
    )
    assert [path.name for path in save_sweep_plots(on_cpu, tmp_path / "cpu")] == ["time.png"]


def test_bars_without_an_interval_have_no_caps() -> None:
    found = tuple(Configuration({"strategy": each}, 1, outcome(0.01, 8)) for each in ("ddp", "zero1"))
    result = SweepResult("toy", "gpu", {"strategy": ("ddp", "zero1")}, (), found)
    memory, time = plot_sweep_memory(result), plot_sweep_time(result)
    assert [bar.get_height() for bar in memory.patches] == [3.0, 3.0]
    assert (len(memory.containers), len(time.containers)) == (1, 2)


def test_micro_batches_stand_along_the_axis_and_throughput_is_drawn(tmp_path: Path) -> None:
    key = "parallelism.pp.micro_batches"
    steps_s = {(2, 1): 0.04, (4, 1): 0.02, (2, 2): 0.05, (4, 2): 0.04, (2, 3): 0.06, (4, 3): 0.03}
    found = tuple(
        Configuration({"size": size, key: count}, 1, outcome(step_s, 8)) for (count, size), step_s in steps_s.items()
    )
    result = SweepResult("toy", "gpu", {"size": (1, 2, 3), key: (2, 4)}, (), found)
    ax = plot_sweep_throughput(result)
    assert (ax.get_xlabel(), ax.lines[0].get_ydata().tolist()) == (key, pytest.approx([200.0, 400.0]))
    title = plot_sweep_memory(result).get_title()
    assert title == "peak memory in use of the rank that takes most; the device has 8 GiB"
    (time, _) = save_sweep_plots(result, tmp_path)
    one = replace(result, vary={"size": (1,)}, configurations=(Configuration({"size": 1}, 1, outcome(0.01, 8)),))
    (smaller, _) = save_sweep_plots(one, tmp_path / "one")
    assert height(time) == 2 * height(smaller)


def height(path: Path) -> int:
    """Of a PNG, in pixels."""
    return int.from_bytes(path.read_bytes()[20:24], "big")


def test_what_does_not_fit_stands_above_the_limit() -> None:
    known = CAPS.configurations[-1].outcome
    assert known is not None
    over = replace(CAPS.configurations[-1], outcome=replace(known, needed_bytes=10 * GIB))
    ax = plot_sweep_memory(replace(CAPS, configurations=(*CAPS.ranked, over)))
    line, limit = ax.lines
    assert (line.get_xdata().tolist(), line.get_ydata().tolist()) == ([1, 5, 25], [7.0, 10.0, 3.0])
    assert list(limit.get_ydata()) == [8, 8]
    assert ax.get_ylim() == (0, pytest.approx(11.0))
