"""Gradual conversion: from the plain product to the decoupled one, over some steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gonio.errors import AlreadyAppliedError, InvalidArgumentError
from gonio.nn.decoupled import Decoupled

__all__ = ["Blending", "convert_gradually_"]


class Blending:
    """A conversion under way.

    Attributes:
        paths: the layers.
        steps: optimizer steps from the plain to the decoupled product.
        done: steps taken.

    Example:
        >>> layer = gonio.nn.DecoupledLinear(3, 2)
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        >>> gonio.nn.convert_gradually_(layer, optimizer, steps=10).share
        0.0
    """

    def __init__(self, layers: dict[str, Decoupled], steps: int, done: int) -> None:
        self.paths = tuple(layers)
        self.steps = steps
        self.done = done
        self._layers = list(layers.values())
        self._handle: Any = None

    @property
    def share(self) -> float:
        """How much of the output is the decoupled product, from 0 to 1."""
        return min(1.0, self.done / self.steps)

    def finish_(self) -> None:
        """Drop the plain product now."""
        self.done = self.steps
        if self._handle is not None:
            self._handle.remove()
        for layer in self._layers:
            layer.blend = None

    def _after_step(self, *_: Any) -> None:
        self.done += 1
        if self.done >= self.steps:
            self.finish_()
        for layer in self._layers:
            if layer.blend is not None:
                layer.blend.fill_(self.share)


def convert_gradually_(model: nn.Module, optimizer: torch.optim.Optimizer, *, steps: int, start: int = 0) -> Blending:
    r"""Let the decoupled layers of a trained model start as the plain layers that they were made of.

    The output is :math:`(1 - t) \lVert w \rVert \lVert x \rVert \cos\theta + t\, h\, g(\theta)` (plus the
    bias), where :math:`t` rises from 0 by 1/`steps` after each step of the optimizer. At :math:`t = 1` the
    plain product is dropped and costs nothing any more.

    Args:
        model: its decoupled layers are changed in place; convert the layers first.
        optimizer: counts the steps.
        steps: until the plain product is dropped.
        start: steps that were taken already, when a training is resumed.

    Raises:
        InvalidArgumentError: if there is no decoupled layer, or `steps` or `start` make no sense.
        AlreadyAppliedError: if a conversion of one of the layers is under way.

    Example:
        >>> linear = nn.Linear(3, 2)
        >>> layer = gonio.nn.DecoupledLinear.from_linear(linear)
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
        >>> blending = gonio.nn.convert_gradually_(layer, optimizer, steps=2)
        >>> x = torch.eye(3)
        >>> torch.allclose(layer(x), linear(x))
        True
        >>> optimizer.step(); optimizer.step(); blending.share, layer.blend
        (1.0, None)

    References:
        W. Liu et al., "Decoupled Networks", CVPR 2018, advises to start from a trained plain
        network. https://arxiv.org/abs/1804.08071

    Differs: the paper changes the operator at once.
    """
    if not (isinstance(steps, int) and steps >= 1 and 0 <= start < steps):
        raise InvalidArgumentError(
            "convert_gradually_ takes steps >= 1 and 0 <= start < steps", f"steps={steps}, start={start}", "Give both."
        )
    layers = {path: module for path, module in model.named_modules() if isinstance(module, Decoupled)}
    if not layers:
        raise InvalidArgumentError(
            "convert_gradually_ takes a model with decoupled layers", "none", "Swap some in first, with from_conv."
        )
    for path, layer in layers.items():
        if layer.blend is not None:
            raise AlreadyAppliedError("convert_gradually_", path, "a gradual conversion")
    blending = Blending(layers, steps, start)
    for layer in layers.values():
        layer.blend = torch.full((), blending.share, device=layer.weight.device)
    blending._handle = optimizer.register_step_post_hook(blending._after_step)
    return blending
