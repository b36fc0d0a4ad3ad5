"""The one definition of a training step, run on fake tensors by the tracer and on a device by the validator.

A new optimizer is made in :func:`optimizer_settings`; its name stands in ``OptimizerSection`` (scenario/scenario.py)
and in ``OPTIMIZERS`` (hardware/host_calls.py), and its host cost is measured in calibrate/host/optimizers.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, assert_never

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
    "clip_shards",
    "make_inputs",
    "make_optimizer",
    "optimizer_settings",
    "precision_switches",
    "update",
]

LEARNING_RATE = 1e-4

Mark = Callable[[str, int], None]


class Reducer:
    """The communication of ranks that share a model; this one, of a single rank, does nothing but clip.

    Attributes
    ----------
    phase : str or None
        The name of a phase of its own after the last backward; None where backward contains the communication.
    """

    phase: str | None = None

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        """Return a context for forward and backward of each micro-batch."""
        return nullcontext()

    def after_backward(self) -> None:
        """Communicate after the last backward, before clipping."""

    def clip(self, module: nn.Module, max_norm: float) -> None:
        """Scale the gradients down to ``max_norm`` of all of them together."""
        nn.utils.clip_grad_norm_(module.parameters(), max_norm, foreach=True)

    def after_step(self) -> None:
        """Communicate after the optimizer, within its phase."""


def clip_shards(shards: Sequence[nn.Parameter], max_norm: float, add_up: Callable[[torch.Tensor], object]) -> None:
    """Scale the gradients of this rank's shards down, where all ranks' together have a norm above ``max_norm``.

    Parameters
    ----------
    shards : sequence of nn.Parameter
        This rank's shards of all parameters.
    max_norm : float
    add_up : callable
        Makes a tensor the sum of the ranks' tensors, in place.
    """
    squared = nn.utils.get_total_norm([shard.grad for shard in shards if shard.grad is not None], foreach=True).square()
    add_up(squared)
    nn.utils.clip_grads_with_norm_(shards, max_norm, squared.sqrt(), foreach=True)


@contextmanager
def precision_switches(scenario: Scenario) -> Iterator[None]:
    """Set torch's global switches for this scenario: TF32 GEMMs under precision tf32, else torch's defaults."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = scenario.matmul_tf32
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def make_optimizer(parameters: Iterable[nn.Parameter], scenario: Scenario) -> torch.optim.Optimizer:
    """Return the optimizer of :func:`optimizer_settings` over ``parameters``."""
    kind, settings = optimizer_settings(scenario)
    optimizer: torch.optim.Optimizer = kind(parameters, **settings)
    return optimizer


def optimizer_settings(scenario: Scenario) -> tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]:
    """Return the class of the scenario's optimizer and its settings: torch's defaults but for these.

    What torch would choose by itself on CUDA is ``foreach``; it is always asked for by name, since torch chooses
    otherwise for CPU and for fake tensors.
    """
    wanted = scenario.optimizer
    settings: dict[str, Any] = {
        "lr": LEARNING_RATE,
        "foreach": wanted.implementation == "foreach",
        "fused": wanted.implementation == "fused",
    }
    match wanted.name:
        case "adamw":
            return torch.optim.AdamW, settings
        case "sgd":
            return torch.optim.SGD, settings | {"momentum": wanted.momentum}
    assert_never(wanted.name)


def update(optimizer: torch.optim.Optimizer, scaler: Any, clip: Callable[[], object] | None, mark: Mark) -> None:
    """Run what follows the gradients: phase clip (-1), if there is any clipping, and optimizer (-1).

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
    scaler : torch.amp.GradScaler or None
        Undoes the scaling before clipping.
    clip : callable or None
        Clips the gradients.
    mark : callable
        Called with each phase before it begins.
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
    module, inputs
        As :func:`build_module` and :func:`make_inputs` make them.
    optimizer : torch.optim.Optimizer or None
        None for ``mode: forward``.
    scenario : Scenario
    allow_import : bool
        Whether ``model.loss`` may name code of the user's own.
    reducer : Reducer, optional
        What several ranks do with their gradients and parameters; None for one rank.
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
        """Run one whole step; call ``mark(phase, micro_batch)`` right before each phase and ``mark("end", -1)`` after.

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
