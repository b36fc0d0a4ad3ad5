"""The command ``perfmodel schema``."""

from __future__ import annotations

import json

import click

from perfmodel.cli.help import TaughtCommand
from perfmodel.terminal import write


@click.command(cls=TaughtCommand)
@click.argument("kind", default="scenario")
def schema(kind: str) -> None:
    """Print the JSON Schema of a scenario, profile or measurement file."""
    from perfmodel.report.json_schema import json_schema

    write(json.dumps(json_schema(kind), indent=1) + "\n")
