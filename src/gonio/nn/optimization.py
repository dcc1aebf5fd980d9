"""Training of decoupled layers: weight projection, and gradual conversion from the plain product."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gonio.errors import AlreadyAppliedError, InvalidArgumentError, NotApplicableError
from gonio.nn.decoupled import Decoupled


@dataclass(frozen=True)
class Projection:
    """A weight projection that was done once, or is repeated.

    Example:
        >>> gonio.nn.project_weights_(gonio.nn.DecoupledLinear(3, 2)).paths
        ('',)
    """

    paths: tuple[str, ...]  # of the layers
    every: int | None  # after how many optimizer steps; None if it was done once
    _remove: Callable[[], None]

    def undo_(self) -> None:
        """End a repeated projection; the weights stay as they are."""
        self._remove()


def project_weights_(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    every: int | None = None,
    norm: float = 1.0,
) -> Projection:
    r"""Scale every filter of the decoupled layers to one norm: :math:`w \leftarrow s\, w / \lVert w \rVert`.

    An operator that uses :math:`w / \lVert w \rVert` alone computes the same before and after. Its gradient
    is divided by :math:`\lVert w \rVert`, and every plain gradient step makes the filter longer, so
    without projection the layer learns ever more slowly. A zero filter stays zero. The state of the
    optimizer is left as it is.

    Args:
        model: changed in place.
        optimizer: project after its steps instead of now.
        every: after how many of its steps.
        norm: the norm :math:`s`.

    Raises:
        NotApplicableError: for a layer whose output depends on the norm of its filters (`weighted`, or
            during a gradual conversion), or whose weight is computed by a parametrization.
        InvalidArgumentError: if there is no decoupled layer, or one of `optimizer` and `every` is missing.

    Example:
        >>> layer = gonio.nn.DecoupledLinear(2, 1, bias=False)
        >>> _ = layer.weight.data.copy_(torch.tensor([[3.0, 4.0]]))
        >>> _ = gonio.nn.project_weights_(layer)
        >>> layer.weight.tolist()
        [[0.6000000238418579, 0.800000011920929]]

    References:
        W. Liu et al., "Decoupled Networks", CVPR 2018 (weight projection); the official code
        projects every 100 iterations with s = 1. https://arxiv.org/abs/1804.08071
    """
    if not (math.isfinite(norm) and norm > 0):
        raise InvalidArgumentError("project_weights_: invalid norm", repr(norm), "Pass a positive number; 1 is usual.")
    if (optimizer is None) != (every is None) or (every is not None and every < 1):
        found = f"every={every}, optimizer={'None' if optimizer is None else 'given'}"
        do = "Pass optimizer and every >= 1, or neither."
        raise InvalidArgumentError("project_weights_: invalid schedule", found, do)
    layers = _decoupled_layers(model, "project_weights_")
    for path, layer in layers.items():
        _check_directional(path, layer)
    if optimizer is None or every is None:
        _project_(layers.values(), norm)
        return Projection(tuple(layers), None, lambda: None)
    steps = itertools.count(1)

    def after(*_: Any) -> None:
        if next(steps) % every == 0:
            _project_(layers.values(), norm)

    return Projection(tuple(layers), every, optimizer.register_step_post_hook(after).remove)


def _decoupled_layers(model: nn.Module, verb: str) -> dict[str, Decoupled]:
    layers = {path: module for path, module in model.named_modules() if isinstance(module, Decoupled)}
    if not layers:
        do = "Swap some in first, with from_conv or from_linear."
        raise InvalidArgumentError(f"{verb}: the model has no decoupled layer", type(model).__name__, do)
    return layers


def _check_directional(path: str, layer: Decoupled) -> None:
    """Raise unless the layer's output depends on the directions of its filters alone."""
    why = None
    if layer.weighted is not None:
        why = f"its output depends on the norm of its filters (weighted={layer.weighted!r})"
    elif layer.blend is not None:
        why = "its output depends on the norm of its filters until its gradual conversion has ended"
    elif layer._parameters.get("weight") is not layer.weight:
        why = "its weight is computed by a parametrization"
    if why is not None:
        raise NotApplicableError("project_weights_", path, why, "Call it on a part of the model without this layer.")


@torch.no_grad()
def _project_(layers: Iterable[Decoupled], norm: float) -> None:
    for layer in layers:
        norms = layer._map.filter_norms(layer.weight)
        factor: Tensor = torch.where(norms > 0, norm / norms, torch.ones_like(norms))
        layer.weight.mul_(layer._map.along_filters(factor, layer.weight).to(layer.weight.dtype))


class Blending:
    """A gradual conversion of the layers `paths`, of which `done` of `steps` optimizer steps are taken.

    Example:
        >>> layer = gonio.nn.DecoupledLinear(3, 2)
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        >>> gonio.nn.convert_gradually_(layer, optimizer, steps=10).share
        0.0
    """

    def __init__(self, layers: Mapping[str, Decoupled], steps: int, done: int) -> None:
        self.paths, self.steps, self.done = tuple(layers), steps, done
        self._layers = list(layers.values())
        self._handle: Any = None

    @property
    def share(self) -> float:
        """The share of the decoupled product in the output, from 0 to 1."""
        return min(1.0, self.done / self.steps)

    def undo_(self) -> None:
        """End the conversion: the layers compute the decoupled product alone, as before `convert_gradually_`."""
        if self._handle is not None:
            self._handle.remove()
        self._finish_()

    def _finish_(self) -> None:
        self.done = self.steps
        for layer in self._layers:
            layer.blend = None

    def _after_step(self, *_: Any) -> None:
        if self.done >= self.steps:  # torch iterates over its hooks during a step: a hook cannot remove itself there
            return
        self.done += 1
        if self.done >= self.steps:
            self._finish_()
        for layer in self._layers:
            if layer.blend is not None:
                layer.blend.fill_(self.share)


def convert_gradually_(model: nn.Module, optimizer: torch.optim.Optimizer, *, steps: int, start: int = 0) -> Blending:
    r"""Blend from the plain product of a trained layer to its decoupled product.

    The output is :math:`(1 - t) \lVert w \rVert \lVert x \rVert \cos\theta + t\, h\, g(\theta)` (plus the
    bias), where :math:`t` rises from 0 by 1/`steps` after each step of the optimizer. At :math:`t = 1` the
    plain product is dropped, and costs nothing any more.

    Args:
        model: its decoupled layers are changed in place; convert the layers first.
        optimizer: counts the steps.
        steps: until the plain product is dropped.
        start: steps that were taken already, when a training is resumed.

    Raises:
        InvalidArgumentError: if there is no decoupled layer, or `steps` or `start` is out of range.
        AlreadyAppliedError: if one of the layers is being converted.

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
        found, do = f"steps={steps}, start={start}", "Pass steps >= 1 and 0 <= start < steps."
        raise InvalidArgumentError("convert_gradually_: invalid schedule", found, do)
    layers = _decoupled_layers(model, "convert_gradually_")
    for path, layer in layers.items():
        if layer.blend is not None:
            raise AlreadyAppliedError("convert_gradually_", path, "a gradual conversion")
    blending = Blending(layers, steps, start)
    for layer in layers.values():
        layer.blend = torch.full((), blending.share, device=layer.weight.device)
    blending._handle = optimizer.register_step_post_hook(blending._after_step)
    return blending
