"""The one definition of a training step, run on fake tensors by the tracer and on a device by the validator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from perfmodel.models.build import build_module, make_inputs
from perfmodel.models.losses import Loss, loss_of_step
from perfmodel.models.precision import AUTOCAST_DTYPES

if TYPE_CHECKING:
    from perfmodel.scenario.scenario import Scenario

__all__ = [
    "LEARNING_RATE",
    "Reducer",
    "TrainingStep",
    "build_module",
    "clip_parts",
    "make_inputs",
    "make_optimizer",
    "optimizer_settings",
    "precision_switches",
    "update",
]

LEARNING_RATE = 1e-4

Mark = Callable[[str, int], None]


class Reducer:
    """What ranks that share a model do beside the step; this one, of a single rank, does nothing but clip.

    phase: the name of a phase of its own after the last backward, or None where backward contains the communication.
    """

    phase: str | None = None

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of each micro-batch."""
        return nullcontext()

    def after_backward(self) -> None:
        """After the last backward, before clipping."""

    def clip(self, module: nn.Module, max_norm: float) -> None:
        """Scale the gradients down to ``max_norm`` of all of them together."""
        nn.utils.clip_grad_norm_(module.parameters(), max_norm, foreach=True)

    def after_step(self) -> None:
        """After the optimizer, within its phase."""


def clip_parts(parts: Sequence[nn.Parameter], max_norm: float, add_up: Callable[[torch.Tensor], object]) -> None:
    """Scale the gradients of this rank's parts of all parameters down to ``max_norm`` of all of them together.

    add_up: makes a tensor the sum of the ranks', in place.
    """
    squared = nn.utils.get_total_norm([part.grad for part in parts if part.grad is not None], foreach=True).square()
    add_up(squared)
    nn.utils.clip_grads_with_norm_(parts, max_norm, squared.sqrt(), foreach=True)


@contextmanager
def precision_switches(scenario: Scenario) -> Iterator[None]:
    """Torch's global switches for this scenario: TF32 matrix products under precision tf32, else its defaults."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = scenario.matmul_tf32
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def make_optimizer(parameters: Iterable[nn.Parameter], scenario: Scenario) -> torch.optim.Optimizer:
    """The optimizer of :func:`optimizer_settings` over ``parameters``."""
    kind, settings = optimizer_settings(scenario)
    optimizer: torch.optim.Optimizer = kind(parameters, **settings)
    return optimizer


def optimizer_settings(scenario: Scenario) -> tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]:
    """AdamW or SGD, and its settings: torch's defaults but for the learning rate, in the implementation asked for.

    What torch would choose by itself on CUDA is ``foreach``; it is always asked for by name, since torch chooses
    otherwise for CPU and for fake tensors.
    """
    wanted = scenario.optimizer
    settings: dict[str, Any] = {
        "lr": LEARNING_RATE,
        "foreach": wanted.implementation == "foreach",
        "fused": wanted.implementation == "fused",
    }
    if wanted.name == "adamw":
        return torch.optim.AdamW, settings
    return torch.optim.SGD, settings | {"momentum": wanted.momentum}


def update(optimizer: torch.optim.Optimizer, scaler: Any, clip: Callable[[], object] | None, mark: Mark) -> None:
    """What follows the gradients: phase clip (-1), if there is any clipping, and optimizer (-1).

    scaler: a gradient scaler, which undoes the scaling before clipping; None for none.
    """
    if clip is not None:
        mark("clip", -1)
        if scaler is not None:
            scaler.unscale_(optimizer)
        clip()
    mark("optimizer", -1)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()


class TrainingStep:
    """One step after another over the same resident inputs.

    Each micro-batch runs forward (under autocast for the amp precisions) and backward (outside of it) on the same
    inputs; the loss is divided by the number of micro-batches where there are several. Loss and outputs are freed
    before the next phase. ``mode: forward`` is one call of the module without gradients and without a loss.

    Parameters
    ----------
    module, inputs : as made by :func:`build_module` and :func:`make_inputs`
    optimizer : None for ``mode: forward``
    scenario : Scenario
    allow_import : whether ``model.loss`` may name code of the user's own
    reducer : what several ranks do with their gradients and parameters; None for one rank
    """

    def __init__(
        self,
        module: nn.Module,
        inputs: dict[str, torch.Tensor],
        optimizer: torch.optim.Optimizer | None,
        scenario: Scenario,
        allow_import: bool = False,
        reducer: Reducer | None = None,
    ) -> None:
        self.module = module
        self.inputs = inputs
        self.optimizer = optimizer
        self.scenario = scenario
        self.reducer = reducer or Reducer()
        self.device_type = next(chain(inputs.values(), module.parameters())).device.type  # parameters may be offloaded
        self.loss: Loss | None = None if scenario.mode == "forward" else loss_of_step(scenario, allow_import)
        self.scaler: Any = None
        if scenario.precision == "amp-fp16" and scenario.mode == "train":
            self.scaler = torch.amp.GradScaler(self.device_type)

    def run(self, mark: Mark = lambda phase, micro_batch: None) -> None:
        """One whole step; ``mark(phase, micro_batch)`` is called right before each phase and ``mark("end", -1)`` after.

        Phases: zero_grad (-1), then forward (i) and backward (i) of every micro-batch, the reducer's (-1) if it has
        one, clip (-1) where gradients are clipped, optimizer (-1). ``mode: forward`` has forward (0) only.
        """
        if self.optimizer is None:
            self._run_forward(mark)
        else:
            self._run_training(self.optimizer, mark)
        mark("end", -1)

    def _run_forward(self, mark: Mark) -> None:
        mark("forward", 0)
        with torch.no_grad(), self._autocast():
            self.module(**self.inputs)

    def _run_training(self, optimizer: torch.optim.Optimizer, mark: Mark) -> None:
        mark("zero_grad", -1)
        optimizer.zero_grad(set_to_none=True)
        count = self.scenario.training.gradient_accumulation
        for micro_batch in range(count):
            with self.reducer.micro_batch(last=micro_batch == count - 1):
                self._run_micro_batch(micro_batch, mark)
        if self.reducer.phase is not None:
            mark(self.reducer.phase, -1)
        self.reducer.after_backward()
        norm = self.scenario.optimizer.max_grad_norm
        clip = None if norm is None else partial(self.reducer.clip, self.module, norm)
        update(optimizer, self.scaler, clip, mark)
        self.reducer.after_step()

    def _run_micro_batch(self, micro_batch: int, mark: Mark) -> None:
        assert self.loss is not None
        count = self.scenario.training.gradient_accumulation
        mark("forward", micro_batch)
        with self._autocast():
            loss = self.loss(self.module, self.inputs)
        if count > 1:
            loss = loss / count
        mark("backward", micro_batch)
        if self.scaler is None:
            loss.backward()
        else:
            self.scaler.scale(loss).backward()

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = AUTOCAST_DTYPES.get(self.scenario.precision)
        context: AbstractContextManager[Any] = nullcontext()
        if dtype is not None:
            context = torch.autocast(self.device_type, dtype)
        return context
