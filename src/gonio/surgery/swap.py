"""`swap_`: put other layers in the place of chosen layers."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gonio.errors import AlreadyAppliedError, NotApplicableError
from gonio.surgery.edit import Edit, Edited
from gonio.surgery.optimizer import follow_parameters_
from gonio.surgery.site import Site, select
from gonio.surgery.where import Where

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

    Args:
        model: changed in place.
        factory: `f(layer, **options) -> layer`. The annotation of its first parameter says which
            layers it takes.
        where: which layers; None for all that the factory takes.
        optimizer: told about parameters that appear and disappear.
        options: go to the factory.

    Raises:
        NoMatchError: if `where` selects no layer that the factory takes.
        AlreadyAppliedError: if a selected layer already is what the factory makes.
        NotApplicableError: if the model itself is selected; it cannot be replaced in place.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        >>> edited = gonio.swap_(model, gonio.nn.SwitchableNorm2d.from_batch_norm)
        >>> print(edited)
        swap_: 1 module
          1  BatchNorm2d → SwitchableNorm2d
        >>> edited.undo_()
        >>> type(model[1]).__name__
        'BatchNorm2d'
    """
    accepted = _accepted(factory)
    found = select(model, where, verb=f"swap_ to {_name(factory)}", can_act=lambda module: _refuse(module, accepted))
    target = getattr(factory, "__self__", None)
    for site in found:
        if isinstance(target, type) and isinstance(site.module, target):
            raise AlreadyAppliedError("swap_", site.path, f"a {type(site.module).__name__}")
        if not site.owners:
            raise NotApplicableError(
                "swap_",
                "",
                "it selects the model itself",
                "Wrap the model in nn.Sequential, or swap its layers.",
            )
    with Edit(model, "swap_") as edit:
        for site in found:
            _swap_one_(edit, site, factory(site.module, **options), optimizer)
    return edit.done()


def _swap_one_(edit: Edit, site: Site, new: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    old = site.module
    new.train(old.training)
    edit.replace_(site, new, what=f"{type(old).__name__} → {type(new).__name__}")
    if old._forward_hooks or old._forward_pre_hooks:
        edit.note(f"{site.path}: its forward hooks stayed with the replaced layer")
    if optimizer is not None:
        follow_parameters_(edit, optimizer, list(old.parameters()), list(new.parameters()))


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
