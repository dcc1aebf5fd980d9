"""Orthonormal filters: the polar factor of the trained matrix, and its derivatives of every order."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from gonio.execution import apply, cut_like, is_sharded, ordinary_eager
from gonio.geometry.norms import small_side, whole, widen
from gonio.geometry.views import from_matrices, matrix_view
from gonio.parametrizations.parametrization import Parametrization, positive


class Orthogonal(Parametrization):
    r"""Orthonormal filters: the polar factor :math:`Q = (V V^\top)^{-1/2} V` of each group's matrix, times s.

    Q is the nearest matrix to V with orthonormal rows, or columns if there are more filters than entries.
    The filters of one group are orthonormal; those of different groups act on different inputs. A depthwise
    layer has one filter per group, of unit norm. Attaching projects the trained tensor, so training starts
    from the orthogonal matrix that is nearest to the weight.

    Unlike the exponential or the Cayley transform of a skew matrix, this map needs no base point, so the
    trained tensor alone determines the weight and a plain checkpoint is a valid start; it reaches every
    orthogonal matrix (Cayley excludes those with eigenvalue −1); and for one row it equals :class:`Sphere`.
    Its derivative divides by sums of two singular values of V, or by one for directions out of the span of the
    rows. Plain gradient steps only raise the singular values from 1, as they raise norms under weight
    normalisation, so the map stays well conditioned; weight decay lowers them. Directions in which V is zero
    (a zero weight) stay zero.

    Invariances: :math:`V \to A V` for a symmetric positive A that commutes with :math:`V V^\top`, as rescaling of V.

    Raises: InvalidArgumentError if the scale s, every singular value of the weight, is not positive and finite.

    Cost: per read, one eigendecomposition of the smaller side and two products of the size of a Gram matrix; four for
    a weight of a condition above 2, and on accelerators.

    Example:
        >>> layer = nn.Conv2d(4, 6, 3, groups=2)
        >>> _ = gonio.parametrizations.attach(layer, "weight", gonio.parametrizations.Orthogonal())
        >>> filters = layer.weight.view(2, 3, 18)
        >>> torch.allclose(filters @ filters.mT, torch.eye(3).expand(2, 3, 3), atol=1e-6)
        True

    References:
        [1] N. J. Higham, "Functions of Matrices", SIAM 2008, chapter 8: the polar decomposition, Theorem 8.4
        (nearest) and section 8.3 (derivative). [2] P.-O. Löwdin, J. Chem. Phys. 18, 1950.
        Differs: torch's ``parametrizations.orthogonal`` makes each 2-D kernel of a convolution orthogonal,
        which says nothing about its filters.
    """

    options: ClassVar[tuple[str, ...]] = ("scale",)

    def __init__(self, *, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = positive("Orthogonal", "scale", scale, "Often it is 1.")

    def weight_of(self, raw: Tensor) -> Tensor:
        if is_sharded(raw):  # its own gradient would be left as partial sums, to which FSDP 2 cannot add
            return cut_like(self.weight_of(whole(raw)), raw)
        layout = self.bound_layout
        if layout.matrices == 1 and not layout.transposed:
            factor = polar(raw.flatten(1)).view_as(raw)  # operations on a stack take longer
        else:
            factor = from_matrices(polar(matrix_view(raw, layout)), raw.shape, layout)
        return factor if self.scale == 1 else factor * self.scale

    @torch.no_grad()
    def right_inverse(self, weight: Tensor) -> Tensor:
        """The nearest orthogonal tensor; orthonormal rows complete a rank-deficient weight."""
        layout = self.bound_layout
        nearest = completed_polar(matrix_view(widen(weight), layout))
        return from_matrices(nearest, weight.shape, layout).to(weight.dtype)

    def holds(self, weight: Tensor) -> bool:
        """Whether the rows (or columns) of each group are orthonormal up to the scale and rounding."""
        matrices = matrix_view(weight.detach().double(), self.bound_layout) / self.scale
        return bool(defect_of(matrices) <= 10 * max(matrices.shape[-2:]) ** 0.5 * torch.finfo(weight.dtype).eps)


def defect_of(matrices: Tensor) -> Tensor:
    """The largest entry of |A Aᴴ − I| of real or complex matrices, by their smaller sides."""
    small = small_side(matrices)
    return (small @ small.mH - torch.eye(small.shape[-2], dtype=small.dtype, device=small.device)).abs().max()


# Note [Polar derivative]
# For a wide A = H Q with H = (A Aᵀ)^{1/2}, a direction P changes Q by
#     J(P) = Ω Q + H⁻¹ (P − P Qᵀ Q),   where  H Ω + Ω H = P Qᵀ − Q Pᵀ:
# a rotation of the rows among themselves, and a tilt of the rows out of their span. In the eigenbasis of H
# the first has factors 1/(s_i + s_j) and the second 1/s_i, so equal singular values are no problem, unlike
# in the derivative of an SVD. J is its own transpose: it serves backwards and forwards.


def polar(matrices: Tensor) -> Tensor:
    """The nearest matrix with orthonormal rows (columns, if there are more rows) to a matrix or to each of a stack.

    It is unique for a matrix of full rank. Singular values below about √(n·eps) of the largest cannot be
    distinguished from zero and shrink towards zero; a zero matrix stays zero, with the gradient of the identity.
    """
    if matrices.shape[-2] > matrices.shape[-1]:
        return polar(matrices.mT).mT
    if torch.compiler.is_compiling():
        # Plain operations with the first derivative, which a compiler can trace. torch raises an error for the
        # second derivative of any compiled graph.
        factor, vectors, values = (x.detach() for x in _decomposed(matrices.detach()))
        return factor + _derivative(factor, vectors, values, matrices - matrices.detach())
    found: Tensor = apply(_EagerPolar, matrices) if ordinary_eager(matrices) else _Polar.apply(matrices)[0]
    return found


def completed_polar(matrices: Tensor) -> Tensor:
    """As :func:`polar`, without a derivative; orthonormal rows complete a rank-deficient matrix."""
    u, _, vh = torch.linalg.svd(matrices, full_matrices=False)
    return u @ vh


def _decomposed(matrices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Q, and the eigenvectors and eigenvalues of H."""
    values, vectors = torch.linalg.eigh(matrices @ matrices.mT)
    if _well_conditioned(values):
        values = values.sqrt()
        return _inverse_root(vectors, values) @ matrices, vectors, values
    largest = values[..., -1:]
    floor = matrices.shape[-2] * torch.finfo(matrices.dtype).eps * largest
    zero = largest < torch.finfo(matrices.dtype).tiny
    values = torch.where(zero, 1.0, torch.maximum(values, floor)).sqrt()
    factor = corrected(_inverse_root(vectors, values) @ matrices)  # by the digits that the Gram matrix lost
    return torch.where(zero.unsqueeze(-1), matrices, factor), vectors, values


def corrected(factor: Tensor) -> Tensor:
    """One Newton–Schulz step: the polar factor of a matrix that is nearly one, with its rounding errors squared."""
    if factor.shape[-2] > factor.shape[-1]:
        return 1.5 * factor - 0.5 * factor @ (factor.mT @ factor)
    return 1.5 * factor - 0.5 * (factor @ factor.mT) @ factor


def _well_conditioned(values: Tensor) -> bool:
    """Whether the Gram matrices with these eigenvalues lost no digits that an SVD would have kept: condition below 2.

    Entries of Q then differ by 3e-7 from the exact ones in float32, as those of an SVD do. Weights stay so in training
    with this map. False where reading the numbers would wait for a device, or is not possible.
    """
    if not values.is_cpu or not ordinary_eager(values):
        return False
    low, high = values.aminmax()
    return low.item() > max(high.item() / 4, torch.finfo(values.dtype).tiny)


def _derivative(factor: Tensor, vectors: Tensor, values: Tensor, direction: Tensor) -> Tensor:
    """J(direction), see Note [Polar derivative]; three products of the matrices' size, the others are smaller."""
    turned = direction @ factor.mT
    inner = vectors.mT @ (turned - turned.mT) @ vectors
    rotation = vectors @ (inner / (values.unsqueeze(-1) + values.unsqueeze(-2))) @ vectors.mT
    inverse = _inverse_root(vectors, values)
    return (rotation - inverse @ turned) @ factor + inverse @ direction


def _inverse_root(vectors: Tensor, values: Tensor) -> Tensor:
    """H⁻¹."""
    return (vectors / values.unsqueeze(-2)) @ vectors.mT


class _Polar(torch.autograd.Function):
    """:func:`_decomposed` with derivatives of Q in both modes and of every order."""

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
        if not torch.is_grad_enabled():
            return _derivative(factor, vectors, values, grad)
        # J(grad) in operations that can be differentiated again
        factor, vectors, values = _Polar.apply(matrices)
        root = factor @ matrices.mT
        root = (root + root.mT) / 2
        # The value is the H of :func:`_decomposed`, whose singular values are not below its floor; the derivative
        # is that of H itself.
        root = root + ((vectors * values.unsqueeze(-2)) @ vectors.mT - root).detach()
        turned = grad @ factor.mT
        rotation = _Lyapunov.apply(root, turned - turned.mT)
        return rotation @ factor + torch.linalg.solve(root, grad - turned @ factor)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> tuple[Tensor, None, None]:
        _, factor, vectors, values = ctx.saved_tensors
        return _derivative(factor, vectors, values, tangent), None, None


class _EagerPolar(_Polar):
    """The same for reverse mode alone: torch takes half as long to call a function without `setup_context`."""

    generate_vmap_rule = False
    setup_context = torch.autograd.Function.setup_context

    @staticmethod
    def forward(ctx: Any, matrices: Tensor) -> Tensor:  # type: ignore[override]
        factor, vectors, values = _decomposed(matrices)
        ctx.save_for_backward(matrices, factor, vectors, values)
        return factor


class _Lyapunov(torch.autograd.Function):
    """Ω with H Ω + Ω H = K, for a symmetric positive H; its derivatives solve two more such equations."""

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
