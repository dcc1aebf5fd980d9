"""`match_statistics_`: give filters back the scale and mean that the batch norm behind them stores."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gonio.editing.edit import Edit, Edited
from gonio.editing.memory import memory_key, registered
from gonio.editing.twin import copy_of, evaluating
from gonio.editing.where import Site, Where, left_out, modules_at, refuse_meta, refuse_shards, select, sites, why_not
from gonio.errors import InvalidArgumentError, NotApplicableError, listing
from gonio.geometry import layout_of, matrix_view, unview
from gonio.messages import say
from gonio.surgery.calibrate import can_act as why_no_statistics
from gonio.surgery.equivalent import call, checked_batches, first_input, fitting
from gonio.surgery.recycle import can_act

FACTOR = 2.0  # between the stored and the measured standard deviation, above which a filter is changed
_NONE = say("no batch norm with running statistics gets its output")
_EXCHANGED = say("it, or the norm behind it, runs with other tensors in the place of its own")
_SHARED = say("another layer has the same weight or bias")
SHIFT = 1.0  # between the means, in stored standard deviations


def match_statistics_(model: nn.Module, batches: Iterable[Any], *, where: Where = None) -> Edited:
    r"""Scale and shift filters so that their outputs have the mean and variance that the batch norm behind them stores.

    It is the inverse of :func:`gonio.calibrate_`: the running statistics count as right, and the weights as changed
    since. With :math:`u = \langle w, x \rangle` over the batches, and the stored mean :math:`\mu` and variance
    :math:`\sigma^2` of the channel,

    .. math::
        w \leftarrow s\,w, \qquad b \leftarrow \mu - s\,\operatorname{mean}(u), \qquad
        s = \sigma / \operatorname{std}(u).

    Without a bias, where this does not give the mean :math:`\mu`, a number that was added to every weight of the filter
    is sought as well: :math:`w \leftarrow s\,w - k`, with s and k such that mean and variance are the stored ones; of
    two solutions the one with s nearer to 1 is taken. A filter stays if its standard deviation is within a factor of 2
    of the stored one, and its mean within one stored standard deviation.

    A norm is behind a layer if it gets the layer's output itself in a run of the first batch, unchanged by a hook or by
    an operation in place. Layers are treated in the order in which they run, each with what the layers before it have
    become. One that shares its weight or bias with another layer stays, because the other's outputs would change too.

    Args:
        batches: inputs; each a tensor, a tuple of arguments, a dict of keyword arguments or a list `[x, y]`. They are
            read once and held.
        where: which layers; None for all linear and convolutional ones.

    Raises:
        NoMatchError: if `where` selects no linear or convolutional layer.
        InvalidArgumentError: if there is no batch, if one has another size than a layer takes, or is not in a list.
        NotApplicableError: if no selected layer has a batch norm with statistics behind it, or the model is sharded.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)).eval()
        >>> x = torch.randn(256, 8)
        >>> before = gonio.calibrate_(model, [x]) and model(x)
        >>> with torch.no_grad():
        ...     _ = model[0].weight[1].mul_(100), model[0].bias[2].add_(50)
        >>> print(gonio.match_statistics_(model, [x]))
        match_statistics_: 1 module
          0  filters 1, 2 get the statistics of 1
        >>> torch.allclose(model(x), before, atol=1e-4)
        True
    """
    kept = list(checked_batches("match_statistics_", batches))
    if not kept:
        raise InvalidArgumentError("match_statistics_ measures on batches", "no batch", "Pass at least one.")
    found = {site.path: site for site in select(model, where, verb="match_statistics_", can_act=can_act)}
    refuse_shards(model, "match_statistics_")
    refuse_meta(model, "match_statistics_")
    norms = modules_at(model)
    with fitting(model, kept[0], say("a batch of {verb}", verb="match_statistics_")):
        norms_of = _norms_behind(model, kept[0])
    shared = _sharing(model)
    behind = {layer: norm for layer, norm in norms_of.items() if norm and layer in found and layer not in shared}
    left = [path for path in found if path not in behind]
    stay = {p: _NONE if p not in norms_of else _SHARED if norms_of[p] else _EXCHANGED for p in left}
    if not behind:
        path, why = next(((path, why) for path, why in stay.items() if why is not _NONE), next(iter(stay.items())))
        do = "Choose layers in front of one by `where`."
        raise NotApplicableError("match_statistics_", path, why, do, action="restore the scale of")
    with Edit(model, "match_statistics_") as edit, torch.no_grad():
        for layer, norm in behind.items():
            _match(edit, found[layer], norms[norm], norm, _measured(model, layer, kept))
        edit.note_stays(stay)
        edit.note_stays(left_out(model, where, can_act=can_act))
    return edit.done()


def _sharing(model: nn.Module) -> set[str]:
    """The layers with a Parameter that another layer has, too."""
    held = {site.path: {memory_key(p) for p in site.module.parameters(recurse=False)} for site in sites(model)}
    count = Counter(key for keys in held.values() for key in keys)
    return {path for path, keys in held.items() if any(count[key] > 1 for key in keys)}


def _norms_behind(model: nn.Module, batch: Any) -> dict[str, str]:
    """For each layer whose output a batch norm gets, in the order of execution: the norm. Each runs once.

    The norm is empty where one of both ran with other tensors in the place of its own.
    """
    made: dict[int, tuple[str, Tensor, int]] = {}
    calls: list[str] = []
    exchanged: set[str] = set()
    pairs: dict[str, str] = {}

    def ran(path: str, module: nn.Module) -> None:
        calls.append(path)
        if registered(module) != own[path]:
            exchanged.add(path)

    def keep(path: str, module: nn.Module, _inputs: Any, output: Tensor) -> None:
        ran(path, module)
        if output.dim() == (2 if isinstance(module, nn.Linear) else module.weight.dim()):  # type: ignore[operator]
            made[id(output)] = path, output, output._version  # held, so that no other tensor gets its id

    def read(path: str, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        ran(path, module)
        given = first_input(arguments, keywords)
        layer, output, version = made.get(id(given), ("", None, 0))
        if output is given and version == output._version:
            pairs[layer] = path

    # Outside of inference mode, whose tensors keep no versions; before the layer's own hooks, which may change outputs.
    with torch.inference_mode(False), evaluating(model) as plain, torch.no_grad(), ExitStack() as hooks:
        own = {site.path: registered(site.module) for site in sites(plain)}
        for site in sites(plain):
            if why_not(site, can_act) is None:
                hooks.enter_context(site.module.register_forward_hook(partial(keep, site.path), prepend=True))
            elif isinstance(site.module, _BatchNorm) and why_no_statistics(site.module) is None:
                hooks.enter_context(site.module.register_forward_pre_hook(partial(read, site.path), with_kwargs=True))
        call(plain, batch)
    once = {layer: norm for layer, norm in pairs.items() if calls.count(layer) == calls.count(norm) == 1}
    return {layer: "" if {layer, norm} & exchanged else norm for layer, norm in once.items()}


@dataclass
class _Moments:
    """Of the outputs u of each filter without its bias, and of the sums S of the inputs that it reads, in float64."""

    count: int = 0
    sums: Tensor = field(
        default_factory=lambda: torch.zeros((), device="cpu", dtype=torch.float32)
    )  # of u, S, u², uS, S²

    def add(self, u: Tensor, s: Tensor) -> None:
        u, s = (each.double().transpose(0, 1).flatten(1) for each in (u, s))
        self.count += u.shape[1]
        new = torch.stack([each.sum(1) for each in (u, s, u * u, u * s, s * s)])
        self.sums = self.sums.to(new) + new

    @property
    def figures(self) -> tuple[Tensor, ...]:
        """Means of u and S, variance of u, covariance, variance of S."""
        u, s, uu, us, ss = (self.sums / max(1, self.count)).unbind()
        unbiased = self.count / max(1, self.count - 1)  # as the stored variances are
        return u, s, unbiased * (uu - u * u), unbiased * (us - u * s), unbiased * (ss - s * s)


def _measured(model: nn.Module, path: str, batches: list[Any]) -> _Moments:
    moments = _Moments()

    def add(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], _output: Tensor) -> None:
        own, ones = copy_of(module), copy_of(module)
        ones.weight.fill_(1.0)  # type: ignore[operator]
        for each in (own, ones):
            if each.bias is not None:
                each.bias.zero_()  # type: ignore[operator]
        given = first_input(arguments, keywords)
        moments.add(own.forward(given), ones.forward(given))

    with evaluating(model) as plain, torch.no_grad(), ExitStack() as hooks:
        hooks.enter_context(modules_at(plain)[path].register_forward_hook(add, with_kwargs=True))
        for batch in batches:
            with fitting(model, batch, say("a batch of {verb}", verb="match_statistics_")):
                call(plain, batch)
    return moments


def _match(edit: Edit, site: Site, norm: nn.Module, name: str, seen: _Moments) -> None:
    """Change the filters whose statistics are far from the stored ones."""
    mean, var = (norm.get_buffer(each).double() for each in ("running_mean", "running_var"))
    u, s, var_u, cov, var_s = seen.figures
    weight, bias = site.module.get_parameter("weight"), site.module._parameters.get("bias")
    known = torch.isfinite(u) & torch.isfinite(mean) & (var > 0) & (var < float("inf")) & (var_u > 1e-12 * u * u)
    scale, offset = (var / var_u).sqrt(), torch.zeros_like(var)
    own = torch.zeros_like(u) if bias is None else bias.double()
    near = (scale.log().abs() <= math.log(FACTOR)) & ((u + own - mean).abs() <= SHIFT * var.sqrt())
    far = known & ~near
    if bias is None:
        shifted = far & ((scale * u - mean).abs() > SHIFT * var.sqrt()) & (s.abs() > 1e-6 * var_s.sqrt())
        other, constant = _with_offset(u / s, mean / s, var, var_u, cov, var_s)
        solved = shifted & torch.isfinite(other)
        scale, offset = torch.where(solved, other, scale), torch.where(solved, constant, offset)
    chosen = far.nonzero().flatten().tolist()
    if not chosen:
        return
    layout = layout_of(site.module)
    rows = matrix_view(weight.detach().double(), layout)
    factors, constants = (each.view(*rows.shape[:2], 1) for each in (scale, offset))
    new = torch.where(far.view_as(factors), factors * rows - constants, rows)
    edit.set_data_(weight, unview(new, weight.shape, layout).to(weight))
    if bias is not None:
        edit.set_data_(bias, torch.where(far, mean - scale * u, own).to(bias))
    told = {"listed": listing([*map(str, chosen)], limit=8), "norm": name}
    one = say("filter {listed} gets the statistics of {norm}", **told)
    edit.changed(site.path, one if len(chosen) == 1 else say("filters {listed} get the statistics of {norm}", **told))


def _with_offset(a: Tensor, b: Tensor, var: Tensor, var_u: Tensor, cov: Tensor, var_s: Tensor) -> tuple[Tensor, Tensor]:
    """s and k with the stored mean and variance of s·u − k·S, where k = a·s − b; not finite where there are none."""
    square, linear, constant = var_u - 2 * a * cov + a * a * var_s, 2 * b * (cov - a * var_s), b * b * var_s - var
    root = (linear * linear - 4 * square * constant).sqrt()
    both = torch.stack([(-linear + root) / (2 * square), (-linear - root) / (2 * square)])
    both = torch.where(both > 0, both, float("nan"))
    distance = both.log().abs().nan_to_num(nan=float("inf"))
    scale = both.gather(0, distance.argmin(0, keepdim=True))[0]
    return scale, a * scale - b
