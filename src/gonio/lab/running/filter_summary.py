"""Norms and angles of a trained model's filters, small enough to be stored with every run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gonio.geometry import angles, filter_norms, layout_of, matrix_view

QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)
ANGLE_EDGES = tuple(range(0, 181, 2))  # degrees; the same for every layer, run and study


@torch.no_grad()
def filter_summary(model: nn.Module) -> dict[str, Any]:
    """Filter norms and pairwise angles of every linear and convolutional layer.

    A parametrised layer shows its effective weight. Angles are between filters of one group; a filter of norm 0 has
    none and is left out.

    Returns:
        `layers` by path, each with `shape`, `dim` (length of a filter), `filters` (how many), `norms`
        (at :data:`QUANTILES`) and `angle_counts` (per bin of :data:`ANGLE_EDGES`); `norm_quantiles`;
        `angle_edges`.

    Example:
        >>> layer = nn.Linear(2, 3)
        >>> _ = layer.weight.data.copy_(torch.tensor([[1.0, 0.0], [0.0, 2.0], [-3.0, 0.0]]))
        >>> found = gonio.lab.filter_summary(nn.Sequential(layer))["layers"]["0"]
        >>> found["norms"][0], found["norms"][-1], sum(found["angle_counts"])
        (1.0, 3.0, 3)
    """
    return {
        "layers": {
            path: _layer(module.weight, matrix_view(module.weight, layout_of(module)).double())
            for path, module in model.named_modules()
            if isinstance(module, (nn.Linear, nn.modules.conv._ConvNd))
        },
        "norm_quantiles": list(QUANTILES),
        "angle_edges": list(ANGLE_EDGES),
    }


def _layer(weight: Tensor, matrices: Tensor) -> dict[str, Any]:
    norms = filter_norms(matrices)
    first, second = torch.triu_indices(matrices.shape[-2], matrices.shape[-2], offset=1)
    usable = (norms[:, first] > 0) & (norms[:, second] > 0)
    degrees = torch.rad2deg(angles(matrices))[:, first, second][usable]
    return {
        "shape": list(weight.shape),
        "dim": matrices.shape[-1],
        "filters": norms.numel(),
        "norms": torch.quantile(norms.flatten(), torch.tensor(QUANTILES, dtype=torch.float64)).tolist(),
        "angle_counts": torch.histogram(degrees, torch.tensor(ANGLE_EDGES, dtype=torch.float64)).hist.int().tolist(),
    }
