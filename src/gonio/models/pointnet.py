"""The small point-cloud classifier of the task `points`."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

__all__ = ["pointnet"]


def pointnet(num_classes: int = 8, in_channels: int = 3) -> nn.Module:
    """The same three layers for every point (32, 64, 128 filters), the largest answer of each, two linear layers.

    The answer does not depend on the order of the points. Of the paper's network it has the shared layers and
    the maximum, and not the two networks that predict a transformation.

    Shape:
        - input: :math:`(N, 3, P)`: P points.
        - output: :math:`(N, K)` logits.

    Example:
        >>> model = gonio.models.pointnet()
        >>> cloud = torch.rand(2, 3, 50, generator=torch.Generator().manual_seed(0))
        >>> torch.equal(model.eval()(cloud), model(cloud.flip(2)))
        True

    References:
        C. R. Qi et al., "PointNet: deep learning on point sets for 3D classification and segmentation", 2017,
        arXiv 1612.00593, §4.2.
    """
    layers: list[tuple[str, nn.Module]] = []
    before = in_channels
    for index, width in enumerate((32, 64, 128), start=1):
        layers += [
            (f"conv{index}", nn.Conv1d(before, width, 1, bias=False)),
            (f"norm{index}", nn.BatchNorm1d(width)),
            (f"act{index}", nn.ReLU()),
        ]
        before = width
    layers += [
        ("largest", nn.AdaptiveMaxPool1d(1)),
        ("flatten", nn.Flatten()),
        ("fc1", nn.Linear(before, 64)),
        ("act4", nn.ReLU()),
        ("fc2", nn.Linear(64, num_classes)),
    ]
    return nn.Sequential(OrderedDict(layers))
