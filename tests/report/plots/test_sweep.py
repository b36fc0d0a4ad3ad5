"""The pictures of a sweep: what stands on the Axes, and that every file is a PNG."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from perfmodel.prediction.sweep_result import Configuration, SweepResult
from perfmodel.report.plots.sweep import plot_sweep_memory, plot_sweep_throughput, plot_sweep_time, save_sweep_plots
from tests.report.sweeps import GIB, RESULT, outcome

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


def test_names_are_dots_one_colour_for_each_combination_of_the_rest() -> None:
    vary = {"precision": ("fp32", "bf16"), "mode": ("train", "forward")}
    steps_s = {("fp32", "train"): 0.04, ("bf16", "train"): 0.03, ("fp32", "forward"): 0.02, ("bf16", "forward"): 0.01}
    found = tuple(
        Configuration({"precision": precision, "mode": mode}, 1, outcome(step_s, 8))
        for (precision, mode), step_s in steps_s.items()
    )
    ax = plot_sweep_time(SweepResult("toy", "gpu", vary, (), found))
    train, forward = (line for line in ax.lines if line.get_label().startswith("mode"))
    assert [*train.get_ydata(), *forward.get_ydata()] == pytest.approx([40.0, 30.0, 20.0, 10.0])
    assert [*train.get_xdata(), *forward.get_xdata()] == pytest.approx([-0.125, 0.875, 0.125, 1.125])
    assert ax.patches[:] == []
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
    below, above = plot_sweep_memory(small).get_ylim()
    assert (below, above) == pytest.approx((0.95, 1.05))


def test_files(tmp_path: Path) -> None:
    saved = save_sweep_plots(RESULT, tmp_path)
    assert [path.name for path in saved] == ["time.png", "memory.png"]
    assert all(path.read_bytes().startswith(PNG) for path in saved)
    on_cpu = replace(
        CAPS, vary={"bucket": (25,)}, configurations=(Configuration({"bucket": 25}, 1, outcome(0.01, 8, in_use=None)),)
    )
    assert [path.name for path in save_sweep_plots(on_cpu, tmp_path / "cpu")] == ["time.png"]


def test_dots_without_an_interval_have_no_caps() -> None:
    found = tuple(Configuration({"strategy": each}, 1, outcome(0.01, 8)) for each in ("ddp", "zero1"))
    result = SweepResult("toy", "gpu", {"strategy": ("ddp", "zero1")}, (), found)
    memory, time = plot_sweep_memory(result), plot_sweep_time(result)
    assert memory.lines[0].get_ydata().tolist() == [3.0, 3.0]
    assert (len(memory.containers), len(time.containers)) == (0, 1)


def test_differences_can_be_seen() -> None:
    """Steps of 100 and 102 ms with their intervals fill more than half of the axis."""
    found = tuple(
        Configuration({"bucket": size}, 1, replace(outcome(step_s, 8), interval_s=(step_s - 1e-3, step_s + 1e-3)))
        for size, step_s in ((1, 0.100), (25, 0.102))
    )
    below, above = plot_sweep_time(SweepResult("toy", "gpu", {"bucket": (1, 25)}, (), found)).get_ylim()
    assert below < 99
    assert above > 103
    assert above - below < 2 * (103 - 99)


def scaling(samples_per_step: dict[int, int]) -> SweepResult:
    """Steps of 10, 11 and 12 ms on 1, 2 and 4 GPUs."""
    steps_s = {1: 0.010, 2: 0.011, 4: 0.012}
    found = tuple(
        Configuration({"dp": gpus}, 1, replace(outcome(steps_s[gpus], samples), gpus=gpus))
        for gpus, samples in samples_per_step.items()
    )
    return SweepResult("toy", "gpu", {"dp": tuple(samples_per_step)}, (), found)


def ideal_of(ax: Axes) -> list[float]:
    (line,) = [line for line in ax.lines if str(line.get_label()).startswith("ideal")]
    return list(line.get_ydata())


def test_scaling_is_drawn_on_logarithmic_axes_with_the_ideal_line(tmp_path: Path) -> None:
    grows, same = scaling({1: 8, 2: 16, 4: 32}), scaling({1: 8, 2: 8, 4: 8})
    ax = plot_sweep_throughput(grows)
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    assert ideal_of(ax) == pytest.approx([800, 1600, 3200])
    assert ideal_of(plot_sweep_time(grows)) == pytest.approx([10, 10, 10])
    assert ideal_of(plot_sweep_time(same)) == pytest.approx([10, 5, 2.5])
    alone = plot_sweep_throughput(CAPS)
    assert alone.get_yscale() == "linear"
    assert not any(str(line.get_label()).startswith("ideal") for line in alone.lines)
    (time, _), (smaller, _) = save_sweep_plots(same, tmp_path), save_sweep_plots(CAPS, tmp_path / "caps")
    assert height(time) == 2 * height(smaller)


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
    assert "\nabove the limit: the least that is needed" in ax.get_title()
    assert "the least" not in plot_sweep_memory(CAPS).get_title()
