"""What a scenario turns into: types, modes, wrapped blocks, inputs, and the order of placement."""

import pytest
import torch

from perfmodel.models.build import build_module, make_inputs, repeated_blocks, replace_tensors
from perfmodel.scenario.scenario import Scenario
from tests.refusals import refused

TINY = {"family": "gpt", "size": "tiny"}
SMALL_GPT2 = {"family": "gpt2", "layers": 4, "width": 16, "heads": 2, "ffn_width": 32, "vocabulary": 50}
SMALL_LLAMA = SMALL_GPT2 | {"family": "llama"}
TOKENS = {"size": 2, "sequence_length": 8}


def scenario(model, batch=None, **keys):
    return Scenario(model=model, batch=batch or TOKENS, hardware={"profile": "none"}, **keys)


def on_meta(asked):
    with torch.device("meta"):
        return build_module(asked)


def test_bf16_covers_parameters_and_buffers_amp_neither():
    module = on_meta(scenario(SMALL_LLAMA, precision="bf16"))
    assert {t.dtype for t in [*module.parameters(), *module.buffers()]} == {torch.bfloat16}
    module = on_meta(scenario(SMALL_LLAMA, precision="amp-bf16"))
    assert {t.dtype for t in module.parameters()} == {torch.float32}


@pytest.mark.parametrize(("mode", "training"), [("train", True), ("forward", False)])
def test_mode_decides_dropout(mode, training):
    module = on_meta(scenario(SMALL_GPT2, mode=mode))
    assert {part.training for part in module.modules()} == {training}


@pytest.mark.parametrize(
    ("wanted", "wrapped"),
    [
        ("none", [False, False, False, False]),
        ("full", [True, True, True, True]),
        ("selective", [True, True, True, True]),
        ({"every": 2}, [True, False, True, False]),
        ({"every": 3}, [True, False, False, True]),
    ],
)
def test_checkpointing_wraps_every_kth_block(wanted, wrapped):
    asked = scenario(SMALL_GPT2, training={"activation_checkpointing": wanted})
    blocks = repeated_blocks(on_meta(asked), asked)
    assert ["forward" in vars(block) for block in blocks] == wrapped


@pytest.mark.parametrize(
    ("model", "count"),
    [
        (TINY, 2),
        (SMALL_GPT2, 4),
        (SMALL_LLAMA, 4),
        (SMALL_GPT2 | {"family": "bert"}, 4),
        ({"family": "resnet50"}, 16),
        ({"family": "conv_stack", "layers": 3}, 3),
        ({"family": "vgg16"}, 0),
    ],
)
def test_blocks_of_each_family(model, count):
    asked = scenario(model, {"size": 2} if model["family"] in ("resnet50", "conv_stack", "vgg16") else TOKENS)
    assert len(repeated_blocks(on_meta(asked), asked)) == count


def test_blocks_to_checkpoint_must_be_children_of_a_submodule():
    target = {"target": "torch.nn:Linear", "arguments": {"in_features": 2, "out_features": 2}, "blocks": ""}
    asked = scenario(
        target | {"inputs": {"input": {"shape": ["batch", 2]}}}, training={"activation_checkpointing": "full"}
    )
    with refused("model.blocks", "children"):
        build_module(asked, allow_import=True)


def test_token_inputs_are_reproducible_and_in_range():
    asked = scenario(TINY)
    first, second = (make_inputs(asked, "cpu", torch.Generator().manual_seed(3)) for _ in range(2))
    assert list(first) == ["input_ids", "labels"]
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert first["input_ids"].shape == (2, 8) and first["input_ids"].min() >= 0 and first["input_ids"].max() < 512
    assert not torch.equal(first["input_ids"], first["labels"])


def test_image_inputs_follow_precision_and_memory_format():
    asked = scenario(
        {"family": "resnet50", "image_size": 32, "classes": 4},
        {"size": 5},
        precision="bf16",
        training={"memory_format": "channels_last"},
    )
    inputs = make_inputs(asked, "cpu")
    assert (inputs["images"].shape, inputs["images"].dtype) == ((5, 3, 32, 32), torch.bfloat16)
    assert inputs["images"].is_contiguous(memory_format=torch.channels_last)
    assert inputs["labels"].shape == (5,) and inputs["labels"].max() < 4


def test_forward_only_has_no_labels():
    assert list(make_inputs(scenario(SMALL_GPT2, mode="forward"), "cpu")) == ["input_ids"]


def test_replacing_tensors_keeps_order_sharing_and_kind():
    module = on_meta(scenario(SMALL_GPT2))
    module.transformer.stray = torch.ones(3, device="meta")
    names = [name for name, _ in module.named_parameters()]
    expected = [*(p.shape for p in module.parameters()), *(b.shape for b in module.buffers()), torch.Size([3])]
    made = []

    def make(tensor):
        made.append(tensor.shape)
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)

    replace_tensors(module, make)
    assert made == expected
    assert [name for name, _ in module.named_parameters()] == names
    assert module.lm_head.weight is module.transformer.wte.weight
    assert all(p.device.type == "cpu" and p.requires_grad and p.is_leaf for p in module.parameters())
    assert module.transformer.stray.device.type == "cpu"
