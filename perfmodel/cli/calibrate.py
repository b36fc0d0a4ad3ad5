"""The command ``perfmodel calibrate``: this machine by itself, or an interconnect of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from perfmodel.cli.endings import torch_needed
from perfmodel.cli.help import TaughtCommand
from perfmodel.cli.options import ABOVE_0, FILE, wrote
from perfmodel.errors import PerfModelError
from perfmodel.terminal import write

if TYPE_CHECKING:
    from perfmodel.scenario.scenario import Scenario

OF_MACHINE = ("name", "base", "resume", "quiet")  # options without --interconnect
OF_INTERCONNECT = ("ranks", "nnodes", "rdzv", "timeout_s")  # options with it


@click.command(cls=TaughtCommand)
@click.option(
    "--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True, help="What to measure."
)
@click.option(
    "--output", type=FILE, metavar="FILE", help="The profile to write or add to; cuda.json or cpu.json if left out."
)
@click.option("--name", help="The profile's name; the file's if left out.")
@click.option(
    "--scenario", "scenario_files", multiple=True, type=FILE, help="Also measure this scenario's exact kernels."
)
@click.option("--base", metavar="NAME", help="Take kernels from this profile of the same GPU; measure the host alone.")
@click.option("--resume", is_flag=True, help="Continue a calibration that was stopped.")
@click.option(
    "--only",
    multiple=True,
    metavar="KEY",
    help="Repeat only this measurement: a kernel's key, or a name below; repeatable.",
)
@click.option(
    "--budget",
    "budget_s",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="Time for the general calibration (grid, host costs, power): after it no measurement is started, and --resume "
    "continues; the one that runs may take 10 s more, and curves are fitted. 0: no grid and no power, but all host "
    "costs. Kernels of scenarios are not counted. With --interconnect: time for its collectives; 0 leaves out their "
    "grid.",
)
@click.option(
    "--interconnect",
    metavar="NAME",
    help="Add this interconnect to the profile instead; gloo is the one of a CPU.",
)
@click.option(
    "--ranks", type=click.IntRange(min=2), default=2, show_default=True, help="How many ranks, one process each."
)
@click.option(
    "--nnodes", type=click.IntRange(min=1), default=1, show_default=True, help="How many machines; the same on each."
)
@click.option("--rdzv", metavar="HOST:PORT", help="The rendezvous of several machines.")
@click.option(
    "--timeout",
    "timeout_s",
    type=ABOVE_0,
    metavar="SECONDS",
    help="After how long all ranks are ended; 400 if left out.",
)
@click.option("--allow-import", is_flag=True, help="May import a scenario's model.target.")
@click.option("--quiet", is_flag=True, help="Show no progress; warnings are shown.")
def calibrate(
    device: str, output: Path | None, scenario_files: tuple[Path, ...], interconnect: str | None, **options: Any
) -> None:
    """Measure this machine into a hardware profile."""
    _refuse_idle_options(interconnect)
    from perfmodel.scenario.yaml_file import load_scenario

    scenarios = [load_scenario(path) for path in scenario_files]
    output = output or Path(f"{device}.json")
    idle = OF_INTERCONNECT if interconnect is None else OF_MACHINE
    used = {name: value for name, value in options.items() if name not in idle}
    if interconnect is None:
        _calibrate_machine(output, device, scenarios, **used)
    else:
        _calibrate_interconnect(output, device, scenarios, interconnect, **used)


def _refuse_idle_options(interconnect: str | None) -> None:
    """Refuse options that were given and would do nothing."""
    source = click.get_current_context().get_parameter_source
    alone = interconnect is None
    for name in OF_INTERCONNECT if alone else OF_MACHINE:
        if source(name) is not ParameterSource.DEFAULT:
            rule, remedy = ("be given with", "Give both") if alone else ("not be given with", "Leave one out")
            got = "none" if alone else interconnect
            raise PerfModelError(
                f"calibrate: --{name.removesuffix('_s')} must {rule} --interconnect (got {got}). {remedy}."
            )


def _calibrate_machine(
    output: Path, device: str, scenarios: Sequence[Scenario], *, only: tuple[str, ...], quiet: bool, **options: Any
) -> None:
    with torch_needed("calibrate"):
        from calibrate.session import calibrate as calibrate_machine
    calibrate_machine(output, device, scenarios=scenarios, only=only or None, progress=not quiet, **options)
    wrote([output])


def _calibrate_interconnect(
    output: Path,
    device: str,
    scenarios: Sequence[Scenario],
    name: str,
    *,
    ranks: int,
    nnodes: int,
    rdzv: str | None,
    timeout_s: float | None,
    **options: Any,
) -> None:
    with torch_needed("calibrate"):
        from calibrate.interconnect.plan import InterconnectOptions
        from calibrate.interconnect.session import calibrate_interconnect
    asked = InterconnectOptions(name, device, ranks, scenarios, nodes=nnodes, rendezvous=rdzv, **options)
    if calibrate_interconnect(output, asked, timeout_s):
        wrote([output])
    else:
        write(f"{output} is written on rank 0's machine\n", to_stderr=True)
