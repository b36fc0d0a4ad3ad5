"""How well operators whose kind no profile measured are estimated: `python -m bench.estimates PROFILE`.

`--output FILE` measures those calls of bench/estimate_cases.py that the file has not, and adds every sample to it;
`--measured FILE` prints the table of such a file again, without a device. With neither, the predictions are printed
alone. Reports, judges nothing.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import click

from bench.estimate_cases import Case, cases
from perfmodel.cost.kernels.estimates import factor_of_spread
from perfmodel.cost.kernels.kernel_cost import KernelCost
from perfmodel.cost.kernels.lookup import kernel_costs
from perfmodel.hardware.profile import Profile, find_profile, load_profile
from perfmodel.trace.kernel_key import kernel_key

IS_WITHIN, WAS_WITHIN = attrgetter("is_within"), attrgetter("was_within")
REPEATS = 5  # of calls that synchronise, which no stream of calls can time
FORMAT = 1


class Row(NamedTuple):
    """A case, what is predicted for it, and its samples, if there are any; or why there are none.

    ``before_s`` is what was predicted before it was measured.
    """

    case: Case
    cost: KernelCost
    samples_s: tuple[float, ...] = ()
    error: str | None = None
    before_s: float | None = None

    @property
    def measured_s(self) -> float | None:
        return statistics.median(self.samples_s) if self.samples_s else None

    @property
    def factor(self) -> float:
        """Within which the estimate is said to lie."""
        return factor_of_spread(self.cost.spread)

    @property
    def is_within(self) -> bool:
        return self._covers(self.cost.time_s)

    @property
    def was_within(self) -> bool:
        """Whether what was predicted before it was measured lies within the factor."""
        return self.before_s is not None and self._covers(self.before_s)

    def _covers(self, time_s: float) -> bool:
        return self.measured_s is not None and abs(math.log(time_s / self.measured_s)) <= math.log(self.factor)


def predicted(profile: Profile, wanted: Sequence[Case]) -> list[Row]:
    """Return the cost by the profile's curves, without its kernel keys that a scenario brought."""
    costs = kernel_costs([case.operation for case in wanted], profile, matmul_tf32=False, exact=False)
    return [Row(case, cost) for case, cost in zip(wanted, costs, strict=True)]


def with_samples(rows: Sequence[Row], measured: dict[str, Any]) -> list[Row]:
    """Return the rows with what a result file has of their calls: samples, and what was predicted before them."""
    calls = measured["calls"]
    found = ((row, calls.get(kernel_key(row.case.operation), {})) for row in rows)
    return [
        row._replace(
            samples_s=tuple(call.get("samples_s", ())), error=call.get("error"), before_s=call.get("predicted_s")
        )
        for row, call in found
    ]


def measure(rows: Sequence[Row], device: str) -> dict[str, Any]:
    """A result file's content: of each call its mark, what was predicted before it was timed, and all samples."""
    import torch

    from calibrate.kernels.bench import Bench
    from calibrate.timing.cuda_stopwatch import CudaSeparator, CudaStopwatch, CudaStream

    stream = CudaStream()
    bench = Bench(device, CudaStopwatch(stream, separator=CudaSeparator(stream)))
    calls = {}
    with torch.no_grad():
        for row in rows:
            key = kernel_key(row.case.operation)
            calls[key] = {"mark": row.case.mark, "predicted_s": row.cost.time_s, **_timed(row.case, bench)}
            print(key, calls[key].get("samples_s", calls[key].get("error")), flush=True)
    return {
        "format": FORMAT, "device": torch.cuda.get_device_name(), "torch": torch.__version__,
        "date": datetime.now(UTC).date().isoformat(), "calls": calls,
    }  # fmt: skip


def _timed(case: Case, bench: Any) -> dict[str, Any]:
    """Time a call as kernel keys are; one that synchronises, from one synchronisation to the next."""
    from calibrate.jobs import job

    wanted = job(case.operation, "grid")
    record, samples = bench.time(wanted)
    if record.error is not None:
        return {"error": record.error}
    if samples is not None:
        return {"timed": "in a stream of calls", "samples_s": samples.values_s}
    run = bench.make(wanted)
    run()
    return {"timed": "between synchronisations", "samples_s": [_alone_s(run) for _ in range(REPEATS)]}


def _alone_s(run: Any) -> float:
    import torch

    torch.cuda.synchronize()
    start_s = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start_s


def table(rows: Sequence[Row]) -> list[str]:
    """One line a call, and what the factors cover of each kind of operators."""
    lines = [f"{'measured':>12} {'estimated':>12} {'est./meas.':>10} {'factor':>6}         operator"]
    for mark in ("tuning", "held-out"):
        marked = [row for row in rows if row.case.mark == mark]
        if marked:
            lines += ["", mark, *map(_line, marked), *_coverage(marked)]
    return [*lines, *blind_coverage(rows)]


def _line(row: Row) -> str:
    seconds, constants = row.measured_s, ", ".join(row.case.constants)
    measured, times = (f"{seconds * 1e6:10.2f}us", f"{row.cost.time_s / seconds:.2f}") if seconds else ("", "")
    verdict = "failed" if row.error else "outside" if seconds and not row.is_within else ""
    key = kernel_key(row.case.operation).removeprefix("aten.") + (f"  {constants}" if constants else "")
    return f"{measured:>12} {row.cost.time_s * 1e6:10.2f}us {times:>10} {row.factor:6.0f} {verdict:7} {key}"


def blind_coverage(rows: Sequence[Row]) -> list[str]:
    """Return of each round how many calls lay within the factor by what was predicted before they were measured.

    Rules may have been rewritten since, by the calls of a round that are for tuning now; they count here as they were
    predicted at first.
    """
    blind = [row for row in rows if row.case.blind_round is not None and row.measured_s is not None]
    rounds = sorted({row.case.blind_round or 0 for row in blind})
    if not rounds:
        return []
    of_rounds = [(number, [row for row in blind if row.case.blind_round == number]) for number in rounds]
    lines = [f"round {number}: {_of_kinds(of_round, WAS_WITHIN)}" for number, of_round in of_rounds]
    return ["", "within the factor as predicted before they were measured", *lines, f"all: {_of(blind, WAS_WITHIN)}"]


def _coverage(rows: Sequence[Row]) -> list[str]:
    timed = [row for row in rows if row.measured_s is not None]
    return [f"within the factor: {_of_kinds(timed, IS_WITHIN)}"] if timed else []


def _of_kinds(rows: Sequence[Row], within: Callable[[Row], bool]) -> str:
    """Return how many rows are within, in all and of each kind of operators."""
    kinds = dict.fromkeys(row.cost.kind for row in rows)
    each = ", ".join(f"{kind} {_of([row for row in rows if row.cost.kind == kind], within)}" for kind in kinds)
    return f"{_of(rows, within)} ({each})"


def _of(rows: Sequence[Row], within: Callable[[Row], bool]) -> str:
    return f"{sum(map(within, rows))} of {len(rows)}"


@click.command()
@click.argument("profile_name", default="h200-sxm-x4")
@click.option("--measured", type=click.Path(exists=True, path_type=Path), help="A result file to print.")
@click.option("--output", type=click.Path(path_type=Path), help="Measure here what this result file has not.")
@click.option("--mark", type=click.Choice(["tuning", "held-out"]), help="These cases only.")
def main(profile_name: str, measured: Path | None, output: Path | None, mark: str | None) -> None:
    """Hold estimates by PROFILE_NAME against measured times."""
    profile = load_profile(find_profile(profile_name))
    rows = predicted(profile, [case for case in cases() if mark in (None, case.mark)])
    content = json.loads(measured.read_text()) if measured else {"calls": {}}
    if output is not None:
        known = json.loads(output.read_text())["calls"] if output.exists() else {}
        content = measure([row for row in rows if kernel_key(row.case.operation) not in known], profile.device.kind)
        content["calls"] = known | content["calls"]
        output.write_text(json.dumps(content, indent=1) + "\n")
    if "device" in content:
        print(f"{content['device']}, torch {content['torch']}, {content['date']}")
    print("\n".join(table(with_samples(rows, content))))


if __name__ == "__main__":
    main()
