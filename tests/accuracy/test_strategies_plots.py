"""The pictures of strategies: dots, their values and names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from perfmodel.accuracy.card import accuracy_card
from perfmodel.accuracy.cases import Card
from perfmodel.accuracy.plots import save_accuracy_plots
from perfmodel.accuracy.strategies import strategy_groups
from perfmodel.accuracy.strategies_plots import plot_strategies
from perfmodel.hardware.profile import find_profile, load_profile
from perfmodel.prediction.predict import predict
from perfmodel.scenario.scenario import Scenario
from tests.accuracy.measured import measured
from tests.accuracy.strategy_cases import GROUP, case

(TOGETHER,) = strategy_groups([replace(GROUP[0], split="held-out"), *GROUP[1:]])


def dots(ax: Axes) -> list[tuple[float, float]]:
    """Value and height of each."""
    found = [line.get_xydata().tolist() for line in ax.lines]
    return [(point[0][0], round(point[0][1], 6)) for point in found if point]


def test_a_pair_of_dots_for_each_case() -> None:
    ax = Figure().subplots()
    assert plot_strategies(TOGETHER, "step", ax) is ax
    values = [100, 100, 200, 204, 201, 203, 300, 300, 400, 400]
    assert [value for value, _ in dots(ax)] == pytest.approx(values)
    assert [height for _, height in dots(ax)] == pytest.approx(
        [row + side for row in range(5) for side in (-0.13, 0.13)]
    )
    assert [text.get_text().strip() for text in ax.texts[2:4]] == ["200", "204"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["none *", "ddp", "zero1", "zero2", "zero3"]
    assert (ax.get_xlabel(), ax.get_xlim()) == ("ms", (0, pytest.approx(1.35 * 460)))
    assert ax.yaxis_inverted()


def test_the_axis_begins_where_differences_can_be_seen() -> None:
    near = [replace(each, measured={"step": 1.0}, predicted={"step": 1.01}) for each in GROUP]
    low, high = plot_strategies(strategy_groups(near)[0]).get_xlim()
    assert 900 < low < 1000
    assert 1010 < high < 1100


def test_what_was_not_measured_has_one_dot_and_what_is_unknown_none() -> None:
    alone, ddp, *_ = GROUP
    traced = replace(ddp, measured=ddp.measured | {"exposed": 2e-3}, predicted=ddp.predicted | {"exposed": 3e-3})
    hidden = replace(case("gpt-zero1", "zero1"), predicted={"step": 1.0, "exposed": 0.0})
    (group,) = strategy_groups([alone, traced, hidden])
    ax = plot_strategies(group, "exposed", named=False)
    assert [value for value, _ in dots(ax)] == pytest.approx([2, 3, 0])
    assert [text.get_text().strip() for text in ax.texts] == ["no communication", "2", "3", "0"]
    assert [label.get_text() for label in ax.get_yticklabels()] == [""] * 3


def test_settings_stand_below_their_strategy_and_colours_are_explained() -> None:
    root = case("gpt-root", "zero3", parallelism={"fsdp": {"wrap": "root"}})
    (group,) = strategy_groups([*GROUP[:2], replace(root, split="held-out")])
    ax = plot_strategies(group)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["none", "ddp", "zero3 *\nwrap root"]
    handles, sides = ax.get_legend_handles_labels()
    drawn = [line.get_color() for line in ax.lines[:2]]
    assert (sides, [each.get_color() for each in handles]) == (["measured", "predicted"], drawn)


def test_a_panel_of_zeros_has_an_axis() -> None:
    hidden = [replace(each, predicted={"step": 1.0, "exposed": 0.0}) for each in GROUP]
    assert plot_strategies(strategy_groups(hidden)[0], "exposed").get_xlim()[1] > 0


def test_a_picture_for_each_group(tmp_path: Path) -> None:
    again = [replace(each, name=f"other {each.name}", layout=None) for each in GROUP]
    saved = save_accuracy_plots(Card((*GROUP, *again)), tmp_path)
    (path,) = [path for path in saved if path.name.startswith("strategies-")]
    assert path.name == "strategies-gpt-4-GPUs-over-nvlink.png"
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_groups_of_one_name_have_pictures_of_their_own(tmp_path: Path) -> None:
    other = [case(f"gpt-more-{each}", each, batch={"size": 9}) for each in ("none", "ddp", "zero1")]
    renamed = [replace(each, name=each.name.replace("more-", "")) for each in other]
    saved = save_accuracy_plots(Card((*GROUP, *renamed)), tmp_path)
    names = [path.name for path in saved if path.name.startswith("strategies-")]
    assert names == ["strategies-gpt-4-GPUs-over-nvlink.png", "strategies-gpt-4-GPUs-over-nvlink-1.png"]


TINY = {"model": {"family": "gpt", "size": "tiny"}, "batch": {"size": 2, "sequence_length": 16}}


def test_runs_of_every_strategy_become_a_picture(tmp_path: Path) -> None:
    """Measurements are predictions with noise, of which one was not traced."""
    profile, pairs = load_profile(find_profile("h200-sxm-x4")), []
    for seed, strategy in enumerate(("none", "ddp", "zero1", "zero2", "zero3")):
        ranks = 1 if strategy == "none" else 4
        hardware = {"profile": "h200-sxm-x4", "gpus": ranks, **({"interconnect": "nvlink"} if ranks > 1 else {})}
        parallelism = {"dp": ranks, "strategy": strategy}
        asked = TINY | {"name": f"tiny-{strategy}", "parallelism": parallelism, "hardware": hardware}
        predicted = predict(Scenario.model_validate(asked), profile)
        pairs.append(measured(predicted, 0.05, seed, traced=strategy != "ddp", held_out=strategy == "zero2"))
    card = accuracy_card(pairs)
    (group,) = strategy_groups(card.cases)
    assert list(group.cases) == ["none", "ddp", "zero1", "zero2", "zero3"]
    assert [("exposed" in case.measured, "exposed" in case.predicted) for case in group.cases.values()] == [
        (False, False),
        (False, True),
        *[(True, True)] * 3,
    ]
    assert [len(case.rank_peaks.get("peak_allocated", ())) for case in group.cases.values()] == [0, 4, 4, 4, 4]
    (path,) = [path for path in save_accuracy_plots(card, tmp_path) if path.name.startswith("strategies-")]
    assert path.name == "strategies-tiny-4-GPUs-over-nvlink.png"
