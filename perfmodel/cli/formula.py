"""The command ``perfmodel formula``."""

from __future__ import annotations

import click

from perfmodel.cli.help import TaughtCommand
from perfmodel.terminal import write


@click.command(cls=TaughtCommand)
@click.argument("name", required=False)
def formula(name: str | None) -> None:
    """Print the closed forms: all of them, or everything about the one called NAME."""
    from perfmodel.closed_form.formulas import describe

    write(f"{describe(name)}\n")
