"""The statistics of one normalisation layer over many batches, and over all processes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from gonio.nn import SwitchableNorm1d, SwitchableNorm2d, SwitchableNorm3d
from gonio.nn.ranks import several_ranks, total
from gonio.nn.switchable_statistics import batch_statistics
from gonio.surgery.site import Site

__all__ = ["Tally"]

_SWITCHABLE = (SwitchableNorm1d, SwitchableNorm2d, SwitchableNorm3d)
# dimensions of one sample
_UNBATCHED: dict[type[nn.Module], int] = {nn.InstanceNorm1d: 2, nn.InstanceNorm2d: 3, nn.InstanceNorm3d: 4}


class Tally:
    """Running sums in float64 of the batches that a layer meets.

    Kept are the mean of all values and squares about it, never a sum of squares about 0, which has few digits
    left of a spread that is small beside the mean.

    Args:
        site: the layer.
        of_batches: whether the average of the batches' variances is wanted, or the variance of all values.
    """

    def __init__(self, site: Site, *, of_batches: bool) -> None:
        self.site, self.of_batches = site, of_batches
        self.unbiased = isinstance(site.module, (_BatchNorm, _InstanceNorm))
        self.joins = _joins(site.module)
        self.values = self.mean = self.within = self.between = torch.zeros((), dtype=torch.float64)

    def add(self, _: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Count one batch (N, C, *positions): a forward pre-hook. The batches of an instance norm are its samples."""
        x = next(iter((*arguments, *keywords.values()))).detach().double()
        if x.dim() == _UNBATCHED.get(type(self.site.module)):
            x = x.unsqueeze(0)
        if x.numel() == 0 and not self.joins:
            return
        flat = x.flatten(2) if x.dim() > 2 else x.unsqueeze(2)
        means, variances = flat.mean(2), flat.var(2, correction=0)
        n: Tensor = x.new_tensor(float(flat.shape[2]))
        if not isinstance(self.site.module, _InstanceNorm):
            (means, variances), samples = batch_statistics(torch.stack([means, variances]), join=self.joins)
            n = n * samples
        if self.unbiased and self.of_batches and n > 1:
            variances = variances * (n / (n - 1))
        self._merge(n, means, variances)

    def _merge(self, n: Tensor, means: Tensor, variances: Tensor) -> None:
        """Count batches of n values each; their means and variances, (batches, C)."""
        more, center = n * len(means), means.mean(0)
        values, mean = self.values.to(n), self.mean.to(means)
        self.values = values + more
        share = more / self.values.clamp_min(1)
        self.mean = mean + share * (center - mean)
        self.within = self.within.to(means) + n * variances.sum(0)
        apart = n * (means - center).square().sum(0) + values * share * (center - mean).square()
        self.between = self.between.to(means) + apart

    def result(self, channels: int, device: torch.device) -> tuple[float, Tensor, Tensor]:
        """How many values per channel there were in all processes, their mean and variance."""
        n, mean, within, between = (
            t.to(device).expand(channels) for t in (self.values, self.mean, self.within, self.between)
        )
        if several_ranks() and not self.joins:
            everything = total(n)
            center = total(n * mean) / everything.clamp_min(1)
            within, between = total(torch.stack([within, between + n * (mean - center).square()]))
            n, mean = everything, center
        count = float(n[0])
        var = (within if self.of_batches else within + between) / max(count, 1)
        if self.unbiased and not self.of_batches and count > 1:
            var = var * (count / (count - 1))
        return count, mean, var


def _joins(module: nn.Module) -> bool:
    """Whether a layer takes the statistics of its batches over all processes."""
    switchable = isinstance(module, _SWITCHABLE) and module.use_batch and module.synchronize
    return several_ranks() and (switchable or isinstance(module, nn.SyncBatchNorm))
