"""Layers and inputs that the tests of decoupled layers share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from catalog import seeded
from gonio import nn as gnn
from gonio.nn import angular, magnitude

MAGNITUDES = (
    magnitude.Sphere(alpha=1.3),
    magnitude.Ball(alpha=1.3, radius=0.9, learn_radius=True),
    magnitude.Tanh(alpha=1.2, radius=0.7),
    magnitude.Tanh(alpha=1.2, radius=0.7, learn_radius=True),
    magnitude.Tanh(alpha=1.2, radius=0.7, learn_radius=True, learn_alpha=True),
    magnitude.Tanh(alpha=1.2, radius=3.0, radius_in="absolute"),
    magnitude.Linear(alpha=0.7),
    magnitude.Linear(alpha=0.7, learn_alpha=True),
    magnitude.Segmented(alpha=1.1, beta=0.4, radius=1.05, learn_radius=True, learn_beta=True),
    magnitude.Logarithm(alpha=1.3),
    magnitude.Mixed(alpha=0.7, beta=0.4, learn_alpha=True, learn_beta=True),
)
_KINDS = {getattr(magnitude, name) for name in magnitude.__all__} - {magnitude.Magnitude, *map(type, MAGNITUDES)}
MAGNITUDES += tuple(kind() for kind in _KINDS)  # those that are added later
ANGULARS = (
    angular.Cosine(), angular.Linear(), angular.Sigmoid(k=0.4), angular.SquaredCosine(), angular.RectifiedCosine(),
)  # fmt: skip


def is_bounded(h: magnitude.Magnitude) -> bool:
    """Whether |h| ≤ α for a long input too."""
    return float(h(torch.tensor([1e6], dtype=torch.float64))) <= h.alpha


def _operators() -> Iterator[dict[str, Any]]:
    for h in MAGNITUDES:
        for g in ANGULARS:
            for weighted in (None, "linear", "tanh_product", "tanh_each"):
                if weighted in (None, *h.weightings):
                    yield {"magnitude": h, "angular": g, "weighted": weighted}


OPERATORS = list(_operators())  # every magnitude with every angular part and every weighting

_CONV = (  # kernel, stride, padding, dilation, groups, padding mode
    (3, 1, 1, 1, 1, "zeros"),
    (3, 2, 1, 1, 1, "reflect"),
    (2, 1, "same", 1, 4, "zeros"),
    (2, 1, "same", 3, 2, "circular"),
    (1, 1, 0, 1, 1, "zeros"),
    (3, 2, 2, 2, 4, "replicate"),
    (3, 1, "valid", 1, 2, "zeros"),
    (4, 3, 2, 1, 1, "zeros"),
)
_TRANSPOSED = (  # kernel, stride, padding, output padding, dilation, groups
    (3, 1, 1, 0, 1, 1),
    (3, 2, 1, 1, 1, 2),
    (2, 3, 0, 2, 1, 4),  # some outputs meet no input at all
    (3, 2, 2, 1, 2, 2),
    (1, 1, 0, 0, 1, 1),
    (4, 2, 1, 0, 1, 1),
)


def shapes() -> Iterator[tuple[str, type[nn.Module], tuple[Any, ...], tuple[int, ...]]]:
    """(name, class, constructor arguments, input shape) of each kind of layer with each of its options."""
    yield "Linear", gnn.DecoupledLinear, (4, 6), (3, 2, 4)
    for dims in (1, 2, 3):
        plain, transposed = getattr(gnn, f"DecoupledConv{dims}d"), getattr(gnn, f"DecoupledConvTranspose{dims}d")
        for kernel, stride, padding, dilation, groups, mode in _CONV:
            arguments = (4, 8, kernel, stride, padding, dilation, groups, True, mode)
            yield f"Conv{dims}d {arguments[2:]}", plain, arguments, (2, 4, *(9, 8, 7)[:dims])
        for kernel, stride, padding, output, dilation, groups in _TRANSPOSED:
            arguments = (4, 8, kernel, stride, padding, output, groups, True, dilation)
            yield f"ConvTranspose{dims}d {arguments[2:]}", transposed, arguments, (2, 4, *(5, 4, 3)[:dims])


def conversions() -> Iterator[tuple[str, nn.Module, Any, Tensor]]:
    """(name, torch layer, its converter, input), in float64."""
    for name, kind, arguments, shape in shapes():
        torch_kind = getattr(nn, kind.__name__.removeprefix("Decoupled"))
        converter = getattr(kind, "from_linear" if torch_kind is nn.Linear else "from_conv")
        yield name, torch_kind(*arguments).double(), converter, seeded(*shape, dtype=torch.float64)
