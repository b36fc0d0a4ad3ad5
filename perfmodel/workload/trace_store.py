"""Where traces are kept: those shipped with the scenarios, then the user's cache. No torch until one must be made."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from perfmodel.errors import PerfModelError
from perfmodel.workload.scenario import workload_digest, workload_of
from perfmodel.workload.trace_file import Trace, load_trace, save_trace

if TYPE_CHECKING:
    from perfmodel.workload.scenario import Scenario

SHIPPED = Path(__file__).resolve().parents[2] / "scenarios" / "traces"
REMEMBERED_TRACES = 8

_remembered: OrderedDict[tuple[str, bool], Trace] = OrderedDict()


def cache_directory() -> Path:
    """``$PERFMODEL_CACHE/traces``, else ``~/.cache/perfmodel/traces``."""
    root = os.environ.get("PERFMODEL_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "perfmodel") / "traces"


def trace_name(scenario: Scenario) -> str:
    """``gpt-1a2b3c4d5e6f``: the family and the digest of the workload."""
    return f"{scenario.model.family or 'target'}-{workload_digest(workload_of(scenario))}"


def find_trace(scenario: Scenario) -> Path | None:
    """The file that holds the scenario's trace: a shipped one, or one cached under the installed versions.

    A target's code may change without its scenario changing, so targets are never looked up.
    """
    if scenario.model.target is not None:
        return None
    name = trace_name(scenario)
    candidates: Iterator[Path] = iter((SHIPPED / f"{name}.json.gz", *_cached_paths(name)))
    return next((path for path in candidates if path.is_file()), None)


def get_trace(scenario: Scenario, allow_import: bool = False) -> Trace:
    """The scenario's trace: remembered, loaded, or made now and cached.

    Raises
    ------
    PerfModelError
        If it must be made and torch is missing, or it cannot be made.
    """
    key = (trace_name(scenario), allow_import)
    trace = _remembered.get(key)
    if trace is None:
        path = find_trace(scenario)
        trace = _make(scenario, allow_import) if path is None else _load(path, scenario, allow_import)
        _remembered[key] = trace
        while len(_remembered) > REMEMBERED_TRACES:
            _remembered.popitem(last=False)
    _remembered.move_to_end(key)
    return trace


def _load(path: Path, scenario: Scenario, allow_import: bool) -> Trace:
    """A damaged file of the cache is made again; a damaged shipped one is an error."""
    try:
        return load_trace(path)
    except PerfModelError:
        if path.parent == SHIPPED:
            raise
        return _make(scenario, allow_import)


def _make(scenario: Scenario, allow_import: bool) -> Trace:
    try:
        from perfmodel.workload.trace.session import trace_step
    except ImportError as error:
        raise PerfModelError(
            f"{scenario.name}: tracing this scenario needs torch (got: {error}). "
            "Run `pip install .[torch]`, or use a shipped scenario."
        ) from error
    trace = trace_step(scenario, allow_import)
    if scenario.model.target is None:
        for path in _cached_paths(trace_name(scenario)):
            save_trace(trace, path)
    return trace


def _cached_paths(name: str) -> list[Path]:
    """Where the cache keeps a trace of this name, by the versions that decide the operators; none without torch."""
    versions = [_version(package) for package in ("torch", "transformers")]
    if versions[0] is None:
        return []
    return [cache_directory() / f"{name}-{'-'.join(version or 'none' for version in versions)}.json.gz"]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
