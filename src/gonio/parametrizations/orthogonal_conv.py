"""Convolutions that are orthogonal as operators: a product of paraunitary factors, of the kernel's own size."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, prod
from typing import ClassVar

import torch
from torch import Tensor

from gonio.errors import NotApplicableError
from gonio.execution import cut_like, is_sharded
from gonio.geometry.conv_operator import Taps, frequencies, taps_of
from gonio.geometry.norms import whole, widen
from gonio.geometry.views import Layout
from gonio.parametrizations.orthogonal import completed_polar, corrected, defect_of, polar
from gonio.parametrizations.parametrization import Parametrization, positive

_SWEEPS = 8  # of the search for the nearest kernel; twice as many come 1 to 3 % closer

# Note [Paraunitary factors]
# A convolution with circular padding is orthogonal on every grid if its symbol F(ω) = Σ_t K_t e^{−iωt} is unitary for
# every ω. With a projection P the factor (I − P) + P e^{−iω} is, and so is any product of such factors along any axes,
# times an orthogonal matrix. In one dimension every orthogonal kernel is such a product (Vaidyanathan 1993, §14.4).
# A product of two factors whose projections are equal, one of P and one of I − P, is the identity shifted by one tap:
# the factors of an axis alternate between both kinds, so that a kernel of odd size can be a single tap in its centre.
#
# With stride s a first matrix B takes blocks of s pixels per axis (kernel = stride: orthogonal if the matrix is), and
# the factors act on the channels before it: a kernel of size k has k − s of them per axis, K = B * F_1 * … * F_m.
# Dilated taps visit the pixels in another order; with a common divisor of stride and dilation only every gcd-th pixel
# is visited, and the stride that counts is s / gcd.
#
# ⟨K, W⟩ is linear in B and in each P, and ‖K‖ is constant. The nearest kernel to W therefore maximises it, and each
# part has a best value while the others are fixed: the polar factor of the gradient for B, the eigenvectors of the
# largest eigenvalues of its symmetric part for P. For a kernel that is such a product already, the outermost factor
# can be read from the taps at both ends of its axis: K_last = A_last P and K_0 = A_0 (I − P).


@dataclass(frozen=True)
class _Shape:
    """How one group's kernel (out, in, *kernel) is made of factors.

    Attributes:
        swapped: the roles of outputs and inputs are exchanged (more outputs than inputs, without stride).
        out, channels: sides of B's taps; the factors act on `channels`.
        kernel, block: size of the kernel and of B along each axis.
        rank: of each projection. axes: the axis of each factor, from the inside out.
    """

    swapped: bool
    out: int
    channels: int
    kernel: tuple[int, ...]
    block: tuple[int, ...]
    rank: int
    axes: tuple[int, ...]

    @classmethod
    def of(cls, weight: Tensor, layout: Layout) -> _Shape:
        out, channels, kernel = weight.shape[0] // layout.matrices, weight.shape[1], tuple(weight.shape[2:])
        strides = zip(kernel, *layout.per_axis(len(kernel)), strict=True)
        block = tuple(min(k, s // gcd(s, d)) for k, s, d in strides)
        degrees = [k - b for k, b in zip(kernel, block, strict=True)]
        axes = tuple(axis for step in range(max(degrees, default=0)) for axis, e in enumerate(degrees) if step < e)
        swapped = prod(block) == 1 and out > channels
        out, channels = (channels, out) if swapped else (out, channels)
        # The generators of B and of the projections are stored in the trained tensor, which has the kernel's size.
        room = out * (prod(kernel) - prod(block)) // max(1, len(axes))
        return cls(swapped, out, channels, kernel, block, min(channels // 2, room), axes)

    @property
    def first(self) -> int:
        """Number of entries of B."""
        return self.out * self.channels * prod(self.block)

    def moves(self, index: int) -> bool:
        """Whether factor `index` shifts its P; the others of its axis shift I − P."""
        return self.axes[:index].count(self.axes[index]) % 2 == 0

    def unpacked(self, raw: Tensor, groups: int) -> tuple[Tensor, Tensor]:
        """The generators in a trained tensor: of B, (groups, out, channels · block), and of the projections' rows."""
        flat = raw.reshape(groups, -1)
        base = flat[:, : self.first].unflatten(1, (self.out, -1))
        end = self.first + len(self.axes) * self.rank * self.channels
        return base, flat[:, self.first : end].unflatten(1, (len(self.axes), self.rank, self.channels))

    def kernels(self, base: Tensor, rows: Tensor) -> Tensor:
        """K = B * F_1 * … * F_m, (groups, out, in, *kernel), from B and the orthonormal rows of each projection."""
        found = base.unflatten(-1, (self.channels, *self.block))
        for index in range(len(self.axes)):
            found = self.lengthened(found, _projected(found, rows[:, index]), index)
        return found.transpose(1, 2) if self.swapped else found

    def lengthened(self, kernel: Tensor, along: Tensor, index: int) -> Tensor:
        """K * F_index, one tap longer, where `along` is K P."""
        kept, shifted = (kernel - along, along) if self.moves(index) else (along, kernel - along)
        dim = 3 + self.axes[index]
        gap = torch.zeros_like(kernel.narrow(dim, 0, 1))
        return torch.cat((kept, gap), dim) + torch.cat((gap, shifted), dim)

    def shortened(self, kernel: Tensor, along: Tensor, index: int) -> Tensor:
        """K * F_index⁻¹ without the taps by which K is not a product with F_index; `along` is K P."""
        kept, shifted = (kernel - along, along) if self.moves(index) else (along, kernel - along)
        dim, size = 3 + self.axes[index], kernel.shape[3 + self.axes[index]]
        return kept.narrow(dim, 0, size - 1) + shifted.narrow(dim, 1, size - 1)


class OrthogonalConv(Parametrization):
    r"""A convolution that is orthogonal as an operator on feature maps, with circular padding, times `scale`.

    .. math:: K = B * F_1 * \dots * F_m, \quad F_i = (I - P_i) + P_i\, e^{-i\omega_{a(i)}}

    B is a matrix on blocks of stride × stride pixels with orthonormal rows or columns, each :math:`P_i` a projection of
    half of the channels, and :math:`F_i` shifts it by one tap along the axis a(i); with a kernel of size k and stride s
    there are k − s factors per axis. Every singular value of the operator on a periodic grid equals `scale`:

    * with as many outputs as inputs times stride², it is orthogonal;
    * with fewer, its rows are orthonormal: :math:`K K^\top = I`;
    * with more, its columns are: :math:`\lVert K x \rVert = \lVert x \rVert`.

    Groups are separate operators, a transposed convolution is the adjoint of one, dilation permutes pixels. If stride
    and dilation have a common divisor, or the kernel is smaller than the stride, some pixels are never read, and the
    statement is about the others. With zero padding no singular value exceeds `scale`; the columns are orthonormal
    exactly with padding dilation · (k − 1), and the rows without padding. A linear layer is a 1×1 convolution.

    The trained tensor has the shape of the weight and holds the generators of B and of the projections, of which polar
    factors are taken; entries that no factor uses are 0 and have the gradient 0. Attaching replaces the weight by the
    nearest kernel of this form that alternating maximisation finds; :meth:`distance` says how far it is. It is exact
    for a kernel of this form, such as that of :func:`gonio.init.delta_orthogonal_`.

    Invariances: rescaling of the generator of B, or of a projection.

    Args:
        scale: every singular value of the operator.

    Raises: InvalidArgumentError if the scale is not positive and finite; NotApplicableError on attaching to a layer
        with reflected or replicated padding, whose operator repeats pixels.

    Cost: one polar factor of B and one of the stack of projections per read, and 2m products of the kernel with half of
        the channels.

    Example:
        >>> layer = nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular", bias=False)
        >>> _ = gonio.parametrizations.attach(layer, "weight", gonio.parametrizations.OrthogonalConv())
        >>> x = torch.randn(1, 4, 8, 8, generator=gonio.seeding.generator(0))
        >>> torch.allclose(layer(x).norm(), x.norm(), rtol=1e-5)
        True

    References: [1] P. P. Vaidyanathan, "Multirate systems and filter banks", 1993, §14.4: factors of paraunitary
        systems. [2] Q. Li et al., "Preventing gradient attenuation in Lipschitz constrained convolutional networks",
        NeurIPS 2019, §4: products along two axes, projections of half of the channels.
        https://arxiv.org/abs/1911.00937 [3] T. Boissin et al., "An adaptive orthogonal convolution scheme for efficient
        and flexible CNN architectures", ICML 2025: strides by a second orthogonal kernel.
        https://arxiv.org/abs/2501.07930
    Differs: [2] and [3] take inner factors of the larger side for every stride, and train free matrices of their own;
        here the trained tensor keeps the shape of the weight, which limits the rank of the projections of strided
        layers with few outputs.
    """

    options: ClassVar[tuple[str, ...]] = ("scale",)

    def __init__(self, *, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = positive("OrthogonalConv", "scale", scale, "Often it is 1.")

    def bind(self, weight: Tensor, layout: Layout) -> None:
        if layout.padding_mode not in ("zeros", "circular"):
            raise NotApplicableError(
                "OrthogonalConv",
                "weight",
                f"padding_mode={layout.padding_mode!r} repeats pixels, so that no kernel makes the layer orthogonal",
                "Use zero or circular padding.",
            )
        super().bind(weight, layout)

    def weight_of(self, raw: Tensor) -> Tensor:
        if is_sharded(raw):  # every factor needs all of its generator
            return cut_like(self.weight_of(whole(raw)), raw)
        shape, groups = _Shape.of(raw, self.bound_layout), self.bound_layout.matrices
        base, rows = shape.unpacked(raw, groups)
        kernels = shape.kernels(_precise(base), _precise(rows) if rows.numel() else rows).reshape(raw.shape)
        return kernels if self.scale == 1 else kernels * self.scale

    @torch.no_grad()
    def right_inverse(self, weight: Tensor) -> Tensor:
        """Generators of the nearest kernel that is found."""
        shape, groups = _Shape.of(weight, self.bound_layout), self.bound_layout.matrices
        target = widen(weight).reshape(groups, weight.shape[0] // groups, *weight.shape[1:])
        base, rows = _nearest(target.transpose(1, 2) if shape.swapped else target, shape)
        raw = torch.zeros_like(widen(weight)).reshape(groups, -1)
        raw[:, : shape.first] = base.flatten(1)
        raw[:, shape.first : shape.first + rows[0].numel()] = rows.flatten(1)
        return raw.reshape(weight.shape).to(weight.dtype)

    @torch.no_grad()
    def distance(self, weight: Tensor) -> float:
        """‖K − W‖ / ‖W‖ of the kernel that replaces `weight` when this is attached, with the scale that suits it best.

        Example:
            >>> conv = gonio.parametrizations.OrthogonalConv()
            >>> conv.distance(2 * torch.eye(3))  # a linear layer that is orthogonal but for its scale
            0.0
        """
        wide = widen(whole(weight))
        kernel = self.weight_of(self.right_inverse(wide))
        share = float((kernel * wide).sum() / (kernel.norm() * wide.norm()))
        return max(0.0, 1 - share**2) ** 0.5

    def holds(self, weight: Tensor) -> bool:
        """Whether every singular value of the operator on the pixels that it reads is `scale`, up to rounding."""
        limit = 10 * weight[0].numel() ** 0.5 * torch.finfo(weight.dtype).eps
        weight, layout = whole(weight.detach()).double() / self.scale, self.bound_layout
        if weight.ndim == 2 or layout.blocks > 1:
            symbols = weight.reshape(layout.matrices, 1, -1, *weight.shape[1:]).flatten(3)
        else:
            taps, read = taps_of(weight, layout), taps_of(torch.ones_like(weight), layout)
            taps = Taps(taps.matrices[..., read.matrices[0].amax((0, 1)) > 0], taps.positions)
            symbols = taps.symbol(frequencies([2 * reach + 1 for reach in taps.reach], weight))
        return bool(defect_of(symbols) <= limit)


def _precise(matrices: Tensor) -> Tensor:
    """The polar factors; their errors would add up over the factors of a kernel, so they are corrected once more."""
    found = polar(matrices)
    with torch.no_grad():
        correction = corrected(found) - found
    return found + correction


def _projected(kernel: Tensor, rows: Tensor) -> Tensor:
    """K P for the projection on orthonormal rows: (groups, out, channels, *kernel) and (groups, rank, channels)."""
    inner = torch.einsum("goc...,grc->gor...", kernel, rows)
    return torch.einsum("gor...,grc->goc...", inner, rows)


def _nearest(target: Tensor, shape: _Shape) -> tuple[Tensor, Tensor]:
    """B and the rows of the projections whose kernel is nearest to `target`, see Note [Paraunitary factors]."""
    base, rows = _peeled(target, shape)
    for _ in range(_SWEEPS if shape.axes else 0):
        for index in range(len(shape.axes)):
            rows[:, index] = _leading(_pull(target, shape, base, rows, index), shape.rank)
        base = completed_polar(_pull(target, shape, base, rows, None))
    return base, rows


def _peeled(target: Tensor, shape: _Shape) -> tuple[Tensor, Tensor]:
    """The factors as the taps at both ends of each axis show them, from the outermost on; exact for a product."""
    rows = target.new_zeros(len(target), len(shape.axes), shape.rank, shape.channels)
    for index in reversed(range(len(shape.axes))):
        dim = 3 + shape.axes[index]
        first, last = (target.select(dim, end).transpose(1, 2).flatten(2) for end in (0, -1))
        difference = last @ last.mT - first @ first.mT
        rows[:, index] = _leading(difference if shape.moves(index) else -difference, shape.rank)
        target = shape.shortened(target, _projected(target, rows[:, index]), index)
    return completed_polar(target.flatten(2)), rows


def _pull(target: Tensor, shape: _Shape, base: Tensor, rows: Tensor, index: int | None) -> Tensor:
    """The gradient of ⟨K, target⟩ with respect to projection `index`, or to B for None."""
    part = base.clone() if index is None else rows[:, index].mT @ rows[:, index]
    with torch.enable_grad():
        part.requires_grad_()
        found = (part if index is None else base).unflatten(-1, (shape.channels, *shape.block))
        for i in range(len(shape.axes)):
            itself = i == index  # the projection, not its rows, since the product is linear in it
            along = torch.einsum("goc...,gcd->god...", found, part) if itself else _projected(found, rows[:, i])
            found = shape.lengthened(found, along, i)
        (gradient,) = torch.autograd.grad((found * target).sum(), part)
    return gradient


def _leading(square: Tensor, rank: int) -> Tensor:
    """Eigenvectors of the `rank` largest eigenvalues of the symmetric part, as rows."""
    vectors = torch.linalg.eigh((square + square.mT) / 2).eigenvectors
    return vectors[..., vectors.shape[-1] - rank :].mT
