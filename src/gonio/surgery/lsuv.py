"""`lsuv_`: scale each layer to unit variance of its output, in the order of execution."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gonio import init
from gonio.editing.edit import Edit, Edited
from gonio.editing.memory import memory_key
from gonio.editing.twin import evaluating
from gonio.editing.where import Site, Where, at, left_out, modules_at, refuse_meta, refuse_shards, select
from gonio.errors import InvalidArgumentError, NotApplicableError
from gonio.geometry.views import has_filters, layout_of, why_not_dense
from gonio.messages import counted, say
from gonio.seeding import generator
from gonio.surgery.equivalent import call, fitting
from gonio.surgery.facts import TABLES
from gonio.surgery.init import check_function


def lsuv_(
    model: nn.Module,
    batch: Any,
    *,
    where: Where = None,
    function: Callable[..., Tensor] | None = init.orthogonal_,
    tolerance: float = 0.01,
    max_steps: int = 10,
    seed: int = 0,
) -> Edited:
    r"""Layer-sequential unit-variance initialisation.

    Each weight is drawn by `function`, then divided by the standard deviation of the layer's output on the batch until
    that is within `tolerance` of 1:

    .. math::
        W_l \leftarrow W_l \,/\, \operatorname{std}(y_l), \qquad l \text{ in the order of execution}

    The model runs in evaluation mode and gets its modes back; its buffers do not change. A weight that several layers
    share is scaled once, by the first of them that runs. Notes name the layers that do not converge within `max_steps`
    or have a constant output, and selected layers that are left out.

    Args:
        batch: an input tensor, a tuple of arguments, a dict of keyword arguments or a list `[x, y]` of a DataLoader.
        where: which layers; None for all linear and convolutional ones.
        function: draws the weights first; None keeps them and only scales.

    Raises:
        NoMatchError: if `where` selects no linear or convolutional layer.
        InvalidArgumentError: if the batch has another size than a layer takes.
        NotApplicableError: if no selected layer ran on the batch, or the model is sharded.

    Example:
        >>> model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8))
        >>> x = torch.randn(256, 16, generator=torch.Generator().manual_seed(0))
        >>> edited = gonio.lsuv_(model, x)
        >>> abs(model(x).std().item() - 1) < 0.01
        True

    References: D. Mishkin and J. Matas, "All you need is a good init", ICLR 2016, Algorithm 1.
        https://arxiv.org/abs/1511.06422
    """
    if not 0 < tolerance < 1 or max_steps < 1:
        given = f"tolerance={tolerance}, max_steps={max_steps}"
        raise InvalidArgumentError("lsuv_ needs 0 < tolerance < 1 and max_steps ≥ 1", given, "Leave them out.")
    if function is not None:
        check_function("lsuv_", function, {})
    refuse_shards(model, "lsuv_")
    refuse_meta(model, "lsuv_")
    found = select(model, where, verb="lsuv_", can_act=can_act)
    with fitting(model, batch, "lsuv_(batch=)"), evaluating(model) as twin, torch.no_grad():
        layers = modules_at(twin)
        ordered = _in_execution_order(twin, batch, {layers[site.path]: site for site in found})
    with Edit(model, "lsuv_", once=True) as edit, evaluating(model) as twin, torch.no_grad():
        layers = modules_at(twin)
        for site in found:
            if site not in ordered:
                edit.note(say("{path} did not run on the batch: left as it was", path=site.path))
        first = {memory_key(site.module.get_parameter("weight")): site for site in reversed(ordered)}
        for site in [site for site in ordered if site in first.values()]:  # before a forward that writes to weights
            edit.set_data_(site.module.get_parameter("weight"), site.module.get_parameter("weight"))
        for site in ordered:
            if site not in first.values():
                edit.changed(site.path, say("tied: scaled above"))
                continue
            if function is not None:
                with at(site, "weight"):
                    weight, random = site.module.get_parameter("weight"), generator(seed, "init", site.path)
                    function(weight, layout=layout_of(site.module), generator=random)
            with fitting(model, batch, "lsuv_(batch=)"):
                _scale_(edit, site, partial(_output_std, twin, layers[site.path], batch), tolerance, max_steps)
        edit.note_stays(left_out(model, where, can_act=can_act))
    return edit.done()


def _scale_(edit: Edit, site: Site, std_of: Callable[[], float | None], tolerance: float, max_steps: int) -> None:
    """Divide a layer's weight by the standard deviation of its output until that is near 1."""
    weight = site.module.get_parameter("weight")
    start, std, steps = weight.detach().clone(), std_of(), 0
    while std is not None and abs(std - 1) > tolerance and steps < max_steps and 0 < std < float("inf"):
        weight.div_(std)
        before, std, steps = std, std_of(), steps + 1
        if std is not None and math.isclose(std, before, rel_tol=1e-6):
            weight.copy_(start)
            edit.changed(site.path, say("not scaled"))
            edit.note(say("the scale of the weight of {path} has no effect on its output", path=site.path))
            return
    if std is None:
        edit.changed(site.path, say("not scaled"))
        edit.note(
            say(
                "{path} gets no values of the batch any more, since the layers before it have other weights",
                path=site.path,
            )
        )
        return
    edit.changed(site.path, say("output std {std:.3f} after {steps}", std=std, steps=counted(steps, "step")))
    if not abs(std - 1) <= tolerance:
        why = say("its output is constant") if std == 0 else say("its output's std is {std:.3g}", std=std)
        edit.note(say("{path} has not converged: {why}", path=site.path, why=why))


class _Reached(Exception):
    """Ends a forward pass at the measured layer."""


def _output_std(model: nn.Module, module: nn.Module, batch: Any) -> float | None:
    """Of the layer's first outputs with values; None if it has none, as an expert that a router does not choose."""
    measured: list[float] = []

    def stop(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        if output.numel():
            measured.append(float(output.double().std(correction=0)))
            raise _Reached

    with module.register_forward_hook(stop), suppress(_Reached):
        call(model, batch)
    return measured[0] if measured else None


def _in_execution_order(model: nn.Module, batch: Any, found: Mapping[nn.Module, Site]) -> list[Site]:
    ran: list[Site] = []
    with ExitStack() as stack:
        for module, site in found.items():
            stack.enter_context(module.register_forward_hook(lambda *_, site=site: ran.append(site)))
        call(model, batch)
    if not ran:
        raise NotApplicableError("lsuv_", "", "no selected layer ran on the batch", "Check `where`.", action="scale")
    return list(dict.fromkeys(ran))


def can_act(module: nn.Module) -> str | None:
    """Why :func:`lsuv_` cannot act on a layer; None if it can.

    Example:
        >>> from gonio.surgery.lsuv import can_act
        >>> can_act(nn.Linear(2, 2)), can_act(nn.ReLU())
        (None, 'it is not a linear or convolutional layer')
    """
    if isinstance(module, TABLES) or not has_filters(module):
        return "it is not a linear or convolutional layer"
    weight = module._parameters.get("weight")
    if weight is None or weight is not module.weight:
        return "its weight is computed by a parametrization; initialise first"
    return why_not_dense(weight)
