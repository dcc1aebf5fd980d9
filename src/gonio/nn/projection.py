"""`project_weights_`: the filters of decoupled layers get one norm."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from gonio.editing.edit import Edit, Edited
from gonio.editing.where import Where, as_selector, select, sites
from gonio.errors import InvalidArgumentError, NotApplicableError, check_range, with_article
from gonio.messages import counted, joined, say
from gonio.nn.decoupled import Decoupled


def project_weights_(model: nn.Module, *, where: Where = None, norm: float = 1.0) -> Edited:
    r"""Scale every filter of the decoupled layers to one norm: :math:`w \leftarrow s\, w / \lVert w \rVert`.

    An operator that uses :math:`w / \lVert w \rVert` alone computes the same before and after. Its gradient
    is divided by :math:`\lVert w \rVert`, and every plain gradient step makes the filter longer, so
    without projection the layer learns ever more slowly. A zero filter stays zero.

    This is done once. ``gonio.hold_(model, optimizer, norm="filters", radius=1.0)`` projects after every step of an
    optimizer.

    Args:
        model: changed in place.
        where: which layers; None for every decoupled layer. The notes name those that are left out.
        norm: the norm :math:`s`.

    Raises:
        NoMatchError: if no decoupled layer that depends on the directions of its filters alone is selected.
        NotApplicableError: if `where` selects a decoupled layer whose output depends on the norm of its filters
            (`weighted`, or during a gradual conversion), or whose weight is computed by a parametrization.
        InvalidArgumentError: if `norm` is not positive and finite.

    Example:
        >>> layer = gonio.nn.DecoupledLinear(2, 1, bias=False)
        >>> _ = layer.weight.data.copy_(torch.tensor([[3.0, 4.0]]))
        >>> edited = gonio.nn.project_weights_(layer)
        >>> layer.weight.tolist()
        [[0.6000000238418579, 0.800000011920929]]
        >>> edited.undo_(); layer.weight.tolist()
        [[3.0, 4.0]]

    References:
        W. Liu et al., "Decoupled Networks", CVPR 2018 (weight projection); the official code
        projects every 100 iterations with s = 1. https://arxiv.org/abs/1804.08071
    """
    check_range("project_weights_", norm=norm)
    if not (math.isfinite(norm) and norm > 0):
        raise InvalidArgumentError("project_weights_: invalid norm", repr(norm), "Pass a positive number; 1 is usual.")
    chosen = select(model, where, verb="project_weights_", can_act=cannot_project)
    selector, taken = as_selector(where), {site.path for site in chosen}
    left = {
        site.path: str(cannot_project(site.module))
        for site in sites(model)
        if isinstance(site.module, Decoupled) and site.matches(selector) and site.path not in taken
    }
    if where is not None and left:
        path, why = next(iter(left.items()))
        raise NotApplicableError("project_weights_", path, why, "Exclude it in `where`.")
    with Edit(model, "project_weights_") as edit, torch.no_grad():
        for site in chosen:
            layer: Any = site.module
            patches, weight = layer.linear_map.of(layer), layer.weight
            norms = patches.filter_norms(weight)
            factors = patches.along_filters(torch.where(norms > 0, norm / norms, torch.ones_like(norms)), weight)
            edit.set_data_(weight, weight * factors.to(weight.dtype))
            count = int((norms > 0).sum())
            said: list[str] = [say("norm of {filters} set to {norm:g}", filters=counted(count, "filter"), norm=norm)]
            said += [say("{n} zero", n=len(norms) - count)] if count < len(norms) else []
            edit.changed(site.path, joined(said))
        edit.note_stays(left)
    return edit.done()


def cannot_project(module: nn.Module) -> str | None:
    """Why the output of a module does not depend on the directions of its filters alone; None if it does."""
    if not isinstance(module, Decoupled):
        return f"it is {with_article(type(module).__name__)}, not a decoupled layer"
    if module.operator.weighted is not None:
        return f"its output depends on the norm of its filters (weighted={module.operator.weighted!r})"
    if module.blends:
        return "its output depends on the norm of its filters until its gradual conversion has ended"
    if module._parameters.get("weight") is not module.weight:
        return "its weight is computed by a parametrization"
    if module.weight.is_meta:
        return "its weight is on the meta device"
    return None
