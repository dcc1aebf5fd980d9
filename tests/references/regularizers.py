"""Regularizers written out from their formulas, pair by pair, in float64; slow on purpose.

Every function takes a weight as stored, flattens each filter into a row (dim 0 are the filters of a
plain layer) and loops. Nothing here comes from the library.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor


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
