"""Small models: layers with a function as forward, norms as after training, tied and compiled layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from catalog import seeded


class Net(nn.Module):
    """Layers by name, and `compute(module, x)` that calls them."""

    def __init__(self, compute: Callable[[Any, Tensor], Any], **layers: nn.Module) -> None:
        super().__init__()
        self.compute = compute
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Any:
        return self.compute(self, x)


def trained(model: nn.Module, *, spread: float = 0.3) -> nn.Module:
    """Norms away from their defaults, as after training; in evaluation mode."""
    with torch.no_grad():
        for seed, norm in enumerate(m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)):
            values = seeded(4, norm.num_features, seed=seed)
            norm.weight.copy_((spread * values[0]).exp())
            norm.bias.copy_(spread * values[1])
            norm.running_mean.copy_(spread * values[2])
            norm.running_var.copy_((0.5 * values[3]).exp())
    return model.eval()


def batch_only(norm: nn.Module) -> nn.Module:
    """A switchable norm with all weight on batch statistics, which a convolution can take in."""
    with torch.no_grad():
        for logits in (norm.mean_logits, norm.var_logits):
            logits.copy_(torch.tensor([0.0, 0.0, 1e3]))
    return norm


class Activated(nn.BatchNorm2d):
    """A subclass that computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class Doubled(nn.Conv2d):
    """A subclass that computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def tied(*between: nn.Module) -> nn.Sequential:
    """Two layers with one weight."""
    model = nn.Sequential(nn.Linear(4, 4), *between, nn.Linear(4, 4))
    model[-1].weight = model[0].weight
    return model


def compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


def between_channels(m: Any, x: Tensor) -> Tensor:
    """Channels look at one another: a query has an entry for each position."""
    q, k, v = m.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 4, 1)
    return m.proj(F.scaled_dot_product_attention(q, k, v).flatten(1, 2).mT)
