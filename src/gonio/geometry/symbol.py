"""A convolution as a matrix per frequency: the symbol F(ω) = Σ_t W_t e^{−iω·t}.

On a periodic grid the Fourier transform turns a convolution into these blocks, so the operator's norm
is the largest singular value of any of them; over all real ω it bounds the zero-padded operator on
every grid. A stride is folded into channels first (polyphase form), after which it is 1; a transposed
convolution is the adjoint of the convolution with the same stored weight and has the same norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import pi, prod

import torch
from torch import Tensor

from gonio.errors import InvalidArgumentError
from gonio.geometry.precision import widen
from gonio.geometry.views import PLAIN, Layout

__all__ = ["Taps", "frequencies", "taps_of"]


@dataclass(frozen=True)
class Taps:
    """A stride-1 convolution: one matrix per tap, and where the taps lie."""

    matrices: Tensor  # (groups, taps, out, in)
    positions: Tensor  # (taps, dims), integers from 0

    @property
    def reach(self) -> tuple[int, ...]:
        """Largest position in each dimension: the degree of the symbol."""
        return tuple(int(p) for p in self.positions.amax(0))

    def phases(self, omega: Tensor) -> Tensor:
        """e^{−iω·t}, (taps, frequencies), complex."""
        angle = -(self.positions.to(omega) @ omega.mT)
        return torch.polar(torch.ones_like(angle), angle)

    def symbol(self, omega: Tensor) -> Tensor:
        """F(ω), (groups, frequencies, out, in), complex."""
        phase = self.phases(omega)
        flat = self.matrices.flatten(2).to(phase.dtype)  # (groups, taps, out·in)
        return (phase.mT @ flat).unflatten(-1, self.matrices.shape[2:])

    def group(self, index: int) -> Taps:
        """The taps of one group."""
        return Taps(self.matrices[index : index + 1], self.positions)

    def smaller_side(self) -> Taps:
        """The taps, or their transposes (the adjoint up to a reflection), with out ≤ in."""
        out, in_ = self.matrices.shape[2:]
        return self if out <= in_ else Taps(self.matrices.mT, self.positions)


def taps_of(weight: Tensor, layout: Layout = PLAIN) -> Taps:
    """The stride-1 form of a convolution, transposed or not, dilated, strided, grouped.

    Raises:
        InvalidArgumentError: for a weight without kernel dimensions, stacked blocks, a stride or dilation
            of another rank, or padding that is neither zeros nor circular (mirrored pixels are counted
            twice, so reflection and replication have no symbol and a larger norm).
    """
    dims = weight.ndim - 2
    stride, dilation = layout.stride or (1,) * dims, layout.dilation or (1,) * dims
    _check(weight, layout, stride, dilation)
    kernel = weight.shape[2:]
    offsets = torch.cartesian_prod(*(torch.arange(k) for k in kernel)).reshape(-1, dims)
    offsets = (offsets * torch.tensor(dilation)).to(weight.device)
    taps = widen(weight).unflatten(0, (layout.groups, -1)).flatten(3).movedim(-1, 1)  # (groups, taps, out, in)
    return Taps(taps, offsets) if prod(stride) == 1 else _polyphase(taps, offsets, stride)


def _check(weight: Tensor, layout: Layout, stride: Sequence[int], dilation: Sequence[int]) -> None:
    dims = weight.ndim - 2
    if dims < 1 or layout.blocks != 1 or len(stride) != dims or len(dilation) != dims:
        raise InvalidArgumentError(
            "the norm of a convolution needs its weight (out, in/groups, *kernel) and its layout",
            f"shape {tuple(weight.shape)} with {layout}",
            "Take the layout from the layer with layout_of(conv); for a Linear use spectral_norm().",
        )
    if layout.padding_mode not in ("zeros", "circular"):
        raise InvalidArgumentError(
            "the norm of a convolution is defined here for zero and circular padding",
            f"padding_mode={layout.padding_mode!r}, which repeats pixels and can exceed it",
            "Measure the dense operator_matrix() on a small grid instead.",
        )


def _polyphase(taps: Tensor, offsets: Tensor, stride: Sequence[int]) -> Taps:
    """Fold the stride into input channels: tap t becomes phase t mod s at position t div s."""
    steps = torch.tensor(stride, device=offsets.device)
    positions, phases = offsets // steps, offsets % steps
    unique, where = torch.unique(positions, dim=0, return_inverse=True)
    phase = phases[:, 0]
    for dim in range(1, len(stride)):
        phase = phase * stride[dim] + phases[:, dim]
    groups, _, out, in_ = taps.shape
    folded = taps.new_zeros(groups, len(unique) * prod(stride), out, in_)
    folded = folded.index_copy(1, where * prod(stride) + phase, taps)
    folded = folded.unflatten(1, (len(unique), prod(stride))).permute(0, 1, 3, 4, 2)
    return Taps(folded.flatten(3), unique)


def frequencies(size: Sequence[int], like: Tensor) -> Tensor:
    """The half of the frequency grid that determines a real operator: (count, dims), in radians.

    The other half is complex conjugate, with the same singular values.
    """
    half = [*size[:-1], size[-1] // 2 + 1]
    axes = [
        torch.arange(h, device=like.device, dtype=torch.float64) * (2 * pi / n) for h, n in zip(half, size, strict=True)
    ]
    return torch.cartesian_prod(*axes).reshape(-1, len(size)).to(like.dtype)
