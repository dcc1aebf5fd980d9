"""A residual network for tests that need more than a chain: torchvision's ResNet-18 in shape, narrow and small."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from catalog import seeded


class Block(nn.Module):
    """Two convolutions and a shortcut, projected where the shape changes."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample = None
        if stride != 1 or channels_in != channels:
            projection = nn.Conv2d(channels_in, channels, 1, stride, bias=False)
            self.downsample = nn.Sequential(projection, nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        y = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(y)) + shortcut)


class ResNet18(nn.Module):
    """17 convolutions and a classifier; `width` is 64 in the original."""

    def __init__(self, width: int = 8, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        for index, (before, after) in enumerate(pairwise(widths), start=1):
            stage = nn.Sequential(Block(before, after, 1 if index == 1 else 2), Block(after, after, 1))
            self.add_module(f"layer{index}", stage)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.avgpool(x).flatten(1))


def images(batch: int = 8, seed: int = 0) -> Tensor:
    return seeded(batch, 3, 32, 32, seed=seed)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *, batches: int = 3) -> list[float]:
    """A few steps on one fixed set of labels; the losses."""
    labels, losses = torch.arange(8) % 10, []
    model.train()
    for seed in range(batches):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images(seed=seed)), labels)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses
