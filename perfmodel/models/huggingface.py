"""Hugging Face's own modules from configurations: random weights, nothing downloaded, no key-value cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from perfmodel.errors import PerfModelError

if TYPE_CHECKING:
    from perfmodel.scenario.scenario import ModelSection


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise PerfModelError(
            "model.family: gpt2, llama and bert need transformers (not installed). Run `pip install .[torch]`."
        ) from error
    return transformers


def gpt2(model: ModelSection, sequence_length: int) -> nn.Module:
    """GPT2LMHeadModel: tied embeddings, 1024 positions or more, dropout on embeddings, attention and residuals."""
    transformers = _transformers()
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


def llama(model: ModelSection, sequence_length: int) -> nn.Module:
    """LlamaForCausalLM: rotary positions, SwiGLU, grouped heads, untied embeddings, no dropout."""
    transformers = _transformers()
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


def bert(model: ModelSection, sequence_length: int) -> nn.Module:
    """BertForMaskedLM: tied embeddings, 512 positions or more, dropout on hidden states and attention."""
    transformers = _transformers()
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
