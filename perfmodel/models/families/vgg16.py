"""VGG-16 with torchvision's architecture and parameter names."""

from __future__ import annotations

import torch
from torch import nn

from perfmodel.models.family import TorchFamily
from perfmodel.models.initialisation import initialise_convolutions

CHANNELS = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)  # 0: max-pooling by 2


class VGG16(nn.Module):
    """Thirteen 3x3 convolutions with biases in ``features``, three linear layers with dropout in ``classifier``."""

    def __init__(self, classes: int, dropout: float) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for width in CHANNELS:
            if width:
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
                channels = width
            else:
                layers.append(nn.MaxPool2d(2, 2))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d((7, 7))
        self.classifier = nn.Sequential(
            nn.Linear(512 * 7 * 7, 4096), nn.ReLU(True), nn.Dropout(dropout),
            nn.Linear(4096, 4096), nn.ReLU(True), nn.Dropout(dropout),
            nn.Linear(4096, classes),
        )  # fmt: skip
        initialise_convolutions(self)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.avgpool(self.features(images))
        return self.classifier(torch.flatten(x, 1))


FAMILY = TorchFamily(lambda model, _: VGG16(model.classes, model.dropout))
