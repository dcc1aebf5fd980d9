"""Models of the built-in tasks: handwritten digits, point clouds, bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gonio.models.deep import deep_cnn, deep_mlp, residual_mlp


def digits_cnn(num_classes: int = 10, in_channels: int = 1) -> nn.Module:
    """Three conv-BN-ReLU blocks (16, 32, 64 filters), pooling to 2 × 2, and two linear layers.

    It has every kind of layer that the methods of gonio change: convolutions whose scale a normalisation removes,
    batch normalisation, and two linear layers joined by a ReLU alone.

    Shape: :math:`(N, C, H, W)` with :math:`H, W \\ge 4` → :math:`(N, K)` logits.

    Example:
        >>> model = gonio.models.digits_cnn()
        >>> sum(p.numel() for p in model.parameters())
        40506
        >>> model(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """
    layers = _blocks(nn.Conv2d, nn.BatchNorm2d, (in_channels, 16, 32, 64), kernel_size=3, padding=1)
    layers.insert(6, ("pool", nn.MaxPool2d(2)))  # after the second block
    layers += [("squeeze", nn.AdaptiveAvgPool2d(2)), *_classifier(4 * 64, num_classes)]
    return nn.Sequential(OrderedDict(layers))


def pointnet(num_classes: int = 8, in_channels: int = 3) -> nn.Module:
    """Three layers shared by all points (32, 64, 128 filters), their maximum over the points, two linear layers.

    The output does not depend on the order of the points. The network has the shared layers and the maximum
    of the paper, without the two networks that predict a transformation.

    Shape: :math:`(N, 3, P)`: P points → :math:`(N, K)` logits.

    Example:
        >>> model = gonio.models.pointnet()
        >>> cloud = torch.rand(2, 3, 50, generator=torch.Generator().manual_seed(0))
        >>> torch.equal(model.eval()(cloud), model(cloud.flip(2)))
        True

    References: C. R. Qi et al., "PointNet: deep learning on point sets for 3D classification and segmentation", 2017,
        arXiv 1612.00593, §4.2.
    """
    layers = _blocks(nn.Conv1d, nn.BatchNorm1d, (in_channels, 32, 64, 128), kernel_size=1)
    layers += [("largest", nn.AdaptiveMaxPool1d(1)), *_classifier(128, num_classes)]
    return nn.Sequential(OrderedDict(layers))


def _blocks(
    conv: type[nn.Module], norm: type[nn.Module], widths: Sequence[int], **options: int
) -> list[tuple[str, nn.Module]]:
    """Convolution, normalisation and ReLU for each pair of successive widths."""
    layers: list[tuple[str, nn.Module]] = []
    for i, (before, width) in enumerate(pairwise(widths), start=1):
        layers += [(f"conv{i}", conv(before, width, bias=False, **options)), (f"norm{i}", norm(width))]
        layers += [(f"act{i}", nn.ReLU())]
    return layers


def _classifier(width: int, num_classes: int) -> list[tuple[str, nn.Module]]:
    first, last = nn.Linear(width, 64), nn.Linear(64, num_classes)
    return [("flatten", nn.Flatten()), ("fc1", first), ("act4", nn.ReLU()), ("fc2", last)]


class ByteTransformer(nn.Module):
    r"""A causal transformer over bytes: embedding, blocks of attention and MLP with pre-layer-norm, logits.

    Shape: :math:`(N, L)` integers below `vocabulary`, :math:`L \le` `context` → :math:`(N, L, V)` logits of the symbol
        after each position.

    Example:
        >>> model = gonio.models.ByteTransformer(10, width=8, heads=2, depth=1, context=4)
        >>> first, second = model(torch.tensor([[1, 2, 3], [1, 2, 9]]))
        >>> torch.equal(first[:2], second[:2]), torch.equal(first[2], second[2])  # causal
        (True, False)

    References: A. Vaswani et al., "Attention is all you need", 2017, arXiv 1706.03762; with pre-layer-norm as in R.
        Xiong et al., "On layer normalization in the transformer architecture", 2020, arXiv 2002.04745.
    """

    def __init__(self, vocabulary: int = 256, *, width: int = 64, heads: int = 4, depth: int = 2, context: int = 128):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        # torch draws embeddings with variance 1, compared with which the first outputs of the blocks are small
        with torch.no_grad():
            self.embed.weight.mul_(width**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        embedded = self.embed(x) + self.position[: x.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(embedded)))
        return logits


class Block(nn.Module):
    """Residual attention, then a residual MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        mixed: Tensor = x + self.down(F.relu(self.up(self.norm2(x))))
        return mixed

    def attend(self, x: Tensor) -> Tensor:
        """Causal self-attention."""
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed: Tensor = self.out(found.transpose(1, 2).flatten(2))
        return mixed


def byte_transformer(num_classes: int = 256, *, width: int = 64, depth: int = 2) -> nn.Module:
    """A :class:`ByteTransformer` of `depth` blocks of width `width` with 4 heads, for 128 bytes of context.

    Example:
        >>> model = gonio.models.byte_transformer()
        >>> sum(p.numel() for p in model.parameters())
        140544
        >>> model(torch.zeros(2, 16, dtype=torch.int64)).shape
        torch.Size([2, 16, 256])
    """
    return ByteTransformer(num_classes, width=width, depth=depth)


BUILT_IN: Mapping[str, Callable[..., nn.Module]] = {
    "byte-transformer": byte_transformer,
    "deep-cnn": deep_cnn,
    "deep-mlp": deep_mlp,
    "digits-cnn": digits_cnn,
    "pointnet": pointnet,
    "residual-mlp": residual_mlp,
}
