"""Forty layer shapes and what a real forward pass does to white noise; shared by the init tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gonio.geometry import Layout, layout_of


def _shapes() -> dict[str, nn.Module]:
    layers: dict[str, nn.Module] = {}
    for out in (16, 64, 96):
        layers[f"Linear 64→{out}"] = nn.Linear(64, out, bias=False)
    for groups in (1, 4, 16):
        for stride in (1, 2):
            for out in (16, 32):
                options: dict[str, Any] = {"groups": groups, "stride": stride, "bias": False}
                layers[f"Conv1d→{out} g{groups} s{stride}"] = _periodic(nn.Conv1d, out, 5, options)
                layers[f"Conv2d→{out} g{groups} s{stride}"] = _periodic(nn.Conv2d, out, 3, options)
                layers[f"ConvTranspose2d→{out} g{groups} s{stride}"] = nn.ConvTranspose2d(16, out, 3, **options)
    layers["Conv3d"] = _periodic(nn.Conv3d, 24, 3, {"bias": False})
    layers["Conv2d dilated"] = _periodic(nn.Conv2d, 24, 3, {"bias": False, "dilation": 2})
    layers["ConvTranspose1d"] = nn.ConvTranspose1d(16, 24, 4, stride=3, bias=False)
    return layers


def _periodic(kind: type[nn.Module], out: int, kernel: int, options: dict[str, Any]) -> nn.Module:
    """Circular padding: no border at which connections are missing."""
    padding = options.get("dilation", 1) * (kernel // 2)
    return kind(16, out, kernel, padding=padding, padding_mode="circular", **options)


LAYERS = _shapes()


def fresh(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def signal(layer: nn.Module, *, seed: int = 0) -> tuple[float, float]:
    """Mean ‖y‖²/‖x‖² and var(y)/var(x) for white noise x, away from borders."""
    g = fresh(seed)
    if isinstance(layer, nn.Linear):
        x = torch.randn(4096, layer.in_features, generator=g)
        return _ratios(x, layer(x))
    dims = layer.weight.ndim - 2
    size = {1: 240, 2: 24, 3: 8}[dims]
    x = torch.randn(24, layer.in_channels, *[size] * dims, generator=g)
    y = layer(x)
    norm, _ = _ratios(x, y)  # a transposed convolution without cropping loses nothing
    border = slice(6, -6) if layout_of(layer) != Layout() and layer.transposed else slice(None)
    return norm, _ratios(x, y[(slice(None), slice(None), *[border] * dims)])[1]


def _ratios(x: Tensor, y: Tensor) -> tuple[float, float]:
    y = y.detach()
    norm = float(y.square().sum() / x.square().sum())
    return norm, float(y.square().mean() / x.square().mean())
