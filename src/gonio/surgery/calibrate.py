"""`calibrate_`: statistics of normalisation layers measured on whole batches."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy

from gonio.editing.edit import Edit, Edited
from gonio.editing.twin import evaluating
from gonio.editing.where import Site, Where, as_selector, modules_at, refuse_meta, select, sites
from gonio.errors import InvalidArgumentError, NotApplicableError
from gonio.execution import ordinary_eager, several_ranks, total
from gonio.messages import joined, say
from gonio.nn.switchable_function import batch_statistics
from gonio.surgery.equivalent import call, checked_batches, first_input, fitting
from gonio.surgery.facts import facts_of

# dimensions of one sample
_UNBATCHED: dict[type[nn.Module], int] = {nn.InstanceNorm1d: 2, nn.InstanceNorm2d: 3, nn.InstanceNorm3d: 4}


def calibrate_(
    model: nn.Module, batches: Iterable[Any], *, where: Where = None, variance: Literal["total", "mean"] = "total",
    channels: Literal["all", "invalid"] = "all",
) -> Edited:  # fmt: skip
    r"""Replace running statistics by averages over batches, with all parameters frozen.

    For batches :math:`b` with :math:`n_b` values per channel, mean :math:`\mu_b` and (biased) variance
    :math:`\sigma_b^2`, with weights :math:`p_b = n_b / \sum n_b`:

    .. math::
        \mu = \sum_b p_b \mu_b, \qquad
        \sigma^2_{\text{mean}} = \sum_b p_b \sigma_b^2, \qquad
        \sigma^2_{\text{total}} = \sigma^2_{\text{mean}} + \sum_b p_b (\mu_b - \mu)^2

    `variance="total"` is the variance of all values together; `"mean"` is the average variance of the batches, as in
    training. torch's layers store unbiased variances: for them the total is multiplied by N/(N − 1), and each
    :math:`\sigma_b^2` of the mean by n_b/(n_b − 1). The batches of an instance norm are its samples.

    During the call the layers normalise by each batch's own statistics, as in training; everything else (dropout) is
    in evaluation mode, and compiled models run eagerly. In a distributed process group every process must make the
    call with its own batches, and gets the statistics of all batches. The numbers of batches may differ, except for
    layers that join their statistics (switchable norms, SyncBatchNorm).

    Call it after averaging weights (SWA, EMA): `torch.optim.swa_utils.update_bn` does not reset switchable norms.

    Args:
        model: only its buffers `running_mean` and `running_var` change.
        batches: inputs; each a tensor, a tuple of arguments, a dict of keyword arguments or a list `[x, y]` of a
            DataLoader, of which the model gets what its forward takes.
        where: which layers; None for all that keep running statistics.
        channels: "invalid" for those alone whose mean or variance is not finite, or whose variance is negative.

    Raises:
        NoMatchError: if no selected layer keeps running statistics.
        InvalidArgumentError: if there is no batch, if one has another size than a layer takes, if it is not in a list,
            or if processes that join statistics have different numbers.
        NotApplicableError: if a layer saw no values, or statistics are not finite.

    Example:
        >>> model = nn.Sequential(nn.BatchNorm1d(1))
        >>> edited = gonio.calibrate_(model, [torch.tensor([[0.0], [2.0]]), torch.tensor([[4.0], [6.0]])])
        >>> model[0].running_mean, model[0].running_var
        (tensor([3.]), tensor([6.6667]))

    References: P. Luo et al., "Differentiable Learning-to-Normalize via Switchable Normalization", ICLR 2019, section
        2.2 ("batch average"). Y. Wu and J. Johnson, "Rethinking 'Batch' in BatchNorm", 2021, section 3 (precise
        statistics). https://arxiv.org/abs/2105.07576
    """
    if variance not in ("total", "mean"):
        raise InvalidArgumentError('calibrate_ takes variance="total" or "mean"', repr(variance), "Choose one.")
    if channels not in ("all", "invalid"):
        raise InvalidArgumentError('calibrate_ takes channels="all" or "invalid"', repr(channels), "Choose one.")
    refuse_meta(model, "calibrate_")
    checked_batches("calibrate_", batches)
    found = select(model, where, verb="calibrate_", can_act=can_act)
    layers = [_RunningMoments(site, of_batches=variance == "mean") for site in found]
    count = _run(model, batches, layers)
    with Edit(model, "calibrate_") as edit:
        edit.note(
            say(
                "{count} batch{s}, variance={variance!r}",
                count=count,
                s="" if count == 1 else "es",
                variance=variance,
            )
        )
        for moments in layers:
            _store_(edit, moments, channels)
        chosen = [
            site for site in sites(model) if site.matches(as_selector(where)) and "running_mean" in site.module._buffers
        ]
        edit.note_stays({site.path: why for site in chosen if (why := can_act(site.module)) is not None})
    return edit.done()


def _run(model: nn.Module, batches: Iterable[Any], layers: list[_RunningMoments]) -> int:
    """Run the batches; the number of batches in all processes."""
    device = layers[0].site.module.get_buffer("running_mean").device
    count = 0
    with ExitStack() as stack:
        # Without wrappers: a data-parallel one would exchange buffers at each call.
        plain = stack.enter_context(evaluating(model))
        stack.enter_context(torch.no_grad())
        modules = modules_at(plain)
        for moments in layers:
            module = modules[moments.site.path].train()
            for part in module.children():  # such as a dropout
                part.eval()
            stack.enter_context(own_buffers(module))
            stack.enter_context(module.register_forward_pre_hook(moments.add, with_kwargs=True))
        for batch in _in_step(batches, device, joins=any(moments.joins for moments in layers)):
            with fitting(model, batch, say("a batch of {verb}", verb="calibrate_")):
                call(plain, batch)
            count += 1
    if several_ranks():
        count = int(total(torch.tensor(float(count), device=device)))
    if count == 0:
        raise InvalidArgumentError("calibrate_ averages over batches", "no batch", "Pass at least one.")
    return count


def _in_step(batches: Iterable[Any], device: torch.device, *, joins: bool) -> Iterator[Any]:
    """The batches; raises if layers join their statistics and processes have different numbers of batches."""
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


@contextmanager
def own_buffers(module: nn.Module) -> Iterator[None]:
    """Copies of the buffers inside, because a forward in training mode updates them."""
    before = dict(module._buffers)
    module._buffers.update({name: buffer.clone() for name, buffer in before.items() if buffer is not None})
    try:
        yield
    finally:
        module._buffers.update(before)


def _store_(edit: Edit, moments: _RunningMoments, channels: str) -> None:
    site = moments.site
    running_mean, running_var = site.module.get_buffer("running_mean"), site.module.get_buffer("running_var")
    n, mean, var = moments.result(running_mean.numel(), running_mean.device)
    if n == 0:
        raise moments.refuse("it saw no values", "Leave it out of `where`.")
    if not (torch.isfinite(mean).all() and torch.isfinite(var).all()):
        raise moments.refuse("its statistics are not finite", "Check weights and batches.")
    chosen = ~(torch.isfinite(running_mean) & (running_var >= 0) & torch.isfinite(running_var))
    if channels == "all":
        chosen = torch.ones_like(chosen)
    for name, old, new in (("running_mean", running_mean, mean), ("running_var", running_var, var)):
        edit.set_buffer_(site.module, name, torch.where(chosen, new.to(old.dtype), old))
    what: list[str] = [say("statistics of {n:.0f} values per channel", n=n)]
    what += [] if channels == "all" else [say("in {k} of {n} channels", k=int(chosen.sum()), n=chosen.numel())]
    edit.changed(site.path, joined(what))


def can_act(module: nn.Module) -> str | None:
    """Why :func:`calibrate_` cannot act on a layer; None if it can.

    Example:
        >>> from gonio.surgery.calibrate import can_act
        >>> can_act(nn.BatchNorm1d(2)), can_act(nn.LayerNorm(2))
        (None, 'it keeps no running statistics')
    """
    buffers = dict(module._buffers.items())  # a scripted module keeps no dict of them
    stored = [buffers.get(name) for name in ("running_mean", "running_var")]
    if not all(isinstance(each, Tensor) for each in stored):
        return say("it keeps no running statistics")
    return say("it is lazy; run one batch first") if any(is_lazy(each) for each in stored if each is not None) else None


class _RunningMoments:
    """Mean and centred sum of squares (Welford) of the inputs of one layer, in float64.

    With `of_batches` the variances of the batches are averaged; otherwise it is the variance of all values.
    """

    def __init__(self, site: Site, *, of_batches: bool) -> None:
        self.site, self.of_batches = site, of_batches
        self.refuse = partial(NotApplicableError, "calibrate_", site.path, action="calibrate", kind=site.kind)
        module = site.module
        self.unbiased = isinstance(module, (_BatchNorm, _InstanceNorm))
        self.fits = isinstance(module, (_BatchNorm, _InstanceNorm))  # whether it normalises dim 1, as far as is known
        # whether the layer takes the statistics of its batches over all processes
        self.group = vars(module).get("process_group")
        joins = facts_of(module).joins
        together = isinstance(module, nn.SyncBatchNorm) or (joins is not None and joins(module))
        self.joins = several_ranks(self.group) and together
        self.values = self.mean = self.within = self.between = torch.zeros((), dtype=torch.float64, device="cpu")

    def add(self, _: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Add one batch (N, C, *positions): a forward pre-hook. The batches of an instance norm are its samples."""
        given = first_input(arguments, keywords).detach()
        if not ordinary_eager():
            why = "it runs in a transform of torch.func, in which values cannot be read"
            raise self.refuse(why, "Leave it out of `where`.")
        if not self.fits and given.numel():
            self._check(given, arguments, keywords)
        x = given.double()
        if any(isinstance(self.site.module, kind) and x.dim() == dims for kind, dims in _UNBATCHED.items()):
            x = x.unsqueeze(0)
        if x.numel() == 0 and not self.joins:
            return
        flat = x.flatten(2) if x.dim() > 2 else x.unsqueeze(2)
        means, variances = flat.mean(2), flat.var(2, correction=0)
        n: Tensor = x.new_tensor(float(flat.shape[2]))
        if not isinstance(self.site.module, _InstanceNorm):
            both, samples = batch_statistics((means, variances), join=self.joins, group=self.group)
            means, variances = both
            n = n * samples
        if self.unbiased and self.of_batches and n > 1:
            variances = variances * (n / (n - 1))
        self._merge(n, means, variances)

    def _check(self, given: Tensor, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Raise for a layer whose statistics are not those of dim 1: its first channel's change other outputs too."""
        module = copy.deepcopy(self.site.module).eval()
        mean = module.get_buffer("running_mean").zero_()
        module.get_buffer("running_var").fill_(1)
        before = module.forward(*arguments, **keywords)
        fits = given.dim() > 1 and mean.dim() == 1 and len(mean) == given.shape[1]
        if fits and isinstance(before, Tensor) and before.shape[:2] == given.shape[:2]:
            mean[0] = 1
            after = module.forward(*arguments, **keywords)
            fits = torch.equal(before[:, 1:].nan_to_num(), after[:, 1:].nan_to_num())
        if not fits:
            why = "its running statistics are not those of the second dimension of its input"
            raise self.refuse(why, "Leave it out of `where`.")
        self.fits = True

    def _merge(self, n: Tensor, means: Tensor, variances: Tensor) -> None:
        """Add batches of n values each, with their means and variances, (batches, C)."""
        more, center = n * len(means), means.mean(0)
        values, mean = self.values.to(n), self.mean.to(means)
        self.values = values + more
        share = more / self.values.clamp_min(1)
        self.mean = mean + share * (center - mean)
        self.within = self.within.to(means) + n * variances.sum(0)
        apart = n * (means - center).square().sum(0) + values * share * (center - mean).square()
        self.between = self.between.to(means) + apart

    def result(self, channels: int, device: torch.device) -> tuple[float, Tensor, Tensor]:
        """The number of values per channel in all processes, their mean and variance."""
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
