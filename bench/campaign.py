"""Thousands of mutated inputs: `python bench/campaign.py --examples 10000 --processes 2 --seed 1`.

Each process works through chunks of examples; each chunk has a seed of its own, so that any one can be run again. What
failed is written as one file a kind of failure, to be run again with `--again FILE`; the counts by command and outcome
as summary.json.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import sys
import tempfile
import time
import warnings
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
CHUNK = 500
MOST_MEMORY_BYTES = 6 * 2**30
KEPT_A_KIND = 3
SILENT_S = 240  # after which a process is killed: no limit of running.py stops it
PACKAGES = ("click", "hypothesis", "numpy", "pydantic", "PyYAML", "rich", "torch")


def run_chunk(seed: int, count: int, output: Path) -> None:
    """Run in a process of its own and print a line of JSON for each example as it begins and as it ends."""
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as seeded

    from tests.campaign.commands import Example, examples
    from tests.campaign.running import limit_memory, run

    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message=".torch.jit", category=DeprecationWarning)
    os.environ["PERFMODEL_CACHE"] = tempfile.mkdtemp(dir=output)
    limit_memory(MOST_MEMORY_BYTES)

    with (output / f"{seed}.jsonl").open("w") as log:

        @seeded(seed)
        @settings(
            max_examples=count,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(examples())
        def campaign(example: Example) -> None:
            print(json.dumps({"begins": example.to_json()}), file=log, flush=True)
            outcome = run(example)
            ends = {
                "command": example.command,
                "code": outcome.exit_code,
                "fault": outcome.fault,
                "cpu_s": outcome.cpu_s,
            }
            print(json.dumps(ends), file=log, flush=True)

        campaign()


def run_all(seed: int, examples: int, processes: int, output: Path) -> list[dict[str, Any]]:
    """All chunks; what is left of one whose process died is a chunk with the next seed."""
    waiting = [(seed * 1_000_000 + first, min(CHUNK, examples - first)) for first in range(0, examples, CHUNK)]
    running: list[tuple[int, int, multiprocessing.process.BaseProcess]] = []
    outcomes: list[dict[str, Any]] = []
    while waiting or running:
        while waiting and len(running) < processes:
            chunk_seed, count = waiting.pop(0)
            process = multiprocessing.get_context("spawn").Process(target=run_chunk, args=(chunk_seed, count, output))
            process.start()
            running.append((chunk_seed, count, process))
        time.sleep(0.5)
        for chunk in list(running):
            chunk_seed, count, process = chunk
            log = output / f"{chunk_seed}.jsonl"
            if process.is_alive() and log.exists() and time.time() - log.stat().st_mtime > SILENT_S:
                process.kill()
                process.join()
            if not process.is_alive():
                running.remove(chunk)
                done = read_chunk(log)
                outcomes += done
                if len(done) < count:
                    waiting.append((chunk_seed + 1, count - len(done)))
                print(
                    f"{len(outcomes)} done, {sum(row['fault'] is not None for row in outcomes)} faults", file=sys.stderr
                )
    return outcomes


def read_chunk(path: Path) -> list[dict[str, Any]]:
    """Its outcomes; an example that took its process with it is a fault too."""
    outcomes: list[dict[str, Any]] = []
    begun = None
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if "begins" in row:
            begun = row["begins"]
        else:
            outcomes.append(row | {"example": begun})
            begun = None
    if begun is not None:
        command = json.loads(begun)["command"]
        outcomes.append({"command": command, "code": None, "fault": "the process died", "cpu_s": 0, "example": begun})
    return outcomes


def summary(outcomes: list[dict[str, Any]], seed: int, seconds: float) -> dict[str, Any]:
    by_command: dict[str, Counter[str]] = {}
    for row in outcomes:
        by_command.setdefault(row["command"], Counter())["fault" if row["fault"] else f"exit {row['code']}"] += 1
    return {
        "examples": len(outcomes),
        "seed": seed,
        "minutes": round(seconds / 60, 1),
        "faults": dict(Counter(row["fault"] for row in outcomes if row["fault"]).most_common()),
        "outcomes": {name: dict(sorted(counts.items())) for name, counts in sorted(by_command.items())},
        "longest_cpu_s": round(max(row["cpu_s"] for row in outcomes), 1),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def keep_failures(outcomes: list[dict[str, Any]], output: Path) -> None:
    """The shortest few of each kind of fault, one file each."""
    kinds: dict[str, list[str]] = {}
    for row in outcomes:
        if row["fault"]:
            kinds.setdefault(row["fault"], []).append(row["example"])
    for number, (fault, found) in enumerate(sorted(kinds.items())):
        for place, example in enumerate(sorted(found, key=len)[:KEPT_A_KIND]):
            (output / f"fault-{number}-{place}.json").write_text(example + "\n")
        print(f"fault-{number}: {len(found)} x {fault}")


def again(path: Path) -> None:
    """Run one kept example again and show how it ended."""
    from tests.campaign.commands import Example
    from tests.campaign.running import run

    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message=".torch.jit", category=DeprecationWarning)
    outcome = run(Example.from_json(path.read_text()))
    print(f"exit code {outcome.exit_code}, {outcome.cpu_s:.1f} s, fault: {outcome.fault}\n{outcome.output[-2000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=10_000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("out/campaign"))
    parser.add_argument("--again", type=Path, metavar="FILE")
    asked = parser.parse_args()
    if asked.again is not None:
        again(asked.again)
        return
    asked.output.mkdir(parents=True, exist_ok=True)
    output = asked.output.resolve()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    start_s = time.monotonic()
    outcomes = run_all(asked.seed, asked.examples, asked.processes, output)
    found = summary(outcomes, asked.seed, time.monotonic() - start_s)
    (output / "summary.json").write_text(json.dumps(found, indent=1) + "\n")
    keep_failures(outcomes, output)
    print(json.dumps(found["outcomes"], indent=1))


if __name__ == "__main__":
    main()
