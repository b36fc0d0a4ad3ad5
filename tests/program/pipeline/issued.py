"""What ranks of gloo do in a step of torch's schedules, recorded once in tests/data.

``python -m tests.program.pipeline.issued`` records it again, with the torch that is installed: for new cases, or another
torch. test_schedules.py checks a few cases against ranks of gloo themselves.
"""

from __future__ import annotations

import gzip
import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

from perfmodel.program.pipeline.schedules import Action, Await, Compute, Message, Post, Reduce
from perfmodel.scenario.scenario import Schedule
from tests.places import TESTS
from tests.program.pipeline.recorded_steps import Case, record

PATH = TESTS / "data" / "pipeline_schedules.json.gz"
ACTIONS: dict[str, Any] = {kind.__name__: kind for kind in (Await, Compute, Message, Post, Reduce)}
IN_TURNS: tuple[Schedule, ...] = ("interleaved-1f1b", "looped-bfs", "interleaved-zero-bubble")
CASES = [
    *(Case("gpipe", ranks, number) for ranks in (2, 4) for number in (1, 3, 6)),
    *(Case("1f1b", ranks, number) for ranks in (2, 3, 4) for number in (ranks, ranks + 1, 9)),
    *(Case(name, ranks, number, 2) for name in IN_TURNS for ranks in (2, 4) for number in (1, 4, 8)),
    *(Case(name, 2, 4, virtual) for name in IN_TURNS for virtual in (1, 4)),
    *(Case("zbv-zero-bubble", ranks, number, 2) for ranks in (2, 4) for number in (2, 7, 9)),
    *(Case("dualpipev", ranks, 2 * ranks + more, 2) for ranks in (2, 3, 4) for more in (0, 3)),
]


def issued(case: Case) -> list[tuple[Action, ...]]:
    """Return the actions of each rank when they were recorded."""
    return [tuple(map(_decoded, actions)) for actions in _file()["steps"][str(case)]]


@cache
def _file() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(gzip.decompress(PATH.read_bytes()))
    return data


def _encoded(value: Any) -> Any:
    if type(value) in ACTIONS.values():
        return {type(value).__name__: [_encoded(getattr(value, name)) for name in _fields(type(value))]}
    return [_encoded(each) for each in value] if isinstance(value, tuple) else value


def _decoded(value: Any) -> Any:
    if isinstance(value, dict):
        ((name, fields),) = value.items()
        return ACTIONS[name](*map(_decoded, fields))
    return tuple(map(_decoded, value)) if isinstance(value, list) else value


def _fields(kind: Any) -> tuple[str, ...]:
    names: tuple[str, ...] = kind._fields if hasattr(kind, "_fields") else tuple(kind.__dataclass_fields__)
    return names


def record_all() -> None:
    """Record every case."""
    with tempfile.TemporaryDirectory() as folder:
        found = record(CASES, Path(folder), timeout_s=600)
    steps = {
        str(case): [[_encoded(action) for action in actions] for actions in ranks] for case, ranks in found.items()
    }
    PATH.write_bytes(gzip.compress(json.dumps({"torch": torch.__version__, "steps": steps}).encode(), 9, mtime=0))


if __name__ == "__main__":
    record_all()
