"""`swap_`: put other layers in the place of chosen layers."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from gonio.editing.edit import Edit, Edited
from gonio.editing.steps import check_optimizer, note_added, update_optimizer_
from gonio.editing.where import Site, Where, as_selector, holds_original, left_out, refuse_shards, select, sites
from gonio.errors import (
    AlreadyAppliedError,
    InvalidArgumentError,
    NoMatchError,
    NotApplicableError,
    listing,
    with_article,
)
from gonio.geometry.views import why_not_dense
from gonio.messages import say
from gonio.surgery.facts import tail_of, without_tail
from gonio.surgery.graph import trace


def swap_(
    model: nn.Module,
    factory: Callable[..., nn.Module],
    *,
    where: Where = None,
    optimizer: torch.optim.Optimizer | None = None,
    **options: Any,
) -> Edited:
    """Replace every chosen layer by the layer that the factory makes from it.

    The factories of :mod:`gonio.nn` (`from_conv`, `from_linear`, `from_batch_norm`) use the same Parameter objects in
    the new layer, so an optimizer built before stays valid for them. A module with several names is converted once and
    replaced under each of them. A batch norm of timm with its activation inside becomes the new layer followed by that
    activation. Forward hooks stay with the replaced layers, which the notes name.

    The output projection of ``nn.MultiheadAttention`` is left out, because its parent reads its weight without calling
    it (use :func:`gonio.parametrize_` there). The fast path of ``nn.TransformerEncoderLayer``, which reads weights too,
    is disabled for a layer whose parts are replaced. A layer that the factory refuses (a subclass that computes
    something else than its torch class) is an error if `where` selects it; without `where` it stays, with a note.

    Args:
        factory: `f(layer, **options) -> layer`. The annotation of its first parameter says which layers it takes. An
            object with a call, such as :func:`gonio.surgery.qk_norm` makes for one model, may state it: `takes` are the
            types, `can_act(layer)` gives why it does not take a layer, or None, and `stays`, by path with the reasons,
            is what the notes name without `where`.
        where: which layers; None for all that the factory takes.
        optimizer: updated with the parameters that are added and removed. Without it, the next step of one that trains
            the layers' old parameters raises :class:`gonio.errors.UntrainedParametersError`, unless an optimizer with
            the added ones has taken a step (the second step, for one of several optimizers).
        options: arguments of the factory.

    Raises:
        NoMatchError: if `where` selects no layer that the factory takes.
        AlreadyAppliedError: if a selected layer already is of the class that the factory makes, or was made by it.
        NotApplicableError: if the model itself is selected, or the module inside a compiled wrapper, which cannot be
            replaced in place; if a selected layer contains another one and the factory drops it; if the forward of the
            model reads a tensor of the layer, such as running statistics, that the new layer does not have; if the
            model is sharded, or replicated and gets other parameters.
        InvalidArgumentError: if the factory is a layer or a layer class, makes something else than a module, or returns
            every layer as it is, or if `optimizer` is not of this model.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        >>> print(gonio.swap_(model, gonio.nn.SwitchableNorm2d.from_batch_norm))
        swap_: 1 module
          1  BatchNorm2d → SwitchableNorm2d
          note: 2 new parameters: build the optimizer after this edit, or pass optimizer=
    """
    accepted = accepted_layers(factory)
    check_optimizer(optimizer, model, "swap_")
    refuse_shards(model, "swap_")
    able = partial(can_act, factory=factory)
    try:
        found = select(model, where, verb=f"swap_ to {_name(factory)}", can_act=able)
    except NoMatchError:
        _check_new(model, where, factory)
        raise
    made = getattr(factory, "__self__", None)
    for site in found:
        if isinstance(made, type) and isinstance(site.module, made):
            raise AlreadyAppliedError("swap_", site.path, with_article(site.kind))
        _check_replaceable(site)
    read = trace(model, training=False).read_by_name
    with Edit(model, "swap_") as edit:
        refused: dict[str, NotApplicableError] = {}
        returned: dict[str, str] = {}
        for site in found:
            try:
                parts = _made(factory, accepted, site, options)
                if parts[0] is site.module:
                    returned[site.path] = "the factory returns it as it is"
                    continue
                _check_readable(site, parts, read.get(site.path, set()))
            except NotApplicableError as error:
                refused[site.path] = error
                continue
            _replace_(edit, site, factory, parts, optimizer)
        if refused and (where is not None or not edit.changes):
            first = next(iter(refused.values()))
            first.add_note(f"at {listing(list(refused))}")
            raise first
        if returned and not edit.changes:
            asked = f"swap_ needs a factory that makes another layer ({_name(factory)})"
            given = f"the layer that it was given, for {listing(list(returned))}"
            raise InvalidArgumentError(asked, given, "Return one.")
        edit.note_stays({path: str(why) for path, why in refused.items()} | returned)
        replaced = [site for site in found if site.path not in refused and site.path not in returned]
        _check_reachable(edit, replaced)
        _disable_fast_path_(edit, replaced)
        edit.note_adapters()
        stays = getattr(_stating(factory), "stays", None) if where is None else None
        if stays is None:
            stays = left_out(model, as_selector(where) & accepted, can_act=able)
        edit.note_stays(stays)
        if optimizer is None:
            note_added(edit)
    return edit.done()


_MADE: WeakKeyDictionary[nn.Module, object] = WeakKeyDictionary()  # the factory of each layer that swap_ has put in


def _check_new(model: nn.Module, where: Where, factory: object) -> None:
    """Raise where an earlier call has put the layers in, with the same factory."""
    for site in sites(model):
        if _MADE.get(site.module) == factory and site.matches(as_selector(where)):
            raise AlreadyAppliedError("swap_", site.path, f"{with_article(site.kind)} of the same factory")


def accepted_layers(factory: Callable[..., nn.Module]) -> tuple[type[nn.Module], ...]:
    """The layers that a factory takes: `takes` of a class that has it and the converter; otherwise the annotation.

    Without an annotation of its first parameter a function takes every module.

    Raises: InvalidArgumentError for a layer, and for a layer class, whose first parameter is a number, say.
    """
    given: object = factory
    if not callable(given):
        do = "Pass a function, such as gonio.nn.to_group_norm or gonio.nn.DecoupledConv2d.from_conv."
        raise InvalidArgumentError("swap_ needs a function that makes a layer from a layer", repr(factory), do)
    if isinstance(given, nn.Module):
        kind = type(given).__name__
        do = f"For the same layer everywhere pass a function that makes it, e.g. lambda layer: {kind}(…)."
        raise InvalidArgumentError(
            "swap_ needs a function that makes a layer from a layer", f"{with_article(kind)}, which is a layer", do
        )
    if takes := getattr(_stating(factory), "takes", None):
        return tuple(takes)
    is_class = isinstance(factory, type)
    function = factory.__init__ if is_class else getattr(factory, "__func__", factory)
    parameters = [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]
    try:
        annotation = typing.get_type_hints(function).get(parameters[0], nn.Module) if parameters else nn.Module
    except (NameError, TypeError):  # an annotation that cannot be evaluated
        annotation = nn.Module
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    kinds = [k for k in (typing.get_args(annotation) if is_union else [annotation]) if isinstance(k, type)]
    layers = tuple(kind for kind in kinds if issubclass(kind, nn.Module))
    makes_numbers = kinds and not layers and not any(issubclass(nn.Module, k) or k is Any for k in kinds)
    if is_class and (makes_numbers or hasattr(factory, "takes")):
        name = factory.__name__
        converters = [f"{name}.{method}" for method in dir(factory) if method.startswith("from_")]
        do = f"Use {' or '.join(converters)}." if converters else f"Pass a function, e.g. lambda layer: {name}(…)."
        found = f"{name}, which is a layer class, not a converter"
        raise InvalidArgumentError("swap_ needs a function that makes a layer from a layer", found, do)
    return layers or (nn.Module,)


def can_act(module: nn.Module, factory: Callable[..., nn.Module]) -> str | None:
    """Why :func:`swap_` cannot put a layer of this factory in the place of a layer; None if it can try.

    Example:
        >>> from gonio.surgery.swap import can_act
        >>> can_act(nn.ReLU(), gonio.nn.DecoupledLinear.from_linear)
        'it is a ReLU, not a Linear'
    """
    accepted = accepted_layers(factory)
    if not isinstance(module, accepted):
        names, kind = [each.__name__ for each in accepted], type(module)
        name = f"{kind.__module__}.{kind.__name__}" if kind.__name__ in names else kind.__name__  # as quantised layers
        return f"it is {with_article(name)}, not {with_article(' or '.join(names))}"
    # the output projection of torch's attention is never called: its parent reads its weight
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return "its parent reads its weight and does not call it"
    stating = _stating(factory)
    if (refuses := getattr(stating, "can_act", None)) and (why := refuses(module)) is not None:
        return str(why)
    own = hasattr(stating, "takes")  # a layer that computes with the same weight
    weight = module._parameters.get("weight")
    return why_not_dense(weight) if own or (weight is not None and is_lazy(weight)) else None


def _stating(factory: Callable[..., nn.Module]) -> object:
    """What states `takes`, `can_act` and `stays` for a factory: the object of a method, or an object with a call."""
    return getattr(factory, "__self__", None if isinstance(factory, type) else factory)


def _check_replaceable(site: Site) -> None:
    compiled = next((parent for parent, _ in site.owners if holds_original(parent)), None)
    if compiled is not None:
        why = f"the {type(compiled).__name__} around it would go on calling it"
        raise _cannot_replace(site, why, "Swap it before you compile it.")
    if not site.path:
        do = "Wrap the model in nn.Sequential, or swap its layers."
        raise _cannot_replace(site, "`where` selects the model itself", do)


def _made(
    factory: Callable[..., Any], accepted: tuple[type[nn.Module], ...], site: Site, options: dict[str, Any]
) -> list[nn.Module]:
    """The factory's layer for a site; for a norm with its activation inside, followed by that activation."""
    old, plain = site.module, without_tail(site.module)
    tail = [part for part in tail_of(old) if not isinstance(part, nn.Identity)]
    splits = plain is not old and accepted != (nn.Module,) and isinstance(plain, accepted)
    parts = [factory(plain, **options), *tail] if splits else [factory(old, **options)]
    if not isinstance(parts[0], nn.Module):
        found = f"{with_article(type(parts[0]).__name__)} for {site.path!r}"
        raise InvalidArgumentError(f"swap_ needs a factory that makes modules ({_name(factory)})", found, "Return one.")
    return parts


def _check_readable(site: Site, parts: list[nn.Module], names: set[str]) -> None:
    """The new layer has what the forward of the model reads of the old one without calling it."""
    missing = sorted(name for name in names if len(parts) > 1 or not hasattr(parts[0], name))
    if missing:
        kind = with_article(type(parts[0]).__name__)
        why = f"the forward of the model reads its {missing[0]}, which {kind} does not have"
        raise _cannot_replace(site, why, "Leave it out.")


def _replace_(
    edit: Edit, site: Site, factory: object, parts: list[nn.Module], optimizer: torch.optim.Optimizer | None
) -> None:
    old, new = site.module, parts[0] if len(parts) == 1 else nn.Sequential(*parts)
    kept = {id(module) for module in old.modules()}  # a factory may put the old layer into the new one
    for module in new.modules():
        if id(module) not in kept:
            module.training = old.training
    made = " + ".join(type(part).__name__ for part in parts)
    edit.replace_(site, new, what=f"{type(old).__name__} → {made}")
    _MADE[new] = factory
    update_optimizer_(edit, site.path, optimizer, list(old.parameters()), dict(new.named_parameters()))


def _check_reachable(edit: Edit, replaced: list[Site]) -> None:
    """Every new layer is in the model, unless a selected layer around it was replaced by one without it."""
    here = {id(module) for module in edit.model.modules()}
    for site in replaced:
        if not any(id(parent) in here for parent, _ in site.owners):
            why = "a selected layer around it was replaced by one that does not contain it"
            raise _cannot_replace(site, why, "Select the one or the other.")


def _disable_fast_path_(edit: Edit, replaced: list[Site]) -> None:
    """Make transformer layers of torch call the replaced parts; in evaluation they use one fused kernel instead."""
    parents = {id(parent) for site in replaced for parent, _ in site.owners}
    layers = [
        layer
        for layer in edit.model.modules()
        if isinstance(layer, nn.TransformerEncoderLayer) and any(id(part) in parents for part in layer.modules())
    ]
    for layer in layers:
        edit.set_attribute_(layer, "activation_relu_or_gelu", 0)
    for encoder in edit.model.modules():
        if isinstance(encoder, nn.TransformerEncoder) and any(m in layers for m in encoder.modules()):
            edit.set_attribute_(encoder, "use_nested_tensor", False)
    if layers:
        edit.note(
            say("the fast path of TransformerEncoderLayer is off where a part was replaced: it would not call it")
        )


def _cannot_replace(site: Site, why: str, do: str) -> NotApplicableError:
    return NotApplicableError("swap_", site.path, why, do, action="replace", kind=site.kind)


def _name(factory: Callable[..., Any]) -> str:
    return getattr(factory, "__qualname__", repr(factory))
