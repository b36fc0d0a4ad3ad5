"""A module cut into the parts of a pipeline, each of which computes what the whole module would in its place.

The first part takes token ids, the last gives logits, and between parts goes one tensor of hidden states, [batch,
sequence, width] in the parameters' type. What Hugging Face computes once and hands to every block (masks, positions,
rotary embeddings) each part computes for itself. Under the amp precisions each part's forward is autocast by itself.

gpt2 and bert share one matrix between embeddings and head. Parts that lie on different ranks cannot, unless both ranks
reduced its gradient after every step, which torch.distributed.pipelining does not do: the last part gets a copy that is
trained by itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from perfmodel.models.build import HALF
from perfmodel.models.step import AUTOCAST_DTYPES
from perfmodel.scenario.families import FAMILIES, Cut
from perfmodel.scenario.stage_split import blocks_of_stages, micro_batch_size

if TYPE_CHECKING:
    from perfmodel.scenario.scenario import Scenario


class StageModule(nn.Module, ABC):
    """Some blocks in a row, under the names that they have in the whole module, behind the embeddings in the first part
    and before the head in the last.

    dtype: of the hidden states that it takes and gives. The family's :meth:`enter` and :meth:`leave` say what is before
    and behind the blocks.
    """

    def __init__(self, module: nn.Module, names: Iterable[str], scenario: Scenario, *, is_first: bool, is_last: bool):
        super().__init__()
        self.is_first, self.is_last = is_first, is_last
        self.dtype = HALF.get(scenario.precision, torch.float32)
        self.config: Any = getattr(module, "config", None)
        self._autocast = AUTOCAST_DTYPES.get(scenario.precision)
        (self._blocks,) = FAMILIES[scenario.model.family or ""].blocks
        for name in names:
            _graft(self, name, module.get_submodule(name))
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
        """Hidden states of tokens (in the first part) or as they come, and what every block is called with."""

    @abstractmethod
    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of the last block's hidden states."""


class _Gpt(StageModule):
    def enter(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        if self.is_first:
            x = self.token_embeddings(x) + self.position_embeddings(torch.arange(x.shape[1], device=x.device))
        return x, {}

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.ln_final(x))


class _Gpt2(StageModule):
    def enter(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        if self.is_first:
            x = self.transformer.wte(x)
        shared = _causal(self.config, x)
        if self.is_first:
            x = self.transformer.drop(x + self.transformer.wpe(shared["position_ids"]))
        return x, shared

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.transformer.ln_f(x))


class _Llama(StageModule):
    def enter(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        if self.is_first:
            x = self.model.embed_tokens(x)
        shared = _causal(self.config, x)
        shared["position_embeddings"] = self.model.rotary_emb(x, position_ids=shared["position_ids"])
        return x, shared

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.model.norm(x))


class _Bert(StageModule):
    def enter(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        from transformers.masking_utils import create_bidirectional_mask

        if self.is_first:
            x = self.bert.embeddings(input_ids=x)
        return x, {"attention_mask": create_bidirectional_mask(self.config, inputs_embeds=x, attention_mask=None)}

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        return self.cls(x)


def _causal(config: Any, x: torch.Tensor) -> dict[str, Any]:
    """What Hugging Face's decoders hand to every block. x: embedded tokens, or hidden states, of which only shape, type
    and device matter.
    """
    from transformers.masking_utils import create_causal_mask

    positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
    mask = create_causal_mask(
        config=config, inputs_embeds=x, attention_mask=None, past_key_values=None, position_ids=positions
    )
    return {"attention_mask": mask, "position_ids": positions, "use_cache": False}


PARTS: dict[str, type[StageModule]] = {"gpt": _Gpt, "gpt2": _Gpt2, "llama": _Llama, "bert": _Bert}


def cut(module: nn.Module, scenario: Scenario) -> list[nn.Module]:
    """The parts of ``module`` in order, one for each of ``stages x virtual_stages``.

    They are made of the module's own submodules, under the same names; the module itself is not to be used any more.
    Called one after another, they give the same logits. A matrix that the head shares with the embeddings becomes two.

    Parameters
    ----------
    module : nn.Module
        As :func:`~perfmodel.models.build.build_module` makes it of the scenario, on any device.
    scenario : Scenario

    Raises
    ------
    PerfModelError
        If the scenario has no pipeline, or one into which the model cannot be cut.
    """
    blocks_of = blocks_of_stages(scenario)
    family = scenario.model.family or ""
    names, (blocks,) = FAMILIES[family].cut, FAMILIES[family].blocks
    assert names is not None
    ends = [sum(blocks_of[:number]) for number in range(len(blocks_of) + 1)]
    made: list[nn.Module] = []
    for number, (start, end) in enumerate(pairwise(ends)):
        is_first, is_last = number == 0, number == len(blocks_of) - 1
        held = [f"{blocks}.{index}" for index in range(start, end)]
        if is_first:
            held = [*names.embeddings, *held]
        if is_last:
            _untie(module, names)
            held = [*held, *names.head]
        made.append(PARTS[family](module, [*held, *names.every], scenario, is_first=is_first, is_last=is_last))
    return made


def _untie(module: nn.Module, names: Cut) -> None:
    """Give the head parameters of its own where they are those of the embeddings."""
    shared = {id(each) for name in names.embeddings for each in module.get_submodule(name).parameters()}
    for name in names.head:
        for part in module.get_submodule(name).modules():
            for slot, parameter in part.named_parameters(recurse=False):
                if id(parameter) in shared:
                    setattr(part, slot, nn.Parameter(parameter.detach().clone(), parameter.requires_grad))


def _graft(part: nn.Module, name: str, submodule: nn.Module) -> None:
    """Hang ``submodule`` under ``name``, inside of modules that only hold others."""
    *path, leaf = name.split(".")
    for step in path:
        if step not in part._modules:
            part.add_module(step, nn.Module())
        part = part.get_submodule(step)
    part.add_module(leaf, submodule)


def loss_of(scenario: Scenario) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The step's loss of the last part's logits and labels: what the whole module's is.

    Mean cross entropy over tokens; Hugging Face's decoders take the next token as label, and float32 logits.
    """
    if scenario.model.family in ("gpt2", "llama"):
        from transformers.loss.loss_utils import ForCausalLMLoss

        return lambda logits, labels: ForCausalLMLoss(logits, labels, vocab_size=logits.shape[-1])
    return lambda logits, labels: nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


def boundary_tensors(part: Any, scenario: Scenario) -> tuple[torch.Tensor, torch.Tensor]:
    """What the part takes and gives for a micro-batch, as tensors without data."""
    model: Any = scenario.model.resolved()
    tokens = (micro_batch_size(scenario), scenario.batch.sequence_length or 0)

    def hidden() -> torch.Tensor:
        return torch.empty(*tokens, model.width, dtype=part.dtype, device="meta", requires_grad=True)

    takes = torch.empty(*tokens, dtype=torch.int64, device="meta") if part.is_first else hidden()
    if not part.is_last:
        return takes, hidden()
    dtype = AUTOCAST_DTYPES.get(scenario.precision, part.dtype)
    return takes, torch.empty(*tokens, model.vocabulary, dtype=dtype, device="meta", requires_grad=True)
