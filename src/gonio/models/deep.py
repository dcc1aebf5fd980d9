"""Models with a chosen depth, activation and normalisation, for experiments on one of them at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from gonio.errors import UnknownNameError
from gonio.nn import SwitchableNorm2d

_ACTIVATIONS: Mapping[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
    "none": nn.Identity,
}
_GROUPS = 8  # of a group norm, where the width has so many channels
_CONV_NORMS: Mapping[str, Callable[[int], nn.Module]] = {
    "none": lambda width: nn.Identity(),
    "batch": nn.BatchNorm2d,
    "group": lambda width: nn.GroupNorm(min(_GROUPS, width), width),
    "layer": lambda width: nn.GroupNorm(1, width),
    "instance": lambda width: nn.InstanceNorm2d(width, affine=True),
    "switchable": SwitchableNorm2d,
}
_LINEAR_NORMS: Mapping[str, Callable[[int], nn.Module]] = {
    "none": lambda width: nn.Identity(),
    "batch": nn.BatchNorm1d,
    "layer": nn.LayerNorm,
}


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
        >>> from gonio.models.deep import Residual
        >>> Residual(nn.Identity())(torch.ones(2))
        tensor([2., 2.])
    """

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = x + self.branch(x)
        return mixed


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


def _named(kind: str, name: str, known: Mapping[str, Callable[..., nn.Module]]) -> Callable[..., nn.Module]:
    if name not in known:
        raise UnknownNameError(kind, name, known)
    return known[name]
