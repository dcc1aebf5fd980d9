"""Top singular vectors of convolutions, by power iteration at all frequencies of a grid at once."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from math import cos, pi, prod
from typing import Self

import torch
from torch import Tensor

from gonio.geometry.conv_lanczos import conv_spectral_norm_estimate
from gonio.geometry.norms import normalize, safe_norm
from gonio.geometry.symbol import frequencies
from gonio.geometry.views import Layout
from gonio.parametrizations.spectral_views import EXACT, ITERATIONS, SpectralView, random_vectors, unit_or

__all__ = ["ConvolutionView"]

_POINTS = 8  # of the grid, per dimension and unit of the kernel's reach: a margin of 2 % per dimension


class ConvolutionView(SpectralView):
    r"""The convolution itself, by its symbol :math:`F(\omega) = \sum_t W_t e^{-i \omega t}` on a grid.

    Every frequency has its own right singular vector (state `basis`), and all of them are improved by two
    matrix products per step; `u` and `v` belong to the frequency with the largest norm.
    """

    @classmethod
    def of(cls, layout: Layout, shape: torch.Size) -> Self:
        stride = layout.stride or (1,) * len(shape[2:])
        return cls(layout, shape, _taps(stride, layout.dilation, shape[2:]).margin)

    def measured(self, weight: Tensor) -> float:
        finer = [2 * n * s for n, s in zip(self._taps().grid, self._stride(), strict=True)]
        return float(conv_spectral_norm_estimate(weight, finer, layout=self.layout))

    def matrices(self, weight: Tensor) -> Tensor:
        # A transposed convolution is the adjoint of the convolution with the same stored weight.
        return weight.unflatten(0, (self.layout.groups, -1)).flatten(2)

    def weight_of(self, matrices: Tensor) -> Tensor:
        return matrices.reshape(self.shape)

    def start(self, matrices: Tensor) -> dict[str, Tensor]:
        groups, rows, columns = matrices.shape
        taps = self._taps()
        inputs = self.shape[1] * taps.phases
        shape = (groups, len(taps.omega), inputs)
        state = {
            "u": matrices.new_zeros(groups, 2, rows),
            "v": matrices.new_zeros(groups, 2, columns),
            "length": matrices.new_ones(groups),
            "basis": matrices.new_zeros(*shape, 2),
        }
        if matrices.is_meta:
            return state
        if prod(shape) * rows * min(rows, inputs) <= EXACT:
            state["basis"] = _as_pairs(self._right_vectors(matrices))
            return self.step(matrices, state)
        state["basis"][..., 0] = random_vectors(shape, matrices)
        for _ in range(ITERATIONS):
            state = self.step(matrices, state)
        return state

    def step(self, matrices: Tensor, state: dict[str, Tensor]) -> dict[str, Tensor]:
        folded, waves = self._folded(matrices), self._waves(matrices)
        basis = torch.view_as_complex(state["basis"].to(matrices.dtype))
        waved = (waves.unsqueeze(-1) * basis.unsqueeze(2)).flatten(2)  # (groups, frequencies, steps · inputs)
        left = _as_complex(normalize(_as_pairs(_times(waved, folded.mT)), (2, 3)))
        right = _times(left, folded).unflatten(2, (waves.shape[1], -1))
        right = _as_pairs((waves.conj().unsqueeze(-1) * right).sum(2))
        best = safe_norm(right, (2, 3)).argmax(1)
        basis = unit_or(right, state["basis"], (2, 3))
        spread = self._against_stored(basis, best, waves)
        u = unit_or(spread @ matrices.mT, state["u"], (1, 2))
        return {"u": u, "v": normalize(spread, (1, 2)), "length": safe_norm(spread, (1, 2)), "basis": basis}

    def _against_stored(self, basis: Tensor, best: Tensor, waves: Tensor) -> Tensor:
        """The vector of the best frequency of each group as real and imaginary parts, (groups, 2, columns)."""
        taps = self._taps()
        vector = _as_complex(basis[torch.arange(len(best), device=best.device), best])
        by_tap = vector.unflatten(1, (-1, taps.phases))[..., taps.phase] * waves[best][:, None, taps.step]
        return _as_pairs(by_tap.flatten(1)).movedim(-1, 1)

    def _right_vectors(self, matrices: Tensor) -> Tensor:
        """Top right singular vector of the symbol at each frequency, (groups, frequencies, inputs)."""
        waves = self._waves(matrices)
        folded = self._folded(matrices).unflatten(2, (waves.shape[1], -1))
        symbol = torch.einsum("ft,gnti->gfni", waves, folded.to(waves.dtype))
        return torch.linalg.svd(symbol, full_matrices=False)[2][..., 0, :].conj()

    def _folded(self, matrices: Tensor) -> Tensor:
        """The stored matrices with their columns in the order (step, input, phase); absent taps are 0."""
        taps = self._taps()
        by_tap = matrices.unflatten(2, (self.shape[1], -1))  # (groups, rows, inputs, taps)
        groups, rows, inputs, _ = by_tap.shape
        folded = matrices.new_zeros(groups, rows, len(taps.steps), inputs, taps.phases)
        folded[:, :, taps.step, :, taps.phase] = by_tap.movedim(3, 0)
        return folded.flatten(2)

    def _waves(self, like: Tensor) -> Tensor:
        """e^{−iω·t}, (frequencies, steps)."""
        taps = self._taps()
        angle = -(taps.omega @ taps.steps.to(taps.omega).mT).to(like)
        return torch.polar(torch.ones_like(angle), angle)

    def _stride(self) -> tuple[int, ...]:
        return self.layout.stride or (1,) * len(self.shape[2:])

    def _taps(self) -> _Taps:
        return _taps(self._stride(), self.layout.dilation, self.shape[2:])


@dataclass(frozen=True)
class _Taps:
    """Where a kernel's taps lie once the stride is folded into input channels: tap = step · stride + phase."""

    steps: Tensor  # (distinct steps, dims)
    step: Tensor  # (taps,): the step of each tap, as an index
    phase: Tensor  # (taps,): the phase of each tap, as an index
    phases: int  # product of the strides
    grid: tuple[int, ...]  # points per dimension
    omega: Tensor  # (frequencies, dims): half of a grid; the other half is complex conjugate
    margin: float


@functools.lru_cache(maxsize=256)
def _taps(stride: tuple[int, ...], dilation: tuple[int, ...], kernel: torch.Size) -> _Taps:
    offsets = torch.cartesian_prod(*(torch.arange(k) for k in kernel)).reshape(-1, len(kernel))
    if dilation and prod(stride) > 1:  # at stride 1 a dilation only renames the frequencies
        offsets = offsets * torch.tensor(dilation)
    steps, step = torch.unique(offsets // torch.tensor(stride), dim=0, return_inverse=True)
    phase = torch.zeros_like(step)
    for dim, size in enumerate(stride):
        phase = phase * size + offsets[:, dim] % size
    reach = steps.amax(0).tolist()
    grid = tuple(max(1, _POINTS * r) for r in reach)
    # Note [Between the grid points]: a product yᴴF(ω)x is, up to a phase, a trigonometric polynomial of degree
    # r/2 in each component of ω. One of degree r/2 is at most 1/cos(πr/2N) times its maximum on N points
    # [H. Ehlich and K. Zeller, "Schwankung von Polynomen zwischen Gitterpunkten", Math. Z. 86, 1964].
    margin = prod(1 / cos(pi * r / (2 * n)) for r, n in zip(reach, grid, strict=True))
    omega = frequencies(grid, torch.zeros((), dtype=torch.float64))
    return _Taps(steps, step, phase, prod(stride), grid, omega, margin)


def _times(x: Tensor, matrices: Tensor) -> Tensor:
    """A complex stack of rows times real matrices, as one real product."""
    return torch.complex(*(torch.cat([x.real, x.imag], 1) @ matrices).chunk(2, 1))


def _as_pairs(x: Tensor) -> Tensor:
    return torch.view_as_real(x.resolve_conj()).contiguous()


def _as_complex(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.contiguous())
