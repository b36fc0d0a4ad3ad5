"""The command ``perfmodel sweep``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from perfmodel.cli.help import TaughtCommand
from perfmodel.cli.options import FILE, question_options, wrote
from perfmodel.files.writing import check_folder
from perfmodel.terminal import write


@click.command(cls=TaughtCommand)
@click.argument("scenario_file", metavar="SCENARIO", type=FILE)
@click.option(
    "--vary",
    "vary",
    multiple=True,
    required=True,
    metavar="KEY=VALUE,VALUE...",
    help="Values to try; repeatable: every combination is predicted.",
)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.option("--plot", type=FILE, metavar="DIR", help="Write plots of time and memory there.")
@click.option("--no-exact-keys", is_flag=True, help="Use the general grid only, no kernel measured for a scenario.")
@question_options
def sweep(
    scenario_file: Path, vary: tuple[str, ...], as_json: bool, plot: Path | None, no_exact_keys: bool, **question: Any
) -> None:
    """Predict SCENARIO with every combination of values and rank the configurations.

    Where SCENARIO has as many hardware.gpus as ranks (parallelism.dp x pp.stages), and hardware.gpus is neither set nor
    varied, each configuration has as many as its own ranks.
    """
    from perfmodel.prediction.sweep import parse_vary
    from perfmodel.prediction.sweep import sweep as sweep_scenario
    from perfmodel.report.text.sweep import sweep_text

    if plot is not None:
        check_folder(plot)
    result = sweep_scenario(scenario_file, parse_vary(vary), exact=not no_exact_keys, progress=True, **question)
    write(json.dumps(result.to_json(), indent=1) + "\n" if as_json else sweep_text(result))
    if plot is not None:
        from perfmodel.report.plots.sweep import save_sweep_plots

        wrote(save_sweep_plots(result, plot))
