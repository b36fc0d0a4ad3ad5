"""Where traces are kept: those shipped with the scenarios, then the user's cache. No torch until one must be made."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfmodel.errors import PerfModelError
from perfmodel.workload.scenario import workload_digest, workload_of
from perfmodel.workload.trace_file import Trace, load_trace, save_trace

if TYPE_CHECKING:
    from perfmodel.workload.ops import TensorSpec
    from perfmodel.workload.optimizer_share import Parts
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


def optimizer_trace_name(scenario: Scenario, tensors: Sequence[TensorSpec], parts: Parts | None = None) -> str:
    """``optimizer-1a2b3c4d5e6f``: the digest of the optimizer, of what it steps over, and of what goes before."""
    workload: dict[str, Any] = {
        "optimizer": scenario.optimizer.model_dump(mode="json"),
        "tensors": [each.text for each in tensors],
    }
    if parts is not None:
        workload["parts"] = parts._asdict()
    return f"optimizer-{workload_digest(workload)}"


def find_trace(name: str) -> Path | None:
    """The file that holds the trace of that name: a shipped one, or one cached under the installed versions."""
    candidates: Iterator[Path] = iter((SHIPPED / f"{name}.json.gz", *_cached_paths(name)))
    return next((path for path in candidates if path.is_file()), None)


def get_trace(scenario: Scenario, allow_import: bool = False) -> Trace:
    """The scenario's trace: remembered, loaded, or made now and cached.

    A target's code may change without its scenario changing, so targets are never looked up in files.

    Raises
    ------
    PerfModelError
        If it must be made and torch is missing, or it cannot be made.
    """

    def make() -> Trace:
        with _torch_needed(scenario):
            from perfmodel.workload.trace.session import trace_step
        return trace_step(scenario, allow_import)

    return _get(trace_name(scenario), make, scenario.model.target is None, allow_import)


def get_optimizer_trace(scenario: Scenario, tensors: Sequence[TensorSpec], parts: Parts | None = None) -> Trace:
    """The scenario's optimizer over parameters like these alone: remembered, loaded, or made now and cached.

    Raises
    ------
    PerfModelError
        If it must be made and torch is missing.
    """

    def make() -> Trace:
        with _torch_needed(scenario):
            from perfmodel.workload.trace.optimizer import trace_optimizer
        return trace_optimizer(scenario, tensors, parts)

    return _get(optimizer_trace_name(scenario, tensors, parts), make)


def _get(name: str, make: Callable[[], Trace], in_files: bool = True, allow_import: bool = False) -> Trace:
    trace = _remembered.get((name, allow_import))
    if trace is None:
        path = find_trace(name) if in_files else None
        trace = None if path is None else _load(path)
        if trace is None:
            trace = make()
            for kept in _cached_paths(name) if in_files else []:
                save_trace(trace, kept)
        _remembered[name, allow_import] = trace
        while len(_remembered) > REMEMBERED_TRACES:
            _remembered.popitem(last=False)
    _remembered.move_to_end((name, allow_import))
    return trace


def _load(path: Path) -> Trace | None:
    """A damaged file of the cache is made again; a damaged shipped one is an error."""
    try:
        return load_trace(path)
    except PerfModelError:
        if path.parent == SHIPPED:
            raise
        return None


@contextmanager
def _torch_needed(scenario: Scenario) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise PerfModelError(
            f"{scenario.name}: tracing this scenario needs torch (got: {error}). "
            "Run `pip install .[torch]`, or use a shipped scenario."
        ) from error


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
