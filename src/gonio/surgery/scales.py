"""The scales of a network that could move, and the sizes of the weights that they would change."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from gonio.surgery.kinds import WEIGHTED

__all__ = ["Layer", "Variable", "in_all", "layer_of"]

_CONV_TRANSPOSE = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(eq=False)
class Layer:
    """One weight as a map between channels.

    Attributes:
        squares: (groups, out/groups, in/groups) float64: the sums of squared entries between a channel that
            is read and one that is made. For a normalisation layer's affine map (1, channels, 1).
    """

    path: str
    module: nn.Module
    squares: Tensor

    @property
    def is_norm(self) -> bool:
        """Whether it is a normalisation layer's affine map, which has no input side."""
        return not isinstance(self.module, WEIGHTED)

    @property
    def out_channels(self) -> int:
        return self.squares.shape[0] * self.squares.shape[1]

    @property
    def in_channels(self) -> int:
        return self.squares.shape[0] * self.squares.shape[2]


@dataclass(eq=False)
class Variable:
    """One free scale per channel of a tensor, with the layers that produce and consume it."""

    channels: int  # 0 where it stands for the output of a layer that is left out
    producers: list[Layer] = field(default_factory=list)
    consumers: list[tuple[Layer, int]] = field(default_factory=list)  # and features per channel
    pinned: str = ""  # the reason why it must stay 1

    def free(self) -> bool:
        """Whether it can move."""
        return not self.pinned and bool(self.producers) and bool(self.consumers)

    def ends(self) -> tuple[frozenset[str], frozenset[str]]:
        """Paths of producers and consumers, by which variables of two graphs of one model are compared."""
        made, used = {layer.path for layer in self.producers}, {layer.path for layer, _ in self.consumers}
        return frozenset(made), frozenset(used)


def in_all(variables: list[Variable], others: Iterable[list[Variable]]) -> list[Variable]:
    """The variables, those pinned that are not free in the same way in every other graph of the model."""
    for other in others:
        free = {variable.ends() for variable in other if variable.free()}
        for variable in variables:
            if variable.free() and variable.ends() not in free:
                variable.pinned = "it is used otherwise in training than in evaluation"
    return variables


@torch.no_grad()
def layer_of(path: str, module: nn.Module) -> Layer:
    """The layer of a weighted module or of a normalisation's affine map, at its present weights."""
    weight: Tensor = module.weight.detach().double().square()  # type: ignore[operator]
    if not isinstance(module, WEIGHTED):
        return Layer(path, module, weight.view(1, -1, 1))
    if isinstance(module, nn.Linear):
        return Layer(path, module, weight.unsqueeze(0))
    groups = int(module.groups)  # type: ignore[arg-type]
    blocks = weight.flatten(2).sum(2).unflatten(0, (groups, -1))
    return Layer(path, module, blocks.transpose(1, 2) if isinstance(module, _CONV_TRANSPOSE) else blocks)
