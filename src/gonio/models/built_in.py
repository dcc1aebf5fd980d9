"""Built-in models: those of the built-in tasks, and models with a chosen depth, activation and normalisation."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gonio.errors import UnknownNameError
from gonio.models.generative import byte_gru, digits_gan, digits_vae
from gonio.models.sizes import sized
from gonio.nn import SwitchableNorm2d


@sized
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


@sized
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

    Args:
        dropout: probability with which an entry of the embedding and of what a block adds is 0 in training.

    Shape: :math:`(N, L)` integers below `vocabulary`, :math:`L \le` `context` → :math:`(N, L, V)` logits of the symbol
        after each position.

    Example:
        >>> model = gonio.models.ByteTransformer(10, width=8, heads=2, depth=1, context=4)
        >>> first, second = model(torch.tensor([[1, 2, 3], [1, 2, 9]]))
        >>> (first - second).abs().amax(-1) < 1e-5  # causal
        tensor([ True,  True, False])

    References: A. Vaswani et al., "Attention is all you need", 2017, arXiv 1706.03762; with pre-layer-norm as in R.
        Xiong et al., "On layer normalization in the transformer architecture", 2020, arXiv 2002.04745.
    """

    def __init__(
        self,
        vocabulary: int = 256,
        *,
        width: int = 64,
        heads: int = 4,
        depth: int = 2,
        context: int = 128,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.dropout = dropout
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        # torch draws embeddings with variance 1, compared with which the first outputs of the blocks are small
        with torch.no_grad():
            self.embed.weight.mul_(width**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        embedded = F.dropout(self.embed(x) + self.position[: x.shape[1]], self.dropout, self.training)
        logits: Tensor = self.head(self.norm(self.blocks(embedded)))
        return logits


class Block(nn.Module):
    """Residual attention, then a residual MLP."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.attend(self.norm1(x)), self.dropout, self.training)
        added = self.down(F.relu(self.up(self.norm2(x))))
        mixed: Tensor = x + F.dropout(added, self.dropout, self.training)
        return mixed

    def attend(self, x: Tensor) -> Tensor:
        """Causal self-attention."""
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed: Tensor = self.out(found.transpose(1, 2).flatten(2))
        return mixed


@sized
def byte_transformer(num_classes: int = 256, *, width: int = 64, depth: int = 2, dropout: float = 0.0) -> nn.Module:
    """A :class:`ByteTransformer` of `depth` blocks of width `width` with 4 heads, for 128 bytes of context.

    Example:
        >>> model = gonio.models.byte_transformer()
        >>> sum(p.numel() for p in model.parameters())
        140544
        >>> model(torch.zeros(2, 16, dtype=torch.int64)).shape
        torch.Size([2, 16, 256])
    """
    return ByteTransformer(num_classes, width=width, depth=depth, dropout=dropout)


# --- one depth, activation and normalisation at a time ---------------------------------------------------

_ACTIVATIONS: Mapping[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
    "none": nn.Identity,
}
_GROUPS = 8  # of a group norm, where the width has so many channels
_CONV_NORMS: Mapping[str, Callable[[int], nn.Module]] = {
    "none": nn.Identity,
    "batch": nn.BatchNorm2d,
    "group": lambda width: nn.GroupNorm(min(_GROUPS, width), width),
    "layer": lambda width: nn.GroupNorm(1, width),
    "instance": lambda width: nn.InstanceNorm2d(width, affine=True),
    "switchable": SwitchableNorm2d,
}
_LINEAR_NORMS: Mapping[str, Callable[[int], nn.Module]] = {
    "none": nn.Identity,
    "batch": nn.BatchNorm1d,
    "layer": nn.LayerNorm,
}


@sized
def deep_mlp(
    num_classes: int = 10,
    *,
    pixels: int = 64,
    depth: int = 10,
    width: int = 64,
    activation: str = "relu",
    norm: str = "none",
) -> nn.Module:
    """`depth` linear layers of one width, each with its activation and then a norm, and a classifier.

    Args:
        pixels: numbers per example.
        activation: relu, tanh, gelu or none.
        norm: none, batch or layer.

    Shape: :math:`(N, ...)` with `pixels` numbers each → :math:`(N, K)` logits.

    Raises:
        UnknownNameError: another activation or norm.

    Example:
        >>> model = gonio.models.deep_mlp(depth=3, activation="tanh")
        >>> [type(layer).__name__ for layer in model[:3]], model(torch.zeros(2, 1, 8, 8)).shape
        (['Flatten', 'Linear', 'Tanh'], torch.Size([2, 10]))
    """
    act, made = _named("activation", activation, _ACTIVATIONS), _named("norm", norm, _LINEAR_NORMS)
    layers: list[nn.Module] = [nn.Flatten()]
    for index in range(depth):
        layers += [nn.Linear(width if index else pixels, width), act()]
        layers += [made(width)] if norm != "none" else []
    return nn.Sequential(*layers, nn.Linear(width, num_classes))


class Residual(nn.Module):
    """A branch with a skip connection around it: x + branch(x).

    Example:
        >>> from gonio.models.built_in import Residual
        >>> Residual(nn.Identity())(torch.ones(2))
        tensor([2., 2.])
    """

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = x + self.branch(x)
        return mixed


@sized
def residual_mlp(
    num_classes: int = 10, *, pixels: int = 64, blocks: int = 3, width: int = 64, activation: str = "relu"
) -> nn.Module:
    """A linear layer, `blocks` residual blocks of two linear layers with an activation between, and a classifier.

    Args:
        pixels: numbers per example.
        activation: relu, tanh, gelu or none.

    Shape: :math:`(N, ...)` with `pixels` numbers each → :math:`(N, K)` logits.

    Raises:
        UnknownNameError: another activation.

    Example:
        >>> model = gonio.models.residual_mlp(blocks=2)
        >>> [type(layer).__name__ for layer in model], model(torch.zeros(2, 1, 8, 8)).shape
        (['Flatten', 'Linear', 'Residual', 'Residual', 'Linear'], torch.Size([2, 10]))
    """
    act = _named("activation", activation, _ACTIVATIONS)
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(pixels, width)]
    layers += [Residual(nn.Sequential(nn.Linear(width, width), act(), nn.Linear(width, width))) for _ in range(blocks)]
    return nn.Sequential(*layers, nn.Linear(width, num_classes))


@sized
def deep_cnn(
    num_classes: int = 10,
    in_channels: int = 1,
    *,
    depth: int = 3,
    width: int = 32,
    pools: int = 1,
    activation: str = "relu",
    norm: str = "batch",
) -> nn.Module:
    """`depth` convolutions of one width, each followed by norm and activation, and one linear classifier.

    The image is halved `pools` times, at equal distances, and reduced to 2 × 2 in front of the classifier.

    Args:
        activation: relu, tanh, gelu or none.
        norm: none, batch, group (8 groups), layer (one group), instance or switchable.

    Shape: :math:`(N, C, H, W)` with :math:`H, W \\ge 4` → :math:`(N, K)` logits.

    Raises:
        UnknownNameError: another activation or norm.

    Example:
        >>> model = gonio.models.deep_cnn(depth=2, norm="group")
        >>> [type(layer).__name__ for layer in model[:3]], model(torch.zeros(2, 1, 8, 8)).shape
        (['Conv2d', 'GroupNorm', 'ReLU'], torch.Size([2, 10]))
    """
    act, made = _named("activation", activation, _ACTIVATIONS), _named("norm", norm, _CONV_NORMS)
    halved = {depth * (number + 1) // (pools + 1) - 1 for number in range(pools)}
    layers: list[nn.Module] = []
    for index in range(depth):
        layers += [nn.Conv2d(width if index else in_channels, width, 3, padding=1, bias=norm == "none")]
        layers += [made(width)] if norm != "none" else []
        layers += [act()]
        layers += [nn.MaxPool2d(2)] if index in halved else []
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * width, num_classes))


class BasicBlock(nn.Module):
    """Two 3 × 3 convolutions with norms and a skip connection: ReLU(shortcut(x) + branch(x)).

    The shortcut is the identity, or a 1 × 1 convolution where width or resolution change.

    References: K. He et al., "Deep residual learning for image recognition", arXiv 1512.03385, §3.2 and §4.2.

    Example:
        >>> from gonio.models.built_in import BasicBlock
        >>> BasicBlock(4, 8, 2, nn.BatchNorm2d)(torch.zeros(1, 4, 8, 8)).shape
        torch.Size([1, 8, 4, 4])
    """

    def __init__(self, before: int, width: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(before, width, 3, stride, padding=1, bias=False), norm(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1, bias=False), norm(width)
        self.shortcut: nn.Module = nn.Identity()
        if (before, stride) != (width, 1):
            self.shortcut = nn.Conv2d(before, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        branch = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(self.shortcut(x) + branch)


@sized
def resnet20(
    num_classes: int = 10, in_channels: int = 3, *, width: int = 16, blocks: int = 3, norm: str = "batch"
) -> nn.Module:
    """ResNet-20 for 32 × 32 images: three stages of `blocks` basic blocks with `width`, 2 and 4 times as many filters.

    Args:
        norm: none, batch, group (8 groups), layer (one group), instance or switchable.

    Shape: :math:`(N, C, H, W)` → :math:`(N, K)` logits.

    Raises:
        UnknownNameError: another norm.

    References: K. He et al., "Deep residual learning for image recognition", arXiv 1512.03385, §4.2; the shortcut
        between stages is a convolution.

    Example:
        >>> model = gonio.models.resnet20()
        >>> sum(p.numel() for p in model.parameters()), model.eval()(torch.zeros(2, 3, 32, 32)).shape
        (272282, torch.Size([2, 10]))
    """
    made = _named("norm", norm, _CONV_NORMS)
    layers: list[tuple[str, nn.Module]] = [
        ("conv", nn.Conv2d(in_channels, width, 3, padding=1, bias=False)), ("norm", made(width)), ("act", nn.ReLU()),
    ]  # fmt: skip
    before = width
    for stage in range(3):
        after = width * 2**stage
        for block in range(blocks):
            made_block = BasicBlock(before, after, 2 if stage and not block else 1, made)
            layers.append((f"stage{stage + 1}_block{block + 1}", made_block))
            before = after
    layers += [("pool", nn.AdaptiveAvgPool2d(1)), ("flatten", nn.Flatten()), ("fc", nn.Linear(before, num_classes))]
    return nn.Sequential(OrderedDict(layers))


@sized
def plain_cnn9(num_classes: int = 10, in_channels: int = 3, *, width: int = 64, norm: str = "batch") -> nn.Module:
    """The plain network of nine 3 × 3 convolutions, three for each of three resolutions, with which DCNet is compared.

    Args:
        norm: none, batch, group (8 groups), layer (one group), instance or switchable.

    Shape: :math:`(N, C, H, W)` with :math:`H, W \\ge 8` → :math:`(N, K)` logits.

    Raises:
        UnknownNameError: another norm.

    References: W. Liu et al., "Decoupled networks", arXiv 1804.08071, §5.

    Example:
        >>> model = gonio.models.plain_cnn9(width=16)
        >>> sum(isinstance(layer, nn.Conv2d) for layer in model), model.eval()(torch.zeros(2, 3, 32, 32)).shape
        (9, torch.Size([2, 10]))
    """
    made = _named("norm", norm, _CONV_NORMS)
    layers: list[nn.Module] = []
    before = in_channels
    for stage in range(3):
        after = width * 2**stage
        for _ in range(3):
            layers += [nn.Conv2d(before, after, 3, padding=1, bias=norm == "none")]
            layers += [made(after)] if norm != "none" else []
            layers += [nn.ReLU()]
            before = after
        layers += [nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, num_classes))


def _named(kind: str, name: str, known: Mapping[str, Callable[..., nn.Module]]) -> Callable[..., nn.Module]:
    if name not in known:
        raise UnknownNameError(kind, name, known)
    return known[name]


BUILT_IN: Mapping[str, Callable[..., nn.Module]] = {
    "byte-gru": byte_gru,
    "byte-transformer": byte_transformer,
    "deep-cnn": deep_cnn,
    "deep-mlp": deep_mlp,
    "digits-cnn": digits_cnn,
    "digits-gan": digits_gan,
    "digits-vae": digits_vae,
    "plain-cnn9": plain_cnn9,
    "pointnet": pointnet,
    "residual-mlp": residual_mlp,
    "resnet20": resnet20,
}
