"""The commands ``perfmodel profile show`` and ``perfmodel profile import``."""

from __future__ import annotations

from pathlib import Path

import click

from perfmodel.cli.help import TaughtGroup
from perfmodel.cli.options import FILE, wrote
from perfmodel.terminal import print_rich


@click.group(cls=TaughtGroup)
def profile() -> None:
    """Look into hardware profiles."""


@profile.command()
@click.argument("name")
def show(name: str) -> None:
    """Show what the profile NAME (of the catalog, or a file) knows, and how well its fitted curves hold."""
    from perfmodel.hardware.profile import load_profile
    from perfmodel.report.text.profile import profile_report

    print_rich(profile_report(load_profile(name, key="NAME")))


@profile.command(name="import")
@click.argument("profile_file", metavar="PROFILE", type=FILE)
@click.argument("measurements", metavar="FILE", type=FILE)
@click.option("--interconnect", metavar="NAME", help="Where collectives belong; the machine's own if left out.")
def import_(profile_file: Path, measurements: Path, interconnect: str | None) -> None:
    """Put FILE, the output of nccl-tests or of `nvbandwidth -j`, into PROFILE."""
    from calibrate.imported import import_measurements

    import_measurements(profile_file, measurements, interconnect)
    wrote([profile_file])
