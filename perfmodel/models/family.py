"""What torch has to know of a model family beyond its row in :mod:`perfmodel.scenario.families`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from perfmodel.models.stage_module import StageModule

LossOfLogits = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy over all tokens."""
    return nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


@dataclass(frozen=True)
class TorchFamily:
    """How the modules of a family are made: ``FAMILY`` of ``perfmodel/models/families/<name>.py``.

    Parameters
    ----------
    build : callable
        Makes the module of the resolved ``model`` section and the sequence length (0 for images).
    has_loss : bool
        Whether forward takes labels, which are the tokens themselves, and returns an output with the loss in it.
        Otherwise the loss is the cross entropy of what forward returns and labels of its own.
    stage : type of StageModule, optional
        The class of a pipeline's stages; None for a family that is not cut.
    stage_loss : callable
        The loss of the last stage's logits and labels: what the whole module's is.
    """

    build: Callable[[Any, int], nn.Module]
    has_loss: bool = False
    stage: type[StageModule] | None = None
    stage_loss: LossOfLogits = cross_entropy


def torch_family(name: str) -> TorchFamily:
    """Return the torch side of the family of that name."""
    family: TorchFamily = import_module(f"perfmodel.models.families.{name}").FAMILY
    return family
