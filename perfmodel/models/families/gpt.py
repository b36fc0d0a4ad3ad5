"""The decoder of seed report 001: pre-norm, learned positions, no biases, every norm and activation written out.

It follows the definitions of the CS336 reference model operator for operator: RMSNorm as pow, mean, add, rsqrt, mul,
mul; GELU by erf; attention as matmul, div, masked_fill, softmax, matmul with the causal mask made in every layer.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from perfmodel.models.family import TorchFamily
from perfmodel.models.stage_module import StageModule


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, as separate operators."""

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Attention(nn.Module):
    """Causal self-attention with separate projections; ``eager`` writes it out, ``sdpa`` calls torch's fused one."""

    def __init__(self, width: int, heads: int, attention: str) -> None:
        super().__init__()
        self.heads = heads
        self.head_dim = width // heads
        self.fused = attention == "sdpa"
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.output_proj = nn.Linear(width, width, bias=False)

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        return x.view(batch, length, self.heads, self.head_dim).transpose(1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q = self._split(self.q_proj(x))
        k = self._split(self.k_proj(x))
        v = self._split(self.v_proj(x))
        if self.fused:
            x = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            x = self._weights(q, k) @ v
        x = x.transpose(1, 2).reshape(batch, length, width)
        return self.output_proj(x)

    def _weights(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        length = q.shape[-2]
        mask = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.head_dim)
        return torch.softmax(scores.masked_fill(mask, float("-inf")), dim=-1)


class FeedForward(nn.Module):
    """w2(gelu(w1(x))) with the exact GELU."""

    def __init__(self, width: int, ffn_width: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, ffn_width, bias=False)
        self.w2 = nn.Linear(ffn_width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.w1(x)
        return self.w2(0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0))))


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x))."""

    def __init__(self, width: int, heads: int, ffn_width: int, attention: str) -> None:
        super().__init__()
        self.ln1 = RMSNorm(width)
        self.attn = Attention(width, heads, attention)
        self.ln2 = RMSNorm(width)
        self.ffn = FeedForward(width, ffn_width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.ffn(self.ln2(x))


class GPT(nn.Module):
    """Token and position embeddings, ``layers`` blocks, a final norm and an untied output projection to logits."""

    def __init__(
        self, *, layers: int, width: int, heads: int, ffn_width: int, vocabulary: int, context: int, attention: str
    ) -> None:
        super().__init__()
        self.token_embeddings = nn.Embedding(vocabulary, width)
        self.position_embeddings = nn.Embedding(context, width)
        self.layers = nn.ModuleList(Block(width, heads, ffn_width, attention) for _ in range(layers))
        self.ln_final = RMSNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.token_embeddings(input_ids) + self.position_embeddings(
            torch.arange(input_ids.shape[1], device=input_ids.device)
        )
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.ln_final(x))


def build(model: Any, sequence_length: int) -> nn.Module:
    """Return a GPT with a position for each token of the sequence."""
    return GPT(
        layers=model.layers,
        width=model.width,
        heads=model.heads,
        ffn_width=model.ffn_width,
        vocabulary=model.vocabulary,
        context=sequence_length,
        attention=model.attention,
    )


class _Gpt(StageModule):
    def enter(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        if self.is_first:
            x = self.token_embeddings(x) + self.position_embeddings(torch.arange(x.shape[1], device=x.device))
        return x, {}

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.ln_final(x))


FAMILY = TorchFamily(build, stage=_Gpt)
