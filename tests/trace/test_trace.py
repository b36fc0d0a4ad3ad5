"""A damaged trace file is one sentence, whatever is wrong with it; every shipped trace is whole."""

from __future__ import annotations

import copy
import functools
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perfmodel.errors import PerfModelError
from perfmodel.trace.store import SHIPPED
from perfmodel.trace.trace import EventKind, load_trace

NAME = "part-c40e82284d45.json.gz"  # of a pipeline, so that it has a boundary


@functools.cache
def shipped() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(gzip.decompress((SHIPPED / NAME).read_bytes()))
    return found


def put(*keys_and_value: Any) -> Callable[[dict[str, Any]], None]:
    *keys, last, value = keys_and_value

    def change(data: Any) -> None:
        for key in keys:
            data = data[key]
        data[last] = value

    return change


def point_outside(kind: EventKind) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        events = data["steady"]
        events["a"][events["kind"].index(kind)] = 10**9

    return change


def allocate_twice(data: dict[str, Any]) -> None:
    events = data["steady"]
    first, second = [at for at, kind in enumerate(events["kind"]) if kind == EventKind.ALLOC][:2]
    events["a"][second] = events["a"][first]


def leave_unentered(data: dict[str, Any]) -> None:
    events = data["steady"]
    events["kind"][events["kind"].index(EventKind.MODULE_ENTER)] = int(EventKind.MODULE_EXIT)


def refusal(tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> str:
    data = copy.deepcopy(shipped())
    change(data)
    path = tmp_path / NAME
    path.write_bytes(gzip.compress(json.dumps(data).encode(), compresslevel=1))
    with pytest.raises(PerfModelError) as raised:
        load_trace(path)
    where, _, sentence = str(raised.value).partition(": ")
    assert (where, "\n" in sentence) == (str(path), False)
    assert sentence.endswith("Delete it to trace again.")
    return sentence


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (put("workload", []), "must hold a workload"),
        (put("provenance", {"torch": 2}), "must hold a workload, and versions as text"),
        (put("provenance", None), "must hold a whole trace"),
        (put("operations", 3), "must hold a whole trace"),
        (put("operations", 0, [1, 2]), "must hold a whole trace"),
        (put("operations", 0, 0, "mm"), "must hold a whole trace"),
        (put("operations", 0, 1, [{"t": "float31[2]"}]), "must hold a whole trace"),
        (put("operations", 0, 1, [{"t": "float32[2,3]{1}"}]), "must hold a whole trace"),
        (put("operations", 0, 1, [{"t": "float32[" + "9" * 5000 + "]"}]), "must hold a whole trace"),
        (put("operations", 0, 1, [{}]), "must hold a whole trace"),
        (put("operations", 0, 2, []), "must hold a whole trace"),
        (put("operations", 0, 5, [[10**12], [1, 0, 10**12]]), "must hold a whole trace"),
        (put("modules", 0, 3), "must hold a whole trace"),
        (put("modules", 0, [1, 2]), "must name its modules, calls and nodes by text"),
        (put("calls", [None]), "must name its modules, calls and nodes by text"),
        (put("parameters", 0, ["p"]), "must hold a whole trace"),
        (put("parameters", 0, 2, 10**9), "must hold the storage of each parameter"),
        (put("parameters", 0, 2, "x"), "must hold a whole trace"),
        (put("persistent", 0, 1, -1), "must hold storages of 0 to"),
        (put("persistent", 0, 2, 99), "must hold a whole trace"),
        (put("boundary", []), "must hold a whole trace"),
        (put("boundary", 4, 1, [10**9, 10**9]), "must hold the storages of its boundary"),
        (put("storage_kinds", [[], [1]]), "must hold a whole trace"),
        (put("steady", "kind", []), "must have equally long columns in the steady step"),
        (put("steady", "kind", 0, 99), "must have events of known kinds"),
        (put("steady", "a", 0, 10**40), "must hold a whole trace"),
        (put("steady", "a", 0, [1]), "must hold a whole trace"),
        (put("steady", "touch_counts", 0, -1), "must count what each event touches in the steady step"),
        (put("steady", "touch_counts", 0, 5), "must touch as much as is counted in the steady step"),
        (put("steady", "touches", 0, 10**9), "must touch storages that it holds in the steady step"),
        (put("first", "segments", 0, 3, 1), "must have segments that cover the events in order in the first step"),
        (put("first", "segments", []), "must have segments that cover the events in order in the first step"),
        (put("first", "segments", 0, [1]), "must hold a whole trace"),
        (point_outside(EventKind.OP), "must point into its table with each OP in the steady step"),
        (point_outside(EventKind.MODULE_ENTER), "must point into its table with each MODULE_ENTER"),
        (point_outside(EventKind.NODE), "must point into its table with each NODE"),
        (point_outside(EventKind.ALLOC), "must have events of known kinds, of storages that it holds"),
        (allocate_twice, "must allocate and free each storage in turn in the steady step"),
        (leave_unentered, "must have an MODULE_ENTER for each MODULE_EXIT in the steady step"),
    ],
)
def test_damaged_traces(tmp_path: Path, change: Callable[[dict[str, Any]], None], rule: str) -> None:
    assert rule in refusal(tmp_path, change)


def test_bombs_and_depth(tmp_path: Path) -> None:
    path = tmp_path / NAME
    for content in (b"[" * 100_000, b'{"a":' * 100_000, b'{"version": 3, "version": 3}', b'{"version": NaN}', b""):
        path.write_bytes(gzip.compress(content))
        with pytest.raises(PerfModelError, match=r"Delete it to trace again\.$"):
            load_trace(path)


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.json.gz"))[::16], ids=lambda path: path.stem)
def test_shipped_traces_are_whole(path: Path) -> None:
    assert load_trace(path).provenance
