"""`init_`: initialise the weights of chosen layers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from gonio.errors import InvalidArgumentError, NotApplicableError
from gonio.geometry.precision import whole
from gonio.geometry.views import layout_of
from gonio.init.draws import write_
from gonio.seeding import generator
from gonio.surgery.edit import Edit, Edited
from gonio.surgery.graph import activation_after
from gonio.surgery.site import Site, select, sites
from gonio.surgery.where import Where, as_selector
from gonio.surgery.wrapping import refuse_flat_shards

__all__ = ["init_"]

_LAYERS = (nn.Linear, nn.modules.conv._ConvNd, nn.Embedding, nn.EmbeddingBag)


def init_(
    model: nn.Module,
    function: Callable[..., Tensor],
    *,
    where: Where = None,
    tensor: str = "weight",
    seed: int = 0,
    **options: Any,
) -> Edited:
    r"""Initialise a weight of every chosen layer in place; biases stay as they are.

    Each weight is drawn from a generator that depends on `seed` and on the layer's path alone, so
    that two models which share a layer's path start with the same weight there, whatever else
    differs. If the function takes a `gain` and none is given, the gain of the activation that follows
    the layer is used, found by tracing the model; where that is not possible the function's own default
    stands, and the result says so. The padding row of an embedding stays as it is.

    Layers that keep several matrices take one call per tensor: `tensor="in_proj_weight"` for the packed
    projections of ``nn.MultiheadAttention``, each of which is drawn as a matrix of its own, or
    `"weight_hh_l0"` for an LSTM. The result names those that a call for `"weight"` leaves as they are.

    Args:
        model: changed in place.
        function: one of :mod:`gonio.init`, or any `f(weight, *, layout, generator, …)` that fills the
            weight in place. A tied weight is initialised once, by its first path.
        where: which layers; None for all that have such a weight matrix.
        tensor: the name of the tensor.
        seed: of the generators.
        options: go to the function, e.g. `gain="relu"`.

    Raises:
        NoMatchError: if `where` selects no layer with such a weight matrix.
        InvalidArgumentError: for an option that the function does not take.
        NotApplicableError: if the function gives values that are not finite, or the model is in FSDP 1.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        >>> edited = gonio.init_(model, gonio.init.orthogonal_, gain=1.0)
        >>> print(edited)
        init_: 2 modules
          0  orthogonal_(gain=1.0)
          2  orthogonal_(gain=1.0)
        >>> torch.allclose(model[0].weight @ model[0].weight.T, torch.eye(8), atol=1e-5)
        True
        >>> edited.undo_()
    """
    _check_options(function, options)
    refuse_flat_shards(model, "init_")
    found = select(model, where, verb="init_", can_act=lambda module: _cannot_initialise(module, tensor))
    gains = _gains(model, function, options) if tensor == "weight" else None
    with Edit(model, "init_") as edit:
        if gains is not None and any(site.path not in gains for site in found):
            edit.note("the function's own gain where the following activation is not known")
        done: set[int] = set()
        for site in found:
            own = {**options, "gain": gains[site.path]} if gains is not None and site.path in gains else options
            _init_one_(edit, site, tensor, done, function, seed, own)
        _note_left_out(edit, where, tensor)
        if where is None and tensor == "weight":
            _note_other_matrices(edit)
    return edit.done()


def _init_one_(
    edit: Edit,
    site: Site,
    tensor: str,
    done: set[int],
    function: Callable[..., Tensor],
    seed: int,
    options: dict[str, Any],
) -> None:
    weight = site.module.get_parameter(tensor)
    if id(weight) in done:
        edit.changed(site.path, "tied: initialised above")
        return
    done.add(id(weight))
    edit.set_data_(weight, _fresh(site, tensor, weight, function, seed, options))
    said = f"{_name(function)}({', '.join(f'{k}={v}' for k, v in options.items())})"
    edit.changed(site.path, said if tensor == "weight" else f"{tensor}: {said}")


def _fresh(
    site: Site, tensor: str, weight: Tensor, function: Callable[..., Tensor], seed: int, options: dict[str, Any]
) -> Tensor:
    """A new value for the weight, drawn beside it, so that a failure leaves the weight as it was."""
    value = torch.empty_like(weight, requires_grad=False)
    names = (site.path,) if tensor == "weight" else (site.path, tensor)
    random = generator(seed, "init", *names)  # of the CPU: the same weights on every device
    function(value, layout=layout_of(site.module, tensor), generator=random, **options)
    padding = getattr(site.module, "padding_idx", None)
    if padding is not None:  # on the whole tensor: one row of a DTensor cannot be written
        drawn = whole(value).clone()
        drawn[padding] = whole(weight.detach())[padding]
        write_(value, drawn)
    if not torch.isfinite(value).all():
        raise NotApplicableError(_name(function), site.path, "it gave non-finite values", "Check its options.")
    return value


def _cannot_initialise(module: nn.Module, tensor: str) -> str | None:
    weight = module._parameters.get(tensor)
    if weight is None:
        computed = isinstance(getattr(module, tensor, None), Tensor)
        return "its weight is computed; initialise before that" if computed else f"it has no parameter {tensor!r}"
    if isinstance(weight, UninitializedParameter):
        return "it is lazy; run one batch first"
    if getattr(module, tensor) is not weight:
        return "its weight is parametrized; initialise first"
    if weight.dim() < 2:
        return "it has no weight matrix"
    if weight.is_meta:
        return "its weight is on the meta device; materialise the model first"
    try:
        layout_of(module, tensor)
    except NotApplicableError:
        return "its weight is not a stack of filters"
    return None


def _note_left_out(edit: Edit, where: Where, tensor: str) -> None:
    """Name the selected layers that have such a weight and keep it; containers match globs all the time."""
    selector = as_selector(where)
    for site in sites(edit.model):
        if isinstance(site.module, _LAYERS) and site.matches(selector):
            why = _cannot_initialise(site.module, tensor)
            if why is not None and tensor == "weight":
                edit.note(f"{site.path} stays as it is: {why}")


def _note_other_matrices(edit: Edit) -> None:
    """Name the matrices of attention and recurrent layers, which have names of their own."""
    kept: dict[str, list[str]] = {}
    for module in edit.model.modules():
        if isinstance(module, (nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)):
            names = [n for n in module._parameters if n != "weight" and _cannot_initialise(module, n) is None]
            kept.setdefault(type(module).__name__, names)
    for kind, names in kept.items():
        edit.note(f"{', '.join(names)} of {kind} layers stay as they are: initialise them with tensor=")


def _gains(model: nn.Module, function: Callable[..., Tensor], options: dict[str, Any]) -> dict[str, str] | None:
    takes_gain = "gain" in inspect.signature(function).parameters
    return activation_after(model) if takes_gain and "gain" not in options else None


def _check_options(function: Callable[..., Tensor], options: dict[str, Any]) -> None:
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    unknown = [name for name in options if name not in parameters]
    if unknown:
        known = [name for name in list(parameters)[1:] if name not in ("layout", "generator")]
        raise InvalidArgumentError(
            f"init_ was given options for {_name(function)}",
            f"{', '.join(unknown)}, which it does not take",
            f"It takes {', '.join(known) or 'none'}.",
        )


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", repr(function))
