"""The operator norm of a convolution on a periodic grid.

The first candidate is exact, so the deviation of each other one is its error: power iteration through
convolutions has not converged after 100 steps, and the certified bound is another quantity, above the norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import Candidate, Operation, Row
from gonio.geometry import conv_spectral_norm, conv_spectral_norm_bound, conv_spectral_norm_estimate

TITLE = "Operator norm of a convolution"
FLOOR = "the Fourier transform of the kernel, half of the frequencies"
SHAPES = ((64, 8), (64, 16), (64, 32), (128, 16), (256, 16), (512, 8))  # channels, side of the grid
STEPS = 100
Norm = Callable[[Tensor, int], Tensor]


def kernel(channels: int) -> Tensor:
    draw = torch.randn(channels, channels, 3, 3, generator=torch.Generator().manual_seed(0))
    return draw / math.sqrt(9 * channels)


def symbol(weight: Tensor, n: int) -> Tensor:
    """A matrix per frequency; the other half of the frequencies is conjugate to these."""
    return torch.fft.rfft2(weight, s=(n, n)).permute(2, 3, 0, 1)


def decomposed(weight: Tensor, n: int) -> Tensor:
    """Fourier transform and singular values at every frequency (Sedghi, Gupta and Long)."""
    return torch.linalg.svdvals(symbol(weight, n))[..., 0].amax()


def iterated(weight: Tensor, n: int) -> Tensor:
    """Power iteration with the convolution and its adjoint."""
    x = torch.randn(1, weight.shape[1], n, n, generator=torch.Generator().manual_seed(1))
    for _ in range(STEPS):
        y = F.conv2d(F.pad(x, (1, 1, 1, 1), mode="circular"), weight)
        x = F.conv_transpose2d(F.pad(y, (1, 1, 1, 1), mode="circular"), weight)[..., 2:-2, 2:-2]
        x = x / torch.linalg.vector_norm(x)
    return torch.linalg.vector_norm(F.conv2d(F.pad(x, (1, 1, 1, 1), mode="circular"), weight))


NORMS: dict[str, Norm] = {
    "FFT + SVD": decomposed,
    f"power iteration ×{STEPS}": iterated,
    "gonio, exact": lambda weight, n: conv_spectral_norm(weight, (n, n)),
    "gonio, estimate": lambda weight, n: conv_spectral_norm_estimate(weight, (n, n)),
}
BOUNDS: dict[str, Norm] = {
    "FFT + SVD": decomposed,
    "gonio, bound": lambda weight, n: conv_spectral_norm_bound(weight, size=(n, n)),
}


def _candidate(name: str, norm: Norm, channels: int, n: int) -> Candidate:
    def make() -> Operation:
        weight = kernel(channels)

        def operation() -> Sequence[Tensor]:
            with torch.no_grad():
                return [norm(weight, n)]

        return operation

    return Candidate(name, make)


def _floor(channels: int, n: int) -> Candidate:
    def make() -> Operation:
        weight = kernel(channels)
        return lambda: [symbol(weight, n)]

    return Candidate("FFT", make)


def rows(*, quick: bool) -> Iterator[Row]:
    """Norms from below and exact, then the certified bound."""
    for table, norms in (("norms", NORMS), ("bound", BOUNDS)):
        for channels, n in ((4, 6),) if quick else SHAPES:
            candidates = tuple(_candidate(name, norm, channels, n) for name, norm in norms.items())
            yield Row(f"{channels}→{channels}, 3×3, grid {n}", "F", _floor(channels, n), candidates, table)
