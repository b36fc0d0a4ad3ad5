"""GPT-2, as Hugging Face has it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from perfmodel.models.family import TorchFamily
from perfmodel.models.huggingface import for_causal_blocks, next_token_loss, transformers_module
from perfmodel.models.stage_module import StageModule


def build(model: Any, sequence_length: int) -> nn.Module:
    """Return GPT2LMHeadModel: tied embeddings, 1024 positions or more, dropout on embeddings, attention, residuals."""
    transformers = transformers_module()
    config = transformers.GPT2Config(
        vocab_size=model.vocabulary,
        n_positions=max(1024, sequence_length),
        n_embd=model.width,
        n_layer=model.layers,
        n_head=model.heads,
        n_inner=model.ffn_width,
        resid_pdrop=model.dropout,
        embd_pdrop=model.dropout,
        attn_pdrop=model.dropout,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
        attn_implementation=model.attention,
    )
    module = transformers.GPT2LMHeadModel(config)
    module.loss_type = "ForCausalLM"  # what it falls back to, with a message, when nothing is said
    return module


class _Gpt2(StageModule):
    def enter(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        if self.is_first:
            x = self.transformer.wte(x)
        shared = for_causal_blocks(self.config, x)
        if self.is_first:
            x = self.transformer.drop(x + self.transformer.wpe(shared["position_ids"]))
        return x, shared

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.transformer.ln_f(x))


FAMILY = TorchFamily(build, has_loss=True, stage=_Gpt2, stage_loss=next_token_loss)
