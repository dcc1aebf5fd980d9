"""Effective weights in float64, filter by filter, from the formulas and from how torch's layers compute; and cases.

The formulas share nothing with the library: filters are found by asking the layer which weight entries an
output channel reads, and reductions are loops over filters.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from catalog.cases import ParametrizationCase
from gonio import parametrizations as P


def filter_masks(layer: nn.Module) -> list[tuple[int, Tensor]]:
    """(group, mask over the weight) of each output filter, by differentiating the layer's output."""
    weight = layer._parameters["weight"].detach().double().requires_grad_()
    bias = None if layer.bias is None else layer.bias.detach().double()
    if isinstance(layer, nn.Linear):
        output = nn.functional.linear(torch.ones(1, layer.in_features).double(), weight, bias)
        groups = 1
    else:
        size = [3 * k for k in layer.kernel_size]
        x = torch.ones(1, layer.in_channels, *size, dtype=torch.float64)
        function = getattr(nn.functional, f"conv{'_transpose' if layer.transposed else ''}{len(size)}d")
        output = function(x, weight, bias, groups=layer.groups)
        groups = layer.groups
    per_group = output.shape[1] // groups
    masks = []
    for channel in range(output.shape[1]):
        (grad,) = torch.autograd.grad(output[:, channel].sum(), weight, retain_graph=True)
        masks.append((channel // per_group, grad != 0))
    return masks


def rows(layer: nn.Module, raw: Tensor, change) -> Tensor:
    """Apply `change(filter) -> filter` to each output filter of `raw`."""
    weight = torch.zeros_like(raw)
    for _, mask in filter_masks(layer):
        weight = weight.masked_scatter(mask, change(raw[mask]))
    return weight


def matrices(layer: nn.Module, raw: Tensor) -> list[Tensor]:
    """One matrix per group, an output filter in each row."""
    found: dict[int, list[Tensor]] = {}
    for group, mask in filter_masks(layer):
        found.setdefault(group, []).append(raw[mask])
    return [torch.stack(filters) for filters in found.values()]


def sphere(layer: nn.Module, raw: Tensor, radius: float = 1.0) -> Tensor:
    return rows(layer, raw, lambda w: radius * w / w.square().sum().sqrt())


def weight_norm(layer: nn.Module, raw: Tensor) -> Tensor:
    """With the gains that attaching to `raw` sets."""
    return rows(layer, raw, lambda w: w.detach().square().sum().sqrt() * w / w.square().sum().sqrt())


def standardized(layer: nn.Module, raw: Tensor) -> Tensor:
    def change(w: Tensor) -> Tensor:
        middle = w - w.sum() / w.numel()
        return middle / middle.square().sum().div(w.numel() - 1).sqrt()

    return rows(layer, raw, change)


def centred(layer: nn.Module, raw: Tensor) -> Tensor:
    """Standardised, with learned gains that start at the deviations, which are constants in the gradient."""

    def change(w: Tensor) -> Tensor:
        middle = w - w.sum() / w.numel()
        std = middle.square().sum().div(w.numel() - 1).sqrt()
        return std.detach() * middle / std

    return rows(layer, raw, change)


def spectral(layer: nn.Module, raw: Tensor) -> Tensor:
    """Divided by the largest singular value over groups, whose singular vectors are held constant."""
    return raw / _largest(layer, raw)


def spectrally_bounded(layer: nn.Module, raw: Tensor, bound: float) -> Tensor:
    """Scaled to the bound if its largest singular value exceeds it."""
    largest = _largest(layer, raw)
    return raw * bound / largest if float(largest.detach()) > bound else raw


def conv_spectrally_bounded(layer: nn.Module, raw: Tensor, bound: float) -> Tensor:
    whole = conv_spectral(layer, raw)
    return whole * bound if float((raw / whole).detach().mean()) > bound else raw


def _largest(layer: nn.Module, raw: Tensor) -> Tensor:
    largest = None
    for matrix in matrices(layer, raw):
        u, s, vh = torch.linalg.svd(matrix.detach())
        value = u[:, 0] @ matrix @ vh[0]
        largest = value if largest is None or s[0] > largest.detach() else largest
    return largest


def conv_spectral(layer: nn.Module, raw: Tensor) -> Tensor:
    """Divided by the circular norm on a grid of 8 points per unit of reach, raised to bound every grid.

    The operator on the grid is built densely, column by column, from torch's own convolution with circular
    padding; its norm is the largest singular value, with constant singular vectors.
    """
    if isinstance(layer, nn.Linear):
        return spectral(layer, raw)
    reach = [-(-k // s) - 1 for k, s in zip(layer.kernel_size, layer.stride, strict=True)]
    size = [max(1, 8 * r) * s for r, s in zip(reach, layer.stride, strict=True)]
    margin = math.prod(1 / math.cos(math.pi * r / (2 * max(1, 8 * r))) for r in reach)
    operator = _circular_operator(layer, raw, size)
    u, _, vh = torch.linalg.svd(operator.detach(), full_matrices=False)
    return raw / (margin * (u[:, 0] @ operator @ vh[0]))


def _circular_operator(layer: nn.Module, raw: Tensor, size: list[int]) -> Tensor:
    """Of the convolution with the stored weight, whose adjoint a transposed convolution is."""
    channels = raw.shape[1] * layer.groups
    count = channels * math.prod(size)
    basis = torch.eye(count, dtype=raw.dtype).view(count, channels, *size)
    tail = [n for k in reversed(layer.kernel_size) for n in (0, k - 1)]
    padded = nn.functional.pad(basis, tail, mode="circular")
    function = getattr(nn.functional, f"conv{len(size)}d")
    return function(padded, raw, stride=layer.stride, groups=layer.groups).flatten(1).T


def orthogonal(layer: nn.Module, raw: Tensor) -> Tensor:
    """The polar factor of each group's matrix, by averaging with the inverse transpose (Newton)."""
    weight = torch.zeros_like(raw)
    by_group: dict[int, list[Tensor]] = {}
    for group, mask in filter_masks(layer):
        by_group.setdefault(group, []).append(mask)
    for masks, matrix in zip(by_group.values(), matrices(layer, raw), strict=True):
        wide = matrix.shape[0] <= matrix.shape[1]
        gram = matrix @ matrix.T if wide else matrix.T @ matrix
        root = _inverse_root(gram)
        polar = root @ matrix if wide else matrix @ root
        for mask, row in zip(masks, polar, strict=True):
            weight = weight.masked_scatter(mask, row)
    return weight


def _inverse_root(gram: Tensor) -> Tensor:
    """The inverse square root of a positive matrix, by the Denman–Beavers iteration (differentiable)."""
    y, z = gram, torch.eye(len(gram), dtype=gram.dtype)
    for _ in range(60):
        y, z = (y + torch.linalg.inv(z)) / 2, (z + torch.linalg.inv(y)) / 2
    return z


def orthogonal_conv(layer: nn.Module, raw: Tensor) -> Tensor:
    """The product of paraunitary factors, tap by tap; generators lie one after the other in each group's numbers."""
    groups = getattr(layer, "groups", 1)
    return torch.cat([_orthogonal_kernel(layer, part) for part in raw.chunk(groups)])


def _orthogonal_kernel(layer: nn.Module, raw: Tensor) -> Tensor:
    out, channels, *size = raw.shape
    strides = getattr(layer, "stride", ()), getattr(layer, "dilation", ())
    block = [min(k, s // math.gcd(s, d)) for k, s, d in zip(size, *strides, strict=True)]
    swap = math.prod(block) == 1 and out > channels
    if swap:
        out, channels = channels, out
    degrees = [k - b for k, b in zip(size, block, strict=True)]
    axes = [axis for step in range(max(degrees, default=0)) for axis in range(len(size)) if step < degrees[axis]]
    numbers, used = raw.flatten(), out * channels * math.prod(block)
    first = _polar_factor(numbers[:used].view(out, -1)).view(out, channels, *block)
    taps = {t: first[(slice(None), slice(None), *t)] for t in itertools.product(*map(range, block))}
    rank = min(channels // 2, (raw.numel() // channels - out * math.prod(block)) // max(1, len(axes)))
    count = [0] * len(size)
    for axis in axes:
        rows_ = _polar_factor(numbers[used : used + rank * channels].view(rank, channels))
        used += rank * channels
        moved = rows_.T @ rows_ if count[axis] % 2 == 0 else torch.eye(channels).to(raw) - rows_.T @ rows_
        kept = torch.eye(channels).to(raw) - moved
        count[axis] += 1
        longer: dict[tuple[int, ...], Tensor] = {}
        for t, matrix in taps.items():
            after = tuple(i + (a == axis) for a, i in enumerate(t))
            longer[t] = longer.get(t, 0) + matrix @ kept
            longer[after] = longer.get(after, 0) + matrix @ moved
        taps = longer
    kernel = torch.stack([taps[t] for t in itertools.product(*map(range, size))], -1)
    return (kernel.transpose(0, 1) if swap else kernel).reshape(raw.shape)


def _polar_factor(matrix: Tensor) -> Tensor:
    if matrix.shape[0] > matrix.shape[1]:
        return _polar_factor(matrix.T).T
    return _inverse_root(matrix @ matrix.T) @ matrix


# --- the cases ------------------------------------------------------------------------------------


_CORNERS: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: nn.Linear(6, 4),
    "Conv2d": lambda: nn.Conv2d(3, 5, 3, stride=2, padding=1),
    "grouped Conv2d": lambda: nn.Conv2d(4, 6, 3, groups=2),
    "ConvTranspose2d": lambda: nn.ConvTranspose2d(4, 6, 3, groups=2),
}


def _on_corners(
    name: str,
    make: Callable[[], Any],
    reference: Callable[[nn.Module, Tensor], Tensor],
    *,
    keeps_weight: bool = False,
    corners: tuple[str, ...] = tuple(_CORNERS),
) -> list[ParametrizationCase]:
    same = {"make": make, "reference": reference, "keeps_weight": keeps_weight}
    return [ParametrizationCase(name=f"{name} on {corner}", layer=_CORNERS[corner], **same) for corner in corners]


PARAMETRIZATIONS = [
    *_on_corners("Sphere", lambda: P.Sphere(radius=1.5), lambda m, v: sphere(m, v, 1.5)),
    *_on_corners("WeightNorm", P.WeightNorm, weight_norm, keeps_weight=True),
    *_on_corners("SpectralNorm", lambda: P.SpectralNorm(norm=1.5), lambda m, v: 1.5 * spectral(m, v)),
    *_on_corners(
        "SpectralNorm at most 0.3",
        lambda: P.SpectralNorm(at_most=0.3),
        lambda m, v: spectrally_bounded(m, v, 0.3),
        corners=("Linear", "grouped Conv2d"),
    ),
    *_on_corners(
        "SpectralNorm at most 50",
        lambda: P.SpectralNorm(at_most=50.0),
        lambda m, v: spectrally_bounded(m, v, 50.0),
        keeps_weight=True,
        corners=("Conv2d",),
    ),
    *_on_corners("Orthogonal", P.Orthogonal, orthogonal),
    *_on_corners("OrthogonalConv", P.OrthogonalConv, orthogonal_conv),
    *_on_corners("WeightStandardization", P.WeightStandardization, standardized),
    *_on_corners(
        "scaled WeightStandardization",
        lambda: P.WeightStandardization(scale="fan_in", gain=1.7, learn_gain=True),
        centred,
        corners=("Linear", "ConvTranspose2d"),
    ),
    *_on_corners(
        "SpectralNorm of conv",
        lambda: P.SpectralNorm(view="conv"),
        conv_spectral,
        corners=("Conv2d", "grouped Conv2d", "ConvTranspose2d"),
    ),
    *_on_corners(
        "SpectralNorm of conv at most 0.3",
        lambda: P.SpectralNorm(view="conv", at_most=0.3),
        lambda m, v: conv_spectrally_bounded(m, v, 0.3),
        corners=("Conv2d",),
    ),
]
