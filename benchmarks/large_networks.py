"""ResNet-50 (He et al. 2016) and ViT-B/16 (Dosovitskiy et al. 2021), without weights from anywhere."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["ResNet50", "VisionTransformer"]


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions and a shortcut, projected where the shape changes."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(before, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, after, 1, bias=False), nn.BatchNorm2d(after)
        self.shortcut = nn.Sequential()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        y = torch.relu(self.bn2(self.conv2(y)))
        return torch.relu(self.bn3(self.conv3(y)) + self.shortcut(x))


class ResNet50(nn.Module):
    """53 convolutions and a classifier: 25.6 million weights at width 64."""

    def __init__(self, width: int = 64, blocks: tuple[int, ...] = (3, 4, 6, 3), classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        stages, before = nn.Sequential(), width
        for stage, count in enumerate(blocks):
            for index in range(count):
                stages.append(Bottleneck(before, width << stage, 2 if stage and not index else 1))
                before = 4 * width << stage
        self.stages = stages
        self.classifier = nn.Linear(before, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.stages(self.stem(x)).mean((2, 3)))
        return logits


class Attention(nn.Module):
    """Self-attention whose query, key and value are one linear layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        out: Tensor = self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return out


class Layer(nn.Module):
    """Attention and a perceptron of four times the width, each normalised before and added."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class VisionTransformer(nn.Module):
    """Patches of 16 pixels, 12 layers of width 768 and a classifier on their mean: 86 million weights."""

    def __init__(
        self, width: int = 768, depth: int = 12, heads: int = 12, size: int = 224, classes: int = 1000
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.positions = nn.Parameter(torch.zeros(1, (size // 16) ** 2, width))
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(depth)), nn.LayerNorm(width))
        self.classifier = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).mT + self.positions
        logits: Tensor = self.classifier(self.layers(tokens).mean(1))
        return logits
