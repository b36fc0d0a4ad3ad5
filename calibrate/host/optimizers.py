"""Host cost of loops over parameters: optimizer steps, zero_grad, gradient clipping, the gradient scaler, and what a
pipeline does to gradients of several micro-batches.

The real ones are timed, on a few counts of tiny parameters in general, and on a workload's own parameters for a trace.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.pipelining.stage import _PipelineStageBase

from calibrate.host.reference import FEW_LAYERS, HostReference, synchronize
from calibrate.timing.host_stopwatch import WARM_UP, OperatorTimes, observe, record, timed
from calibrate.timing.paired import Timings, paired_samples
from calibrate.timing.samples import relative_spread
from perfmodel.cost.host import list_key
from perfmodel.hardware.profile import HostRecord
from perfmodel.trace.kernel_key import optimizer_prefix
from perfmodel.trace.trace import EventKind, Trace

COUNTS = (4, 64, 192)
ROUNDS = 9
LAYER_CALLS, MOST_LAYERS = 30, 12  # Python calls of the layer that stands in for the model's; at most so many of it
TINY = 1024  # elements
MOST_BYTES = {"cuda": 24 << 30, "cpu": 256 << 20}  # of a timed optimizer; more would fill the launch queue
COPIES = 4  # parameters, gradients, two states

IMPLEMENTATIONS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "optimizer adamw foreach": lambda parameters: torch.optim.AdamW(parameters, foreach=True, fused=False),
    "optimizer adamw fused": lambda parameters: torch.optim.AdamW(parameters, foreach=False, fused=True),
    "optimizer adamw for-loop": lambda parameters: torch.optim.AdamW(parameters, foreach=False, fused=False),
    "optimizer sgd foreach": lambda parameters: torch.optim.SGD(parameters, foreach=True, fused=False),
    "optimizer sgd fused": lambda parameters: torch.optim.SGD(parameters, foreach=False, fused=True),
    "optimizer sgd for-loop": lambda parameters: torch.optim.SGD(parameters, foreach=False, fused=False),
    "optimizer sgd-momentum foreach": lambda parameters: torch.optim.SGD(
        parameters, momentum=0.9, foreach=True, fused=False
    ),
    "optimizer sgd-momentum fused": lambda parameters: torch.optim.SGD(
        parameters, momentum=0.9, foreach=False, fused=True
    ),
    "optimizer sgd-momentum for-loop": lambda parameters: torch.optim.SGD(
        parameters, momentum=0.9, foreach=False, fused=False
    ),
}


ZERO_GRAD, CLIP, SCALER, SCALE = "zero_grad", "clip", "scaler", "scale"
Shapes = list[tuple[tuple[int, ...], torch.dtype]]


def list_prefixes() -> tuple[str, ...]:
    """Return the prefixes of all loops whose general records :func:`measure_list` measures."""
    return (ZERO_GRAD, CLIP, SCALER, SCALE, *IMPLEMENTATIONS)


def measure_list(prefix: str, device: str, times: OperatorTimes, reference: HostReference) -> dict[str, HostRecord]:
    """``a`` under the prefix and ``b`` under ``<prefix> parameter`` of seconds = a + b n."""
    return _measure_line(prefix, LoopBench(device, times, reference, FEW_LAYERS))


def measure_trace_lists(
    trace: Trace, device: str, known: dict[str, HostRecord], times: OperatorTimes, reference: HostReference
) -> dict[str, HostRecord]:
    """Measure the loops of the trace's phases on its own parameters, with their sizes where they fit, else tiny."""
    parameters = [parameter for parameter in trace.parameters if parameter.requires_grad]
    if not parameters or trace.workload.get("mode") == "forward":
        return {}
    fits = COPIES * sum(parameter.tensor.bytes for parameter in parameters) <= MOST_BYTES[device]
    shapes: Shapes = [
        (parameter.tensor.shape if fits else (TINY,), getattr(torch, parameter.tensor.dtype))
        for parameter in parameters
    ]
    prefixes = [ZERO_GRAD, optimizer_prefix(trace.workload)]
    phases = {segment.phase for segment in trace.steady.segments}
    prefixes += [prefix for prefix in (CLIP, SCALE) if prefix in phases]
    if trace.workload.get("precision") == "amp-fp16":
        prefixes.append(SCALER)
    calls = int(np.count_nonzero(trace.steady.kind == EventKind.CALL_ENTER))
    bench = LoopBench(device, times, reference, min(max(calls // LAYER_CALLS, FEW_LAYERS), MOST_LAYERS))
    found: dict[str, HostRecord] = {}
    for prefix in prefixes:
        key = list_key(prefix, trace.parameters)
        if key not in known:
            values_s, operators_s = bench.time(prefix, shapes)
            found[key] = record(values_s, operators_s)
    return found


def _measure_line(prefix: str, bench: LoopBench) -> dict[str, HostRecord]:
    seconds, spreads = [], []
    for count in COUNTS:
        values_s, operators_s = bench.time(prefix, [((TINY,), torch.float32)] * count)
        seconds.append(statistics.median(values_s) - operators_s)
        spreads.append(relative_spread(values_s))
    slope_s, intercept_s = np.polyfit(COUNTS, seconds, 1, w=1 / np.maximum(np.abs(seconds), 1e-6))
    spread, samples = max(spreads), ROUNDS * len(COUNTS)
    return {
        prefix: HostRecord(time_s=max(float(intercept_s), 0.0), spread=spread, samples=samples),
        f"{prefix} parameter": HostRecord(time_s=max(float(slope_s), 0.0), spread=spread, samples=samples),
    }


class LoopBench:
    """Times loops over parameters where they stand in a step: after backward; zero_grad after the optimizer."""

    def __init__(self, device: str, times: OperatorTimes, reference: HostReference, layers: int) -> None:
        self.device, self.times, self.reference, self.layers = device, times, reference, layers

    def time(self, prefix: str, shapes: Shapes) -> tuple[list[float], float]:
        """Return samples of one run of the loop, and the seconds of its operators."""
        parameters = [nn.Parameter(torch.randn(shape, device=self.device).to(dtype)) for shape, dtype in shapes]
        loop = loop_of(prefix, parameters, self.device)
        before = torch.optim.AdamW(parameters).step if prefix == ZERO_GRAD else lambda: None

        def one_round() -> Timings:
            give_gradients(parameters)
            self.reference.disturb(self.layers)
            before()
            synchronize(self.device)
            yield prefix, timed(loop)[0]

        samples_s = paired_samples(self.reference, one_round, rounds=ROUNDS, warm_up=WARM_UP)
        give_gradients(parameters)
        seen = observe(loop, backward=False, keeps_calls=self.times.is_needed)
        return samples_s[prefix], sum(self.times.total(work.calls) for work in seen.works)


def give_gradients(parameters: list[nn.Parameter]) -> None:
    """New ones, which nothing else refers to: zero_grad then frees them as it does in a step."""
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)


def loop_of(prefix: str, parameters: list[nn.Parameter], device: str) -> Callable[[], Any]:
    """Return what is timed under ``prefix``."""
    if prefix == ZERO_GRAD:
        optimizer = torch.optim.SGD(parameters)
        return lambda: optimizer.zero_grad(set_to_none=True)
    if prefix == CLIP:
        model = nn.ModuleList([nn.ParameterList([parameter]) for parameter in parameters])
        return lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
    if prefix == SCALER:
        return _Scaled(parameters, device)
    if prefix == SCALE:
        stage: Any = SimpleNamespace(submod=nn.ModuleList([nn.ParameterList([each]) for each in parameters]))
        return lambda: _PipelineStageBase.scale_grads(stage, 2)
    step: Callable[[], Any] = IMPLEMENTATIONS[prefix](parameters).step
    return step


class _Scaled:
    """What GradScaler adds to the step of an optimizer that does nothing itself."""

    def __init__(self, parameters: list[nn.Parameter], device: str) -> None:
        self.scaler = torch.amp.GradScaler(device)
        self.optimizer = torch.optim.SGD(parameters)
        self.optimizer.step = lambda *args, **kwargs: None
        self.scaler.scale(torch.ones((), device=device))

    def __call__(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()
