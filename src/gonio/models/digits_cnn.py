"""The small convolutional network of the built-in comparison."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

__all__ = ["digits_cnn"]


def digits_cnn(num_classes: int = 10, in_channels: int = 1) -> nn.Module:
    """Three conv-BN-ReLU blocks (16, 32, 64 filters), pooling to 2 × 2, and two linear layers.

    It has one layer of every kind that the seed systems act on: convolutions whose scale a norm layer
    absorbs, batch normalisation, and a pair of linear layers with a ReLU between them and nothing else.

    Shape:
        - input: :math:`(N, C, H, W)` with :math:`H, W \\ge 4`.
        - output: :math:`(N, K)` logits.

    Example:
        >>> model = gonio.models.digits_cnn()
        >>> sum(p.numel() for p in model.parameters())
        40506
        >>> model(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """
    layers: list[tuple[str, nn.Module]] = []
    before = in_channels
    for index, width in enumerate((16, 32, 64), start=1):
        layers += [
            (f"conv{index}", nn.Conv2d(before, width, 3, padding=1, bias=False)),
            (f"norm{index}", nn.BatchNorm2d(width)),
            (f"act{index}", nn.ReLU()),
        ]
        if index == 2:
            layers.append(("pool", nn.MaxPool2d(2)))
        before = width
    layers += [
        ("squeeze", nn.AdaptiveAvgPool2d(2)),
        ("flatten", nn.Flatten()),
        ("fc1", nn.Linear(4 * before, 64)),
        ("act4", nn.ReLU()),
        ("fc2", nn.Linear(64, num_classes)),
    ]
    return nn.Sequential(OrderedDict(layers))
