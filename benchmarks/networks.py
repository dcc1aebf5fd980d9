"""ResNet-18 as in He et al. 2016, without weights from anywhere."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

__all__ = ["ResNet18"]


class Block(nn.Module):
    """Two convolutions and a shortcut, projected where the shape changes."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.shortcut = nn.Sequential()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet18(nn.Module):
    """17 convolutions, 3 projections and a classifier: 11 million weights at width 64.

    With `small_images` the stem is a 3×3 convolution without pooling, as is usual for 32×32 pixels.
    """

    def __init__(self, width: int = 64, classes: int = 10, *, small_images: bool = False) -> None:
        super().__init__()
        stem = nn.Conv2d(3, width, 3, 1, 1, bias=False) if small_images else nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.stem = nn.Sequential(stem, nn.BatchNorm2d(width), nn.ReLU())
        if not small_images:
            self.stem.append(nn.MaxPool2d(3, 2, 1))
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        stages = [
            nn.Sequential(Block(before, after, 1 if index == 0 else 2), Block(after, after, 1))
            for index, (before, after) in enumerate(pairwise(widths))
        ]
        self.stages = nn.Sequential(*stages)
        self.classifier = nn.Linear(8 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stages(self.stem(x))
        logits: Tensor = self.classifier(x.mean((2, 3)))
        return logits
