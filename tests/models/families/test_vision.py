"""vgg16 and resnet50 against the recordings of torchvision's, conv_stack by hand."""

import gzip
import json

import pytest
import torch

from perfmodel.models.families.conv_stack import ConvStack
from perfmodel.models.step import build_module
from perfmodel.scenario.scenario import Scenario
from tests.places import TESTS

RECORDED = TESTS / "data" / "cuda_steps"


def built(model, **keys):
    with torch.device("meta"):
        return build_module(Scenario(model=model, batch={"size": 4}, hardware={"profile": "none"}, **keys))


@pytest.mark.parametrize(
    ("family", "file", "count"),
    [("vgg16", "vgg16-fp32", 138_357_544), ("resnet50", "resnet50-amp-channels_last", 25_557_032)],
)
def test_parameters_are_torchvisions(family, file, count):
    recorded = json.loads(gzip.decompress((RECORDED / f"{file}.json.gz").read_bytes()))
    module = built({"family": family})
    named = [[name, list(p.shape), str(p.dtype).removeprefix("torch.")] for name, p in module.named_parameters()]
    assert named == recorded["parameters"]
    assert sum(parameter.numel() for parameter in module.parameters()) == count


def test_channels_last_reaches_the_convolutions():
    module = built({"family": "resnet50"}, training={"memory_format": "channels_last"})
    assert module.conv1.weight.is_contiguous(memory_format=torch.channels_last)
    assert not module.conv1.weight.is_contiguous()


@pytest.mark.parametrize("family", ["vgg16", "resnet50"])
def test_classes_and_image_size_are_free(family):
    module = build_module(
        Scenario(
            model={"family": family, "classes": 7, "image_size": 64},
            batch={"size": 2},
            mode="forward",
            hardware={"profile": "none"},
        )
    )
    with torch.no_grad():
        assert module(torch.rand(2, 3, 64, 64)).shape == (2, 7)


def test_conv_stack_keeps_the_resolution_and_counts_its_weights():
    module = ConvStack(layers=3, width=8, classes=5)
    # 3x3 convolutions 3->8, 8->8, 8->8 without biases, a scale and a shift a channel, one linear layer
    assert sum(parameter.numel() for parameter in module.parameters()) == 9 * (24 + 64 + 64) + 3 * 16 + 8 * 5 + 5
    seen = []
    module.pool.register_forward_pre_hook(lambda _, arguments: seen.append(tuple(arguments[0].shape)))
    assert module(torch.rand(2, 3, 12, 12)).shape == (2, 5)
    assert seen == [(2, 8, 12, 12)]
