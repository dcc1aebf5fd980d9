"""The Self-Orthogonality value as a function of outputs: sums over pairs of correlated soft signs.

Note [One product in the backward]
    With G = T Tᵀ, d = diag(G)^(−1/2), C = d G d off the diagonal and A = ∂R/∂C, the derivative by T is
    2 d (A − diag(b)) d T with b_j = Σ_i C_ij A_ij: a k × k matrix, formed in the forward. Autograd would
    multiply twice, and would keep T and its normalised copy.

Note [Wide layers]
    Fewer samples than filters: Σ_ij C_ij = |Σ_i t̂_i|² and Σ_ij C_ij² = |T̂ᵀ T̂|², a samples × samples
    matrix, so nothing of size k × k is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gonio.regularizers.base import require
from gonio.regularizers.closed_form import Formula
from gonio.regularizers.gram import product
from gonio.regularizers.sharding import identity_like
from gonio.regularizers.soft_signs import Channels, SoftSigns

__all__ = ["Pairs", "TallPairs", "WidePairs"]


@dataclass(frozen=True)
class Pairs:
    """What is summed: w₁ (Σ_{i≠j} C_ij)² + w₂ Σ_{i≠j} C_ij² over groups."""

    signs: SoftSigns
    mean_ratio: float
    reduction: str

    def weights(self, alive: Tensor) -> tuple[Tensor, Tensor]:
        """w₁ and w₂ of each group, given its number of filters that have a sign."""
        ones = torch.ones_like(alive)
        if self.reduction == "sum":
            return self.mean_ratio * ones, ones
        pairs = (alive * (alive - 1)).clamp_min(1)
        return self.mean_ratio / (pairs.square() * len(pairs)), 1 / (pairs * len(pairs))

    def results(self, first: Tensor, second: Tensor, alive: Tensor) -> tuple[Tensor, ...]:
        """The value, its mean term and its spread term, from ΣC and ΣC² of each group."""
        on_mean, on_spread = self.weights(alive)
        mean, spread = (on_mean * first.square()).sum(), (on_spread * second).sum()
        return mean + spread, mean, spread

    def scale(self, square: Tensor, channels: Channels) -> Tensor:
        """1/|t| for each channel, given |t|², and 0 for a channel that does not vary."""
        noise = channels.noise(self.signs.least).view_as(square).square() * channels.samples.to(square.dtype)
        zero = square <= noise.clamp_min(torch.finfo(square.dtype).tiny)
        return square.masked_fill(zero, 1).rsqrt().masked_fill(zero, 0)

    def plain(self, x: Tensor) -> tuple[Tensor, ...]:
        """:meth:`results` for outputs (N, k, P) in differentiable operations."""
        require(
            self.signs.process_group is None,
            "a compiled SelfOrthogonality, or its second derivative, was asked for",
            "a batch spread over processes",
            "Differentiate it once, in eager mode, or leave process_group out.",
        )
        t = self.signs.grouped(x).flatten(2)
        noise = torch.full_like(t[..., :1], self.signs.least)
        if self.signs.center:
            rounding = 64 * torch.finfo(x.dtype).eps ** 2 * t.detach().abs().amax(-1, keepdim=True)
            noise = torch.maximum(noise, rounding)
            t = t - t.mean(-1, keepdim=True)
            t = t - t.mean(-1, keepdim=True)  # what rounding left of the mean
        if self.signs.standardize:
            t = _unit(t, noise) * t.shape[-1] ** 0.5
        unit = _unit(torch.tanh(self.signs.gamma * t), self.signs.gamma * noise)
        gram = unit @ unit.mT
        gram = gram * (1 - identity_like(gram))
        alive = (unit.detach().square().sum(-1) > 0.5).sum(-1).to(x.dtype)
        return self.results(gram.sum((-2, -1)), gram.square().sum((-2, -1)), alive)


@dataclass(frozen=True)
class TallPairs(Formula):
    """At least as many samples as filters. Note [One product in the backward]"""

    results: ClassVar[int] = 3
    pairs: Pairs

    def plain(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.pairs.plain(x)

    def fast(self, x: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        channels = self.pairs.signs.channels(x)
        gram, channels = self.pairs.signs.gram(x, channels)
        scale = self.pairs.scale(gram.diagonal(dim1=-2, dim2=-1), channels)
        gram.mul_(scale.unsqueeze(-1)).mul_(scale.unsqueeze(-2))
        gram.diagonal(dim1=-2, dim2=-1).zero_()
        alive = (scale > 0).sum(-1).to(x.dtype)
        once, twice = gram.sum(-2), gram.square().sum(-2)
        first = once.sum(-1)
        on_mean, on_spread = self.pairs.weights(alive)
        on_mean, on_spread = 2 * on_mean * first, 2 * on_spread
        own = -(on_mean.unsqueeze(-1) * once + on_spread.unsqueeze(-1) * twice)  # −b
        slope = _slope(gram, on_mean, on_spread, own, scale)
        return self.pairs.results(first, twice.sum(-1), alive), (slope, *channels.tensors())

    def gradient(self, x: Tensor, saved: tuple[Tensor, ...], factor: Tensor) -> Tensor:
        slope, channels = saved[0], Channels(*saved[1:])
        slope = slope * (channels.gain * (factor * _processes(self.pairs))).view(*slope.shape[:2], 1)
        signs = self.pairs.signs.by_images(x)
        return signs.pull_back(x, channels, lambda bent, out: product(slope, bent, out=out))


def _slope(gram: Tensor, on_mean: Tensor, on_spread: Tensor, own: Tensor, scale: Tensor) -> Tensor:
    """2 d (A − diag(b)) d, with A the constant `on_mean` plus `on_spread` × C off the diagonal."""
    slope = torch.addcmul(on_mean.view(-1, 1, 1), gram, on_spread.view(-1, 1, 1))
    slope.diagonal(dim1=-2, dim2=-1).copy_(own)
    return slope.mul_(2 * scale.unsqueeze(-1)).mul_(scale.unsqueeze(-2))


@dataclass(frozen=True)
class WidePairs(Formula):
    """Fewer samples than filters, in one piece and one process. Note [Wide layers]"""

    results: ClassVar[int] = 3
    pairs: Pairs

    def plain(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.pairs.plain(x)

    def fast(self, x: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        channels = self.pairs.signs.channels(x)
        (piece,) = self.pairs.signs.pieces(x)
        unit = channels.bend_(self.pairs.signs.shifted(piece, channels, self.pairs.signs.room(x)))
        scale = self.pairs.scale(unit.square().sum(-1), channels)
        unit.mul_(scale.unsqueeze(-1))
        alive = (scale > 0).sum(-1).to(x.dtype)
        across, total = unit.mT @ unit, unit.sum(-2)
        first = total.square().sum(-1) - alive
        second = (across.square().sum((-2, -1)) - alive).clamp_min(0)
        return self.pairs.results(first, second, alive), (across, total, scale, *channels.tensors())

    def gradient(self, x: Tensor, saved: tuple[Tensor, ...], factor: Tensor) -> Tensor:
        across, total, scale, *rest = saved
        alive = (scale > 0).sum(-1).to(x.dtype)
        on_mean, on_spread = (4 * factor * w.view(-1, 1, 1) for w in self.pairs.weights(alive))
        first = (total.square().sum(-1) - alive).view(-1, 1, 1)
        across, total = on_spread * across, on_mean * first * total.unsqueeze(-2)
        channels = Channels(*rest)
        stretch = (scale * channels.gain.view_as(scale)).unsqueeze(-1)

        def slope(signs: Tensor, out: Tensor) -> None:
            unit = signs * scale.unsqueeze(-1)
            back = product(unit, across, out=out).add_(total)
            back.sub_((unit * back).sum(-1, keepdim=True) * unit).mul_(stretch)

        return self.pairs.signs.pull_back(x, channels, slope)


def _unit(t: Tensor, noise: Tensor) -> Tensor:
    """Unit rows; a row whose root mean square is within the noise becomes zero, with gradient 0."""
    square = (t * t).sum(-1, keepdim=True)
    zero = square <= (noise.square() * t.shape[-1]).clamp_min(torch.finfo(t.dtype).tiny)
    return t * square.masked_fill(zero, 1).rsqrt().masked_fill(zero, 0)


def _processes(pairs: Pairs) -> int:
    """Data-parallel training averages gradients over processes; this value wants their sum."""
    group = pairs.signs.process_group
    return 1 if group is None else group.size()
