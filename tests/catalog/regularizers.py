"""Regularizers written out from their formulas, pair by pair, in float64, slow on purpose; and their cases.

Every function takes a weight as stored, flattens each filter into a row (dim 0 are the filters of a
plain layer) and loops. The formulas share nothing with the library.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from catalog.cases import RegularizerCase, TensorChange, seeded
from gonio import regularizers as R


def rows(weight: Tensor) -> Tensor:
    return weight.reshape(weight.shape[0], -1)


def _pairs(n: int) -> list[tuple[int, int]]:
    return [(i, j) for i in range(n) for j in range(n) if i != j]


def _total(terms: list[Tensor], like: Tensor) -> Tensor:
    return torch.stack(terms).sum() if terms else like.new_zeros(()) * like.sum()


def half_squared_norm(weight: Tensor) -> Tensor:
    return sum(x**2 for x in weight.flatten()) / 2  # type: ignore[return-value]


def norm_power(weight: Tensor, *, power: float) -> Tensor:
    return sum(x**2 for x in weight.flatten()) ** (power / 2) / power  # type: ignore[return-value]


def row_orthogonality(weight: Tensor) -> Tensor:
    """Σ_ij (⟨w_i, w_j⟩ − δ_ij)²."""
    w = rows(weight)
    return _total([(torch.dot(a, b) - float(i == j)) ** 2 for i, a in enumerate(w) for j, b in enumerate(w)], w)


def orthogonality(weight: Tensor) -> Tensor:
    """The row form on the side that has fewer vectors."""
    w = rows(weight)
    return row_orthogonality(w if w.shape[0] <= w.shape[1] else w.T)


def off_diagonal(weight: Tensor) -> Tensor:
    """Σ_{i≠j} ⟨w_i, w_j⟩²."""
    w = rows(weight)
    return _total([torch.dot(w[i], w[j]) ** 2 for i, j in _pairs(len(w))], w)


def squared_cosines(weight: Tensor) -> Tensor:
    """Σ_{i≠j} cos² θ_ij."""
    w = rows(weight)
    return _total(
        [torch.dot(w[i], w[j]) ** 2 / (torch.dot(w[i], w[i]) * torch.dot(w[j], w[j])) for i, j in _pairs(len(w))],
        w,
    )


def double_orthogonality(weight: Tensor) -> Tensor:
    return row_orthogonality(rows(weight)) + row_orthogonality(rows(weight).T)


def worst_entry(weight: Tensor) -> Tensor:
    w = rows(weight)
    w = w if w.shape[0] <= w.shape[1] else w.T
    return torch.stack(
        [(torch.dot(a, b) - float(i == j)).abs() for i, a in enumerate(w) for j, b in enumerate(w)]
    ).max()


def worst_cosine(weight: Tensor) -> Tensor:
    w = rows(weight)
    return torch.stack([torch.cosine_similarity(w[i], w[j], dim=0).abs() for i, j in _pairs(len(w))]).max()


def spectral_defect(weight: Tensor) -> Tensor:
    """max |σ² − 1| over the singular values, by a full decomposition."""
    return (torch.linalg.svdvals(rows(weight)).square() - 1).abs().max()


def energy(weight: Tensor, power: int, *, angle: bool = False, half_space: bool = False, eps: float = 1e-4) -> Tensor:
    """Mean over i<j of −log ρ or ρ^(−s); ρ² = 2 − 2 cos + eps, or ρ = θ/π + eps."""
    w = rows(weight)
    w = torch.cat([w, -w]) if half_space else w
    found = []
    for a, b in itertools.combinations(w, 2):
        cosine = torch.dot(a, b) / (a.norm() * b.norm())
        if angle:
            a, b = a / a.norm(), b / b.norm()
            # acos loses half of the digits at a filter and its negative
            rho = 2 * torch.atan2(_length(a - b), _length(a + b)) / math.pi + eps
            found.append(-torch.log(rho) if power == 0 else rho ** (-power))
        else:
            square = 2 - 2 * cosine + eps
            found.append(-torch.log(square) if power == 0 else square ** (-power / 2))
    return torch.stack(found).mean()


def _length(x: Tensor) -> Tensor:
    """√Σx², with a derivative of 0 at 0."""
    square = x.square().sum()
    return square.sqrt() if square.detach() > 0 else square * 0


def conv_operator(weight: Tensor, size: int, stride: int) -> Tensor:
    """The matrix of a circular 2-D convolution on size × size maps, entry by entry."""
    out, inp, kh, kw = weight.shape
    side = size // stride
    operator = weight.new_zeros(out, side, side, inp, size, size)
    for o, y, x, i, a, b in itertools.product(range(out), range(side), range(side), range(inp), range(kh), range(kw)):
        operator[o, y, x, i, (y * stride + a) % size, (x * stride + b) % size] += weight[o, i, a, b]
    return operator.reshape(out * side * side, inp * size * size)


def conv_orthogonality(weight: Tensor, stride: int = 1) -> Tensor:
    """‖𝒦𝒦ᵀ − I‖_F per output pixel, from the dense operator on a map larger than two kernels."""
    size = stride * (2 * max(weight.shape[2:]) + 1)
    operator = conv_operator(weight, size, stride)
    gram = operator @ operator.T - torch.eye(len(operator), dtype=weight.dtype)
    return gram.norm() / (size // stride)


def log_norm(weight: Tensor, floor: float) -> Tensor:
    norm = torch.sqrt((weight * weight).sum())
    return torch.log(norm) if norm.detach() > floor else math.log(floor) + 0 * weight.sum()


def direction(weight: Tensor) -> Tensor:
    """‖W/‖W‖‖₁."""
    return (weight / torch.sqrt((weight * weight).sum())).abs().sum()


def self_orthogonality(
    outputs: Tensor, *, mean_ratio: float = 100.0, gamma: float = 10.0, center: bool = True, total: bool = False
) -> Tensor:
    """The seed's four steps, pair by pair; `total` sums over pairs instead of averaging."""
    y = outputs.movedim(1, 0).reshape(outputs.shape[1], -1)
    y = y - y.mean(1, keepdim=True) if center else y
    signs = [row / row.norm() for row in torch.tanh(gamma * y)]
    found = [torch.dot(signs[i], signs[j]) for i, j in _pairs(len(signs))]
    if not found:
        return outputs.sum() * 0
    first, second = torch.stack(found).sum(), torch.stack(found).square().sum()
    if total:
        return mean_ratio * first**2 + second
    return mean_ratio * (first / len(found)) ** 2 + second / len(found)


# --- the cases ------------------------------------------------------------------------------------


def _rotated(x: Tensor) -> Tensor:
    """The input space rotated: every filter multiplied by one orthogonal matrix."""
    flat = x.flatten(1)
    return (flat @ torch.linalg.qr(seeded(flat.shape[1], flat.shape[1], seed=3, dtype=x.dtype))[0]).view_as(x)


def _rescaled(x: Tensor) -> Tensor:
    """Each filter times a positive number of its own."""
    return x * (0.5 + torch.arange(len(x), dtype=x.dtype)).view(-1, *[1] * (x.ndim - 1))


_PERMUTED: Mapping[str, TensorChange] = {
    "filters in another order": lambda x: x.roll(1, 0),
    "a filter flipped": lambda x: torch.cat([-x[:1], x[1:]]),
}
_TURNED: Mapping[str, TensorChange] = {**_PERMUTED, "input space rotated": _rotated}
_SCALES: Mapping[str, TensorChange] = {"filters rescaled": _rescaled, "all of it doubled": lambda x: 2 * x}
_SHEARED: Mapping[str, TensorChange] = {"a filter leant on the next": lambda x: torch.cat([x[:1] + x[1:2], x[1:]])}
_ORTHONORMAL = torch.eye(4, 6, dtype=torch.float64)
_SHIFTS = torch.zeros(2, 2, 3, 3, dtype=torch.float64).index_put_(
    (torch.arange(2), torch.arange(2), torch.tensor([0, 2]), torch.tensor([1, 1])), torch.ones(2, dtype=torch.float64)
)


def _penalty(
    name: str,
    make: Callable[[], Any],
    shape: tuple[int, ...],
    reference: Callable[[Tensor], Tensor],
    zero_at: Tensor | None = None,
    *,
    invariances: Mapping[str, TensorChange] = _TURNED,
    sensitivities: Mapping[str, TensorChange] = _SCALES,
    long_to_compile: bool = False,
) -> RegularizerCase:
    """A penalty of a weight; the defaults are the changes of one that reads lengths and angles."""
    return RegularizerCase(
        name=name,
        make=make,
        shape=shape,
        reference=reference,
        zero_at=None if zero_at is None else lambda: zero_at,
        invariances=invariances,
        sensitivities=sensitivities,
        long_to_compile=long_to_compile,
    )


_ANY_LENGTH = {**_TURNED, "filters rescaled": _rescaled}
_ALIKE: Mapping[str, TensorChange] = {"two filters alike": lambda x: torch.cat([x[1:2], x[1:]])}

REGULARIZERS = [
    _penalty("L2", lambda: R.L2(1.0), (4, 6), half_squared_norm, torch.zeros(4, 6, dtype=torch.float64)),
    *(
        _penalty(
            f"NormPower {power}",
            lambda power=power: R.NormPower(1.0, power=power),
            (4, 6),
            partial(norm_power, power=power),
            torch.zeros(4, 6, dtype=torch.float64),
        )
        for power in (1.0, 1.5)
    ),
    _penalty("Orthogonality 4x6", lambda: R.Orthogonality(1.0), (4, 6), orthogonality, _ORTHONORMAL),
    _penalty(
        *("Orthogonality 6x4", lambda: R.Orthogonality(1.0), (6, 4), orthogonality, _ORTHONORMAL),
        invariances={"input space rotated": _rotated},
    ),
    *(
        _penalty(
            f"Orthogonality off the diagonal {rows}x{cols}",
            lambda: R.Orthogonality(1.0, diagonal=False),
            *((rows, cols), off_diagonal, 3 * _ORTHONORMAL),
        )
        for rows, cols in ((4, 6), (6, 4))
    ),
    _penalty(
        "Orthogonality of unit filters",
        lambda: R.Orthogonality(1.0, filters="unit"),
        *((4, 6), squared_cosines, 3 * _ORTHONORMAL),
        invariances=_ANY_LENGTH,
        sensitivities=_SHEARED,
    ),
    _penalty("Orthogonality of a convolution", lambda: R.Orthogonality(1.0), (4, 3, 3, 3), orthogonality),
    _penalty(
        "DoubleOrthogonality",
        lambda: R.DoubleOrthogonality(1.0),
        *((4, 6), double_orthogonality, torch.eye(4, dtype=torch.float64)),
    ),
    _penalty("MutualCoherence", lambda: R.MutualCoherence(1.0), (4, 6), worst_entry, _ORTHONORMAL),
    _penalty(
        "MutualCoherence of unit filters",
        lambda: R.MutualCoherence(1.0, filters="unit"),
        *((6, 4), worst_cosine, 3 * _ORTHONORMAL),
        invariances=_ANY_LENGTH,
        sensitivities=_ALIKE,
    ),
    _penalty(
        "SRIP",
        lambda: R.SRIP(1.0, iterations=100),
        *((3, 5), spectral_defect, _ORTHONORMAL),
        long_to_compile=True,
    ),
    *(
        RegularizerCase(
            name=f"HypersphericalEnergy s={power} {distance}{' half-space' * half}",
            make=lambda p=power, d=distance, h=half: R.HypersphericalEnergy(1.0, power=p, distance=d, half_space=h),
            shape=(4, 6),
            reference=lambda w, p=power, d=distance, h=half: energy(w, p, angle=d == "angle", half_space=h),
            invariances={
                "filters in another order": lambda x: x.roll(1, 0),
                "input space rotated": _rotated,
                "filters rescaled": _rescaled,
                **({"a filter flipped": _PERMUTED["a filter flipped"]} if half else {}),
            },
            sensitivities={**_SHEARED, **({} if half else {"a filter flipped": _PERMUTED["a filter flipped"]})},
        )
        for power, distance, half in (
            (0, "chord", False),
            (1, "chord", True),
            (2, "chord", False),
            (0, "angle", True),
            (1, "angle", False),
            (2, "angle", False),
        )
    ),
    _penalty(
        "ConvOrthogonality",
        lambda: R.ConvOrthogonality(1.0),
        *((2, 2, 3, 3), conv_orthogonality, _SHIFTS),
        invariances=_PERMUTED,
        sensitivities={**_SCALES, "input space rotated": _rotated},
    ),
    _penalty(
        "ScaleShift",
        lambda: R.ScaleShift(1.0, floor=0.1),
        *((4, 6), lambda w: log_norm(w, 0.1), _ORTHONORMAL / 2),
    ),
    *(
        RegularizerCase(
            name=f"SelfOrthogonality {name}",
            reads="outputs",
            make=make,
            shape=shape,
            reference=reference,
            invariances={
                "samples in another order": lambda y: y.flip(0),
                "filters in another order": lambda y: y.roll(1, 1),
                **({} if "paper" in name else {"a constant added to a filter's outputs": lambda y: y + 3}),
            },
            sensitivities={
                "an output leant on the next": lambda y: torch.cat([y[:, :1] + y[:, 1:2], y[:, 1:]], 1),
                **({"a constant added to outputs": lambda y: y + 3} if "paper" in name else {}),
            },
        )
        for name, make, shape, reference in (
            ("", lambda: R.SelfOrthogonality(1.0), (12, 5), self_orthogonality),
            ("of a convolution", lambda: R.SelfOrthogonality(1.0), (3, 4, 3, 2), self_orthogonality),
            ("wide", lambda: R.SelfOrthogonality(1.0), (5, 8), self_orthogonality),
            (
                "paper",
                R.SelfOrthogonality.paper,
                (12, 5),
                lambda y: self_orthogonality(y, center=False, total=True),
            ),
        )
    ),
]
