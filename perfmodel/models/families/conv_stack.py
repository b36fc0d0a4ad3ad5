"""A plain stack of convolutions."""

from __future__ import annotations

import torch
from torch import nn

from perfmodel.models.family import TorchFamily
from perfmodel.models.initialisation import initialise_convolutions


class ConvStack(nn.Module):
    """``layers`` times [3x3 convolution, batch norm, ReLU] at full resolution, average pooling, one linear layer."""

    def __init__(self, layers: int, width: int, classes: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width if index else 3, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
            )
            for index in range(layers)
        )
        self.pool = nn.AdaptiveAvgPool2d((1, 1))
        self.head = nn.Linear(width, classes)
        initialise_convolutions(self)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = images
        for block in self.blocks:
            x = block(x)
        return self.head(torch.flatten(self.pool(x), 1))


FAMILY = TorchFamily(lambda model, _: ConvStack(model.layers, model.width, model.classes))
