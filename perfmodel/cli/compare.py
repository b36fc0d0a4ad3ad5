"""The command ``perfmodel compare``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from perfmodel.cli.help import TaughtCommand
from perfmodel.cli.options import FILE, wrote
from perfmodel.errors import PerfModelError
from perfmodel.files.writing import check_folder
from perfmodel.progress import shown
from perfmodel.terminal import write

if TYPE_CHECKING:
    from collections.abc import Iterable

    from perfmodel.accuracy.cases import Pair


@click.command(cls=TaughtCommand)
@click.argument("directory", metavar="RESULTS", type=FILE)
@click.option("--plot", type=FILE, metavar="DIR", help="Write predicted-against-measured plots there.")
@click.option(
    "--output", type=FILE, metavar="FILE.md", help="Write the accuracy card there, and its numbers next to it as JSON."
)
@click.option(
    "--check", type=FILE, metavar="CARD.json", help="Fail where a class got worse than on that card by over 0.3 points."
)
@click.option("--profile", help="Predict with this profile, whatever the measured scenarios name.")
@click.option(
    "--allow-import",
    is_flag=True,
    help="May import the scenarios' model.target and model.loss: the files in RESULTS then choose what code is called, "
    "so only for files of people whom you would let run code here.",
)
def compare(
    directory: Path, plot: Path | None, output: Path | None, check: Path | None, profile: str | None, allow_import: bool
) -> None:
    """Predict every measurement in RESULTS again and show how far off the predictions are."""
    from perfmodel.accuracy.card import accuracy_card, check_card_path, load_card, refuse_worse, save_card
    from perfmodel.accuracy.card_text import accuracy_markdown, summary_line
    from perfmodel.accuracy.comparison import predict_measured

    if plot is not None:
        check_folder(plot)
    if output is not None:
        if output.resolve().is_relative_to(directory.resolve()):
            raise PerfModelError(
                f"--output must lie outside {directory} (got {output}): every JSON file in there is read as a "
                "measurement. Choose another folder."
            )
        check_card_path(output)
    before = None if check is None else load_card(check)  # which --output may replace
    with shown():
        pairs: Iterable[Pair] = predict_measured(directory, profile, allow_import=allow_import)
        if plot is not None:  # the card alone needs one at a time
            pairs = list(pairs)
        card = accuracy_card(pairs)
    write(f"{summary_line(card) if output or check else accuracy_markdown(card)}\n")
    if plot is not None:
        from perfmodel.accuracy.micro_batches_plot import save_micro_batch_plots
        from perfmodel.accuracy.plots import save_accuracy_plots
        from perfmodel.report.plots.pipeline import save_measured_pipelines

        wrote(save_accuracy_plots(card, plot))
        wrote([*save_micro_batch_plots(card, pairs, plot), *save_measured_pipelines(pairs, plot)])
    if output is not None:
        wrote(save_card(card, accuracy_markdown(card), output))
    if check is not None and before is not None:
        refuse_worse(card, before, check)
