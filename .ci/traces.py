"""Trace every scenario in scenarios/ and every validation case anew into scenarios/traces, and remove what none needs.

Takes torch, and about two minutes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from perfmodel.program.ranks import as_computed, optimizer_shares
from perfmodel.workload.scenario import Scenario
from perfmodel.workload.scenario_file import load_scenario
from perfmodel.workload.trace.optimizer import trace_optimizer
from perfmodel.workload.trace.session import trace_step
from perfmodel.workload.trace_file import save_trace
from perfmodel.workload.trace_store import SHIPPED, get_trace, optimizer_trace_name, trace_name
from validate import cases

ROOT = Path(__file__).resolve().parent.parent


def questions() -> Iterator[tuple[str, Scenario]]:
    """Name and scenario of all that is predicted in this repository."""
    for path in sorted(ROOT.glob("scenarios/*.yaml")):
        yield path.stem, load_scenario(path)
    for path in sorted(ROOT.glob("validate/cases/*.yaml")):
        for case in cases.load(path):
            yield case.name, case.scenario


def main() -> None:
    written: set[Path] = set()
    for name, scenario in questions():
        computed = as_computed(scenario)
        target = SHIPPED / f"{trace_name(computed)}.json.gz"
        if target not in written:
            save_trace(trace_step(computed), target)
            written.add(target)
            print(f"{name}: {target.name}, {target.stat().st_size} bytes")
        for each in optimizer_shares(scenario, get_trace(computed)):
            share = SHIPPED / f"{optimizer_trace_name(scenario, each.tensors, each.parts)}.json.gz"
            if share not in written:
                save_trace(trace_optimizer(scenario, each.tensors, each.parts), share)
                written.add(share)
                print(f"{name}: {share.name}, {share.stat().st_size} bytes")
    for path in set(SHIPPED.glob("*.json.gz")) - written:
        path.unlink()
        print(f"removed {path.name}")


if __name__ == "__main__":
    main()
