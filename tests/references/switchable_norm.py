"""Switchable normalisation from its definition, in float64.

Luo et al., "Differentiable Learning-to-Normalize via Switchable Normalization" (ICLR 2019):
y = γ (x − Σ w_k μ_k) / sqrt(Σ w'_k σ²_k + ε) + β over instance, layer and batch statistics, each computed
from the values themselves, with the biased variance. A statistic of a single value is left out.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

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
