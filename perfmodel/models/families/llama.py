"""Llama, as Hugging Face has it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from perfmodel.models.family import TorchFamily
from perfmodel.models.huggingface import for_causal_blocks, next_token_loss, transformers_module
from perfmodel.models.stage_module import StageModule


def build(model: Any, sequence_length: int) -> nn.Module:
    """Return LlamaForCausalLM: rotary positions, SwiGLU, grouped heads, untied embeddings, no dropout."""
    transformers = transformers_module()
    config = transformers.LlamaConfig(
        vocab_size=model.vocabulary,
        max_position_embeddings=max(2048, sequence_length),
        hidden_size=model.width,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        bos_token_id=None,
        eos_token_id=None,
        intermediate_size=model.ffn_width,
        use_cache=False,
        attn_implementation=model.attention,
    )
    return transformers.LlamaForCausalLM(config)


class _Llama(StageModule):
    def enter(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        if self.is_first:
            x = self.model.embed_tokens(x)
        shared = for_causal_blocks(self.config, x)
        shared["position_embeddings"] = self.model.rotary_emb(x, position_ids=shared["position_ids"])
        return x, shared

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.model.norm(x))


FAMILY = TorchFamily(build, has_loss=True, stage=_Llama, stage_loss=next_token_loss)
