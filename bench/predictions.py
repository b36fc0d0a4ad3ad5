"""How fast predictions are: `python bench/predictions.py`. Reports, judges nothing.

Three ways a person meets the time: a warm prediction inside a program, a warm command line, and the first prediction
of a workload that has to be traced (in a process of its own, with an empty cache).
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCENARIO = Path(__file__).parent.parent / "scenarios" / "gpt2.7b.yaml"
TARGETS_S = {"warm, in process": 0.05, "warm command line": 1.0, "first, with tracing": 8.0}


def in_process_s(repeats: int = 20) -> list[float]:
    from perfmodel.hardware.profile import find_profile, load_profile
    from perfmodel.prediction.predict import predict
    from perfmodel.scenario.yaml_file import load_scenario

    scenario = load_scenario(SCENARIO)
    profile = load_profile(find_profile(scenario.hardware.profile))
    predict(scenario, profile)
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        predict(scenario, profile)
        seconds.append(time.perf_counter() - start)
    return seconds


def command_s(*arguments: str, repeats: int = 5, **environment: str) -> list[float]:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "cli", "predict", *arguments],
            check=True,
            stdout=subprocess.DEVNULL,
            env=os.environ | environment,
        )
        seconds.append(time.perf_counter() - start)
    return seconds


def traced_s() -> list[float]:
    """A workload no shipped trace covers: one more layer."""
    seconds = []
    for layers in (31, 33):
        with tempfile.TemporaryDirectory() as cache:
            seconds += command_s(
                str(SCENARIO), "--json", "--set", f"model.layers={layers}", repeats=1, PERFMODEL_CACHE=cache
            )
    return seconds


def main() -> None:
    results = {
        "warm, in process": in_process_s(),
        "warm command line": command_s(str(SCENARIO), "--json"),
        "first, with tracing": traced_s(),
    }
    print(f"{'gpt 2.7b, fp32':24}{'median':>10}{'worst':>10}{'target':>10}")
    for name, seconds in results.items():
        print(f"{name:24}{statistics.median(seconds):9.3f}s{max(seconds):9.3f}s{TARGETS_S[name]:9.2f}s")


if __name__ == "__main__":
    main()
