"""Image models: VGG-16 and ResNet-50 with torchvision's architecture and parameter names, and a plain stack."""

from __future__ import annotations

import torch
from torch import nn

VGG16_CHANNELS = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)  # 0: max-pooling by 2


def _initialise(module: nn.Module) -> None:
    """He initialisation of convolutions, so that activations keep their scale through the depth."""
    for part in module.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")


class VGG16(nn.Module):
    """Thirteen 3x3 convolutions with biases in ``features``, three linear layers with dropout in ``classifier``."""

    def __init__(self, classes: int, dropout: float) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for width in VGG16_CHANNELS:
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
        _initialise(self)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.avgpool(self.features(images))
        return self.classifier(torch.flatten(x, 1))


class Bottleneck(nn.Module):
    """1x1, 3x3 (with the stride), 1x1 to four times the width, around a shortcut."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or channels != 4 * width:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels, 4 * width, 1, stride=stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        identity = x
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        x = self.bn3(self.conv3(x))
        if self.downsample is not None:
            identity = self.downsample(identity)
        x += identity
        return self.relu(x)


def _stage(channels: int, width: int, blocks: int, stride: int) -> nn.Sequential:
    first = Bottleneck(channels, width, stride)
    return nn.Sequential(first, *(Bottleneck(4 * width, width, 1) for _ in range(blocks - 1)))


class ResNet50(nn.Module):
    """A 7x7 stem, four stages of bottlenecks, average pooling and one linear layer."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = _stage(64, 64, blocks=3, stride=1)
        self.layer2 = _stage(256, 128, blocks=4, stride=2)
        self.layer3 = _stage(512, 256, blocks=6, stride=2)
        self.layer4 = _stage(1024, 512, blocks=3, stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(2048, classes)
        _initialise(self)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = stage(x)
        return self.fc(torch.flatten(self.avgpool(x), 1))


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
        _initialise(self)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = images
        for block in self.blocks:
            x = block(x)
        return self.head(torch.flatten(self.pool(x), 1))
