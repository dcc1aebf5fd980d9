"""`calibrate_`: statistics of normalisation layers measured on whole batches."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gonio.errors import InvalidArgumentError, NotApplicableError
from gonio.surgery.edit import Edit, Edited
from gonio.surgery.equivalent import call, evaluating
from gonio.surgery.site import Site, select
from gonio.surgery.where import Where

__all__ = ["calibrate_"]


def calibrate_(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    where: Where = None,
    variance: Literal["total", "mean"] = "total",
) -> Edited:
    r"""Replace running statistics by averages over batches, with all parameters frozen.

    For batches :math:`b` with :math:`n_b` values per channel, mean :math:`\mu_b` and (biased)
    variance :math:`\sigma_b^2`, with weights :math:`p_b = n_b / \sum n_b`:

    .. math::
        \mu = \sum_b p_b \mu_b, \qquad
        \sigma^2_{\text{mean}} = \sum_b p_b \sigma_b^2, \qquad
        \sigma^2_{\text{total}} = \sigma^2_{\text{mean}} + \sum_b p_b (\mu_b - \mu)^2

    `"total"` is the variance of all values together, what a single pass over joined batches would
    show; `"mean"` is the average variance that the layers met in training, smaller by the spread of
    the batch means. torch's layers store unbiased variances: for them the total is taken times
    N/(N − 1), and each :math:`\sigma_b^2` of the mean times n_b/(n_b − 1).

    The layers normalise by each batch's own statistics meanwhile, as in training, so every layer sees
    the inputs it saw in training; everything else (dropout) is in evaluation mode.

    Args:
        model: changed in place: the buffers `running_mean` and `running_var` alone.
        batches: inputs; each a tensor, a tuple of arguments or a dict of keyword arguments.
        where: which layers; None for all that keep running statistics.
        variance: see above.

    Raises:
        NoMatchError: if no selected layer keeps running statistics.
        InvalidArgumentError: if there is no batch, or statistics are not finite.

    Example:
        >>> model = nn.Sequential(nn.BatchNorm1d(1))
        >>> edited = gonio.calibrate_(model, [torch.tensor([[0.0], [2.0]]), torch.tensor([[4.0], [6.0]])])
        >>> model[0].running_mean, model[0].running_var
        (tensor([3.]), tensor([6.6667]))

    References:
        P. Luo et al., "Differentiable Learning-to-Normalize via Switchable Normalization", ICLR 2019,
        section 2.2 ("batch average"). Y. Wu and J. Johnson, "Rethinking 'Batch' in BatchNorm", 2021,
        section 3 (precise statistics). https://arxiv.org/abs/2105.07576
    """
    if variance not in ("total", "mean"):
        raise InvalidArgumentError('calibrate_ takes variance="total" or "mean"', repr(variance), "Choose one.")
    found = select(model, where, verb="calibrate_", can_act=_keeps_no_statistics)
    tallies = [(site, _Tally(unbiased=variance == "mean" and _is_torchs(site.module))) for site in found]
    count = _run(model, batches, tallies)
    if count == 0:
        raise InvalidArgumentError("calibrate_ averages over batches", "no batch", "Pass at least one.")
    with Edit(model, "calibrate_") as edit:
        edit.note(f"{count} batches, variance={variance!r}")
        for site, tally in tallies:
            _store_(edit, site, tally, variance)
    return edit.done()


@dataclass
class _Tally:
    """Sums over batches, in float64, of one layer's statistics."""

    unbiased: bool
    values: float = 0.0
    sums: dict[str, Tensor] = field(default_factory=dict)

    def add(self, x: Tensor) -> None:
        """Count one batch (N, C, *positions)."""
        dims = [0, *range(2, x.dim())]
        n = x.numel() // x.shape[1]
        if n == 0:
            return
        x = x.detach().double()
        mean = x.mean(dims)
        var = (x - mean.view(1, -1, *[1] * (x.dim() - 2))).square().mean(dims)
        if self.unbiased and n > 1:
            var = var * (n / (n - 1))
        self.values += n
        for name, term in {"mean": n * mean, "var": n * var, "square": n * mean.square()}.items():
            self.sums[name] = self.sums[name] + term if name in self.sums else term

    def joined(self, channels: int, device: torch.device) -> tuple[float, dict[str, Tensor]]:
        """Sums over all processes of the default group, if there are several."""
        names = ("mean", "var", "square")
        rows = [self.sums.get(name, torch.zeros(channels, dtype=torch.float64, device=device)) for name in names]
        packed = torch.cat([*rows, torch.tensor([self.values], dtype=torch.float64, device=device)])
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(packed)
        return float(packed[-1]), dict(zip(names, packed[:-1].view(3, channels), strict=True))


def _run(model: nn.Module, batches: Iterable[Any], tallies: list[tuple[Site, _Tally]]) -> int:
    count = 0
    with ExitStack() as stack:
        stack.enter_context(evaluating(model))
        stack.enter_context(torch.no_grad())
        for site, tally in tallies:
            stack.callback(_restorer(site.module))
            site.module.train()
            handle = site.module.register_forward_pre_hook(lambda _, inputs, tally=tally: tally.add(inputs[0]))
            stack.callback(handle.remove)
        for batch in batches:
            call(model, batch)
            count += 1
    return count


def _restorer(module: nn.Module) -> Any:
    """Puts back the buffers that a training-mode forward moves."""
    before = {name: buffer.clone() for name, buffer in module.named_buffers(recurse=False)}

    def restore() -> None:
        for name, value in before.items():
            module.get_buffer(name).copy_(value)

    return restore


def _store_(edit: Edit, site: Site, tally: _Tally, variance: str) -> None:
    running_mean, running_var = site.module.get_buffer("running_mean"), site.module.get_buffer("running_var")
    n, sums = tally.joined(running_mean.numel(), running_mean.device)
    if n == 0:
        raise NotApplicableError("calibrate_", site.path, "it saw no values", "Leave it out of `where`.")
    mean, var = sums["mean"] / n, sums["var"] / n
    if variance == "total":
        var = var + (sums["square"] / n - mean.square()).clamp_min(0)
        if _is_torchs(site.module) and n > 1:
            var = var * (n / (n - 1))
    if not (torch.isfinite(mean).all() and torch.isfinite(var).all()):
        raise NotApplicableError("calibrate_", site.path, "its statistics are not finite", "Check weights and batches.")
    edit.set_data_(running_mean, mean.to(running_mean.dtype))
    edit.set_data_(running_var, var.to(running_var.dtype))
    edit.changed(site.path, f"statistics of {n:.0f} values per channel")


def _is_torchs(module: nn.Module) -> bool:
    return isinstance(module, (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm))


def _keeps_no_statistics(module: nn.Module) -> str | None:
    buffers = module._buffers
    if isinstance(buffers.get("running_mean"), Tensor) and isinstance(buffers.get("running_var"), Tensor):
        return None
    return "it keeps no running statistics"
