"""The `perfmodel` command: parse, one library call, print. What is heavy is imported by the command that needs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from perfmodel import __version__
from perfmodel.cli.options import ABOVE_0, FILE, OneLineErrors, question_options, sweep_command, torch_needed, wrote
from perfmodel.errors import PerfModelError, naming
from perfmodel.files.kinds import MEMORY_SNAPSHOT
from perfmodel.files.writing import check_folder, check_writable
from perfmodel.progress import doing, shown
from perfmodel.terminal import print_rich, sentence, write

if TYPE_CHECKING:
    from collections.abc import Iterable

    from perfmodel.accuracy.card import Pair
    from perfmodel.prediction.prediction import Prediction


@click.group(cls=OneLineErrors, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="perfmodel", message="%(prog)s %(version)s")
def main() -> None:
    """How long a training step takes, how much memory it needs and what it waits for."""


@main.command()
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
    prediction = _predict(scenario_file, exact=not no_exact_keys, **question)
    fitting = None
    if prediction.fits is False:
        from perfmodel.prediction.fitting import what_fits

        with shown(), doing("trying what would fit"):
            fitting = what_fits(prediction)
    if as_json:
        from perfmodel.report.json_report import json_report

        write(json.dumps(json_report(prediction, fitting), indent=1) + "\n")
    else:
        from perfmodel.report.text.fitting import fitting_lines
        from perfmodel.report.text.prediction import report

        def ask(vary: dict[str, list[str]]) -> str:
            return sweep_command(scenario_file, vary, no_exact_keys=no_exact_keys, **question)

        print_rich(report(prediction))
        lines = [] if fitting is None else fitting_lines(fitting, ask)
        write("\n  ".join(["\nwhat would fit", *lines]) + "\n" if lines else "")
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


def _check_outputs(plot: Path | None, trace: Path | None, memory_snapshot: Path | None) -> None:
    """Refuse what could not be written before time is spent on it."""
    if plot is not None:
        check_folder(plot)
    if trace is not None:
        from perfmodel.report.traces.chrome import check_trace_path

        check_trace_path(trace)
    if memory_snapshot is not None:
        check_writable(memory_snapshot, MEMORY_SNAPSHOT)


def _predict(
    scenario_file: Path, assignments: tuple[str, ...], device: str | None, allow_import: bool, exact: bool = True
) -> Prediction:
    from perfmodel.prediction.predict import predict as predict_scenario
    from perfmodel.scenario.yaml_file import load_question

    scenario, profile = load_question(scenario_file, assignments, device)
    with naming(scenario_file), shown():
        return predict_scenario(scenario, profile, exact=exact, allow_import=allow_import)


def _refuse_strangers(interconnect: str | None) -> None:
    """Options of calibrate that were given and would do nothing."""
    source = click.get_current_context().get_parameter_source
    alone = interconnect is None
    for name in ("ranks", "nnodes", "rdzv", "timeout_s") if alone else ("name", "base", "resume", "quiet"):
        if source(name) is not ParameterSource.DEFAULT:
            rule, remedy = ("be given with", "Give both") if alone else ("not be given with", "Leave one out")
            got = "none" if alone else interconnect
            raise PerfModelError(
                f"calibrate: --{name.removesuffix('_s')} must {rule} --interconnect (got {got}). {remedy}."
            )


@main.command()
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
@click.option("--resume", is_flag=True, help="Go on where an earlier calibration was stopped.")
@click.option(
    "--only",
    multiple=True,
    metavar="KEY",
    help="Measure just this again: a kernel's key, or a name below; repeatable.",
)
@click.option(
    "--budget",
    "budget_s",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="For the general calibration (grid, host costs, power): after them nothing more is begun, and --resume goes "
    "on; what runs then may take 10 s more, and the curves are fitted. 0: no grid and no power, but all host costs. "
    "Scenarios' kernels are not counted. Or for an interconnect's collectives; 0 leaves out their grid.",
)
@click.option(
    "--interconnect",
    metavar="NAME",
    help="Add an interconnect to the profile instead; gloo is that of a CPU.",
)
@click.option("--ranks", type=click.IntRange(min=2), default=2, show_default=True, help="Processes that it joins.")
@click.option("--nnodes", type=click.IntRange(min=1), default=1, show_default=True, help="Machines; the same on each.")
@click.option("--rdzv", metavar="HOST:PORT", help="Where several machines meet.")
@click.option(
    "--timeout", "timeout_s", type=ABOVE_0, metavar="SECONDS", help="When all ranks are ended; 400 if left out."
)
@click.option("--allow-import", is_flag=True, help="May import a scenario's model.target.")
@click.option("--quiet", is_flag=True, help="Show no progress; warnings are shown.")
def calibrate(
    device: str,
    output: Path | None,
    scenario_files: tuple[Path, ...],
    quiet: bool,
    only: tuple[str, ...],
    interconnect: str | None,
    ranks: int,
    nnodes: int,
    rdzv: str | None,
    timeout_s: float | None,
    budget_s: float | None,
    allow_import: bool,
    **options: Any,
) -> None:
    """Measure this machine into a hardware profile."""
    _refuse_strangers(interconnect)
    from perfmodel.scenario.yaml_file import load_scenario

    scenarios = [load_scenario(path) for path in scenario_files]
    output = output or Path(f"{device}.json")
    if interconnect is not None:
        with torch_needed("calibrate"):
            from calibrate.interconnect.plan import InterconnectOptions
            from calibrate.interconnect.session import calibrate_interconnect
        asked = InterconnectOptions(
            interconnect, device, ranks, scenarios, allow_import, budget_s, only, nodes=nnodes, rendezvous=rdzv
        )
        if calibrate_interconnect(output, asked, timeout_s):
            wrote([output])
        else:
            write(f"{output} is written on rank 0's machine\n", to_stderr=True)
        return
    with torch_needed("calibrate"):
        from calibrate.session import calibrate as calibrate_machine
    options |= {"allow_import": allow_import, "budget_s": budget_s}
    calibrate_machine(output, device, scenarios=scenarios, only=only or None, progress=not quiet, **options)
    wrote([output])


@main.command()
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
    question["set"] = question.pop("assignments")
    result = sweep_scenario(scenario_file, parse_vary(vary), exact=not no_exact_keys, progress=True, **question)
    write(json.dumps(result.to_json(), indent=1) + "\n" if as_json else sweep_text(result))
    if plot is not None:
        from perfmodel.report.plots.sweep import save_sweep_plots

        wrote(save_sweep_plots(result, plot))


@main.command()
@click.argument("name", required=False)
def formula(name: str | None) -> None:
    """Print the closed forms: all of them, or everything about the one called NAME."""
    with torch_needed("formula"):
        import sympy  # noqa: F401
    from perfmodel.closed_form.formulas import describe

    write(f"{describe(name)}\n")


@main.command()
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
    file: Path, output: Path, only: tuple[str, ...], device: str | None, assignments: tuple[str, ...], **options: Any
) -> None:
    """Run a scenario, or each of a list of cases, for real and hold the prediction against it."""
    with torch_needed("validate"):
        from validate.cases import choose_cases
        from validate.run import measure_cases
    from perfmodel.accuracy.card import accuracy_card
    from perfmodel.accuracy.card_text import case_table
    from perfmodel.accuracy.comparison import predict_measurements

    cases = choose_cases(file, assignments, device, only)
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


@main.command()
@click.argument("scenario_file", metavar="SCENARIO", type=FILE)
@click.argument("trace_file", metavar="TRACE", type=FILE)
@question_options
def diff(scenario_file: Path, trace_file: Path, **question: Any) -> None:
    """Hold the predicted timeline of SCENARIO against TRACE, a torch.profiler Chrome trace, operator by operator."""
    from perfmodel.report.diff.diff import diff_with_trace
    from perfmodel.report.diff.text import diff_report

    print_rich(diff_report(diff_with_trace(_predict(scenario_file, **question), trace_file)))


@main.command()
@click.argument("directory", metavar="RESULTS", type=FILE)
@click.option("--plot", type=FILE, metavar="DIR", help="Write predicted-against-measured plots there.")
@click.option(
    "--output", type=FILE, metavar="FILE.md", help="Write the accuracy card there, and its numbers beside it as JSON."
)
@click.option(
    "--check", type=FILE, metavar="CARD.json", help="Fail where a class got worse than on that card by over 0.3 points."
)
@click.option("--profile", help="Predict with this profile, whatever the measured scenarios name.")
@click.option(
    "--allow-import",
    is_flag=True,
    help="May import the scenarios' model.target and model.loss: the files in RESULTS then choose what code is called, "
    "so only for files of people whom you would let run code here.",
)
def compare(
    directory: Path, plot: Path | None, output: Path | None, check: Path | None, profile: str | None, allow_import: bool
) -> None:
    """Predict every measurement in RESULTS again and show how far off the predictions are."""
    from perfmodel.accuracy.card import accuracy_card, check_card_path, load_card, refuse_worse, save_card
    from perfmodel.accuracy.card_text import accuracy_markdown, summary_line
    from perfmodel.accuracy.comparison import predict_measured

    if plot is not None:
        check_folder(plot)
    if output is not None:
        if output.resolve().is_relative_to(directory.resolve()):
            raise PerfModelError(
                f"--output must lie outside {directory} (got {output}): every JSON file in there is read as a "
                "measurement. Choose another folder."
            )
        check_card_path(output)
    before = None if check is None else load_card(check)  # which --output may replace
    with shown():
        pairs: Iterable[Pair] = predict_measured(directory, profile, allow_import=allow_import)
        if plot is not None:  # the card alone needs one at a time
            pairs = list(pairs)
        card = accuracy_card(pairs)
    write(f"{summary_line(card) if output or check else accuracy_markdown(card)}\n")
    if plot is not None:
        from perfmodel.accuracy.micro_batches_plot import save_micro_batch_plots
        from perfmodel.accuracy.plots import save_accuracy_plots
        from perfmodel.report.plots.pipeline import save_measured_pipelines

        wrote(save_accuracy_plots(card, plot))
        wrote([*save_micro_batch_plots(card, pairs, plot), *save_measured_pipelines(pairs, plot)])
    if output is not None:
        wrote(save_card(card, accuracy_markdown(card), output))
    if check is not None and before is not None:
        refuse_worse(card, before, check)


@main.group()
def profile() -> None:
    """Look into hardware profiles."""


@profile.command()
@click.argument("name")
def show(name: str) -> None:
    """What the profile NAME (of the catalog, or a file) knows, and how well its fitted curves hold."""
    from perfmodel.hardware.profile import find_profile, load_profile
    from perfmodel.report.text.profile import profile_report

    print_rich(profile_report(load_profile(find_profile(name))))


@profile.command(name="import")
@click.argument("profile_file", metavar="PROFILE", type=FILE)
@click.argument("measurements", metavar="FILE", type=FILE)
@click.option("--interconnect", metavar="NAME", help="Where collectives belong; the machine's own if left out.")
def import_(profile_file: Path, measurements: Path, interconnect: str | None) -> None:
    """Put FILE, the output of nccl-tests or of `nvbandwidth -j`, into PROFILE."""
    from calibrate.imported import import_measurements

    import_measurements(profile_file, measurements, interconnect)
    wrote([profile_file])


@main.command()
@click.argument("source", metavar="[FILE]", required=False)
@click.option("--plot", type=FILE, metavar="FILE", help="Draw it there: .png, .svg or .pdf.")
@click.option("--groups", "layout", metavar="NAME=SIZE,...", help="List groups of ranks, innermost first: tp=4,dp=2.")
@click.option("--gpu", metavar="NAME", help="Whose datasheet gives the rates of links where FILE names no GPU: H200.")
def topology(source: str | None, plot: Path | None, layout: str | None, gpu: str | None) -> None:
    """Print what joins the GPUs: best ways, ring and groups.

    FILE: a saved `nvidia-smi topo -m`, a profile (file or catalog name), or a description such as
    2x8:nvswitch=450GB/s,network=8x50GB/s; this machine if left out.
    """
    from perfmodel.topology.paths import parse_layout
    from perfmodel.topology.sources import find_topology
    from perfmodel.topology.text import topology_text

    if plot is not None:
        from perfmodel.report.plots.canvas import check_picture

        check_picture(plot)
    graph = find_topology(source, gpu)
    text = topology_text(graph, None if layout is None else parse_layout(layout))
    if plot is not None:
        from perfmodel.topology.plot import save_topology_plot

        wrote([save_topology_plot(graph, plot)])
    write(text)


@main.command()
@click.argument("kind", default="scenario")
def schema(kind: str) -> None:
    """Print the JSON Schema of a scenario, profile or measurement file."""
    from perfmodel.report.json_schema import json_schema

    write(json.dumps(json_schema(kind), indent=1) + "\n")


if __name__ == "__main__":
    main()
