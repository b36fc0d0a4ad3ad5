"""The accuracy card as Markdown: what a reader of ACCURACY.md finds. Its columns are :data:`COLUMNS`."""

from __future__ import annotations

import statistics

from rich.console import RenderableType
from rich.table import Table

from perfmodel.accuracy.card import AT_MEASURED_HOST, QUANTITIES, WITHOUT_EXACT_KEYS
from perfmodel.accuracy.cases import Card, CardCase, Statistics
from perfmodel.accuracy.choices import NEAR, Choice, choices, common_words
from perfmodel.accuracy.markdown import table
from perfmodel.accuracy.rank_memory import rank_memory_section
from perfmodel.accuracy.strategies_text import strategies_section
from perfmodel.units import format_bytes, format_seconds

INTRODUCTION = """# Accuracy

Predicted against measured. An error is predicted over measured, minus one: plus means predicted too long or too large.
Mean, median, 95th percentile and worst are of absolute errors (the worst keeps its sign); bias is the mean of the
signed ones. Held-out cases were named before they were measured and their steps were never used to build the model.
Written by `perfmodel compare` from the measurement files, without a GPU; `make accuracy` repeats it."""

GRID_ONLY = "Predicted from the general grid and its fitted curves alone, without kernels measured for these scenarios."
HOST_SPEED = (
    "The host speed of a machine that shares its cores drifts, so here each step is predicted at the host speed that a "
    "fixed reference workload had between its measured steps."
)
COMMUNICATION = (
    "Communication of a step, counted from the last rank's arrival in each collective, and the time of it that is "
    "exposed: no kernel runs (normal gaps between kernels are ignored). Values are medians over ranks. Overlap is what "
    "HolisticTraceAnalysis computes from a trace, waiting included. These steps ran under a profiler, which slows the "
    "host."
)
SECTIONS = (
    ("step", "Step time", "Steady state: no synchronisation between steps."),
    (AT_MEASURED_HOST, "Step time at measured host speed", HOST_SPEED),
    (WITHOUT_EXACT_KEYS, "Step time without exact keys", GRID_ONLY),
    ("synced_step", "Step time with a synchronisation after each step", ""),
    ("forward", "Forward", ""),
    ("backward", "Backward", ""),
    ("optimizer", "Optimizer", "Gradient clipping and zero_grad are included."),
    ("peak_allocated", "Peak memory allocated", ""),
    ("peak_reserved", "Peak memory reserved", ""),
)
COLUMNS = {
    "step": "step",
    AT_MEASURED_HOST: "at measured host speed",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "synced_step": "synced",
    "peak_allocated": "allocated",
    "peak_reserved": "reserved",
    WITHOUT_EXACT_KEYS: "without exact keys",
}


def accuracy_markdown(card: Card) -> str:
    """Write the whole of ACCURACY.md."""
    parts = [INTRODUCTION]
    parts += [_section(card, quantity, title, remark) for quantity, title, remark in SECTIONS]
    parts += [
        rank_memory_section(card),
        _communication(card),
        _choices(card),
        strategies_section(card),
        _every_case(card),
        _interval_coverage(card),
        _noise_floor(card),
        _versions(card),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def summary_line(card: Card) -> str:
    """Write one line for the terminal: step-time errors of the held-out cases, or of all if none is held out."""
    split = "held-out" if card.statistics("step", split="held-out") else None
    found = card.statistics("step", split=split)
    if found is None:
        return "no case"
    noun = "case" if found.cases == 1 else "cases"
    cases = f"{found.cases} {split} {noun}" if split else f"{found.cases} {noun}"
    return (
        f"{cases}: step time off by {found.median:.2%} in the median, {found.mean:.2%} in the mean, "
        f"{found.worst:+.2%} at worst ({found.worst_case})"
    )


def case_table(card: Card) -> RenderableType:
    """Draw a table for the terminal: each case with its measured and predicted values."""
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("case", "", "measured", "predicted", "error"):
        shown.add_column(name, justify="left" if name in ("case", "") else "right", no_wrap=True, header_style="cyan")
    for case in card.cases:
        name = case.name
        for quantity in (*QUANTITIES, WITHOUT_EXACT_KEYS, AT_MEASURED_HOST):
            error = case.error(quantity)
            if error is None:
                continue
            unit = format_bytes if quantity.startswith("peak") else format_seconds
            values = (unit(case.measured[quantity]), unit(case.predicted[quantity]), _percent(f"{error:+.1%}"))
            shown.add_row(name, quantity.replace("_", " "), *values)
            name = ""
    return shown


def _percent(text: str) -> str:
    return text.replace("%", " %")


def _section(card: Card, quantity: str, title: str, remark: str) -> str:
    if quantity == WITHOUT_EXACT_KEYS:
        remark += _not_covered(card)
    if quantity == AT_MEASURED_HOST:
        remark += _host_drift(card)
    if quantity.startswith("peak"):
        remark = " ".join(filter(None, [remark, _not_read(card, quantity)]))
    cells = [_statistics_cells(name, found) for name, found in card.rows(quantity).items()]
    if not cells:
        return ""
    head = ("", "cases", "mean", "median", "p95", "worst", "worst case", "bias")
    return "\n\n".join(part for part in (f"## {title}", remark, table(head, cells)) if part)


def _not_covered(card: Card) -> str:
    count = sum(WITHOUT_EXACT_KEYS not in case.predicted for case in card.cases)
    return f" {count} cases have operators that no curve covers, and are left out." if count else ""


def _not_read(card: Card, quantity: str) -> str:
    left_out = [case.name for case in card.cases if quantity in case.predicted and quantity not in case.measured]
    if not left_out:
        return ""
    names = ", ".join(left_out)
    return f"Left out, because memory was read in no step after the one in which DDP rebuilds its buckets: {names}."


def _host_drift(card: Card) -> str:
    """Write a sentence on host speed for each profile."""
    return "".join(_host_drift_of(profile, samples_s) for profile, samples_s in card.host_references().items())


def _host_drift_of(profile: str, samples_s: list[float]) -> str:
    median_s = statistics.median(samples_s)
    spread = statistics.pstdev(samples_s) / median_s
    return (
        f" Over all measurements of {profile}, that reference took {format_seconds(median_s)} in the median, with a "
        f"spread of {spread:.1%}, from {format_seconds(min(samples_s))} to {format_seconds(max(samples_s))}."
    )


def _statistics_cells(name: str, found: Statistics) -> list[str]:
    percentages = [f"{value:.2%}" for value in (found.mean, found.median, found.p95)]
    return [name, str(found.cases), *percentages, f"{found.worst:+.2%}", found.worst_case, f"{found.bias:+.2%}"]


def _communication(card: Card) -> str:
    """Write the section on communication, with the cases whose ranks were all traced."""
    rows = [
        [
            case.name,
            format_seconds(case.measured["communication"]),
            format_seconds(case.predicted["communication"]),
            format_seconds(case.measured["exposed"]),
            format_seconds(case.predicted["exposed"]),
            f"{(case.predicted['exposed'] - case.measured['exposed']) / case.measured['step']:+.2%}",
            f"{case.measured['overlap_ratio']:.0%}",
            f"{case.predicted['overlap_ratio']:.0%}",
        ]
        for case in card.cases
        if "communication" in case.measured and "communication" in case.predicted
    ]
    if not rows:
        return ""
    head = ("case", "measured", "predicted", "measured exposed", "predicted exposed", "off by, of the step")
    overlaps = ("overlap measured", "overlap predicted")
    return "\n\n".join(["## Communication", COMMUNICATION, table((*head, *overlaps), rows)])


def _choices(card: Card) -> str:
    found = choices(card.cases)
    if not found:
        return ""
    right = sum(each.best == each.chosen for each in found)
    near = sum(each.costs <= NEAR for each in found)
    remark = (
        f"Where only one setting differs, does the prediction choose what is fastest? It does in {right} of "
        f"{len(found)} choices, and in {near} within {NEAR:.0%} of the fastest. Values are listed in measured order, "
        "each with its measured and (predicted) time."
    )
    rows = [
        [
            each.setting.partition(".")[2],
            common_words([case.name for case in each.cases.values()]) + _profiles_of(each, card),
            each.best,
            each.chosen,
            f"{each.costs:+.2%}",
            "yes" if each.order_is_right else "no",
            ", ".join(_both_times(value, case) for value, case in each.cases.items()),
        ]
        for each in found
    ]
    head = ("setting", "cases", "fastest", "chosen", "costs", "order right", "measured and predicted")
    return "\n\n".join(["## Choices", remark, table(head, rows)])


def _profiles_of(choice: Choice, card: Card) -> str:
    """Name the profiles of a choice, on a card with several."""
    used = {case.profile for case in choice.cases.values()}
    return f" ({', '.join(sorted(used))})" if len(card.profiles) > 1 else ""


def _both_times(value: str, case: CardCase) -> str:
    return f"{value}: {format_seconds(case.measured['step'])} ({format_seconds(case.predicted['step'])})"


def _every_case(card: Card) -> str:
    head = ("case", "class", "split", "measured", "predicted", *COLUMNS.values())
    rows = [
        [
            case.name,
            case.group,
            case.split,
            format_seconds(case.measured["step"]),
            format_seconds(case.predicted["step"]),
        ]
        + [_error(case, quantity) for quantity in COLUMNS]
        for case in card.cases
    ]
    return f"## Every case\n\n{table(head, rows)}"


def _error(case: CardCase, quantity: str) -> str:
    error = case.error(quantity)
    missing = "-" if quantity == AT_MEASURED_HOST else ""
    return missing if error is None else f"{error:+.2%}"


def _interval_coverage(card: Card) -> str:
    inside = sum(case.in_interval for case in card.cases)
    text = f"{inside} of {len(card.cases)} measured steps lie in the predicted 90 % interval, which is uncalibrated."
    return f"## Intervals\n\n{text}"


def _noise_floor(card: Card) -> str:
    rows = [
        [case.name, str(case.steps), f"{case.spread:.2%}"] for case in sorted(card.cases, key=lambda case: -case.spread)
    ]
    spread = table(("case", "steps", "spread"), rows)
    remark = "Spread: standard deviation of a measurement's steps over their median, largest first."
    return "\n\n".join(["## Noise floor", remark, spread, _repeats(card)]).rstrip()


def _repeats(card: Card) -> str:
    rows = []
    for _, cases in card.repeated():
        times = [case.measured["step"] for case in cases]
        rows.append([", ".join(case.name for case in cases), f"{(max(times) - min(times)) / min(times):.2%}"])
    if not rows:
        return "No scenario was measured twice."
    return "Scenarios measured more than once, and how far their medians lie apart:\n\n" + table(
        ("cases", "apart"), rows
    )


def _versions(card: Card) -> str:
    seen: dict[tuple[str, ...], int] = {}
    names = sorted({name for case in card.cases for name in case.versions})
    for case in card.cases:
        row = (case.profile, *(case.versions.get(name, "") for name in names))
        seen[row] = seen.get(row, 0) + 1
    rows = [[*row, str(count)] for row, count in seen.items()]
    return f"## Versions\n\n{table(('profile', *names, 'cases'), rows)}"
