"""Help beyond options: examples that run as they stand, and the names that a command knows.

Names are read from where they are defined, and only when help is shown.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from textwrap import fill
from typing import Any, get_args

import click

Names = Callable[[], Iterable[str]]


@dataclass(frozen=True)
class Taught:
    """Additions to the help of one command.

    Attributes
    ----------
    examples : tuple of str
        Command lines without ``perfmodel``, to be run in the folder that holds scenarios/.
    names : mapping
        Known names by the key or option that takes them.
    """

    examples: tuple[str, ...] = ()
    names: Mapping[str, Names] = field(default_factory=dict)


class TaughtCommand(click.Command):
    """A command whose help ends with the names and examples of :data:`TAUGHT`."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        taught = TAUGHT.get(self.name or "", Taught())
        if taught.names:
            with formatter.section("Names"):
                for key, known in taught.names.items():
                    formatter.write(_paragraph(key, ", ".join(known()), formatter))
        if taught.examples:
            with formatter.section("Examples"):
                for example in taught.examples:
                    formatter.write(f"{'':{formatter.current_indent}}perfmodel {example}\n")  # never broken


class TaughtGroup(click.Group):
    """A group of commands whose help ends with names and examples."""

    command_class = TaughtCommand

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write(f"\n{ctx.command_path} COMMAND --help shows what a command takes, with examples.\n")


def _paragraph(key: str, text: str, formatter: click.HelpFormatter) -> str:
    """Fill a paragraph whose names are broken at blanks alone, so that they can be copied."""
    first, rest = " " * formatter.current_indent, " " * (formatter.current_indent + 4)
    width = min(formatter.width, 100)
    return fill(f"{key}: {text}", width, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False) + "\n"


def profiles() -> list[str]:
    """Return the shipped profiles."""
    from perfmodel.hardware.profile import catalog_names

    return [*catalog_names(), "or a .json file"]


def interconnects() -> list[str]:
    """Return the interconnects that the shipped profiles have."""
    from perfmodel.hardware.profile import CATALOG

    found = (json.loads(path.read_bytes()).get("interconnects", {}) for path in CATALOG.glob("*.json"))
    return sorted({name for each in found for name in each})


def families() -> list[str]:
    """Return the families of models, each with its sizes."""
    from perfmodel.scenario.families import FAMILIES

    return [f"{name} ({', '.join(family.sizes)})" if family.sizes else name for name, family in FAMILIES.items()]


def named(section: str, key: str) -> Names:
    """Return the named values of a key of a scenario's section; ``""`` is the scenario itself."""

    def known() -> list[str]:
        from perfmodel.scenario import scenario

        model = getattr(scenario, section or "Scenario")
        return _named(model.model_fields[key].annotation)

    return known


def _named(annotation: Any) -> list[str]:
    found = get_args(annotation)
    return [each for each in found if isinstance(each, str)] + [name for each in found for name in _named(each)]


SCENARIO_NAMES: dict[str, Names] = {
    "model.family (model.size)": families,
    "precision": named("", "precision"),
    "optimizer.name": named("OptimizerSection", "name"),
    "optimizer.implementation": named("OptimizerSection", "implementation"),
    "training.activation_checkpointing": named("TrainingSection", "activation_checkpointing"),
    "parallelism.strategy": named("ParallelismSection", "strategy"),
    "parallelism.pp.schedule": named("PipelineSection", "schedule"),
    "hardware.profile": profiles,
    "hardware.interconnect": interconnects,
}


def made_interconnects() -> Iterable[str]:
    """Return the interconnects that calibrate makes on a machine."""
    from calibrate.this_machine.wirings import INTERCONNECTS

    return INTERCONNECTS


def stages() -> Iterable[str]:
    """Return the stages of the general calibration."""
    from calibrate.kernels import grid_cuda
    from calibrate.stage_names import OTHER_STAGES

    return [*OTHER_STAGES, *grid_cuda.classes()]


def interconnect_stages() -> Iterable[str]:
    """Return the stages of the calibration of an interconnect."""
    from calibrate.stage_names import GENERAL

    return GENERAL


def kinds_of_files() -> Iterable[str]:
    """Return the kinds of files that have a schema."""
    from perfmodel.report.json_schema import MODELS

    return MODELS


def gpus() -> list[str]:
    """Return the GPUs whose datasheets are known."""
    from perfmodel.hardware.datasheets import DATASHEETS

    return [" ".join(words) for words, _ in DATASHEETS]


TAUGHT: dict[str, Taught] = {
    "predict": Taught(
        (
            "predict scenarios/gpt2.7b.yaml",
            "predict scenarios/gpt2.7b.yaml --set precision=amp-bf16 --plot out --trace out/trace.json.gz",
        ),
        SCENARIO_NAMES,
    ),
    "sweep": Taught(
        (
            "sweep scenarios/gpt2.7b.yaml --vary precision=fp32,tf32,amp-bf16",
            "sweep scenarios/gpt2.7b-zero3.yaml --vary parallelism.strategy=zero2,zero3 --plot out",
        ),
        SCENARIO_NAMES,
    ),
    "calibrate": Taught(
        (
            "calibrate --output my-gpus.json --scenario scenarios/gpt2.7b.yaml",
            "calibrate --output my-gpus.json --interconnect nvlink --ranks 4",
        ),
        {
            "--interconnect": made_interconnects,
            "--only": stages,
            "--only with --interconnect": interconnect_stages,
            "--base": profiles,
        },
    ),
    "validate": Taught(
        (
            "validate scenarios/gpt2.7b.yaml --output results/mine",
            "validate validate/cases/one-gpu.yaml --only gpt-small-fp32 --only bert-base-amp",
        )
    ),
    "diff": Taught(
        (
            "diff scenarios/gpt2.7b.yaml trace.json.gz",
            "diff scenarios/gpt2.7b.yaml trace.json.gz --set hardware.profile=my-gpus.json",
        )
    ),
    "compare": Taught(("compare results/one-gpu-node --plot out", "compare results --output ACCURACY.md")),
    "formula": Taught(("formula", "formula pipeline_bubble_fraction")),
    "show": Taught(("profile show h200-sxm-x4", "profile show my-gpus.json"), {"NAME": profiles}),
    "import": Taught(
        (
            "profile import my-gpus.json all_reduce_perf.txt --interconnect nvlink",
            "profile import my-gpus.json nvbandwidth.json",
        ),
        {"--interconnect": interconnects},
    ),
    "topology": Taught(
        ("topology 2x8:nvswitch=450GB/s,network=8x50GB/s --groups tp=8,dp=2", "topology h200-sxm-x4 --plot out.png"),
        {"FILE": profiles, "--gpu": gpus},
    ),
    "schema": Taught(("schema", "schema profile"), {"KIND": kinds_of_files}),
}
