"""A convolution as a linear map on feature maps: its symbol per frequency, and its dense matrix on a grid.

The symbol is F(ω) = Σ_t W_t e^{−iω·t}. On a periodic grid the Fourier transform turns a convolution into these blocks;
over all real ω their norm bounds the zero-padded operator on every grid. A stride is folded into channels first. A
transposed convolution is the adjoint of the convolution with the same stored weight and has the same norm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil, pi, prod

import torch
import torch.nn.functional as F
from torch import Tensor

from gonio.errors import InvalidArgumentError
from gonio.geometry.norms import Array, as_real, widen
from gonio.geometry.views import PLAIN, Layout

CONV: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
CONV_TRANSPOSE: dict[int, Callable[..., Tensor]] = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


@dataclass(frozen=True)
class Taps:
    """A stride-1 convolution: one matrix per tap, and the positions of the taps."""

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
    """The stride-1 form of a convolution, transposed or not, dilated, strided, grouped; raises for anything else."""
    dims = weight.ndim - 2
    stride, dilation = layout.per_axis(dims)
    if dims < 1 or layout.blocks != 1 or len(stride) != dims or len(dilation) != dims:
        raise InvalidArgumentError(
            "the norm of a convolution needs its weight (out, in/groups, *kernel) and its layout",
            f"shape {tuple(weight.shape)} with {layout}",
            "Take the layout from the layer with layout_of(conv); for a Linear use spectral_norm().",
        )
    if layout.padding_mode not in ("zeros", "circular"):
        raise InvalidArgumentError(
            "the norm of a convolution is defined for zero and circular padding",
            f"padding_mode={layout.padding_mode!r}, which repeats pixels and can have a larger norm",
            "Use spectral_norm(operator_matrix(weight, size, layout)) on a small grid instead.",
        )
    offsets = torch.cartesian_prod(*(torch.arange(k, device="cpu") for k in weight.shape[2:])).reshape(-1, dims)
    offsets = (offsets * torch.tensor(dilation, device="cpu")).to(weight.device)
    taps = widen(weight).unflatten(0, (layout.groups, -1)).flatten(3).movedim(-1, 1)  # (groups, taps, out, in)
    if prod(stride) == 1:
        return Taps(taps, offsets)
    # Fold the stride into input channels: tap t becomes phase t mod s at position t div s.
    steps = torch.tensor(stride, device=offsets.device)
    positions, phases = offsets // steps, offsets % steps
    unique, where = torch.unique(positions, dim=0, return_inverse=True)
    phase = phases[:, 0]
    for dim in range(1, dims):
        phase = phase * stride[dim] + phases[:, dim]
    groups, _, out, in_ = taps.shape
    folded = taps.new_zeros(groups, len(unique) * prod(stride), out, in_)
    folded = folded.index_copy(1, where * prod(stride) + phase, taps)
    folded = folded.unflatten(1, (len(unique), prod(stride))).permute(0, 1, 3, 4, 2)
    return Taps(folded.flatten(3), unique)


def frequencies(size: Sequence[int], like: Tensor) -> Tensor:
    """:func:`half_grid` in :func:`radians`."""
    return radians(half_grid(size), size, like)


def half_grid(size: Sequence[int], gaps: Sequence[int] | None = None) -> Tensor:
    """The frequencies of a grid, (count, dims), integers, without those that are complex conjugate to others.

    With `gaps` every so many per dimension.
    """
    ends = [*size[:-1], size[-1] // 2 + 1]
    axes = (torch.arange(0, end, gap, device="cpu") for end, gap in zip(ends, gaps or [1] * len(size), strict=True))
    return torch.cartesian_prod(*axes).reshape(-1, len(size))


def radians(points: Tensor, size: Sequence[int], like: Tensor) -> Tensor:
    """Integer frequencies of a grid in radians, in the dtype and on the device of `like`."""
    return (points.double() * (2 * pi / torch.tensor(size, dtype=torch.float64, device="cpu"))).to(like)


def polyphase_grid(size: Sequence[int], layout: Layout, weight: Tensor, reach: Sequence[int]) -> tuple[int, ...]:
    """`size` divided by the stride, and 1 in dimensions in which the symbol is constant."""
    stride, _ = layout.per_axis(weight.ndim - 2)
    if len(size) != len(stride) or any(n < 1 or n % s for n, s in zip(size, stride, strict=False)):
        raise InvalidArgumentError(
            f"the grid needs one size per kernel dimension, each a multiple of the stride {tuple(stride)}",
            f"{tuple(size)} for a weight of shape {tuple(weight.shape)}",
            "Choose for example the layer's input size, rounded up to a multiple.",
        )
    return tuple(n // s if r else 1 for n, s, r in zip(size, stride, reach, strict=True))


def periodic_grid(shape: Sequence[int], layout: Layout, *, least: int = 16) -> tuple[int, ...]:
    """A grid for the norm of a convolution whose input size is not known: `least` points, or twice the kernel's extent.

    Rounded up to a multiple of the stride.
    """
    axes = zip(shape[2:], *layout.per_axis(len(shape) - 2), strict=True)
    return tuple(s * ceil(max(least, 2 * (d * (k - 1) + 1)) / s) for k, s, d in axes)


# --- dense ----------------------------------------------------------------------------------------


def operator_matrix(weight: Array, size: Sequence[int], layout: Layout = PLAIN) -> Tensor:
    r"""The matrix :math:`K` with :math:`\operatorname{vec}(\text{conv}(x)) = K \operatorname{vec}(x)` on a grid.

    The layer's map without bias, dense, (out · output grid) × (in · input grid): for grids of a few hundred pixels.
    `size` is the input's spatial size, one number per kernel dimension.

    Raises: InvalidArgumentError if `size` does not have one number per kernel dimension, or the weight is empty.

    Example:
        >>> gonio.geometry.operator_matrix(torch.tensor([[[1.0, 2.0]]]), (3,))
        tensor([[1., 2., 0.],
                [0., 1., 2.]])
    """
    weight = as_real(weight)
    dims = weight.ndim - 2
    if dims not in CONV or len(size) != dims or weight.numel() == 0:
        raise InvalidArgumentError(
            "operator_matrix() needs a convolution's weight with entries and one grid size per kernel dimension",
            f"shape {tuple(weight.shape)} and size {tuple(size)}",
            "Give for example size=(8, 8) with a Conv2d weight.",
        )
    channels = weight.shape[0] if layout.transposed else weight.shape[1] * layout.groups
    count = channels * prod(size)
    x = torch.eye(count, dtype=weight.dtype, device=weight.device).reshape(count, channels, *size)
    stride, dilation = layout.stride or 1, layout.dilation or 1
    if layout.transposed:
        padding, extra = layout.padding or 0, layout.output_padding or 0
        y = CONV_TRANSPOSE[dims](x, weight, None, stride, padding, extra, layout.groups, dilation)
    else:
        mode = "constant" if layout.padding_mode == "zeros" else layout.padding_mode
        y = CONV[dims](
            F.pad(x, _pad_sides(weight, layout), mode=mode), weight, None, stride, 0, dilation, layout.groups
        )
    return y.reshape(count, -1).mT


def _pad_sides(weight: Tensor, layout: Layout) -> list[int]:
    """Padding of both sides per dimension, last dimension first, as F.pad reads it."""
    kernel = weight.shape[2:]
    if layout.padding == "same":
        totals = [d * (k - 1) for d, k in zip(layout.per_axis(len(kernel))[1], kernel, strict=True)]
        sides = [(total // 2, total - total // 2) for total in totals]
    else:
        widths = () if layout.padding == "valid" else layout.padding
        sides = [(int(p), int(p)) for p in widths or (0,) * len(kernel)]
    return [side for pair in reversed(sides) for side in pair]


def unview_operator(matrix: Array, shape: Sequence[int], size: Sequence[int], layout: Layout = PLAIN) -> Tensor:
    """The weight of `shape` whose :func:`operator_matrix` on the grid `size` is nearest to `matrix`.

    Each weight entry is the mean of the matrix entries that it determines: the exact inverse on operator
    matrices, and the orthogonal projection onto them otherwise. Taps outside of the grid are 0.

    Raises: InvalidArgumentError if `matrix` has another shape, or if two taps contribute to one entry of the matrix
        (reflected or replicated padding, or a periodic grid smaller than the dilated kernel).

    Example:
        >>> weight = torch.tensor([[[1.0, 2.0]]])
        >>> gonio.geometry.unview_operator(gonio.geometry.operator_matrix(weight, (3,)), (1, 1, 2), (3,))
        tensor([[[1., 2.]]])
    """
    matrix = as_real(matrix)
    wide = widen(matrix)  # sums of half-precision entries overflow
    zero = torch.zeros(tuple(shape), dtype=wide.dtype, device=wide.device)
    view, pull = torch.func.vjp(partial(operator_matrix, size=size, layout=layout), zero)[:2]
    if view.shape != matrix.shape:
        raise InvalidArgumentError(
            f"unview_operator() to {tuple(shape)} on the grid {tuple(size)} needs a matrix of {tuple(view.shape)}",
            f"{tuple(matrix.shape)}",
            "Pass the result of operator_matrix() with the same grid and layout.",
        )
    used = operator_matrix(torch.ones_like(zero), size, layout)
    if bool((used > 1.5).any()):
        raise InvalidArgumentError(
            "unview_operator() needs every entry of the operator to come from one tap",
            f"padding_mode={layout.padding_mode!r} on the grid {tuple(size)}, where some are sums of several",
            "Use zero padding, or a periodic grid at least as large as the dilated kernel.",
        )
    (total,) = pull(wide)
    (count,) = pull(used)
    return (total / count.clamp(min=1)).to(matrix.dtype)
