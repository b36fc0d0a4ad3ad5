"""Host seconds of what torch's stage and schedule of a pipeline add to what a micro-batch computes, on one process and
without messages:

    pp <action> = action of a stage with a tiny module - what the module computes in it

The latter is the module's forward, the engine's backward, and the two functions of torch's that compute the gradients
of inputs and of weights apart, which are also what a workload's modules are measured with.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_weight
from torch.profiler import record_function

from calibrate.host.reference import HostReference
from calibrate.host.stages import backward_input
from calibrate.interconnect.wrappers.small_models import ROUNDS, WARM_UP, WIDTH, linears
from calibrate.timing.host_stopwatch import timed
from calibrate.timing.paired import HostStopwatch, Timings, paired_samples, timed_after_work
from calibrate.timing.samples import relative_spread
from perfmodel.hardware import host_calls
from perfmodel.hardware.interconnect import CallRecord
from perfmodel.trace.phases import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT
from perfmodel.tracing.stage import prepared_stage

ROWS, LAYERS = 2, 2
PAIRS = 4 * ROUNDS  # what is added is a small part of what is timed
STAGE, STAGES = 1, 3  # one that has others before and behind it
FORWARD = "forward"
OWN = " of the module"  # ends the names of samples of what the module computes

Action = Callable[[], Any]


class ActionPair(NamedTuple):
    """An action of the stage, and what the module computes in it."""

    name: str
    whole: Action
    own: Action


def pipeline_records(device: str, reference: HostReference, stopwatch: HostStopwatch = timed) -> dict[str, CallRecord]:
    """Return records of ``pp ...``. Ranks may measure at the same time, and do not communicate."""
    bench = StageBench(device)

    def one_round() -> Timings:
        return in_turn((*bench.whole_backward(), *bench.split_backward()))

    def in_turn(pairs: Sequence[ActionPair]) -> Timings:
        for index, pair in enumerate(pairs):
            if index > 0:
                reference.beat()
            yield pair.name, timed_after_work(pair.whole, reference, device, stopwatch)[0]
            yield f"{pair.name}{OWN}", timed_after_work(pair.own, reference, device, stopwatch)[0]

    samples_s = paired_samples(reference, one_round, rounds=PAIRS, warm_up=WARM_UP)
    return {
        host_calls.pipeline_action(name): added(whole_s, samples_s[f"{name}{OWN}"])
        for name, whole_s in samples_s.items()
        if not name.endswith(OWN)
    }


def added(whole_s: Sequence[float], own_s: Sequence[float]) -> CallRecord:
    """Return the median of what each action took more than what the module computes in it, timed right after.

    The spread is that of the whole action."""
    added_s = statistics.median(whole - own for whole, own in zip(whole_s, own_s, strict=True))
    return CallRecord(time_s=max(added_s, 0.0), spread=relative_spread(whole_s), samples=len(whole_s))


class StageBench:
    """A small module in one of torch's pipeline stages, and one like it by itself.

    Pairs of actions are to be run in order: each needs the one before.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self.module: nn.Module = linears(LAYERS, device)
        like = torch.empty(ROWS, WIDTH, device="meta", requires_grad=True)
        self.stage = prepared_stage(
            linears(LAYERS, device), STAGE, STAGES, torch.device(device), like, like, nullcontext()
        )
        self.gradient = torch.ones(ROWS, WIDTH, device=device)

    def whole_backward(self, x: torch.Tensor | None = None) -> tuple[ActionPair, ...]:
        """Return forward and backward of the first micro-batch. The module by itself takes ``x``, or ones."""
        values = self._renew(x)
        return (
            ActionPair(FORWARD, partial(self._forward, 0), lambda: values.update(y=self.module(values["x"]))),
            ActionPair(
                BACKWARD,
                partial(self._act, "Backward", self.stage.backward_one_chunk, 0),
                lambda: torch.autograd.backward(values.pop("y"), self.gradient),
            ),
        )

    def split_backward(self, x: torch.Tensor | None = None) -> tuple[ActionPair, ...]:
        """Return the halves of the second micro-batch's backward. The module by itself takes ``x``, or ones."""
        values = self._renew(x)
        self._forward(1)
        values["y"] = self.module(values["x"])

        def own_input() -> None:
            inputs, parameters = [values["x"]], self.module.parameters()
            values["groups"] = backward_input([values.pop("y")], [self.gradient], inputs, parameters)

        return (
            ActionPair(
                BACKWARD_INPUT,
                partial(self._act, "Input", self.stage.backward_one_chunk, 1, full_backward=False),
                own_input,
            ),
            ActionPair(
                BACKWARD_WEIGHT,
                partial(self._act, "Weight", self.stage.backward_weight_one_chunk, 1),
                lambda: stage_backward_weight(iter(self.module.parameters()), values.pop("groups")),
            ),
        )

    def _renew(self, x: torch.Tensor | None) -> dict[str, Any]:
        """Bring both to the beginning of a step, without gradients or results, and return the module's input."""
        self.module.zero_grad()
        self.stage.submod.zero_grad()
        self.stage.clear_runtime_states()
        return {"x": torch.ones(ROWS, WIDTH, device=self._device, requires_grad=True) if x is None else x}

    def _forward(self, micro_batch: int) -> None:
        self._act("Forward", self.stage.forward_one_chunk, micro_batch, (), {}, save_forward_output=False)

    def _act(self, title: str, action: Callable[..., Any], micro_batch: int, *more: Any, **options: Any) -> None:
        """Run an action as torch's schedules do, under a name for the profiler."""
        with record_function(f"{title} {micro_batch}"):
            action(micro_batch, *more, **options)
