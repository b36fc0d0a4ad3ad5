"""Trace every scenario in scenarios/ and every validation case anew into scenarios/traces, and remove what none needs.

Takes torch, and about two minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from perfmodel.program.pipeline.programs import stages_of_ranks
from perfmodel.program.ranks import as_computed, optimizer_shares
from perfmodel.scenario.scenario import Scenario
from perfmodel.scenario.yaml_file import load_scenario
from perfmodel.trace.store import (
    SHIPPED,
    get_stage_trace,
    get_trace,
    optimizer_trace_name,
    stage_trace_name,
    trace_name,
)
from perfmodel.trace.trace import Trace, save_trace
from perfmodel.tracing.optimizer import trace_optimizer
from perfmodel.tracing.stage import trace_stage
from perfmodel.tracing.step import trace_step
from validate import cases

ROOT = Path(__file__).resolve().parent.parent


def questions() -> Iterator[tuple[str, Scenario]]:
    """Name and scenario of all that is predicted in this repository."""
    for path in sorted(ROOT.glob("scenarios/*.yaml")):
        yield path.stem, load_scenario(path)
    measured = {path.stem for path in ROOT.glob("results/*/*.json")}
    for path in sorted(ROOT.glob("validate/cases/*.yaml")):
        for case in cases.load(path):
            if case.scenario.parallelism.pp is None or case.name in measured:
                yield case.name, case.scenario


def traces_of(scenario: Scenario) -> Iterator[tuple[str, Callable[[], Trace]]]:
    """The name of each that a prediction takes, and what makes it."""
    if scenario.parallelism.pp is not None:
        for traced in stages_of_ranks(scenario):
            for number, is_split in traced:
                yield stage_trace_name(scenario, number, is_split), partial(trace_stage, scenario, number, is_split)
            stages = dict.fromkeys(each.stage for each in traced)
            if len(stages) > 1:  # whose optimizer steps over the parameters of all
                held = [get_stage_trace(scenario, stage).parameters for stage in stages]
                tensors = [parameter.tensor for parameters in held for parameter in parameters]
                yield optimizer_trace_name(scenario, tensors), partial(trace_optimizer, scenario, tensors)
        return
    computed = as_computed(scenario)
    yield trace_name(computed), partial(trace_step, computed)
    for each in optimizer_shares(scenario, get_trace(computed)):
        made = partial(trace_optimizer, scenario, each.tensors, each.before_step)
        yield optimizer_trace_name(scenario, each.tensors, each.before_step), made


def main() -> None:
    written: set[Path] = set()
    for name, scenario in questions():
        for trace, make in traces_of(scenario):
            target = SHIPPED / f"{trace}.json.gz"
            if target not in written:
                save_trace(make(), target)
                written.add(target)
                print(f"{name}: {target.name}, {target.stat().st_size} bytes")
    for path in set(SHIPPED.glob("*.json.gz")) - written:
        path.unlink()
        print(f"removed {path.name}")


if __name__ == "__main__":
    main()
