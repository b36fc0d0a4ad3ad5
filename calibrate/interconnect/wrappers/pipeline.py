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

from calibrate.host.reference import HostReference, synchronize
from calibrate.host.stages import backward_input
from calibrate.interconnect.wrappers.small_models import ROUNDS, WARM_UP, WIDTH, linears
from calibrate.timing.host_stopwatch import timed
from calibrate.timing.samples import relative_spread
from perfmodel.hardware.interconnect import CallRecord
from perfmodel.trace.host_structure import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT
from perfmodel.tracing.stage import prepared_stage

ROWS, LAYERS = 2, 2
PAIRS = 4 * ROUNDS  # what is added is a small part of what is timed
STAGE, STAGES = 1, 3  # one that has others before and behind it
FORWARD = "forward"

Action = Callable[[], Any]


class _Pair(NamedTuple):
    """An action of the stage, and what of it is the module's."""

    name: str
    whole: Action
    own: Action


def pipeline_records(device: str, reference: HostReference) -> dict[str, CallRecord]:
    """Of ``pp ...``; ranks may measure at the same time, and do not talk."""
    bench = _Bench(device)
    samples_s: dict[str, tuple[list[float], list[float]]] = {}
    for index in range(WARM_UP + PAIRS):
        for pair in (*bench.whole_backward(), *bench.split_backward()):
            found = samples_s.setdefault(pair.name, ([], []))
            reference.beat()
            for values_s, action in zip(found, (pair.whole, pair.own), strict=True):
                reference.disturb(1)
                synchronize(device)
                seconds, _ = timed(action)
                if index >= WARM_UP:
                    reference.note(values_s, seconds)
    reference.beat()
    return {f"pp {name}": _added(whole_s, own_s) for name, (whole_s, own_s) in samples_s.items()}


def _added(whole_s: Sequence[float], own_s: Sequence[float]) -> CallRecord:
    """Median of what each action took more than the module's part of it right after; spread: of the whole."""
    added_s = statistics.median(whole - own for whole, own in zip(whole_s, own_s, strict=True))
    return CallRecord(time_s=max(added_s, 0.0), spread=relative_spread(whole_s), samples=len(whole_s))


class _Bench:
    """A module in a stage and one like it by itself. Pairs are to be run in order: each needs the one before."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._part: nn.Module = linears(LAYERS, device)
        like = torch.empty(ROWS, WIDTH, device="meta", requires_grad=True)
        self._stage = prepared_stage(
            linears(LAYERS, device), STAGE, STAGES, torch.device(device), like, like, nullcontext()
        )
        self._gradient = torch.ones(ROWS, WIDTH, device=device)

    def whole_backward(self) -> tuple[_Pair, ...]:
        """Forward and backward of the first micro-batch."""
        made = self._renew()
        return (
            _Pair(FORWARD, partial(self._forward, 0), lambda: made.update(y=self._part(made["x"]))),
            _Pair(
                BACKWARD,
                partial(self._act, "Backward", self._stage.backward_one_chunk, 0),
                lambda: torch.autograd.backward(made.pop("y"), self._gradient),
            ),
        )

    def split_backward(self) -> tuple[_Pair, ...]:
        """The halves of the second's backward."""
        made = self._renew()
        self._forward(1)
        made["y"] = self._part(made["x"])

        def own_input() -> None:
            made["groups"] = backward_input([made.pop("y")], [self._gradient], [made["x"]], self._part.parameters())

        return (
            _Pair(
                BACKWARD_INPUT,
                partial(self._act, "Input", self._stage.backward_one_chunk, 1, full_backward=False),
                own_input,
            ),
            _Pair(
                BACKWARD_WEIGHT,
                partial(self._act, "Weight", self._stage.backward_weight_one_chunk, 1),
                lambda: stage_backward_weight(iter(self._part.parameters()), made.pop("groups")),
            ),
        )

    def _renew(self) -> dict[str, Any]:
        """As a step begins: no gradients, and nothing computed."""
        self._part.zero_grad()
        self._stage.submod.zero_grad()
        self._stage.clear_runtime_states()
        return {"x": torch.ones(ROWS, WIDTH, device=self._device, requires_grad=True)}

    def _forward(self, micro_batch: int) -> None:
        self._act("Forward", self._stage.forward_one_chunk, micro_batch, (), {}, save_forward_output=False)

    def _act(self, title: str, action: Callable[..., Any], micro_batch: int, *more: Any, **options: Any) -> None:
        """As schedules do it, under a name for the profiler."""
        with record_function(f"{title} {micro_batch}"):
            action(micro_batch, *more, **options)
