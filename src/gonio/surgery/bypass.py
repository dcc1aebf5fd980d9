"""Layers of torch that read the weights of their children instead of calling them.

A layer put in the place of such a child would be ignored, without an error. Parametrizations are not
affected: what is read then is the effective weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from gonio.surgery.edit import Edit
from gonio.surgery.site import Site, sites

__all__ = ["bypassed", "call_children_", "note_other_references"]


def bypassed(site: Site) -> bool:
    """Whether a parent of the module never calls it: the output projection of torch's attention.

    Example:
        >>> from gonio.surgery.bypass import bypassed
        >>> found = gonio.surgery.sites(nn.MultiheadAttention(4, 2))
        >>> [(site.path, bypassed(site)) for site in found]
        [('', False), ('out_proj', True)]
    """
    return any(isinstance(parent, nn.MultiheadAttention) for parent, _ in site.owners)


def call_children_(edit: Edit, replaced: list[Site]) -> None:
    """Switch the fast path off in torch's transformer layers of which a part was replaced.

    In evaluation without gradients these layers hand the weights of their parts to one fused kernel.
    """
    parents = {id(parent) for site in replaced for parent, _ in site.owners}
    inside = {id(m): layer for layer in _of(edit.model, nn.TransformerEncoderLayer) for m in layer.modules()}
    layers = {id(inside[key]): inside[key] for key in parents if key in inside}
    for layer in layers.values():
        edit.set_attribute_(layer, "activation_relu_or_gelu", 0)
    for encoder in _of(edit.model, nn.TransformerEncoder):
        if any(id(layer) in layers for layer in encoder.modules()):
            edit.set_attribute_(encoder, "use_nested_tensor", False)
    if layers:
        edit.note("the fast path of TransformerEncoderLayer is off where a part was replaced: it would not call it")


def note_other_references(edit: Edit, replaced: list[Site]) -> None:
    """Say where a replaced module still is held by a plain attribute or list, which no edit reaches."""
    gone = {id(site.module): site.path for site in replaced}
    for site in sites(edit.model):
        for name, value in vars(site.module).items():
            for item in _held(value) if name != "_modules" else ():
                if id(item) in gone:
                    holder = f"{site.path}.{name}" if site.path else name
                    edit.note(f"{holder} still holds the module that was {gone[id(item)]}: it is no registered child")


def _held(value: Any) -> Iterator[Any]:
    """The value itself and what a list, tuple or dict of it contains."""
    yield value
    if isinstance(value, (list, tuple)):
        yield from value
    elif isinstance(value, dict):
        yield from value.values()


def _of(model: nn.Module, kind: type[nn.Module]) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, kind)]
