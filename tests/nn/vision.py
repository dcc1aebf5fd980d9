"""torchvision's networks, where that is installed."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

__all__ = ["torchvision_resnet18"]


@functools.cache
def _operators() -> torch.library.Library:
    """What torchvision's wheel expects of its compiled part, which does not load beside a CPU build of torch."""
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library  # it takes its definitions back when it is deleted


def torchvision_resnet18(classes: int) -> nn.Module:
    """The test that calls this is skipped where torchvision is not installed."""
    if torch.version.cuda is None:
        _operators()
    models = pytest.importorskip("torchvision.models", reason="converts torchvision's network: install torchvision")
    return models.resnet18(num_classes=classes)
