"""Initial weights of image models."""

from __future__ import annotations

from torch import nn


def initialise_convolutions(module: nn.Module) -> None:
    """Give convolutions He's initial weights, so that activations keep their scale through the depth."""
    for submodule in module.modules():
        if isinstance(submodule, nn.Conv2d):
            nn.init.kaiming_normal_(submodule.weight, mode="fan_out", nonlinearity="relu")
