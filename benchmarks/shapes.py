"""Weight shapes of the networks that benchmarks of whole models use."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

__all__ = ["MODELS", "TINY", "resnet18", "resnet50", "resnet152", "weights"]

Shape = tuple[int, ...]
TINY: tuple[Shape, ...] = ((6, 3, 3, 3), (8, 6, 3, 3), (4, 8))


def resnet18() -> list[Shape]:
    """Convolutions and the classifier of ResNet-18: 21 weights."""
    shapes: list[Shape] = [(64, 3, 7, 7)]
    width = 64
    for planes in (64, 128, 256, 512):
        shapes += [(planes, width, 3, 3), *[(planes, planes, 3, 3)] * 3]
        if planes != width:
            shapes.append((planes, width, 1, 1))
        width = planes
    return [*shapes, (1000, 512)]


def resnet50(blocks_per_stage: Sequence[int] = (3, 4, 6, 3)) -> list[Shape]:
    """Convolutions and the classifier of ResNet-50: 54 weights."""
    shapes: list[Shape] = [(64, 3, 7, 7)]
    width = 64
    for planes, blocks in zip((64, 128, 256, 512), blocks_per_stage, strict=True):
        for _ in range(blocks):
            shapes += [(planes, width, 1, 1), (planes, planes, 3, 3), (4 * planes, planes, 1, 1)]
            if width != 4 * planes:
                shapes.append((4 * planes, width, 1, 1))
            width = 4 * planes
    return [*shapes, (1000, 2048)]


def resnet152() -> list[Shape]:
    """Convolutions and the classifier of ResNet-152: 156 weights."""
    return resnet50((3, 8, 36, 3))


MODELS = {"ResNet-18": resnet18, "ResNet-50": resnet50}


def weights(shapes: Sequence[Shape]) -> list[Tensor]:
    """Seeded normal weights of variance 1/fan_in."""
    return list(_weights(shapes))


def _weights(shapes: Sequence[Shape]) -> Iterator[Tensor]:
    for index, shape in enumerate(shapes):
        draw = torch.randn(shape, generator=torch.Generator().manual_seed(index))
        yield (draw / math.sqrt(math.prod(shape[1:]))).requires_grad_()
