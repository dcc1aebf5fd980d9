"""`init_`: initialise the weights of chosen layers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from functools import partial
from math import isfinite
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gonio import init
from gonio.editing.edit import Edit, Edited
from gonio.editing.memory import memory_key
from gonio.editing.twin import without_wrappers
from gonio.editing.where import Site, Where, at, further_matrices, left_out, refuse_flat_shards, select
from gonio.errors import InvalidArgumentError, NotApplicableError, check_range, closest
from gonio.geometry.norms import whole
from gonio.geometry.views import has_filters, layout_of, matrix_view, why_not_dense
from gonio.init.gain import KINDS, gain
from gonio.init.variance import write_
from gonio.messages import joined, say
from gonio.seeding import generator
from gonio.surgery.blocks import Anatomy
from gonio.surgery.facts import padding_rows
from gonio.surgery.graph import activation_after


def init_(
    model: nn.Module,
    function: Callable[..., Tensor],
    *,
    where: Where = None,
    tensor: str = "weight",
    bias: float | Literal["keep"] = 0.0,
    seed: int = 0,
    depth_scaled: Anatomy | None = None,
    **options: Any,
) -> Edited:
    r"""Initialise a weight of every chosen layer in place, and set its bias to 0.

    Each weight is drawn from a generator that depends on `seed` and the layer's path alone, so two models with a layer
    of the same path have the same weight there. If the function takes a `gain` and none is given, it is that of the
    activation after the layer, found by tracing the model, of the kind `"trains"` of :func:`gonio.init.gain`; another
    kind is asked for by its name, e.g. `gain="rms"` or `gain="torch"`. If no activation is found, the function's
    default is used, with a note. The padding row of an embedding is not changed. A tied weight is initialised once, by
    its first path.

    Layers with several matrices take one call per tensor: `tensor="in_proj_weight"` for the packed projections of
    ``nn.MultiheadAttention``, each of which is drawn on its own, or `"weight_hh_l0"` for an LSTM. A call for `"weight"`
    notes the matrices that it leaves out.

    Args:
        function: one of :mod:`gonio.init`, or any `f(weight, *, layout, generator, …)` that fills the weight in place.
        where: which layers; None for all that have such a weight matrix.
        bias: the value of each entry of the bias that belongs to the weight, `bias` for `weight` and `bias_hh_l0` for
            `weight_hh_l0`; "keep" to leave it as it is. Random biases, torch's default, are the same for all inputs:
            of 50 linear layers they make a fifth of the output.
        depth_scaled: what :func:`gonio.surgery.anatomy` has found in the model. Then the weights of layers that add
            to the residual stream, the outputs of attention and of MLPs, are divided by √N for N such blocks, so that
            the variance of the stream does not grow with the depth, as in GPT-2 [1].
        options: arguments of the function, e.g. `gain="relu"`.

    Raises:
        NoMatchError: if `where` selects no layer with such a weight matrix.
        InvalidArgumentError: if `function` is no such function, or does not take an option; if `depth_scaled` is of
            another model, or none of its layers is chosen.
        NotApplicableError: if the function gives values that are not finite, or the model is in FSDP 1.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        >>> print(gonio.init_(model, gonio.init.orthogonal_, gain=1.0))
        init_: 2 modules
          0  orthogonal_(gain=1.0), bias 0
          2  orthogonal_(gain=1.0), bias 0
        >>> torch.allclose(model[0].weight @ model[0].weight.T, torch.eye(8), atol=1e-5)
        True

    References: [1] A. Radford et al., "Language models are unsupervised multitask learners", 2019, section 2.3.
    """
    check_function("init_", function, options)
    refuse_flat_shards(model, "init_")
    able = partial(can_act, tensor=tensor)
    found = select(model, where, verb="init_", can_act=able)
    if bias != "keep" and isinstance(bias, (int, float)):
        check_range("init_", bias=bias)
    if bias != "keep" and not (isinstance(bias, (int, float)) and isfinite(bias)):
        raise InvalidArgumentError('init_ takes a finite number or "keep" as bias', repr(bias), "Leave it out for 0.")
    asked = options.get("gain", "trains")
    traced = "gain" in inspect.signature(function).parameters and asked in KINDS and tensor == "weight"
    gains = activation_after(model) if traced else {}
    adding, blocks = _adding(model, depth_scaled)
    if depth_scaled is not None and not any(id(site.module.get_parameter(tensor)) in adding for site in found):
        do = "Select outputs of attention or of MLPs, or leave depth_scaled out."
        raise InvalidArgumentError("init_(depth_scaled=) divides layers that add to the stream", "none chosen", do)
    with Edit(model, "init_", once=True) as edit:
        if traced and any(site.path not in gains for site in found):
            edit.note(say("the function's own gain where the following activation is not known"))
        done: set[Hashable] = set()
        padding = padding_rows(model)
        for site in found:
            weight = site.module.get_parameter(tensor)
            if memory_key(weight) in done:
                edit.changed(
                    site.path, joined([say("tied: initialised above"), _set_bias_(edit, site, tensor, bias, done)], "")
                )
                continue
            done.add(memory_key(weight))
            own = {name: value for name, value in options.items() if not (traced and name == "gain")}
            shown = dict(own)
            if site.path in gains:
                shown["gain"] = gains[site.path] if asked == "trains" else f"{asked} of {gains[site.path]}"
                own["gain"] = gain(gains[site.path], asked)
            value = _drawn(site, tensor, function, seed, own, padding.get(memory_key(weight), frozenset()))
            edit.set_data_(weight, value / blocks**0.5 if id(weight) in adding else value)
            call = f"{_name(function)}({', '.join(f'{k}={v}' for k, v in shown.items())})"
            call += f" / √{blocks}" if id(weight) in adding else ""
            call = call if tensor == "weight" else f"{tensor}: {call}"
            edit.changed(site.path, joined([call, _set_bias_(edit, site, tensor, bias, done)], ""))
        edit.note_stays(left_out(model, where, can_act=able, tensor=tensor))
        if tensor == "weight" and where is None:
            for what in further_matrices(model, can_act):
                edit.note(say("{what} stay as they are: initialise them with tensor=", what=what))
    return edit.done()


def _adding(model: nn.Module, found: Anatomy | None) -> tuple[set[int], int]:
    """The weights of layers that add to the residual stream, and the number of blocks that they end."""
    if found is None:
        return set(), 0
    parameters = dict(without_wrappers(model).named_parameters())
    names = {part.tensor for block in found.attention for part in block.output} | {
        mlp.down.tensor for mlp in found.mlps
    }
    if unknown := sorted(names - parameters.keys()):
        do = "Pass gonio.surgery.anatomy(model)."
        raise InvalidArgumentError("init_(depth_scaled=) takes the anatomy of this model", f"a {unknown[0]}", do)
    return {id(parameters[name]) for name in names}, len(found.attention) + len(found.mlps)


def _set_bias_(edit: Edit, site: Site, tensor: str, value: float | Literal["keep"], done: set[Hashable]) -> str:
    """Set the bias that belongs to a weight, once; what was done, for the table."""
    bias = site.module._parameters.get(tensor.replace("weight", "bias")) if "weight" in tensor else None
    if value == "keep" or bias is None or memory_key(bias) in done or bias.dim() != 1 or bias.is_meta:
        return ""
    shape = torch.empty(site.module.get_parameter(tensor).shape, device="meta")
    groups, filters, _ = matrix_view(shape, layout_of(site.module, tensor)).shape
    if bias.numel() != groups * filters:  # it is not added to the outputs of these filters
        return ""
    done.add(memory_key(bias))
    edit.set_data_(bias, torch.full_like(bias, value))
    return say(", bias {value:g}", value=value)


def check_function(verb: str, function: Any, options: dict[str, Any]) -> None:
    """Raise unless `function` is an f(weight, *, layout, generator, …) that takes the options."""
    asked = f"{verb} takes a function of gonio.init, or any f(weight, *, layout, generator, …)"
    if not callable(function):
        near = closest(str(function), init.__all__, count=1)
        raise InvalidArgumentError(asked, repr(function), f"Pass gonio.init.{near[0] if near else 'orthogonal_'}.")
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    if not {"layout", "generator"} <= set(parameters):
        name = _name(function)
        own = f"gonio.init.{name}" if name in init.__all__ else "a function of gonio.init"
        found = f"{getattr(function, '__module__', '')}.{name}, which takes no layout or no generator"
        raise InvalidArgumentError(asked, found, f"Pass {own}.")
    unknown = [name for name in options if name not in parameters]
    if unknown:
        known = [name for name in list(parameters)[1:] if name not in ("layout", "generator")]
        found = f"{', '.join(unknown)}, which it does not take"
        takes = f"It takes {', '.join(known) or 'none'}."
        raise InvalidArgumentError(f"{verb} was given options for {_name(function)}", found, takes)


def _drawn(
    site: Site,
    tensor: str,
    function: Callable[..., Tensor],
    seed: int,
    options: dict[str, Any],
    padding: frozenset[int],
) -> Tensor:
    """A new value in a tensor of its own, so that a failure leaves the weight as it was."""
    weight = site.module.get_parameter(tensor)
    value = torch.empty_like(weight, requires_grad=False)
    names = (site.path,) if tensor == "weight" else (site.path, tensor)
    random = generator(seed, "init", *names)  # of the CPU: the same weights on every device
    with at(site, tensor):
        function(value, layout=layout_of(site.module, tensor), generator=random, **options)
    if padding:  # on the whole tensor: one row of a DTensor cannot be written
        drawn, rows = whole(value).clone(), list(padding)
        drawn[rows] = whole(weight.detach())[rows]
        write_(value, drawn)
    if not torch.isfinite(value).all():
        why = f"{_name(function)} gave non-finite values"
        raise NotApplicableError("init_", site.path, why, "Check its options.", action="initialise", kind=site.kind)
    return value


def can_act(module: nn.Module, tensor: str = "weight") -> str | None:
    """Why :func:`init_` cannot act on a layer; None if it can.

    Example:
        >>> from gonio.surgery.init import can_act
        >>> can_act(nn.Linear(2, 2)), can_act(nn.LayerNorm(2))
        (None, 'it has no weight matrix')
    """
    weight = module._parameters.get(tensor)
    if weight is None:
        computed = isinstance(inspect.getattr_static(type(module), tensor, vars(module).get(tensor)), property | Tensor)
        return "its weight is computed; initialise before that" if computed else f"it has no parameter {tensor!r}"
    if (why := why_not_dense(weight)) is not None:
        return why
    if getattr(module, tensor) is not weight:
        return "its weight is parametrized; initialise first"
    if weight.dim() < 2:
        return "it has no weight matrix"
    if weight.is_meta:
        return "its weight is on the meta device; materialise the model first"
    return None if has_filters(module, tensor) else "its weight is not a stack of filters"


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", repr(function))
