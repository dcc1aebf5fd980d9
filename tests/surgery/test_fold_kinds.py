"""Norms and parametrizations fold into layers of every kind, grouped or not, with and without bias."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import gonio
from catalog import seeded
from gonio import parametrizations as P

ALLOWED = {torch.float64: 1e-12, torch.float32: 1e-5}  # relative to the largest output
NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
TEMPLATES: dict[str, Callable[[], P.Parametrization] | None] = {
    "no parametrization": None,
    "WeightNorm": P.WeightNorm,
    "SpectralNorm": P.SpectralNorm,
    "Orthogonal": P.Orthogonal,
    "WeightStandardization": P.WeightStandardization,
}
KINDS = [
    (f"{prefix}{dims}d", dims, groups, channels, bias)
    for prefix, dims, groups, channels, bias in itertools.product(
        ("Conv", "ConvTranspose"), (1, 2, 3), (1, 2, 4), ((4, 8), (8, 4)), (True, False)
    )
]


def trained_(norm: nn.Module) -> nn.Module:
    """A batch norm none of whose statistics and parameters is at its default."""
    with torch.no_grad():
        norm.running_mean.copy_(seeded(norm.num_features, seed=1))
        norm.running_var.copy_(seeded(norm.num_features, seed=2).exp())
        norm.weight.copy_(1 + 0.5 * seeded(norm.num_features, seed=3))
        norm.bias.copy_(seeded(norm.num_features, seed=4))
    return norm


def deviation(found: Tensor, expected: Tensor) -> float:
    return float(((found - expected).abs().max() / expected.abs().max()).detach())


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize(("kind", "dims", "groups", "channels", "bias"), KINDS)
def test_layer_and_norm_become_one_plain_layer(
    kind: str, dims: int, groups: int, channels: tuple[int, int], bias: bool, template: str
) -> None:
    for dtype, allowed in ALLOWED.items():
        torch.manual_seed(0)
        layer = getattr(nn, kind)(*channels, 3, stride=2, padding=1, groups=groups, bias=bias)
        model = nn.Sequential(layer, trained_(NORMS[dims](channels[1])), nn.ReLU()).to(dtype).eval()
        make = TEMPLATES[template]
        if make is not None:
            gonio.parametrize_(model, make())
        x = seeded(2, channels[0], *[5] * dims, dtype=dtype)
        expected = model(x)
        gonio.fold_(model, example=x)
        assert type(model[0]) is getattr(nn, kind)
        assert type(model[1]) is nn.Identity
        assert deviation(model(x), expected) <= allowed
