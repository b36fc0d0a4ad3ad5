"""The section of the accuracy card on strategies: are they predicted in the order in which they were measured?"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from perfmodel.accuracy.choices import NEAR, Swap, swaps
from perfmodel.accuracy.markdown import table
from perfmodel.accuracy.strategies import StrategyGroup, strategy_groups
from perfmodel.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from perfmodel.accuracy.cases import Card, CardCase

QUANTITIES: dict[str, tuple[str, Callable[[float], str]]] = {
    "step": ("time", format_seconds),
    "peak_allocated": ("memory", format_bytes),
}


def strategies_section(card: Card) -> str:
    """Write a sentence and a table for each of :data:`QUANTITIES`; empty if the card has no group."""
    groups = strategy_groups(card.cases)
    if not groups:
        return ""
    remark = (
        "Cases that differ only in settings of `parallelism`; `none` is one GPU with the batch of a rank. Are they "
        "predicted in the order in which they were measured? Memory is the peak allocated by the rank that needs most."
    )
    parts = [_order(groups, quantity, len(card.profiles) > 1) for quantity in QUANTITIES]
    return "\n\n".join(["## Strategies", remark, *filter(None, parts)])


def _order(groups: list[StrategyGroup], quantity: str, several_profiles: bool) -> str:
    title, _ = QUANTITIES[quantity]
    known = [(group, cases) for group in groups if len(cases := _measured(group, quantity)) > 1]
    if not known:
        return ""
    found = [swaps(cases, quantity) for _, cases in known]
    right, near = sum(not each for each in found), sum(all(map(_is_near, each)) for each in found)
    rows = [
        [
            _named(group, several_profiles),
            "no" if swapped else "yes",
            ", ".join(f"{each.smaller} and {each.larger} ({each.apart:.2%} apart)" for each in swapped),
            ("yes" if all(map(_is_near, swapped)) else "no") if swapped else "",
            ", ".join(_both(label, case, quantity) for label, case in cases.items()),
        ]
        for (group, cases), swapped in zip(known, found, strict=True)
    ]
    head = ("group", "order right", "swapped", f"all within {NEAR:.0%}", "measured and (predicted), in measured order")
    sentence = (
        f"By {title}: the order is right in {right} of {len(known)} groups, and in {near} where it may be wrong among "
        f"cases measured within {NEAR:.0%} of each other."
    )
    return f"{sentence}\n\n{table(head, rows)}"


def _measured(group: StrategyGroup, quantity: str) -> dict[str, CardCase]:
    """Return the cases of the group whose quantity is known, in measured order."""
    known = {label: case for label, case in group.cases.items() if case.error(quantity) is not None}
    return dict(sorted(known.items(), key=lambda item: item[1].measured[quantity]))


def _is_near(swap: Swap) -> bool:
    return swap.apart <= NEAR


def _named(group: StrategyGroup, several_profiles: bool) -> str:
    place = f"{group.name}, {group.place}"
    return f"{place} ({', '.join(group.profiles)})" if several_profiles else place


def _both(label: str, case: CardCase, quantity: str) -> str:
    _, shown = QUANTITIES[quantity]
    return f"{label}: {shown(case.measured[quantity])} ({shown(case.predicted[quantity])})"
