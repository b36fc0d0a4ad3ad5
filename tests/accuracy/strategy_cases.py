"""Cases of strategies for accuracy cards, made by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from perfmodel.accuracy.cases import CardCase
from perfmodel.accuracy.strategies import layout_of
from tests.accuracy import cards

GIB = 2.0**30
FOUR = {"profile": "toy", "gpus": 4, "nodes": 1, "interconnect": "nvlink"}


def scenario(strategy: str, hardware: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    section = {"dp": 4, "strategy": strategy, "gradient_as_bucket_view": False, "static_graph": False}
    alone = {"dp": 1, "strategy": "none"}
    known = {"name": strategy, "precision": "fp32", "batch": {"size": 2}}
    if strategy == "none":
        return known | {"parallelism": alone, "hardware": {"profile": "toy", "gpus": 1, "nodes": 1}} | changes
    parallelism = section | changes.pop("parallelism", {})
    return known | {"parallelism": parallelism, "hardware": hardware or FOUR} | changes


def case(name: str, *arguments: Any, step: tuple[float, float] = (1.0, 1.0), **changes: Any) -> CardCase:
    """step: measured and predicted, seconds."""
    strategy, *rest = arguments or (name,)
    sides = {"measured": {"step": step[0]}, "predicted": {"step": step[1]}}
    return cards.case(name, "own", "tuning", 0.0, layout=layout_of(scenario(strategy, *rest, **changes)), **sides)


def with_memory(found: CardCase, measured: float, predicted: float) -> CardCase:
    sides = {"measured": measured * GIB, "predicted": predicted * GIB}
    return replace(found, **{side: getattr(found, side) | {"peak_allocated": value} for side, value in sides.items()})


GROUP = (
    with_memory(case("gpt-none", "none", step=(0.1, 0.1)), 3.0, 3.0),
    with_memory(case("gpt-ddp", "ddp", step=(0.2, 0.204)), 4.0, 4.0),
    with_memory(case("gpt-zero1", "zero1", step=(0.201, 0.203)), 2.0, 1.0),
    case("gpt-zero2", "zero2", step=(0.3, 0.3)),
    with_memory(case("gpt-zero3", "zero3", step=(0.4, 0.4)), 1.0, 1.5),
)
