"""The store of traces: those shipped with the scenarios, then the user's cache. No torch until one must be made."""

from __future__ import annotations

import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfmodel.errors import PerfModelError, PerfModelWarning
from perfmodel.scenario.scenario import workload_digest, workload_of
from perfmodel.scenario.stage_split import blocks_of_stages, micro_batch_size, pipeline_of
from perfmodel.trace.trace import Trace, load_trace, save_trace

if TYPE_CHECKING:
    from perfmodel.scenario.scenario import Scenario
    from perfmodel.trace.operation import TensorSpec
    from perfmodel.trace.optimizer_share import OptimizerShare

SHIPPED = Path(__file__).resolve().parents[2] / "scenarios" / "traces"
REMEMBERED_TRACES = 32

_remembered: OrderedDict[tuple[str, bool, Path | None], Trace] = OrderedDict()
_only_kept = ContextVar("_only_kept", default=False)


class TraceNotKeptError(PerfModelError):
    """A trace would have to be made, inside :func:`only_kept_traces`."""


def cache_directory() -> Path:
    """Return ``$PERFMODEL_CACHE/traces``, else ``~/.cache/perfmodel/traces``."""
    root = os.environ.get("PERFMODEL_CACHE")
    if root:
        return Path(root) / "traces"
    home = os.path.expanduser("~")
    return Path("/" if home == "~" else home) / ".cache" / "perfmodel" / "traces"  # "~": the system knows no home


def trace_name(scenario: Scenario) -> str:
    """Return a name such as ``gpt-1a2b3c4d5e6f``: the family and the digest of the workload."""
    return f"{scenario.model.family or 'target'}-{workload_digest(workload_of(scenario))}"


def optimizer_trace_name(
    scenario: Scenario, tensors: Sequence[TensorSpec], before_step: OptimizerShare | None = None
) -> str:
    """Return a name such as ``optimizer-1a2b3c4d5e6f``: the digest of optimizer, tensors and what precedes the step."""
    workload: dict[str, Any] = {
        "optimizer": scenario.optimizer.model_dump(mode="json"),
        "tensors": [each.text for each in tensors],
    }
    if before_step is not None:
        workload["parts"] = before_step._asdict()
    return f"optimizer-{workload_digest(workload)}"


def stage_workload(scenario: Scenario, blocks: Sequence[int], number: int, split: bool) -> dict[str, Any]:
    """Return the workload that decides which operators stage ``number`` of the scenario's pipeline runs.

    It is that of a micro-batch, and what the stage has of the model: how many blocks, and the place of the first of
    them among those of which every k-th is checkpointed. The number of micro-batches decides nothing.

    Parameters
    ----------
    scenario : Scenario
        With ``parallelism.pp``.
    blocks : sequence of int
        Of each stage.
    number : int
    split : bool
    """
    batch = scenario.batch.model_copy(update={"size": micro_batch_size(scenario)})
    training = scenario.training.model_copy(update={"gradient_accumulation": 2})
    checkpointing = training.activation_checkpointing
    first = 0 if isinstance(checkpointing, str) else sum(blocks[:number]) % checkpointing.every
    stage = {
        "blocks": [first, blocks[number]],
        "is_first": number == 0,
        "is_last": number == len(blocks) - 1,
        "split": split,
    }
    return workload_of(scenario.model_copy(update={"batch": batch, "training": training})) | {"part": stage}


def check_stage(scenario: Scenario, number: int) -> None:
    """Refuse a stage that the scenario's pipeline does not have.

    Raises
    ------
    PerfModelError
        If it does not, or if the scenario has no pipeline.
    """
    count = pipeline_of(scenario).number_of_stages
    if not 0 <= number < count:
        raise PerfModelError(f"stage must be from 0 to {count - 1} (got {number}). Ask for one that the pipeline has.")


def stage_trace_name(scenario: Scenario, number: int, split: bool = False) -> str:
    """Return a name such as ``part-1a2b3c4d5e6f``: the digest of :func:`stage_workload`."""
    return f"part-{workload_digest(stage_workload(scenario, blocks_of_stages(scenario), number, split))}"


def find_trace(name: str) -> Path | None:
    """Return the file that holds the trace of that name: a shipped one, or one cached under the installed versions."""
    candidates: Iterator[Path] = iter((SHIPPED / f"{name}.json.gz", *_cached_paths(name)))
    return next((path for path in candidates if os.path.isfile(path)), None)  # False where it may not be looked at


def get_trace(scenario: Scenario, allow_import: bool = False) -> Trace:
    """Return the scenario's trace: remembered, loaded, or made now and cached.

    A target's code may change without its scenario changing, so targets are never looked up in files.

    Raises
    ------
    PerfModelError
        If it must be made and torch is missing, or it cannot be made.
    """

    def make() -> Trace:
        with _torch_needed(scenario):
            from perfmodel.tracing.step import trace_step
        return trace_step(scenario, allow_import)

    if scenario.model.target is None:
        return _get(trace_name(scenario), make, allow_import=allow_import)
    return _get(trace_name(scenario), make, in_files=False, allow_import=allow_import, folder=scenario.folder)


def get_optimizer_trace(
    scenario: Scenario, tensors: Sequence[TensorSpec], before_step: OptimizerShare | None = None
) -> Trace:
    """Return a trace of the scenario's optimizer alone over tensors like these: remembered, loaded, or made and cached.

    Raises
    ------
    PerfModelError
        If it must be made and torch is missing.
    """

    def make() -> Trace:
        with _torch_needed(scenario):
            from perfmodel.tracing.optimizer import trace_optimizer
        return trace_optimizer(scenario, tensors, before_step)

    return _get(optimizer_trace_name(scenario, tensors, before_step), make)


def get_stage_trace(scenario: Scenario, number: int, split: bool = False) -> Trace:
    """Return the trace of stage ``number`` of the scenario's pipeline: remembered, loaded, or made now and cached.

    Stages that run the same operators share a trace; see :func:`~perfmodel.tracing.stage.trace_stage`.

    Raises
    ------
    PerfModelError
        If it must be made and torch is missing, or it cannot be made.
    """

    def make() -> Trace:
        with _torch_needed(scenario):
            from perfmodel.tracing.stage import trace_stage
        return trace_stage(scenario, number, split)

    check_stage(scenario, number)
    return _get(stage_trace_name(scenario, number, split), make)


def _get(
    name: str,
    make: Callable[[], Trace],
    in_files: bool = True,
    allow_import: bool = False,
    folder: Path | None = None,
) -> Trace:
    """Return the trace of that name; a target's code is looked for in ``folder``, which its name does not say."""
    key = (name, allow_import, folder)
    trace = _remembered.get(key)
    if trace is None:
        path = find_trace(name) if in_files else None
        trace = None if path is None else _load(path)
        if trace is None:
            _refuse_to_make(name)
            trace = make()
            if in_files:
                _keep(trace, name)
        _remembered[key] = trace
        while len(_remembered) > REMEMBERED_TRACES:
            _remembered.popitem(last=False)
    _remembered.move_to_end(key)
    return trace


@contextmanager
def only_kept_traces() -> Iterator[None]:
    """Make no trace inside: one that is neither remembered nor in a file is a :class:`TraceNotKeptError`."""
    before = _only_kept.set(True)
    try:
        yield
    finally:
        _only_kept.reset(before)


def _refuse_to_make(name: str) -> None:
    if _only_kept.get():
        raise TraceNotKeptError(f"the trace {name} must be at hand (it is not). Predict its scenario first.")


def _keep(trace: Trace, name: str) -> None:
    """Put the trace into the cache. A trace that cannot be written costs time, not the prediction."""
    for path in _cached_paths(name):
        try:
            save_trace(trace, path)
        except PerfModelError as error:
            reason = error.__cause__.strerror if isinstance(error.__cause__, OSError) else error
            warnings.warn(
                f"{path.parent}: the trace was not kept, and will be made again ({reason}). Set PERFMODEL_CACHE to a "
                "folder that can be written.",
                PerfModelWarning,
                stacklevel=2,
            )


def _load(path: Path) -> Trace | None:
    """Return the trace of a file; None for a damaged file of the cache. A damaged shipped one is an error."""
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
    """Return where the cache keeps a trace, by the versions that decide its operators; nowhere without torch."""
    versions = [_version(package) for package in ("torch", "transformers")]
    if versions[0] is None:
        return []
    return [cache_directory() / f"{name}-{'-'.join(version or 'none' for version in versions)}.json.gz"]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
