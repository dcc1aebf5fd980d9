"""`swap_`: put other layers in the place of chosen layers."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gonio.errors import AlreadyAppliedError, InvalidArgumentError, NoMatchError, NotApplicableError, listing
from gonio.surgery.bypass import bypassed, call_children_, note_other_references
from gonio.surgery.edit import Edit, Edited
from gonio.surgery.kinds import norm_tail, without_tail
from gonio.surgery.optimizer import check_holds, note_added, tell_
from gonio.surgery.site import Site, select
from gonio.surgery.where import Where, as_selector
from gonio.surgery.wrapping import calls_what_it_was_made_from, refuse_shards

__all__ = ["swap_"]


def swap_(
    model: nn.Module,
    factory: Callable[..., nn.Module],
    *,
    where: Where = None,
    optimizer: torch.optim.Optimizer | None = None,
    **options: Any,
) -> Edited:
    """Replace every chosen layer by what the factory makes of it.

    The factories of :mod:`gonio.nn` (`from_conv`, `from_linear`, `from_batch_norm`) hand the same
    Parameter objects to the new layer, so an optimizer that was built before stays valid for them. A
    module that occurs under several names is converted once and replaced under each of them. Forward
    hooks of the replaced layers stay with the replaced layers; the result says where there were any.

    Some layers of torch read the weights of their children instead of calling them. The output
    projection of ``nn.MultiheadAttention`` is always read: it is left out, and the result says so (use
    :func:`gonio.parametrize_` there). ``nn.TransformerEncoderLayer`` does so on its fast path in
    evaluation, which is switched off for a layer whose parts are replaced.

    Args:
        model: changed in place.
        factory: `f(layer, **options) -> layer`. The annotation of its first parameter says which
            layers it takes.
        where: which layers; None for all that the factory takes.
        optimizer: told about parameters that appear and disappear. Without it, the next step of one that trains
            what the layers had raises :class:`gonio.errors.UntrainedParametersError`, if no optimizer has what
            they have now.
        options: go to the factory.

    A batch norm of timm that has its activation inside becomes the new layer followed by that activation.

    A layer that the factory refuses (a subclass that computes something else than its torch class) is an
    error where `where` selects it; without `where` it stays, and the result says why.

    Raises:
        NoMatchError: if `where` selects no layer that the factory takes.
        AlreadyAppliedError: if a selected layer already is what the factory makes.
        NotApplicableError: if the model itself is selected, or the module that a compiled wrapper was made
            from, because neither can be replaced in place; if a selected layer contains another one and
            the factory drops it; if the model is sharded, or replicated and gets other parameters.
        InvalidArgumentError: if the factory makes something else than a module, or `optimizer` is not of
            this model.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        >>> edited = gonio.swap_(model, gonio.nn.SwitchableNorm2d.from_batch_norm)
        >>> print(edited)
        swap_: 1 module
          1  BatchNorm2d → SwitchableNorm2d
          note: 2 new parameters: build the optimizer after this edit, or pass optimizer=
        >>> edited.undo_()
        >>> type(model[1]).__name__
        'BatchNorm2d'
    """
    check_holds(optimizer, model)
    refuse_shards(model, "swap_")
    found, read = _found(model, factory, where)
    present = list(model.parameters())
    with Edit(model, "swap_") as edit:
        stay = {site.path: _swap_one_(edit, site, factory, options, optimizer, present) for site in found}
        _say_what_stays(edit, {path: error for path, error in stay.items() if error}, strict=where is not None)
        found = [site for site in found if stay[site.path] is None]
        _check_reachable(edit, found)
        call_children_(edit, found)
        note_other_references(edit, found)
        for site in read:
            edit.note(f"{site.path} stays: its parent reads its weight and does not call it")
        if optimizer is None:
            note_added(edit, present)
    return edit.done()


def _found(model: nn.Module, factory: Callable[..., nn.Module], where: Where) -> tuple[list[Site], list[Site]]:
    """The sites that are replaced, and those that are left out because their parents do not call them."""
    accepted, verb = _accepted(factory), f"swap_ to {_name(factory)}"
    everything = select(model, where, verb=verb, can_act=lambda module: _refuse(module, accepted))
    target = getattr(factory, "__self__", None)
    for site in everything:
        if isinstance(target, type) and isinstance(site.module, target):
            raise AlreadyAppliedError("swap_", site.path, f"a {type(site.module).__name__}")
        _check_replaceable(site)
    found = [site for site in everything if not bypassed(site)]
    read = [site for site in everything if bypassed(site)]
    if not found:
        refused = [f"{site.path} (its parent reads its weight and does not call it)" for site in read]
        raise NoMatchError(verb, str(as_selector(where)), [], refused=refused)
    return found, read


def _check_replaceable(site: Site) -> None:
    if not site.path and not any(calls_what_it_was_made_from(parent) for parent, _ in site.owners):
        do = "Wrap the model in nn.Sequential, or swap its layers."
        raise NotApplicableError("swap_", site.path, "it selects the model itself", do)
    for parent, _ in site.owners:
        if calls_what_it_was_made_from(parent):
            why = f"the {type(parent).__name__} around it would go on calling it"
            raise NotApplicableError("swap_", site.path, why, "Swap it before you compile it.")


def _swap_one_(
    edit: Edit,
    site: Site,
    factory: Callable[..., nn.Module],
    options: dict[str, Any],
    optimizer: torch.optim.Optimizer | None,
    present: list[nn.Parameter],
) -> NotApplicableError | None:
    """Replace one layer; what the factory says if it refuses it."""
    old = site.module
    try:
        parts = _made(factory, old, options)
    except NotApplicableError as error:
        return error
    if not isinstance(parts[0], nn.Module):
        found = f"a {type(parts[0]).__name__} for {site.path!r}"
        raise InvalidArgumentError(f"swap_ needs a factory that makes modules ({_name(factory)})", found, "Return one.")
    new = parts[0] if len(parts) == 1 else nn.Sequential(*parts)
    kept = {id(module) for module in old.modules()}  # a factory may put the old layer into the new one
    for module in new.modules():
        if id(module) not in kept:
            module.training = old.training
    made = " + ".join(type(part).__name__ for part in parts)
    edit.replace_(site, new, what=f"{type(old).__name__} → {made}")
    tell_(edit, site.path, optimizer, list(old.parameters()), dict(new.named_parameters()), present=present)
    return None


def _made(factory: Callable[..., nn.Module], old: nn.Module, options: dict[str, Any]) -> list[Any]:
    """What the factory makes; of a norm with its activation inside, the new norm and then that activation."""
    accepted, plain = _accepted(factory), without_tail(old)
    if plain is old or accepted is nn.Module or not isinstance(plain, accepted):
        return [factory(old, **options)]
    return [factory(plain, **options), *(part for part in norm_tail(old) if not isinstance(part, nn.Identity))]


def _say_what_stays(edit: Edit, refused: dict[str, NotApplicableError], *, strict: bool) -> None:
    """A layer that the factory refuses is an error where it was asked for, or if no other was replaced."""
    reasons: dict[str, list[str]] = {}
    for path, error in refused.items():
        reasons.setdefault(str(error), []).append(path)
        if strict or not edit.changes:
            error.add_note(f"at {listing(list(refused))}")
            raise error
    for why, paths in reasons.items():
        edit.note(f"{listing(paths)} stay{'s' * (len(paths) == 1)}: {why}")


def _check_reachable(edit: Edit, found: list[Site]) -> None:
    """Every new layer is in the model, unless a selected layer around it was replaced by one without it."""
    here = {id(module) for module in edit.model.modules()}
    for site in found:
        if not any(id(parent) in here for parent, _ in site.owners):
            why = "a selected layer around it was replaced by one that does not contain it"
            raise NotApplicableError("swap_", site.path, why, "Select the one or the other.")


def _accepted(factory: Callable[..., nn.Module]) -> type[nn.Module] | tuple[type[nn.Module], ...]:
    """The classes that annotate the factory's first parameter; nn.Module if there is no annotation."""
    function = factory.__init__ if isinstance(factory, type) else getattr(factory, "__func__", factory)  # type: ignore[misc]
    parameters = [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]
    annotation = _hints(function).get(parameters[0], nn.Module) if parameters else nn.Module
    if isinstance(annotation, type):
        return annotation if issubclass(annotation, nn.Module) else nn.Module
    members = tuple(arm for arm in typing.get_args(annotation) if isinstance(arm, type))
    return members or nn.Module


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except (NameError, TypeError):  # an annotation that cannot be evaluated says nothing
        return {}


def _refuse(module: nn.Module, accepted: type[nn.Module] | tuple[type[nn.Module], ...]) -> str | None:
    if isinstance(module, accepted):
        return None
    names = [t.__name__ for t in (accepted if isinstance(accepted, tuple) else (accepted,))]
    return f"it is a {type(module).__name__}, not a {' or '.join(names)}"


def _name(factory: Callable[..., Any]) -> str:
    return getattr(factory, "__qualname__", repr(factory))
