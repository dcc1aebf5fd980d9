"""Soft signs of layer outputs, chunk by chunk, and their Gram matrix.

Outputs (N, k, positions) are read as k sequences of N·positions samples. They are never permuted as a
whole: a chunk of a few thousand samples is copied, shifted and bent while it is in cache, multiplied, and
forgotten; the backward makes it again. So nothing of the size of the outputs is kept but their gradient.

Note [tanh by the logistic function]
    tanh z = 2 σ(2z) − 1. Torch's σ takes a ninth of the time of its tanh on some CPUs (AMD Zen 5, torch 2.13), but the
    difference leaves an absolute error of 1e-7, where tanh has a relative one. So the Gram matrix is made with it, and
    where its diagonal then shows a channel whose signs are small, once more with tanh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gonio.geometry.norms import widest
from gonio.regularizers.gram import accumulate_symmetric, mirror

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["CHUNK", "Channels", "SoftSigns"]

CHUNK = 4096  # samples; with 512 channels 8 MiB in float32
SMALL = 2**-6  # root mean square of a channel's soft signs up to which they are made by tanh itself
FEW = 256  # samples of feature maps in the backward: one image is written where it belongs, several through a copy


@dataclass(frozen=True)
class Channels:
    """What shifts and stretches each channel before it is bent: gain · ((x − high) − low).

    The mean is held in two parts, because its rounding to float32 may be as large as the spread. (A sum in
    float64 would cost as much as the Gram matrix on CPU.)

    Attributes:
        high, low: the parts of the mean, (k,); zero if outputs are not centred.
        gain: γ, over the standard deviation if outputs are standardised, (k,).
        samples: in the whole batch, over all processes.
        small: whether signs are too small for anything but tanh. Note [tanh by the logistic function]
    """

    high: Tensor
    low: Tensor
    gain: Tensor
    samples: Tensor
    small: Tensor

    def noise(self, least: float) -> Tensor:
        """The size of a soft sign that means nothing: of rounding, or of a spread below `least`."""
        rounding = 64 * torch.finfo(self.gain.dtype).eps ** 2 * self.high.abs()
        return self.gain * rounding.clamp_min(least)

    def tensors(self) -> tuple[Tensor, ...]:
        """The attributes in order, for saving."""
        return self.high, self.low, self.gain, self.samples, self.small

    def bend_(self, x: Tensor) -> Tensor:
        """tanh of what was shifted; in place."""
        if self.small.device.type != "cpu" or self.small:
            return x.tanh_()
        return torch.add(self.small.new_full((), -1.0, dtype=x.dtype), x.mul_(2).sigmoid_(), alpha=2, out=x)


@dataclass(frozen=True)
class SoftSigns:
    r"""The soft signs :math:`t = \tanh(\gamma y)` of outputs whose channels are in `groups` groups."""

    gamma: float
    center: bool
    standardize: bool
    groups: int
    process_group: ProcessGroup | None
    least: float  # a channel that varies less does not vary: the smallest normal number of its dtype
    chunk: int = CHUNK

    def channels(self, x: Tensor) -> Channels:
        """Means and gains of outputs (N, k, P), over the batch of all processes."""
        wide = widest(x)
        own = torch.full((), x.shape[0] * x.shape[2], dtype=wide, device=x.device)
        samples = self.total(own).clamp_min(1)
        zero = x.new_zeros(x.shape[1])
        unit = Channels(zero, zero, torch.ones_like(zero), samples, torch.ones((), dtype=torch.bool, device=x.device))
        if self.center:
            unit = replace(unit, high=self._guess(x))
            unit = replace(unit, low=self._mean(x, unit, lambda y: y))
        gain = torch.full_like(zero, self.gamma)
        if self.standardize:
            deviation = self._mean(x, unit, lambda y: y.sub_(self._spread(unit.low)).square_()).sqrt()
            flat = deviation <= unit.noise(self.least)
            gain = (gain / deviation.masked_fill(flat, 1)).masked_fill(flat, 0)
        return replace(unit, gain=gain)

    def _guess(self, x: Tensor) -> Tensor:
        """The mean of the first piece: near enough to the mean that what is missing rounds with the spread."""
        piece = next(self.pieces(x))
        count = torch.full((), piece.shape[0] * piece.shape[2], dtype=x.dtype, device=x.device)
        return self.total(piece.sum((0, 2))) / self.total(count).clamp_min(1)

    def _mean(self, x: Tensor, channels: Channels, of: Callable[[Tensor], Tensor]) -> Tensor:
        """The mean over samples of a function of outputs less the first part of their mean."""
        total, room = torch.zeros_like(channels.gain, dtype=widest(x)), self.room(x)
        for piece in self.pieces(x):
            shifted = torch.sub(self.grouped(piece), self._spread(channels.high), out=self._inside(room, piece))
            total += of(shifted).sum((-1, -2)).flatten()
        return (self.total(total) / channels.samples).to(x.dtype)

    def total(self, x: Tensor) -> Tensor:
        """The sum over all processes; in place."""
        if self.process_group is not None:
            torch.distributed.all_reduce(x, group=self.process_group)
        return x

    def pieces(self, x: Tensor) -> Iterator[Tensor]:
        """Views (n, k, p) of the outputs with at most about `chunk` samples each."""
        images, positions = self._steps(x)
        for some in x.split(images):
            yield from some.split(positions, dim=2)

    def _steps(self, x: Tensor) -> tuple[int, int]:
        """Images and positions of a piece."""
        positions = max(1, min(x.shape[2], self.chunk))
        return max(1, self.chunk // positions), positions

    def shifted(self, piece: Tensor, channels: Channels, room: Tensor) -> Tensor:
        """gain · (piece − mean) as a tensor (groups, k/groups, samples) in `room`, which is overwritten."""
        buffer, gain = self._inside(room, piece), self._spread(channels.gain)
        if not self.center:
            return torch.mul(self.grouped(piece), gain, out=buffer).flatten(2)
        torch.sub(self.grouped(piece), self._spread(channels.high), out=buffer)
        low = self._spread(channels.low)
        if self.standardize:
            return buffer.sub_(low).mul_(gain).flatten(2)
        return torch.add(-self.gamma * low, buffer, alpha=self.gamma, out=buffer).flatten(2)

    def grouped(self, piece: Tensor) -> Tensor:
        """(n, k, p) seen as (groups, k/groups, n, p)."""
        return piece.unflatten(1, (self.groups, piece.shape[1] // self.groups)).permute(1, 2, 0, 3)

    def room(self, x: Tensor) -> Tensor:
        """Memory for the largest piece."""
        images, positions = self._steps(x)
        return x.new_empty(min(x.shape[0], images) * x.shape[1] * min(x.shape[2], positions))

    def _inside(self, room: Tensor, piece: Tensor) -> Tensor:
        """The beginning of `room` as (groups, k/groups, n, p), lying in memory as the piece does."""
        n, k, p = piece.shape
        begin = room[: piece.numel()]
        if piece.stride(1) == 1:
            return begin.view(n, p, self.groups, k // self.groups).permute(2, 3, 0, 1)
        return begin.view(self.groups, k // self.groups, n, p)

    def _spread(self, x: Tensor) -> Tensor:
        """A number per channel as (groups, k/groups, 1, 1)."""
        return x.view(self.groups, -1, 1, 1)

    def gram(self, x: Tensor, channels: Channels) -> tuple[Tensor, Channels]:
        """T Tᵀ for each group, (groups, k/groups, k/groups), over the batch of all processes, and how T is made.

        Note [tanh by the logistic function]
        """
        if x.is_cpu and x.dtype is torch.float32:
            quick = replace(channels, small=torch.zeros_like(channels.small))
            gram = self._gram(x, quick)
            square = gram.diagonal(dim1=-2, dim2=-1)
            if not bool(((square > 0) & (square < SMALL**2 * channels.samples)).any()):
                return gram, quick
        return self._gram(x, channels), channels

    def _gram(self, x: Tensor, channels: Channels) -> Tensor:
        width = x.shape[1] // self.groups
        gram, room = x.new_zeros(self.groups, width, width), self.room(x)
        half = gram if x.stride(1) == 1 else gram.mT
        for piece in self.pieces(x):
            accumulate_symmetric(half, channels.bend_(self.shifted(piece, channels, room)))
        mirror(half)
        return self.total(gram)

    def by_images(self, x: Tensor) -> SoftSigns:
        """The same in as few images at a time as still make a product: less memory, for some per cent of time."""
        if x.shape[2] == 1:
            return self
        return replace(self, chunk=min(self.chunk, max(x.shape[2], FEW)))

    def pull_back(self, x: Tensor, channels: Channels, slope: Callable[[Tensor, Tensor], object]) -> Tensor:
        """The derivative by the outputs.

        Args:
            x: the outputs.
            channels: how they were shifted and stretched.
            slope: of a piece of soft signs and a tensor that lies like it: writes gain × the derivative by the signs
                into the latter.
        """
        out, room = torch.empty_like(x), self.room(x)
        first, second = x.new_zeros(2, x.shape[1])
        for piece, target in zip(self.pieces(x), self.pieces(out), strict=True):
            bent = self.shifted(piece, channels, room)
            linear = bent.clone() if self.standardize else None
            back = self._place(target, bent)
            slope(channels.bend_(bent), back)
            _through_tanh(back, bent)
            if self.center:
                first += back.sum(-1).flatten()
            if linear is not None:
                second += linear.mul_(back).sum(-1).flatten()
            if back.data_ptr() != target.data_ptr():
                self.grouped(target).copy_(back.unflatten(2, (piece.shape[0], piece.shape[2])))
        self._project(x, out, channels, first, second)
        return out

    def _place(self, target: Tensor, bent: Tensor) -> Tensor:
        """The target itself, if samples follow one another in it as they do in the piece; else an empty tensor."""
        grouped = self.grouped(target)
        inside = target.shape[0] == 1 or target.shape[2] == 1
        return grouped.flatten(2) if inside else torch.empty_like(bent)

    def _project(self, x: Tensor, out: Tensor, channels: Channels, first: Tensor, second: Tensor) -> None:
        """Take out what moving the means and the deviations undoes; in place."""
        if self.center:
            out.sub_((self.total(first) / channels.samples).to(out.dtype).view(1, -1, 1))
        if self.standardize:
            factor = (self.total(second) / (channels.samples * self.gamma**2)).to(out.dtype)
            factor = factor.view(self.groups, -1, 1)
            room = self.room(x)
            for piece, target in zip(self.pieces(x), self.pieces(out), strict=True):
                linear = self.shifted(piece, channels, room).mul_(factor)
                self.grouped(target).sub_(linear.unflatten(2, (piece.shape[0], piece.shape[2])))


def _through_tanh(back: Tensor, signs: Tensor) -> None:
    """back ← back · (1 − signs²) in one pass."""
    torch.ops.aten.tanh_backward.grad_input(back, signs, grad_input=back)
