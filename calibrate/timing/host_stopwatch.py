"""The stopwatch of the host clock, and what a function does while it is not being timed.

Host time is the wall time until Python goes on, with the device idle at the start and never more launches in a row than
its queue takes, so that the host is not held back however slow the kernels are. Timed code takes turns with other code:
run again and again by itself it stays in the processor's caches and is up to a third faster than in a step. Samples are
brought to one speed of the host (:mod:`calibrate.host.reference`).
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from calibrate.host.reference import HostReference, synchronize
from calibrate.timing.samples import CpuStopwatch, Limits, relative_spread
from perfmodel.hardware.profile import HostRecord
from perfmodel.hardware.quantities import LEAST_DIFFERENCE_S
from perfmodel.tracing.fake_cuda import call_name
from perfmodel.tracing.recorder import Traits

MOST_LAUNCHES = 900  # in a row; the launch queue takes 1024
WARM_UP = 2
OPERATOR_LIMITS = Limits(fewest=3, most=5, enough_spread=0.05, enough_s=2e-3, sample_s=3e-4, most_calls=200)


@contextmanager
def no_collection() -> Iterator[None]:
    """Collect no garbage inside; what exists already is not looked at again."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def autocast(device: str, enabled: bool, dtype: torch.dtype = torch.bfloat16) -> AbstractContextManager[Any]:
    """Return a context in which forward runs under autocast, or not."""
    return torch.autocast(device, dtype) if enabled else nullcontext()


def record(values_s: list[float], base_s: float = 0.0, per: float = 1.0) -> HostRecord:
    """Return the median of the samples less ``base_s``, over ``per`` occurrences; the spread is that of the samples.

    What noise makes so negative that no profile may hold it is cut off.
    """
    spread = relative_spread(values_s)
    time_s = max((statistics.median(values_s) - base_s) / per, LEAST_DIFFERENCE_S)
    return HostRecord(time_s=time_s, spread=spread, samples=len(values_s))


def timed(function: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> tuple[float, Any]:
    """Return the seconds of one call, and what it returned (which is kept, so that freeing it is not timed)."""
    began_s = clock()
    result = function()
    return clock() - began_s, result


def time_backward(roots: list[torch.Tensor], device: str) -> float:
    """Return seconds of one run of the engine over these, and of freeing what led to them (``roots`` is emptied)."""
    gradients = [torch.ones_like(root) for root in roots]
    synchronize(device)

    def run() -> None:
        torch.autograd.backward(roots, gradients)
        roots.clear()

    return timed(run)[0]


@dataclass
class Work:
    """Operators in order: base names of launches, how many views, how many in all, and each as a call to repeat."""

    operators: list[str] = field(default_factory=list)
    views: int = 0
    count: int = 0
    calls: list[tuple[Any, Any, Any]] = field(default_factory=list)

    def note(self, traits: Any, call: tuple[Any, Any, Any] | None) -> None:
        self.count += 1
        self.views += not traits.launches
        if traits.launches:
            self.operators.append(traits.base_name)
        if call is not None:
            self.calls.append(call)


@dataclass
class Seen:
    """What a function did: calls from Python and autograd nodes, each with its operators, and operators in neither."""

    calls: list[tuple[str, Work]] = field(default_factory=list)
    nodes: list[tuple[str, Work]] = field(default_factory=list)
    loose: Work = field(default_factory=Work)

    @property
    def works(self) -> list[Work]:
        return [self.loose, *(work for _, work in self.calls), *(work for _, work in self.nodes)]

    @property
    def launches(self) -> int:
        return sum(len(work.operators) for work in self.works)


class _Names(TorchFunctionMode):
    """Notes calls from Python in which operators run."""

    def __init__(self, watcher: Watcher) -> None:
        super().__init__()
        self.watcher = watcher

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = call_name(func)
        if name is None:
            return func(*args, **(kwargs or {}))
        work = self.watcher.work = Work()
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.watcher.work = self.watcher.seen.loose
            if work.count:
                self.watcher.seen.calls.append((name, work))


class Watcher(TorchDispatchMode):
    """Notes operators; inside backward under the node that runs (:meth:`watch` it first)."""

    def __init__(self, keeps_calls: bool) -> None:
        super().__init__()
        self.seen = Seen()
        self.work = self.seen.loose
        self.keeps_calls = keeps_calls
        self._traits: dict[Any, Any] = {}

    def watch(self, roots: list[torch.Tensor]) -> None:
        """Report every node that leads to these."""
        pending = [root.grad_fn for root in roots if root.grad_fn is not None]
        known = set(pending)
        while pending:
            node = pending.pop()
            name = node.name().rpartition("::")[2]
            node.register_prehook(lambda gradients, name=name: self._start(name))
            following = [edge for edge, _ in node.next_functions if edge is not None and edge not in known]
            known.update(following)
            pending += following

    def _start(self, name: str) -> None:
        self.work = Work()
        self.seen.nodes.append((name, self.work))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in self._traits:
            self._traits[func] = Traits(func)
        traits = self._traits[func]
        result = func(*args, **kwargs)
        if traits.is_recorded:
            self.work.note(traits, (func, args, kwargs) if self.keeps_calls else None)
        return result


def _run_backward(roots: list[torch.Tensor], seen: Seen) -> None:
    torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])


def observe(
    function: Callable[[], Any],
    backward: bool = True,
    keeps_calls: bool = False,
    one_root: bool = True,
    run_backward: Callable[[list[torch.Tensor], Seen], None] = _run_backward,
) -> Seen:
    """Run it once, and its backward (from its first result, or from all), under observation.

    keeps_calls: keep the arguments of operators, so that they can be repeated. run_backward: given the results and what
    was seen so far.
    """
    watcher = Watcher(keeps_calls)
    with watcher:
        with _Names(watcher):
            result = function()
        roots = differentiable(result)[: 1 if one_root else None]
        if backward and roots:
            watcher.watch(roots)
            run_backward(roots, watcher.seen)
    return watcher.seen


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return every tensor of a result: tuples, lists, dicts and models' output objects are opened."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in tensors_in(item)]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


def differentiable(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a result that have a backward."""
    return [tensor for tensor in tensors_in(value) if tensor.grad_fn is not None]


class OperatorTimes:
    """Seconds (at the reference's speed) of operators called in a row by themselves, as kernel keys are measured on a
    CPU. Zero elsewhere.
    """

    def __init__(
        self,
        device: str,
        reference: HostReference,
        known: Mapping[str, float] | None = None,
        note: Callable[[str, float], None] | None = None,
    ) -> None:
        """known: seconds by operator that need not be measured. note: is given each other one."""
        self.is_needed = device == "cpu"
        self._reference = reference
        self._stopwatch = CpuStopwatch(OPERATOR_LIMITS)
        self._known: dict[str, float] = dict(known or {})
        self._note = note

    def total(self, calls: list[tuple[Any, Any, Any]]) -> float:
        """Return the seconds of all these calls together."""
        if not self.is_needed:
            return 0.0
        keys = [f"{func} {_spell(args)} {_spell(kwargs)}" for func, args, kwargs in calls]
        if not self._known.keys() >= set(keys):
            self._reference.beat()
        return sum(self._one(key, *call) for key, call in zip(keys, calls, strict=True))

    def _one(self, key: str, func: Any, args: Any, kwargs: Any) -> float:
        if key not in self._known:
            found_s: list[float] = []
            with torch.no_grad():
                self._reference.note(found_s, self._stopwatch.measure(lambda: func(*args, **kwargs)).median_s)
            self._reference.beat()
            self._known[key] = found_s[0]
            if self._note is not None:
                self._note(key, found_s[0])
        return self._known[key]


def _spell(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{list(value.shape)}{value.stride()}"
    if isinstance(value, dict):
        return " ".join(f"{name}={_spell(item)}" for name, item in value.items())
    if isinstance(value, (tuple, list)):
        return f"[{' '.join(map(_spell, value))}]"
    return str(value)
