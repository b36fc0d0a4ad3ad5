"""The command `perfmodel`; what each command does stands in perfmodel/cli/, one file a command."""

from __future__ import annotations

import click

from perfmodel import __version__
from perfmodel.cli.calibrate import calibrate
from perfmodel.cli.compare import compare
from perfmodel.cli.diff import diff
from perfmodel.cli.endings import OneLineErrors
from perfmodel.cli.formula import formula
from perfmodel.cli.predict import predict
from perfmodel.cli.profile import profile
from perfmodel.cli.schema import schema
from perfmodel.cli.sweep import sweep
from perfmodel.cli.topology import topology
from perfmodel.cli.validate import validate


@click.group(cls=OneLineErrors, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="perfmodel", message="%(prog)s %(version)s")
def main() -> None:
    """How long a training step takes, how much memory it needs and what it waits for."""


for command in (calibrate, compare, diff, formula, predict, profile, schema, sweep, topology, validate):
    main.add_command(command)

if __name__ == "__main__":
    main()
