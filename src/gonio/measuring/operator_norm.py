"""The norm of a layer as a map on whole inputs, which for a convolution is not that of its filters' matrix."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from math import ceil, prod
from typing import Any, Literal

import torch
from torch import Tensor

from gonio.errors import GonioError
from gonio.geometry import Layout, conv_spectral_norm_estimate

__all__ = ["ALSO", "GRID", "Also", "operator_norm"]

Also = Collection[Literal["operator_norm"]]
ALSO = ("operator_norm",)  # the figures that are measured if they are asked for
GRID = 16  # positions each way


def operator_norm(tensor: Tensor, layout: Layout, also: Also, sigma_max: float | None) -> tuple[float | None, str]:
    """The norm where it costs nothing or was asked for, and on which grid it is or why there is none.

    Args:
        sigma_max: of the filters' matrix, which it is for linear layers and kernels of one position.
    """
    kernel = tensor.shape[2:]
    if sigma_max is None or prod(kernel) == 1:
        return sigma_max, ""
    if "operator_norm" not in also:
        return None, ""
    grid = _grid(kernel, layout)
    wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    try:
        found = conv_spectral_norm_estimate(wide, grid, layout=replace(layout, padding_mode="circular"))
    except GonioError as error:
        return None, f"no operator norm: {error}"
    return float(found), f"operator norm on a periodic grid of {'×'.join(map(str, grid))}"


def _grid(kernel: Any, layout: Layout) -> tuple[int, ...]:
    """:data:`GRID` positions each way, or twice what the kernel spans, and a multiple of the stride."""
    dilation = layout.dilation or (1,) * len(kernel)
    stride = layout.stride or (1,) * len(kernel)
    spans = [2 * (d * (k - 1) + 1) for k, d in zip(kernel, dilation, strict=True)]
    return tuple(s * ceil(max(GRID, span) / s) for span, s in zip(spans, stride, strict=True))
