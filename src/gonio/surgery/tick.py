"""`tick_on_step`: the singular vectors of spectral norms advance with the steps of an optimizer."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from gonio.editing.edit import Edit, Edited
from gonio.editing.where import sites
from gonio.errors import NoMatchError
from gonio.parametrizations import SpectralNorm, parametrization_of, tick_
from gonio.surgery.steps import watch


def tick_on_step(optimizer: Any, model: nn.Module) -> Edited:
    """Call :func:`gonio.parametrizations.tick_` after every step of an optimizer, in a wrapper or not.

    The vectors of a spectral norm advance by themselves with every change of the weight that torch counts. This is for
    optimizers that write through ``.data``, which it does not count. Steps that a gradient scaler skips do not count.
    Pickles and state dicts do not contain the call. Layers that are parametrized later are included.

    Raises:
        NoMatchError: if the model has no spectral norm.
        InvalidArgumentError: for an optimizer whose steps cannot be observed.

    Example:
        >>> layer = nn.Linear(4, 4)
        >>> _ = gonio.parametrizations.attach(layer, "weight", gonio.parametrizations.SpectralNorm())
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        >>> edited = gonio.surgery.tick_on_step(optimizer, layer)
        >>> layer(torch.ones(1, 4)).sum().backward(); optimizer.step()
        >>> edited.undo_()
    """
    ref = weakref.ref(model)  # the optimizer does not keep the model

    def after(_: object) -> None:
        there = ref()
        if there is not None:
            tick_(there)

    with Edit(model, "tick_on_step") as edit:
        edit.changes_model = False
        for site in sites(model):
            for name in site.module._parameters:
                found = parametrization_of(site.module, name)
                if isinstance(found, SpectralNorm):
                    edit.changed(site.path, f"{name}: {found} advances after each step")
        if not edit.changes:
            raise NoMatchError("tick_on_step", "the model", [])
        edit.on_undo(watch(optimizer, after=after, verb="tick_on_step"))
    return edit.done()
