"""The command ``perfmodel predict``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from perfmodel.cli.help import TaughtCommand
from perfmodel.cli.options import FILE, question_options, sweep_command, wrote
from perfmodel.files.kinds import MEMORY_SNAPSHOT
from perfmodel.files.writing import check_folder, check_writable
from perfmodel.progress import doing, shown
from perfmodel.terminal import print_rich, write

if TYPE_CHECKING:
    from perfmodel.prediction.fitting import Fitting
    from perfmodel.prediction.prediction import Prediction


@click.command(cls=TaughtCommand)
@click.argument("scenario_file", metavar="SCENARIO", type=FILE)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.option("--plot", type=FILE, metavar="DIR", help="Write timeline, roofline, memory and time plots there.")
@click.option(
    "--trace", type=FILE, metavar="FILE", help="Write a Chrome trace (.json or .json.gz) for Perfetto or HTA."
)
@click.option("--memory-snapshot", type=FILE, metavar="FILE", help="Write a pickle for pytorch.org/memory_viz.")
@click.option("--no-exact-keys", is_flag=True, help="Use the general grid only, no kernel measured for a scenario.")
@question_options
def predict(
    scenario_file: Path,
    as_json: bool,
    plot: Path | None,
    trace: Path | None,
    memory_snapshot: Path | None,
    no_exact_keys: bool,
    **question: Any,
) -> None:
    """Predict step time, memory, timeline and bottleneck of SCENARIO.

    Work that takes over two seconds says on stderr what it does (PERFMODEL_PROGRESS=off keeps it quiet). What would
    take far longer is refused: docs/limits.md lists the limits, such as 1,024 layers, a million GPUs and 5,000,000
    operators in a step.
    """
    _check_outputs(plot, trace, memory_snapshot)
    prediction = predicted(scenario_file, exact=not no_exact_keys, **question)
    fitting = _what_fits(prediction)
    if as_json:
        from perfmodel.report.json_report import json_report

        write(json.dumps(json_report(prediction, fitting), indent=1) + "\n")
    else:
        _print_report(prediction, fitting, scenario_file, no_exact_keys=no_exact_keys, **question)
    _save_outputs(prediction, plot, trace, memory_snapshot)


def predicted(scenario_file: Path, **question: Any) -> Prediction:
    """Predict, with progress on stderr; ``question`` as :func:`perfmodel.prediction.predict.predict` takes it."""
    from perfmodel.prediction.predict import predict as predict_scenario

    with shown():
        return predict_scenario(scenario_file, **question)


def _check_outputs(plot: Path | None, trace: Path | None, memory_snapshot: Path | None) -> None:
    """Refuse what could not be written before time is spent on it."""
    if plot is not None:
        check_folder(plot)
    if trace is not None:
        from perfmodel.report.traces.chrome import check_trace_path

        check_trace_path(trace)
    if memory_snapshot is not None:
        check_writable(memory_snapshot, MEMORY_SNAPSHOT)


def _what_fits(prediction: Prediction) -> Fitting | None:
    """Find settings with which the step would fit; None if it fits, or memory is not predicted."""
    if prediction.fits is not False:
        return None
    from perfmodel.prediction.fitting import what_fits

    with shown(), doing("trying what would fit"):
        return what_fits(prediction)


def _print_report(prediction: Prediction, fitting: Fitting | None, scenario_file: Path, **question: Any) -> None:
    from perfmodel.report.text.fitting import fitting_lines
    from perfmodel.report.text.prediction import report

    def ask(vary: dict[str, list[str]]) -> str:
        return sweep_command(scenario_file, vary, **question)

    print_rich(report(prediction))
    if fitting is not None:
        write("\n  ".join(["\nwhat would fit", *fitting_lines(fitting, ask)]) + "\n")


def _save_outputs(prediction: Prediction, plot: Path | None, trace: Path | None, memory_snapshot: Path | None) -> None:
    """Write the files that were asked for, and name them on stderr."""
    if plot is not None:
        from perfmodel.report.plots.prediction import save_plots

        with shown(), doing("drawing plots"):
            plots = save_plots(prediction, plot)
        wrote(plots)
    if trace is not None:
        from perfmodel.report.traces.chrome import save_chrome_trace

        with shown(), doing("writing the trace"):
            save_chrome_trace(prediction, trace)
        wrote([trace])
    if memory_snapshot is not None:
        from perfmodel.report.traces.memory_snapshot import save_memory_snapshot

        with shown(), doing("writing the memory snapshot"):
            rank = save_memory_snapshot(prediction, memory_snapshot)
        wrote([memory_snapshot], "" if rank is None else f" of rank {rank}")
