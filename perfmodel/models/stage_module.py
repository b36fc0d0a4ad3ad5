"""The base class of a pipeline's stages: blocks of a model that compute what the whole model would in their place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from perfmodel.models.precision import AUTOCAST_DTYPES, HALF
from perfmodel.scenario.families import FAMILIES

if TYPE_CHECKING:
    from perfmodel.scenario.scenario import Scenario


class StageModule(nn.Module, ABC):
    """Some blocks in a row, behind the embeddings in the first stage and before the head in the last.

    Submodules have the names that they have in the whole module. What is computed before and behind the blocks is said
    by :meth:`enter` and :meth:`leave` of each family.
    The names of the families' classes stay as they are: profiles keep what a stage's own code takes the host under them
    (``forward-own _Gpt ...``).

    Parameters
    ----------
    module : nn.Module
        The whole module, whose submodules the stage takes over.
    names : iterable of str
        The submodules that it takes.
    scenario : Scenario
    is_first, is_last : bool

    Attributes
    ----------
    dtype : torch.dtype
        Type of the hidden states that it takes and returns.
    """

    def __init__(self, module: nn.Module, names: Iterable[str], scenario: Scenario, *, is_first: bool, is_last: bool):
        super().__init__()
        self.is_first, self.is_last = is_first, is_last
        self.dtype = HALF.get(scenario.precision, torch.float32)
        self.config: Any = getattr(module, "config", None)
        self._autocast = AUTOCAST_DTYPES.get(scenario.precision)
        (self._blocks,) = FAMILIES[scenario.model.family or ""].blocks
        for name in names:
            graft(self, name, module.get_submodule(name))
        self.train(module.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with nullcontext() if self._autocast is None else torch.autocast(x.device.type, self._autocast):
            x, shared = self.enter(x)
            for block in self.get_submodule(self._blocks).children():
                x = block(x, **shared)
            if self.is_last:
                return self.leave(x)
        return x.to(self.dtype)

    @abstractmethod
    def enter(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return hidden states, of tokens in the first stage, and the keywords that every block is called with."""

    @abstractmethod
    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits of the last block's hidden states."""


def graft(stage: nn.Module, name: str, submodule: nn.Module) -> None:
    """Add ``submodule`` under the dotted ``name``, within modules that only hold others."""
    *path, leaf = name.split(".")
    for step in path:
        if step not in stage._modules:
            stage.add_module(step, nn.Module())
        stage = stage.get_submodule(step)
    stage.add_module(leaf, submodule)
