"""Trace every scenario in scenarios/ anew into scenarios/traces, and remove what no scenario needs; takes torch."""

from __future__ import annotations

from pathlib import Path

from perfmodel.workload.scenario_file import load_scenario
from perfmodel.workload.trace.session import trace_step
from perfmodel.workload.trace_file import save_trace
from perfmodel.workload.trace_store import SHIPPED, trace_name


def main() -> None:
    wanted = set()
    for path in sorted(Path(__file__).resolve().parent.parent.glob("scenarios/*.yaml")):
        scenario = load_scenario(path)
        target = SHIPPED / f"{trace_name(scenario)}.json.gz"
        save_trace(trace_step(scenario), target)
        wanted.add(target)
        print(f"{path.stem}: {target.name}, {target.stat().st_size} bytes")
    for path in set(SHIPPED.glob("*.json.gz")) - wanted:
        path.unlink()
        print(f"removed {path.name}")


if __name__ == "__main__":
    main()
