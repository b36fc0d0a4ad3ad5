"""The command ``perfmodel validate``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from perfmodel.cli.endings import torch_needed
from perfmodel.cli.help import TaughtCommand
from perfmodel.cli.options import ABOVE_0, FILE, question_options
from perfmodel.errors import PerfModelError
from perfmodel.progress import shown
from perfmodel.terminal import print_rich, sentence, write


@click.command(cls=TaughtCommand)
@click.argument("file", metavar="SCENARIO|CASES", type=FILE)
@click.option(
    "--output", type=FILE, metavar="DIR", default=Path("results"), show_default=True, help="Where measurements go."
)
@click.option("--only", multiple=True, metavar="NAME", help="Of a list of cases, run just this one; repeatable.")
@click.option("--timeout", "timeout_s", type=ABOVE_0, default=300.0, show_default=True, help="Seconds a case may take.")
@click.option("--again", is_flag=True, help="Measure anew what is there already, and replace it.")
@click.option(
    "--recordings", is_flag=True, help="Also record a profiler trace and the allocator's history of each case."
)
@question_options
def validate(
    file: Path, output: Path, only: tuple[str, ...], device: str | None, set: tuple[str, ...], **options: Any
) -> None:
    """Run a scenario, or each of a list of cases, for real and hold the prediction against it."""
    with torch_needed("validate"):
        from validate.cases import choose_cases
        from validate.run import measure_cases
    from perfmodel.accuracy.card import accuracy_card
    from perfmodel.accuracy.card_text import case_table
    from perfmodel.accuracy.comparison import predict_measurements

    cases = choose_cases(file, set, device, only)
    outcome = measure_cases(cases, device or "cuda", output, **options)
    for failure in outcome.failures:
        write(f"Error: {sentence(str(failure))}\n", to_stderr=True)
    measured = [*outcome.kept, *outcome.measured]
    with shown():
        pairs = predict_measurements(measured, allow_import=options["allow_import"], folder=file.resolve().parent)
    print_rich(case_table(accuracy_card(pairs)))
    if outcome.failures:
        raise PerfModelError(
            f"{file}: every case must run ({len(outcome.failures)} of {len(cases)} failed). See above."
        )
