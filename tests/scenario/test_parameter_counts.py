"""Parameters of models that are known by name; tests/models/test_stages.py holds small ones against their modules."""

from __future__ import annotations

from types import SimpleNamespace

from perfmodel.scenario.parameter_counts import (
    ParameterCounts,
    bert_parameters,
    gpt2_parameters,
    gpt_parameters,
    llama_parameters,
)


def whole(found: ParameterCounts, layers: int) -> int:
    return found.embeddings + layers * found.block + found.head


def test_gpt2_small_has_124_million_and_its_head_is_its_embedding() -> None:
    model = SimpleNamespace(width=768, ffn_width=3072, vocabulary=50257)
    found = gpt2_parameters(model, 1024)
    assert whole(found, 12) - 50257 * 768 == 124_439_808
    assert gpt2_parameters(model, 2048).embeddings - found.embeddings == 1024 * 768


def test_llama_3_8b_has_8_03_billion() -> None:
    model = SimpleNamespace(width=4096, ffn_width=14336, vocabulary=128256, heads=32, kv_heads=8)
    assert whole(llama_parameters(model, 8192), 32) == 8_030_261_248


def test_bert_base_has_110_million_with_its_masked_head() -> None:
    """bert-base-uncased as BertForMaskedLM without its pooler: 109,514,298, of which the decoder is the embedding."""
    model = SimpleNamespace(width=768, ffn_width=3072, vocabulary=30522)
    assert whole(bert_parameters(model, 512), 12) - 30522 * 768 == 109_514_298


def test_gpt_learns_a_position_for_each_token_and_has_no_biases() -> None:
    model = SimpleNamespace(width=10, ffn_width=40, vocabulary=100)
    assert gpt_parameters(model, 7) == ParameterCounts(
        embeddings=100 * 10 + 7 * 10, block=4 * 100 + 2 * 400 + 2 * 10, head=10 + 100 * 10
    )
