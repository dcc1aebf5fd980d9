"""Switchable normalisation and QK-norm from their definitions, in float64, and their cases.

Luo et al., "Differentiable Learning-to-Normalize via Switchable Normalization" (ICLR 2019):
y = γ (x − Σ w_k μ_k) / sqrt(Σ w'_k σ²_k + ε) + β over instance, layer and batch statistics, each computed
from the values themselves, with the biased variance. A statistic of a single value is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from catalog.cases import LayerCase, LayerChange
from gonio import nn as gnn

AXES = {"instance": (2,), "layer": (1, 2), "batch": (0, 2)}


def switchable_norm(layer: nn.Module, x: Tensor) -> Tensor:
    """The output of a SwitchableNorm of `gonio.nn`, from its parameters and buffers."""
    flat = x.reshape(*x.shape[:2], -1)
    names = list(AXES) if layer.use_batch else ["instance", "layer"]
    used, means, variances = [], [], []
    for position, name in enumerate(names):
        if name == "batch" and not layer.training and layer.running_mean is not None:
            mean, var, count = layer.running_mean[None, :, None], layer.running_var[None, :, None], 2
        else:
            mean = flat.mean(AXES[name], keepdim=True)
            var = ((flat - mean) ** 2).mean(AXES[name], keepdim=True)
            count = flat.numel() // mean.numel()
        if count > 1:
            used.append(position)
            means.append(mean)
            variances.append(var)
    w = torch.softmax(layer.mean_logits[used], 0)
    v = torch.softmax(layer.var_logits[used], 0)
    mean = sum(a * b for a, b in zip(w, means, strict=True))
    var = sum(a * b for a, b in zip(v, variances, strict=True))
    out = (flat - mean) / torch.sqrt(var + layer.eps)
    if layer.affine:
        out = out * layer.weight[:, None] + layer.bias[:, None]
    return out.reshape(x.shape)


def qk_norm(layer: nn.Module, x: Tensor) -> Tensor:
    """The rows of each head of queries and of keys, divided by the root of their mean square."""
    y = x @ layer.weight.T if layer.bias is None else x @ layer.weight.T + layer.bias
    out = y.clone()
    for heads, gain in ((layer.query, layer.query_gain), (layer.key, layer.key_gain)):
        for start, stop in heads:
            head = y[..., start:stop]
            size = torch.sqrt(sum(entry * entry for entry in head.unbind(-1)) / (stop - start) + layer.eps)
            out[..., start:stop] = gain * head / size[..., None]
    return out


# --- the cases ------------------------------------------------------------------------------------


def _samples_swapped(layer: nn.Module, x: Tensor) -> tuple[nn.Module, Tensor]:
    """The last sample replaced by the first: with batch statistics the others notice."""
    return layer, torch.cat([x[:-1], x[:1]])


def _switchable(name: str, make: Callable[[], nn.Module], *shape: int, couples: bool = True) -> LayerCase:
    return LayerCase(
        name=name,
        make=make,
        shape=shape,
        reference=switchable_norm,
        invariances={"input shifted": lambda f, x: (f, x + 5), **({} if couples else _ALONE)},
        sensitivities={"last sample replaced": _samples_swapped},
        channels_last=len(shape) == 4,
        couples_batch=couples,
    )


class _Each(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.layer(row) for row in x.split(1)])


_ALONE: Mapping[str, LayerChange] = {"each sample alone": lambda f, x: (_Each(f), x)}


def _heads_grown(layer: nn.Module, x: Tensor) -> tuple[nn.Module, Tensor]:
    """The rows of all heads seven times as long, and so is the root of eps."""
    with torch.no_grad():
        for start, stop in (*layer.query, *layer.key):
            for parameter in [p for p in (layer.weight, layer.bias) if p is not None]:
                parameter[start:stop] *= 7
    layer.eps *= 49
    return layer, x


def _qk_norm(name: str, make: Callable[[], nn.Module], *shape: int) -> LayerCase:
    return LayerCase(
        name=name,
        make=make,
        shape=shape,
        reference=qk_norm,
        invariances={"rows of heads and the root of eps grown": _heads_grown},
        sensitivities={"input doubled": lambda f, x: (f, 2 * x)},
    )


LAYERS = [
    _qk_norm("QKNormLinear", lambda: gnn.QKNormLinear(6, 8, query=[(0, 4), (4, 8)]), 5, 6),
    _qk_norm(
        "QKNormLinear, with values",
        lambda: gnn.QKNormLinear(6, 13, bias=False, query=[(0, 3), (3, 6)], key=[(6, 9)], eps=1e-3),
        *(2, 4, 6),
    ),
    _qk_norm(
        "QKNormLinear, heads in turn",
        lambda: gnn.QKNormLinear(5, 12, query=[(0, 2), (6, 8)], key=[(2, 4), (8, 10)]),
        *(3, 2, 5),
    ),
    _switchable("SwitchableNorm1d", lambda: gnn.SwitchableNorm1d(4), 5, 4),
    _switchable("SwitchableNorm2d", lambda: gnn.SwitchableNorm2d(3), 4, 3, 4, 3),
    _switchable(
        "SwitchableNorm2d without batch statistics",
        lambda: gnn.SwitchableNorm2d(3, use_batch=False),
        *(2, 3, 4, 4),
        couples=False,
    ),
    _switchable("SwitchableNorm3d", lambda: gnn.SwitchableNorm3d(3, affine=False, momentum=None), 2, 3, 2, 2, 3),
]
