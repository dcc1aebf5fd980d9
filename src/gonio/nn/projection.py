"""Weight projection: filters back to one norm, which an operator on directions does not see."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gonio.errors import InvalidArgumentError, NotApplicableError
from gonio.nn.decoupled import Decoupled

__all__ = ["Projection", "project_weights_"]

VERB = "project_weights_"


@dataclass(frozen=True)
class Projection:
    """What was projected, or is each time.

    Attributes:
        paths: the layers.
        every: after how many optimizer steps; None if it was done once.

    Example:
        >>> layer = gonio.nn.DecoupledLinear(3, 2)
        >>> gonio.nn.project_weights_(layer).paths
        ('',)
    """

    paths: tuple[str, ...]
    every: int | None
    _remove: Callable[[], None]

    def remove(self) -> None:
        """Project no more."""
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

    Returns:
        The layers concerned; `remove()` ends a repeated projection.

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
        raise InvalidArgumentError(f"{VERB} takes a positive norm", repr(norm), "The usual one is 1.")
    if (optimizer is None) != (every is None) or (every is not None and every < 1):
        found = f"every={every}, optimizer={'None' if optimizer is None else 'given'}"
        raise InvalidArgumentError(f"{VERB} takes optimizer and every >= 1 together", found, "Give both, or neither.")
    layers = _directional(model)
    if optimizer is None or every is None:
        _project_(list(layers.values()), norm)
        return Projection(tuple(layers), None, _nothing)
    hook = _Every(list(layers.values()), every, norm)
    return Projection(tuple(layers), every, optimizer.register_step_post_hook(hook).remove)


def _nothing() -> None:
    """There is no hook to remove."""


@dataclass
class _Every:
    """A hook of an optimizer that counts its steps."""

    layers: list[Decoupled]
    every: int
    norm: float
    steps: int = 0

    def __call__(self, *_: Any) -> None:
        self.steps += 1
        if self.steps % self.every == 0:
            _project_(self.layers, self.norm)


def _directional(model: nn.Module) -> dict[str, Decoupled]:
    layers = {path: module for path, module in model.named_modules() if isinstance(module, Decoupled)}
    if not layers:
        raise InvalidArgumentError(f"{VERB} takes a model with decoupled layers", "none", "Swap some in first.")
    for path, layer in layers.items():
        why = None
        if layer.weighted is not None:
            why = f"its output depends on the norm of its filters (weighted={layer.weighted!r})"
        elif layer.blend is not None:
            why = "its output depends on the norm of its filters until its gradual conversion has ended"
        elif layer._parameters.get("weight") is not layer.weight:
            why = "its weight is computed by a parametrization"
        if why is not None:
            raise NotApplicableError(VERB, path, why, "Call it on a part of the model without this layer.")
    return layers


@torch.no_grad()
def _project_(layers: list[Decoupled], norm: float) -> None:
    for layer in layers:
        norms = layer._product.filter_norms(layer.weight)
        factor: Tensor = torch.where(norms > 0, norm / norms, torch.ones_like(norms))
        layer.weight.mul_(layer._product.along_filters(factor, layer.weight).to(layer.weight.dtype))
