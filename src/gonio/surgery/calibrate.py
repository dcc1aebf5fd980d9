"""`calibrate_`: statistics of normalisation layers measured on whole batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gonio.errors import InvalidArgumentError, NotApplicableError
from gonio.nn.ranks import several_ranks, total
from gonio.surgery.edit import Edit, Edited
from gonio.surgery.equivalent import call, evaluating
from gonio.surgery.site import select
from gonio.surgery.tally import Tally
from gonio.surgery.where import Where
from gonio.surgery.wrapping import run_eagerly, unwrapped

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
    N/(N − 1), and each :math:`\sigma_b^2` of the mean times n_b/(n_b − 1). The batches of an instance
    norm are its samples.

    The layers normalise by each batch's own statistics meanwhile, as in training, so every layer sees
    the inputs it saw in training; everything else (dropout) is in evaluation mode, and compiled models
    run uncompiled.

    In a distributed process group every process must make the call, each with batches of its own; all end
    with the statistics of all batches. Processes may have different numbers of batches, unless layers
    that join their statistics are among them (switchable norms, SyncBatchNorm): their batch is that
    of all processes together.

    Args:
        model: changed in place: the buffers `running_mean` and `running_var` alone.
        batches: inputs; each a tensor, a tuple of arguments or a dict of keyword arguments.
        where: which layers; None for all that keep running statistics.
        variance: see above.

    Raises:
        NoMatchError: if no selected layer keeps running statistics.
        InvalidArgumentError: if there is no batch, or if processes that join statistics have different numbers.
        NotApplicableError: if a layer saw no values, or statistics are not finite.

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
    tallies = [Tally(site, of_batches=variance == "mean") for site in found]
    count = _run(model, batches, tallies)
    with Edit(model, "calibrate_") as edit:
        edit.note(f"{count} batches, variance={variance!r}")
        for tally in tallies:
            _store_(edit, tally)
    return edit.done()


def _run(model: nn.Module, batches: Iterable[Any], tallies: list[Tally]) -> int:
    """Run the batches; how many there were in all processes."""
    device = tallies[0].site.module.get_buffer("running_mean").device
    count = 0
    with ExitStack() as stack:
        stack.enter_context(evaluating(model))
        stack.enter_context(torch.no_grad())
        stack.enter_context(run_eagerly(model))
        for tally in tallies:
            stack.callback(_restorer(tally.site.module))
            tally.site.module.train()
            handle = tally.site.module.register_forward_pre_hook(tally.add, with_kwargs=True)
            stack.callback(handle.remove)
        # The model itself: a data-parallel wrapper would exchange buffers at each call.
        for batch in _in_step(batches, device, joins=any(tally.joins for tally in tallies)):
            call(unwrapped(model), batch)
            count += 1
    if several_ranks():
        count = int(total(torch.tensor(float(count), device=device)))
    if count == 0:
        raise InvalidArgumentError("calibrate_ averages over batches", "no batch", "Pass at least one.")
    return count


def _in_step(batches: Iterable[Any], device: torch.device, *, joins: bool) -> Iterator[Any]:
    """The batches. Where layers join their statistics, a process without one would leave the others waiting."""
    for batch in batches:
        if joins:
            _check_step(torch.tensor([1.0, 0.0], device=device))
        yield batch
    if joins:
        _check_step(torch.tensor([0.0, 1.0], device=device))


def _check_step(mine: Tensor) -> None:
    ready, finished = total(mine).tolist()
    if ready and finished:
        raise InvalidArgumentError(
            "calibrate_ of layers that join their statistics over processes needs as many batches in each",
            f"{ready:.0f} processes with one more batch than the other {finished:.0f}",
            "Pass equally many; they may differ in size, and be empty.",
        )


def _restorer(module: nn.Module) -> Any:
    """Puts back the buffers that a training-mode forward moves."""
    before = {name: buffer.clone() for name, buffer in module.named_buffers(recurse=False)}

    def restore() -> None:
        for name, value in before.items():
            module.get_buffer(name).copy_(value)

    return restore


def _store_(edit: Edit, tally: Tally) -> None:
    site = tally.site
    running_mean, running_var = site.module.get_buffer("running_mean"), site.module.get_buffer("running_var")
    n, mean, var = tally.result(running_mean.numel(), running_mean.device)
    if n == 0:
        raise NotApplicableError("calibrate_", site.path, "it saw no values", "Leave it out of `where`.")
    if not (torch.isfinite(mean).all() and torch.isfinite(var).all()):
        raise NotApplicableError("calibrate_", site.path, "its statistics are not finite", "Check weights and batches.")
    edit.set_buffer_(site.module, "running_mean", mean.to(running_mean.dtype))
    edit.set_buffer_(site.module, "running_var", var.to(running_var.dtype))
    edit.changed(site.path, f"statistics of {n:.0f} values per channel")


def _keeps_no_statistics(module: nn.Module) -> str | None:
    buffers = module._buffers
    if isinstance(buffers.get("running_mean"), Tensor) and isinstance(buffers.get("running_var"), Tensor):
        return None
    return "it keeps no running statistics"
