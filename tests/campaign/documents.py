"""The sound files that a campaign begins with, and how an edited one is written."""

from __future__ import annotations

import copy
import functools
import gzip
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from perfmodel.hardware.profile import CATALOG
from perfmodel.scenario.yaml_file import parse_scenario
from perfmodel.trace import store
from perfmodel.trace.store import SHIPPED, trace_name
from tests.places import ROOT

FEW = 5
LONGEST_REPEAT_BYTES = 2_000_000
PROFILE = "profile.json"
AGAIN = "@@again:"
SPECIAL = re.compile(r"[\"']@@(deep|digits|long):(\d+)[\"']|@@again:")

SCENARIOS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "tiny-forward": {"mode": "forward", "precision": "bf16"},
    "tiny-ddp": {"parallelism": {"dp": 2, "strategy": "ddp", "bucket_cap_mb": 1}, "hardware": {"gpus": 2}},
    "tiny-zero1": {"parallelism": {"dp": 2, "strategy": "zero1"}, "hardware": {"gpus": 2, "interconnect": "nvlink"}},
    "tiny-zero3": {
        "parallelism": {
            "dp": 2,
            "strategy": "zero3",
            "fsdp": {"mixed_precision": {"param": "bf16", "reduce": "fp32"}, "reshard_after_forward": True},
        },
        "hardware": {"gpus": 2},
    },
    "tiny-pipeline": {
        "parallelism": {"pp": {"stages": 2, "schedule": "1f1b", "micro_batches": 2, "layers": [1, 1]}},
        "hardware": {"gpus": 2},
    },
    "dimensions": {
        "model": {"family": "llama", "layers": 1, "width": 64, "heads": 2, "ffn_width": 128, "vocabulary": 128},
        "optimizer": {"name": "sgd", "momentum": 0.9, "max_grad_norm": 1.0},
        "training": {"gradient_accumulation": 2, "activation_checkpointing": {"every": 1}},
    },
    "target": {
        "model": {
            "target": "tests.campaign.target:Net",
            "arguments": {"width": 8, "layers": 2},
            "inputs": {"x": {"shape": ["batch", "sequence", 8], "dtype": "float32"}},
            "loss": "tests.campaign.target:mean_square",
            "blocks": "blocks",
        },
    },
}


@dataclass(frozen=True)
class File:
    """A sound file and what is done to it.

    base: a name that :func:`sound` knows. edits: of the tree, each ``(path, action, value)`` (see :func:`edited`).
    text_edits: of what is then written, each ``(action, place, value)`` (see :func:`edited_text`); place runs from 0 to
    1. form: how it lies there (see :func:`lay`).
    """

    base: str
    edits: tuple[Any, ...] = ()
    text_edits: tuple[Any, ...] = ()
    form: str = "plain"


@functools.cache
def sound(base: str) -> Any:
    """The tree, or the text, of the sound file of that name; not to be changed."""
    kind, _, name = base.partition("/")
    return _SOUND[kind](name)


def _scenario(name: str) -> dict[str, Any]:
    data = {
        "version": 1,
        "name": name,
        "model": {"family": "gpt", "size": "tiny"},
        "batch": {"size": 4, "sequence_length": 64},
        "hardware": {"profile": PROFILE},
    }
    changes = copy.deepcopy(SCENARIOS[name])
    data["hardware"] |= changes.pop("hardware", {})
    return data | changes


def _profile(_: str) -> dict[str, Any]:
    data = json.loads((CATALOG / "h200-sxm-x4.json").read_text())
    data["kernels"] = dict(islice(data["kernels"].items(), 40))
    for interconnect in data["interconnects"].values():
        for name, value in interconnect.items():
            interconnect[name] = _few(value) if name in ("contention", "own_contention") else value
        interconnect["collectives"] = dict(islice(interconnect["collectives"].items(), 0, None, 8))
    return data


def _measurement(_: str) -> Any:
    path = ROOT / "results" / "first-two-gpu-node" / "gpt-small-fp32-nodes2-ddp.json"
    return _few(json.loads(path.read_text())) | {"scenario": _scenario("tiny-ddp")}


def _few(tree: Any) -> Any:
    """With lists cut to FEW."""
    if isinstance(tree, dict):
        return {key: _few(value) for key, value in tree.items()}
    return [_few(value) for value in tree[:FEW]] if isinstance(tree, list) else tree


def _trace(_: str) -> Any:
    from perfmodel.hardware.profile import find_profile, load_profile
    from perfmodel.prediction.predict import predict
    from perfmodel.report.traces.chrome import chrome_trace

    prediction = predict(parse_scenario(_scenario("tiny"), "tiny"), load_profile(find_profile("h200-sxm-x4")))
    return json.loads(json.dumps(chrome_trace(prediction)))


def _cached(name: str) -> Any:
    """The trace of that scenario, as it is shipped."""
    return json.loads(gzip.decompress((SHIPPED / f"{_trace_name(name)}.json.gz").read_bytes()))


def _trace_name(scenario: str) -> str:
    return trace_name(parse_scenario(_scenario(scenario), scenario))


def cached_path(scenario: str) -> Path:
    """Where the cache keeps the trace of that scenario, below ``$PERFMODEL_CACHE/traces``."""
    return Path("traces", store._cached_paths(_trace_name(scenario))[0].name)


def _import(name: str) -> Any:
    text = (ROOT / "tests" / "data" / "imports" / name).read_text()
    return json.loads(text) if name.endswith(".json") else text


def _cases(_: str) -> Any:
    return [
        {"name": name, "split": "tuning", "class": "own", "scenario": _scenario(name)} for name in ("tiny", "tiny-ddp")
    ]


_SOUND: dict[str, Callable[[str], Any]] = {
    "scenario": _scenario,
    "profile": _profile,
    "measurement": _measurement,
    "cached": _cached,
    "card": lambda _: _few(json.loads((ROOT / "ACCURACY.json").read_text())),
    "trace": _trace,
    "import": _import,
    "cases": _cases,
    "topology": lambda name: (ROOT / "tests" / "data" / "topology" / name).read_text(),
}


def edited(tree: Any, edits: tuple[Any, ...]) -> Any:
    """A copy after each edit: ``set`` the value at a path, ``remove`` it, ``add`` ``[key, value]`` to it, ``rename``
    its last key, or give that key ``again`` with a value. An edit whose path is gone does nothing.
    """
    tree = copy.deepcopy(tree)
    for path, action, value in edits:
        try:
            tree = _edited(tree, list(path), action, copy.deepcopy(value))
        except (KeyError, IndexError, TypeError):
            continue
    return tree


def _edited(tree: Any, path: list[Any], action: str, value: Any) -> Any:
    if action == "set" and not path:
        return value
    if action == "add":
        path, action, value = [*path, value[0]], "set", value[1]
    *above, last = path
    here = functools.reduce(lambda node, key: node[key], above, tree)
    if action == "set":
        if isinstance(here, list) and last == len(here):
            here.append(value)
        else:
            here[last] = value
    elif action == "again" and isinstance(here, dict):
        here[f"{AGAIN}{last}"] = value
    elif action == "rename" and isinstance(here, dict):
        here[value] = here.pop(last)
    elif action == "remove":
        del here[last]
    return tree


def text_of(tree: Any, as_yaml: bool) -> str:
    """The tree written down, with its special values: nesting, digits and strings of any length, keys given again."""
    if isinstance(tree, str) and not tree.startswith("@@"):
        return tree
    text = yaml.safe_dump(tree, sort_keys=False, width=2**30) if as_yaml else json.dumps(tree)
    return SPECIAL.sub(_special, text)


def _special(found: re.Match[str]) -> str:
    kind, number = found[1], int(found[2] or 0)
    return {"deep": "[" * number + "]" * number, "digits": "9" * number, "long": f'"{"x" * number}"'}.get(kind, "")


@functools.cache
def _sound_text(base: str, as_yaml: bool) -> str:
    return text_of(sound(base), as_yaml)


def edited_text(text: str, edits: tuple[Any, ...]) -> bytes:
    """The text after each edit: ``cut`` it off at the place, ``insert`` there, ``delete`` a number of characters,
    ``repeat`` the line a number of times, put the value in place of the next ``number``, or ``bytes`` (hexadecimal).
    """
    data = text.encode("utf-8", "surrogatepass")
    for action, place, value in edits:
        at = int(place * len(data))
        head, tail = data[:at], data[at:]
        if action == "cut":
            data = head
        elif action == "insert":
            data = head + _repeated(str(value)).encode("utf-8", "surrogatepass") + tail
        elif action == "delete":
            data = head + tail[value:]
        elif action == "repeat":
            line, end, rest = tail.partition(b"\n")
            data = head + (line + end) * min(value, 1 + LONGEST_REPEAT_BYTES // (1 + len(line))) + rest
        elif action == "number":
            data = head + re.sub(rb"[-+.\deE]*\d", lambda _, new=str(value): new.encode(), tail, count=1)
        elif action == "bytes":
            data = head + bytes.fromhex(value) + tail
    return data


def _repeated(text: str) -> str:
    """``@@3:ab`` stands for ``ababab``."""
    found = re.fullmatch(r"@@(\d+):(.*)", text)
    return int(found[1]) * found[2] if found else text


def lay(file: File, path: Path) -> None:
    """Write the file at ``path``, or what ``form`` says stands there: nothing, a folder, a pipe, compressed bytes."""
    if file.form == "missing":
        return
    if file.form == "folder":
        path.mkdir(parents=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    if file.form == "pipe":
        os.mkfifo(path)
        return
    as_yaml = path.suffix == ".yaml"
    text = text_of(edited(sound(file.base), file.edits), as_yaml) if file.edits else _sound_text(file.base, as_yaml)
    data = edited_text(text, file.text_edits)
    if file.form == "gzip":
        data = gzip.compress(data, 1)
    elif file.form == "bomb":
        data = bomb()
    elif file.form == "utf-16":
        data = data.decode("utf-8", "replace").encode("utf-16")
    elif file.form == "bom":
        data = b"\xef\xbb\xbf" + data
    path.write_bytes(data)


@functools.cache
def bomb() -> bytes:
    """Two gigabytes of blanks, compressed to two megabytes: members of a gzip file follow each other."""
    return gzip.compress(b" " * 2**24, 9) * 128
