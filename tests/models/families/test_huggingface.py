"""The Hugging Face families: recorded parameter names, published counts, options that reach the configuration."""

import gzip
import json

import pytest
import torch

from perfmodel.models.step import build_module, make_inputs
from perfmodel.scenario.scenario import Scenario
from tests.places import TESTS

RECORDED = TESTS / "data" / "cuda_steps"
TWO_LAYERS = {"layers": 2, "width": 768, "heads": 12, "ffn_width": 3072}


def built(model, batch, **keys):
    with torch.device("meta"):
        return build_module(Scenario(model=model, batch=batch, hardware={"profile": "none"}, **keys))


@pytest.mark.parametrize(
    ("file", "model", "batch", "precision"),
    [
        ("gpt2-2layer-fp32", {"family": "gpt2", **TWO_LAYERS}, (2, 256), "fp32"),
        ("bert-2layer-amp", {"family": "bert", **TWO_LAYERS}, (4, 128), "amp-bf16"),
        (
            "llama-2layer-bf16",
            {"family": "llama", "layers": 2, "width": 1024, "heads": 16, "kv_heads": 4, "ffn_width": 2816},
            (2, 512),
            "bf16",
        ),
    ],
)
def test_parameters_are_the_recorded_ones(file, model, batch, precision):
    recorded = json.loads(gzip.decompress((RECORDED / f"{file}.json.gz").read_bytes()))
    module = built(model, {"size": batch[0], "sequence_length": batch[1]}, precision=precision)
    named = [[name, list(p.shape), str(p.dtype).removeprefix("torch.")] for name, p in module.named_parameters()]
    assert named == recorded["parameters"]


@pytest.mark.parametrize(
    ("family", "size", "count"),
    [
        ("gpt2", "124m", 124_439_808),  # OpenAI's, embeddings tied
        ("gpt2", "1.5b", 1_557_611_200),
        ("bert", "base", 109_514_298),  # encoder, masked-word head, embeddings tied
        ("llama", "8b", 8_030_261_248),
    ],
)
def test_parameter_counts_are_the_published_ones(family, size, count):
    module = built({"family": family, "size": size}, {"size": 1, "sequence_length": 128})
    assert sum(parameter.numel() for parameter in module.parameters()) == count


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_positions_follow_a_long_sequence_and_dropout_the_scenario(family):
    module = built({"family": family, **TWO_LAYERS, "dropout": 0.25}, {"size": 1, "sequence_length": 4096})
    tables = [part.num_embeddings for part in module.modules() if isinstance(part, torch.nn.Embedding)]
    assert 4096 in tables
    assert {part.p for part in module.modules() if isinstance(part, torch.nn.Dropout)} == {0.25}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_implementation_is_the_one_asked_for(attention):
    model = {"family": "llama", "layers": 1, "width": 32, "heads": 4, "ffn_width": 64, "attention": attention}
    assert built(model, {"size": 1, "sequence_length": 8}).config._attn_implementation == attention


def test_labels_are_the_tokens_themselves():
    scenario = Scenario(
        model={"family": "gpt2", **TWO_LAYERS}, batch={"size": 2, "sequence_length": 8}, hardware={"profile": "none"}
    )
    inputs = make_inputs(scenario, "cpu")
    assert inputs["labels"] is inputs["input_ids"]
    assert inputs["input_ids"].shape == (2, 8)
