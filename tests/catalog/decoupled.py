"""Decoupled layers from their definition, in float64: explicit patches, norms, angles; and their cases.

Liu et al., "Decoupled Networks" (CVPR 2018): y = h(‖w‖, ‖x‖) g(θ) + b for every filter and patch. No
convolution is used: patches are cut out tap by tap. The formulas share nothing with the library.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from catalog.cases import LayerCase, LayerChange
from gonio import nn as gnn


def magnitude(kind: object, norm: Tensor, c: Mapping[str, Tensor]) -> Tensor:
    """h of the norm, by the name of the magnitude; `c` contains its coefficients."""
    name, alpha, beta, rho = type(kind).__name__, c["alpha"], c.get("beta"), c.get("radius")
    if name == "Sphere":
        return torch.where(norm > 0, alpha * torch.ones_like(norm), torch.zeros_like(norm))
    if name == "Ball":
        return alpha * torch.minimum(norm, rho * torch.ones_like(norm)) / rho
    if name == "Tanh":
        return alpha * torch.tanh(norm / rho)
    if name == "Linear":
        return alpha * norm
    if name == "Segmented":
        return torch.where(norm <= rho, alpha * norm, beta * norm + (alpha - beta) * rho)
    if name == "Logarithm":
        return alpha * torch.log(1 + norm)
    assert name == "Mixed"
    return alpha * norm + beta * torch.log(1 + norm)


def angular(kind: object, theta: Tensor) -> Tensor:
    """g of the angle, by the name of the activation."""
    name = type(kind).__name__
    if name == "Cosine":
        return torch.cos(theta)
    if name == "Linear":
        return 1 - 2 * theta / math.pi
    if name == "RectifiedCosine":
        return torch.cos(theta).clamp_min(0)
    if name == "SquaredCosine":
        return torch.sign(torch.cos(theta)) * torch.cos(theta) ** 2
    assert name == "Sigmoid"
    k = kind.k  # type: ignore[attr-defined]
    edge = math.exp(-math.pi / (2 * k))
    inner = torch.exp(theta / k - math.pi / (2 * k))
    return (1 + edge) / (1 - edge) * (1 - inner) / (1 + inner)


def decoupled(layer: nn.Module, x: Tensor) -> Tensor:
    """The output of a decoupled layer of `gonio.nn`, from its parameters, buffers and options."""
    patches, weight, mask = _patches(layer, x)  # (N, G, d, *S), (G, F, d), (1, 1, d, *S)
    dims = patches.dim() - 3
    rows = weight[(None, ..., *(None for _ in range(dims)))]  # (1, G, F, d, *S)
    norm = _root((patches**2).sum(2, keepdim=True))  # (N, G, 1, *S)
    length = _root((rows**2 * mask.unsqueeze(1)).sum(3))  # (1, G, F, *S)
    dot = (patches.unsqueeze(2) * rows).sum(3)
    bottom = norm * length
    cosine = torch.where(bottom > 0, dot / bottom.where(bottom > 0, torch.ones_like(bottom)), torch.zeros_like(dot))
    g = _of_cosine(layer.operator.angular, cosine)
    g = torch.where(bottom > 0, g, torch.zeros_like(g))
    out = (_magnitude_of(layer, norm, length, dims) * g).flatten(1, 2)
    if layer.bias is not None:
        out = out + layer.bias[(slice(None), *(None for _ in range(dims)))]
    return out.flatten(1).reshape(*x.shape[:-1], -1) if isinstance(layer, nn.Linear) else out


def _of_cosine(kind: object, cosine: Tensor) -> Tensor:
    if type(kind).__name__ == "Cosine":
        return cosine
    return angular(kind, torch.acos(cosine.clamp(-1 + 1e-14, 1 - 1e-14)))


def _root(square: Tensor) -> Tensor:
    return torch.where(square > 0, square.where(square > 0, torch.ones_like(square)).sqrt(), torch.zeros_like(square))


def _magnitude_of(layer: nn.Module, norm: Tensor, length: Tensor, dims: int) -> Tensor:
    groups, kind, weighted = norm.shape[1], layer.operator.magnitude, layer.operator.weighted
    learned = dict(layer.named_parameters())
    learned |= {name[4:]: values.exp() for name, values in learned.items() if name.startswith("log_")}
    filters = learned["weight"].shape[1] * groups if "Transpose" in type(layer).__name__ else len(learned["weight"])
    c = {}
    for each in dataclasses.fields(kind):
        given = getattr(kind, each.name)
        if isinstance(given, float):
            values = learned.get(each.name, torch.tensor(given, dtype=norm.dtype))
            c[each.name] = values.expand(filters).reshape(groups, -1, *(1 for _ in range(dims)))
    own = c.get("radius")
    if layer.mean_norm is not None:
        over = (0, *range(2, norm.dim()))
        mean = norm.mean(over) if layer.training else layer.mean_norm
        c["radius"] = own * mean.reshape(groups, 1, *(1 for _ in range(dims)))
    if weighted == "tanh_product":
        return c["alpha"] * torch.tanh(norm * length / c["radius"])
    h = magnitude(kind, norm, c)
    if weighted == "linear":
        return h * length
    return h * torch.tanh(length / own) if weighted == "tanh_each" else h


def _patches(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Patches, filters and which entries of a patch exist."""
    if isinstance(layer, nn.Linear):
        rows = x.reshape(-1, x.shape[-1])[:, None, :]
        return rows, layer.weight[None], torch.ones_like(rows[:1])
    if isinstance(layer, nn.modules.conv._ConvTransposeNd):
        return _transposed(layer, x)
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    padded = F.pad(x, list(_padding(layer)), mode)
    cut = _cut(padded, layer.kernel_size, layer.dilation, layer.stride)
    patches = _by_group(cut, layer.groups)
    weight = layer.weight.reshape(layer.groups, -1, layer.weight[0].numel())
    return patches, weight, torch.ones_like(patches[:1, :1])


def _padding(layer: nn.Module) -> list[int]:
    """(before, after) of the last dimension first, as F.pad wants it."""
    found: list[int] = []
    for axis in reversed(range(len(layer.kernel_size))):
        if layer.padding == "valid":
            before = after = 0
        elif layer.padding == "same":
            missing = layer.dilation[axis] * (layer.kernel_size[axis] - 1)
            before, after = missing // 2, missing - missing // 2
        else:
            before = after = layer.padding[axis]
        found += [before, after]
    return found


def _cut(padded: Tensor, kernel: Sequence[int], dilation: Sequence[int], stride: Sequence[int]) -> Tensor:
    """(N, C, taps, *positions): one strided slice per tap."""
    sizes = padded.shape[2:]
    counts = [(n - d * (k - 1) - 1) // s + 1 for n, k, d, s in zip(sizes, kernel, dilation, stride, strict=True)]
    taps = []
    for offsets in itertools.product(*(range(k) for k in kernel)):
        window = tuple(
            slice(o * d, o * d + s * (c - 1) + 1, s)
            for o, d, s, c in zip(offsets, dilation, stride, counts, strict=True)
        )
        taps.append(padded[(slice(None), slice(None), *window)])
    return torch.stack(taps, 2)


def _by_group(cut: Tensor, groups: int) -> Tensor:
    """(N, G, inputs of a filter, *positions)."""
    return cut.reshape(cut.shape[0], groups, -1, *cut.shape[3:])


def _transposed(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A transposed convolution is a convolution, flipped, of the input with zeros between its entries."""
    ends = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
    spots = [torch.arange(n) * s for n, s in zip(x.shape[2:], layer.stride, strict=True)]
    size = [(n - 1) * s + 1 + 2 * e for n, s, e in zip(x.shape[2:], layer.stride, ends, strict=True)]
    wide = [n + p for n, p in zip(size, layer.output_padding, strict=True)]
    index = torch.meshgrid(*(spot + e for spot, e in zip(spots, ends, strict=True)), indexing="ij")

    def spread(values: Tensor) -> Tensor:
        canvas = values.new_zeros(*values.shape[:2], *wide)
        canvas[(slice(None), slice(None), *index)] = values
        return canvas

    inside = tuple(slice(p, n - p) for p, n in zip(layer.padding, wide, strict=True))
    steps = [1] * len(size)
    cut = _cut(spread(x)[(..., *inside)], layer.kernel_size, layer.dilation, steps)
    mask = _cut(spread(torch.ones_like(x[:1, :1]))[(..., *inside)], layer.kernel_size, layer.dilation, steps)
    flipped = layer.weight.flip(tuple(range(2, layer.weight.dim())))
    grouped = flipped.reshape(layer.groups, -1, *flipped.shape[1:])  # (G, inputs, F, *k)
    weight = grouped.transpose(1, 2).reshape(layer.groups, flipped.shape[1], -1)
    inputs = x.shape[1] // layer.groups
    return (
        _by_group(cut, layer.groups),
        weight,
        mask.repeat(1, inputs, 1, *(1 for _ in size)).flatten(1, 2).unsqueeze(1),
    )


# --- the cases ------------------------------------------------------------------------------------


def _filters_scaled(layer: nn.Module, x: Tensor) -> tuple[nn.Module, Tensor]:
    """Every filter times 3; all filters alike, so that it also holds for transposed convolutions."""
    with torch.no_grad():
        layer.weight.mul_(3)
    return layer, x


def _filters_flipped(layer: nn.Module, x: Tensor) -> tuple[nn.Module, Tensor]:
    with torch.no_grad():
        layer.weight.neg_()
    return layer, x


def _input_doubled(layer: nn.Module, x: Tensor) -> tuple[nn.Module, Tensor]:
    return layer, 2 * x


_SCALINGS: Mapping[str, LayerChange] = {"filters scaled": _filters_scaled, "input doubled": _input_doubled}
_SIGNS: Mapping[str, LayerChange] = {"filters flipped": _filters_flipped}
_BOTH_FLIPPED: Mapping[str, LayerChange] = {"filters and input flipped": lambda f, x: _filters_flipped(f, -x)}


def _decoupled(
    name: str,
    make: Callable[[], nn.Module],
    *shape: int,
    keeps: Sequence[str] = ("filters scaled",),
) -> LayerCase:
    """A decoupled layer; `keeps` names the scalings that leave its output as it is. All others change it."""
    return LayerCase(
        name=name,
        make=make,
        shape=shape,
        reference=decoupled,
        invariances={name: change for name, change in _SCALINGS.items() if name in keeps} | _BOTH_FLIPPED,
        sensitivities={name: change for name, change in _SCALINGS.items() if name not in keeps} | _SIGNS,
        channels_last=len(shape) == 4,
        couples_batch=getattr(make().operator.magnitude, "radius_in", "absolute") == "mean_norm",
    )


LAYERS = [
    _decoupled(
        "DecoupledLinear",
        lambda: gnn.DecoupledLinear(5, 4),
        *(3, 5),
        keeps=tuple(_SCALINGS),  # the radius is measured in mean norms, so it doubles too
    ),
    _decoupled(
        "DecoupledLinear, linear in the angle, tanh of both norms",
        lambda: gnn.DecoupledLinear(
            5,
            4,
            magnitude=gnn.magnitude.Tanh(radius=2.0, radius_in="absolute"),
            angular=gnn.angular.Linear(),
            weighted="tanh_each",
        ),
        *(3, 5),
        keeps=(),
    ),
    _decoupled(
        "DecoupledConv1d, logarithm, sigmoid",
        lambda: gnn.DecoupledConv1d(
            4,
            6,
            3,
            padding=1,
            padding_mode="circular",
            magnitude=gnn.magnitude.Logarithm(alpha=1.5),
            angular=gnn.angular.Sigmoid(),
        ),
        *(2, 4, 7),
    ),
    _decoupled(
        "DecoupledConv2d, groups, stride, dilation",
        lambda: gnn.DecoupledConv2d(4, 6, 3, stride=2, padding=2, dilation=2, groups=2),
        *(2, 4, 7, 6),
        keeps=tuple(_SCALINGS),
    ),
    _decoupled(
        "DecoupledConv2d, learned ball, uneven padding",
        lambda: gnn.DecoupledConv2d(
            3,
            4,
            2,
            padding="same",
            bias=False,
            magnitude=gnn.magnitude.Ball(radius=2.0, learn_radius=True, radius_in="absolute"),
        ),
        *(2, 3, 5, 5),
    ),
    _decoupled(
        "DecoupledConv2d, sphere, linear in the angle",
        lambda: gnn.DecoupledConv2d(3, 4, 3, magnitude=gnn.magnitude.Sphere(alpha=2.0), angular=gnn.angular.Linear()),
        *(2, 3, 5, 5),
        keeps=tuple(_SCALINGS),
    ),
    _decoupled(
        "DecoupledConv2d, all learned, squared cosine, weighted",
        lambda: gnn.DecoupledConv2d(
            3,
            4,
            3,
            padding=1,
            padding_mode="reflect",
            magnitude=gnn.magnitude.Segmented(learn_radius=True, learn_alpha=True, learn_beta=True),
            angular=gnn.angular.SquaredCosine(),
            weighted="linear",
        ),
        *(2, 3, 5, 4),
        keeps=(),
    ),
    _decoupled(
        "DecoupledConv2d, convolution with ReLU",
        lambda: gnn.DecoupledConv2d(
            *(3, 4, 3),
            padding=1,
            bias=False,
            magnitude=gnn.magnitude.Linear(),
            angular=gnn.angular.RectifiedCosine(),
            weighted="linear",
        ),
        *(2, 3, 5, 4),
        keeps=(),
    ),
    _decoupled(
        "DecoupledConv2d, depthwise, tanh of the product",
        lambda: gnn.DecoupledConv2d(4, 4, 3, padding=1, groups=4, weighted="tanh_product"),
        *(2, 4, 5, 5),
        keeps=("input doubled",),
    ),
    _decoupled(
        "DecoupledConv2d, unit filters",
        lambda: gnn.DecoupledConv2d(3, 4, 3, magnitude=gnn.magnitude.Linear(alpha=0.5, learn_alpha=True)),
        *(2, 3, 5, 5),
    ),
    _decoupled(
        "DecoupledConv3d, mixed",
        lambda: gnn.DecoupledConv3d(2, 3, 2, magnitude=gnn.magnitude.Mixed()),
        *(2, 2, 3, 4, 3),
    ),
    _decoupled(
        "DecoupledConvTranspose1d, ball",
        lambda: gnn.DecoupledConvTranspose1d(
            4, 6, 4, stride=3, groups=2, magnitude=gnn.magnitude.Ball(), angular=gnn.angular.SquaredCosine()
        ),
        *(2, 4, 5),
        keeps=tuple(_SCALINGS),
    ),
    _decoupled(
        "DecoupledConvTranspose2d, weighted",
        lambda: gnn.DecoupledConvTranspose2d(3, 4, 3, stride=2, padding=1, output_padding=1, weighted="linear"),
        *(2, 3, 3, 4),
        keeps=("input doubled",),
    ),
    _decoupled(
        "DecoupledConvTranspose3d, sphere",
        lambda: gnn.DecoupledConvTranspose3d(2, 3, 2, magnitude=gnn.magnitude.Sphere()),
        *(2, 2, 2, 3, 2),
        keeps=tuple(_SCALINGS),
    ),
]
