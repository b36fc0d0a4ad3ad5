"""The command ``perfmodel diff``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from perfmodel.cli.help import TaughtCommand
from perfmodel.cli.options import FILE, question_options
from perfmodel.cli.predict import predicted
from perfmodel.terminal import print_rich


@click.command(cls=TaughtCommand)
@click.argument("scenario_file", metavar="SCENARIO", type=FILE)
@click.argument("trace_file", metavar="TRACE", type=FILE)
@question_options
def diff(scenario_file: Path, trace_file: Path, **question: Any) -> None:
    """Hold the predicted timeline of SCENARIO against TRACE, a torch.profiler Chrome trace, operator by operator."""
    from perfmodel.report.diff.diff import diff_with_trace
    from perfmodel.report.diff.text import diff_report

    print_rich(diff_report(diff_with_trace(predicted(scenario_file, **question), trace_file)))
