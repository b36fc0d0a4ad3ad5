"""A module cut into the stages of a pipeline, each of which computes what the whole module would in its place.

The first stage takes token ids, the last gives logits, and between stages goes one tensor of hidden states, [batch,
sequence, width] in the parameters' type. What Hugging Face computes once and hands to every block (masks, positions,
rotary embeddings) each stage computes for itself. Under the amp precisions each stage's forward is autocast by itself.

gpt2 and bert share one matrix between embeddings and head. Stages that lie on different ranks cannot, unless both ranks
reduced its gradient after every step, which torch.distributed.pipelining does not do: the last stage gets a copy that
is trained by itself.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from perfmodel.models.family import LossOfLogits, torch_family
from perfmodel.models.precision import AUTOCAST_DTYPES
from perfmodel.scenario.families import FAMILIES, Cut
from perfmodel.scenario.stage_split import blocks_of_stages, micro_batch_size

if TYPE_CHECKING:
    from perfmodel.scenario.scenario import Scenario


def cut(module: nn.Module, scenario: Scenario) -> list[nn.Module]:
    """Return the stages of ``module`` in order, one for each of ``stages x virtual_stages``.

    They are made of the module's own submodules, under the same names; the module itself is not to be used any more.
    Called one after another, they give the same logits. A matrix that the head shares with the embeddings becomes two.

    Parameters
    ----------
    module : nn.Module
        As :func:`~perfmodel.models.build.build_module` makes it of the scenario, on any device.
    scenario : Scenario
        With a pipeline that :func:`~perfmodel.scenario.rules.check_scenario` lets pass.
    """
    name = scenario.model.family or ""
    row, stage_class = FAMILIES[name], torch_family(name).stage
    assert row.cut is not None and stage_class is not None, f"{name} is not cut"
    (blocks,), blocks_of = row.blocks, blocks_of_stages(scenario)
    ends = [sum(blocks_of[:number]) for number in range(len(blocks_of) + 1)]
    stages: list[nn.Module] = []
    for number, (start, end) in enumerate(pairwise(ends)):
        is_first, is_last = number == 0, number == len(blocks_of) - 1
        names = [f"{blocks}.{index}" for index in range(start, end)]
        if is_first:
            names = [*row.cut.embeddings, *names]
        if is_last:
            _untie(module, row.cut)
            names = [*names, *row.cut.head]
        stages.append(stage_class(module, [*names, *row.cut.every], scenario, is_first=is_first, is_last=is_last))
    return stages


def _untie(module: nn.Module, names: Cut) -> None:
    """Give the head parameters of its own where they are those of the embeddings."""
    shared = {id(parameter) for name in names.embeddings for parameter in module.get_submodule(name).parameters()}
    for name in names.head:
        for submodule in module.get_submodule(name).modules():
            for slot, parameter in submodule.named_parameters(recurse=False):
                if id(parameter) in shared:
                    setattr(submodule, slot, nn.Parameter(parameter.detach().clone(), parameter.requires_grad))


def loss_of(scenario: Scenario) -> LossOfLogits:
    """Return the step's loss, a function of the last stage's logits and labels: what the whole module's is."""
    return torch_family(scenario.model.family or "").stage_loss


def boundary_tensors(stage: Any, scenario: Scenario) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the stage takes and gives for a micro-batch, as tensors without data."""
    model: Any = scenario.model.resolved()
    tokens = (micro_batch_size(scenario), scenario.batch.sequence_length or 0)

    def hidden() -> torch.Tensor:
        return torch.empty(*tokens, model.width, dtype=stage.dtype, device="meta", requires_grad=True)

    takes = torch.empty(*tokens, dtype=torch.int64, device="meta") if stage.is_first else hidden()
    if not stage.is_last:
        return takes, hidden()
    dtype = AUTOCAST_DTYPES.get(scenario.precision, stage.dtype)
    return takes, torch.empty(*tokens, model.vocabulary, dtype=dtype, device="meta", requires_grad=True)
