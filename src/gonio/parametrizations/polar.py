"""The orthogonal polar factor of a matrix and its derivatives of every order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["nearest_orthogonal", "polar"]

# Note [Polar derivative]
# For a wide A = H Q with H = (A Aᵀ)^{1/2}, a direction P changes Q by
#     J(P) = Ω Q + H⁻¹ (P − P Qᵀ Q),   where  H Ω + Ω H = P Qᵀ − Q Pᵀ:
# a rotation of the rows among themselves, and a tilt of the rows out of their span. In the eigenbasis of H
# the first has factors 1/(s_i + s_j) and the second 1/s_i, so equal singular values are no problem, unlike
# in the derivative of an SVD. J is its own transpose: it serves backwards and forwards.


def polar(matrices: Tensor) -> Tensor:
    """The nearest matrix with orthonormal rows (columns, if there are more rows) to each of a stack.

    Of full rank it is unique. Singular values below about √(n·eps) of the largest are not told from zero and
    shrink towards zero instead; a zero matrix stays zero, with the gradient of the identity.

    Shape:
        - ``matrices``: (groups, n, d); the output is the same.
    """
    if matrices.shape[-2] > matrices.shape[-1]:
        return polar(matrices.mT).mT
    if torch.compiler.is_compiling():
        return _linearised(matrices)
    factor: Tensor = _Polar.apply(matrices)[0]
    return factor


@torch.no_grad()
def nearest_orthogonal(matrices: Tensor) -> Tensor:
    """As :func:`polar`, exactly orthogonal for every input: missing directions are completed."""
    u, _, vh = torch.linalg.svd(matrices, full_matrices=False)
    return u @ vh


def _decomposed(matrices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Q, and the eigenvectors and eigenvalues of H."""
    values, vectors = torch.linalg.eigh(matrices @ matrices.mT)
    largest = values[..., -1:]
    floor = matrices.shape[-2] * torch.finfo(matrices.dtype).eps * largest
    zero = largest < torch.finfo(matrices.dtype).tiny
    values = torch.where(zero, 1.0, torch.maximum(values, floor)).sqrt()
    factor = (vectors / values.unsqueeze(-2)) @ (vectors.mT @ matrices)
    # One Newton–Schulz step: the digits that the Gram matrix lost come back.
    factor = 1.5 * factor - 0.5 * (factor @ factor.mT) @ factor
    return torch.where(zero.unsqueeze(-1), matrices, factor), vectors, values


def _linearised(matrices: Tensor) -> Tensor:
    """Q with its first derivative in plain operations, which a compiler can trace.

    A compiled graph has no second derivative in any case; torch says so if one is asked for.
    """
    factor, vectors, values = (x.detach() for x in _decomposed(matrices.detach()))
    return factor + _moved(factor, vectors, values, matrices - matrices.detach())


class _Polar(torch.autograd.Function):
    """:func:`_decomposed` with derivatives of Q, both ways and of every order."""

    generate_vmap_rule = True

    @staticmethod
    def forward(matrices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return _decomposed(matrices)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*inputs, *output)
        ctx.save_for_forward(*inputs, *output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> Tensor:
        matrices, factor, vectors, values = ctx.saved_tensors
        if torch.is_grad_enabled():  # to be differentiated again
            return _differentiable(matrices, grad)
        return _moved(factor, vectors, values, grad)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> tuple[Tensor, None, None]:
        _, factor, vectors, values = ctx.saved_tensors
        return _moved(factor, vectors, values, tangent), None, None


def _moved(factor: Tensor, vectors: Tensor, values: Tensor, direction: Tensor) -> Tensor:
    """J(direction), see Note [Polar derivative]."""
    turned = vectors.mT @ (direction @ factor.mT) @ vectors
    within = (turned - turned.mT) / (values.unsqueeze(-1) + values.unsqueeze(-2))
    basis = vectors.mT @ factor
    out = (vectors.mT @ direction - turned @ basis) / values.unsqueeze(-1)
    return vectors @ (within @ basis + out)


def _differentiable(matrices: Tensor, direction: Tensor) -> Tensor:
    """J(direction) in operations whose derivatives are right again."""
    factor, vectors, values = _Polar.apply(matrices)
    root = factor @ matrices.mT
    root = (root + root.mT) / 2
    # In value the H of :func:`_decomposed`, whose singular values are not below its floor; in derivative H itself.
    root = root + ((vectors * values.unsqueeze(-2)) @ vectors.mT - root).detach()
    turned = direction @ factor.mT
    rotation = _Lyapunov.apply(root, turned - turned.mT)
    return rotation @ factor + torch.linalg.solve(root, direction - turned @ factor)


class _Lyapunov(torch.autograd.Function):
    """Ω with H Ω + Ω H = K, for a symmetric positive H; differentiable by two more such equations."""

    generate_vmap_rule = True

    @staticmethod
    def forward(root: Tensor, right: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(root)
        inner = vectors.mT @ right @ vectors
        return vectors @ (inner / (values.unsqueeze(-1) + values.unsqueeze(-2))) @ vectors.mT

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)
        ctx.save_for_forward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        root, solution = ctx.saved_tensors
        pulled = _Lyapunov.apply(root, grad)
        return -(pulled @ solution.mT + solution.mT @ pulled), pulled

    @staticmethod
    def jvp(ctx: Any, of_root: Tensor, of_right: Tensor) -> Tensor:
        root, solution = ctx.saved_tensors
        moved: Tensor = _Lyapunov.apply(root, of_right - of_root @ solution - solution @ of_root)
        return moved
