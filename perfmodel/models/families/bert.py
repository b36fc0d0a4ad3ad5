"""BERT with its masked-word head, as Hugging Face has it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from perfmodel.models.family import TorchFamily
from perfmodel.models.huggingface import transformers_module
from perfmodel.models.stage_module import StageModule


def build(model: Any, sequence_length: int) -> nn.Module:
    """Return BertForMaskedLM: tied embeddings, 512 positions or more, dropout on hidden states and attention."""
    transformers = transformers_module()
    config = transformers.BertConfig(
        vocab_size=model.vocabulary,
        max_position_embeddings=max(512, sequence_length),
        hidden_size=model.width,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        intermediate_size=model.ffn_width,
        hidden_dropout_prob=model.dropout,
        attention_probs_dropout_prob=model.dropout,
        attn_implementation=model.attention,
    )
    return transformers.BertForMaskedLM(config)


class _Bert(StageModule):
    def enter(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        from transformers.masking_utils import create_bidirectional_mask

        if self.is_first:
            x = self.bert.embeddings(input_ids=x)
        return x, {"attention_mask": create_bidirectional_mask(self.config, inputs_embeds=x, attention_mask=None)}

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        return self.cls(x)


FAMILY = TorchFamily(build, has_loss=True, stage=_Bert)
