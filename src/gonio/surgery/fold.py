"""`fold_`: turn what training needed into plain layers that compute the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gonio.errors import NoMatchError, NotApplicableError
from gonio.parametrizations.base import detach, parametrization_of
from gonio.surgery.edit import Edit, Edited
from gonio.surgery.equivalent import deviation, outputs
from gonio.surgery.fold_norm import fold_norms_
from gonio.surgery.site import Site, sites
from gonio.surgery.where import Where, as_selector

__all__ = ["fold_"]

# largest relative deviation of the outputs that is rounding and not a mistake
_ALLOWED = {torch.float64: 1e-12, torch.float32: 1e-5}


def fold_(model: nn.Module, *, example: Any = None, where: Where = None) -> Edited:
    r"""Replace parametrizations, batch norms and exact decoupled layers by plain torch layers.

    What is folded: every parametrization (the weight becomes the tensor that it computed); a batch
    norm, or a switchable norm whose mixture is batch statistics alone, into the layer whose output
    it alone reads,

    .. math::
        W' = \frac{\gamma}{\sqrt{\sigma^2 + \varepsilon}}\, W, \qquad
        b' = \frac{\gamma}{\sqrt{\sigma^2 + \varepsilon}}\,(b - \mu) + \beta;

    and a decoupled layer that is linear in its input. The result computes what the model computes in
    evaluation mode; it is meant for export and inference, not for further training.

    Args:
        model: changed in place.
        example: an input on which the outputs before and after are compared; the largest deviation is
            in the result's notes. None skips the comparison.
        where: which modules; None for all that can be folded. Naming one that cannot is an error.

    Raises:
        NoMatchError: if nothing that `where` selects can be folded.
        NotApplicableError: if `where` is given and selects a decoupled layer that is not linear, or if the
            outputs changed by more than rounding; the model then is as it was before.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        >>> edited = gonio.fold_(model, example=torch.ones(1, 1, 5, 5))
        >>> [type(layer).__name__ for layer in model]
        ['Conv2d', 'Identity', 'ReLU']
    """
    selector = as_selector(where)
    chosen = [site for site in sites(model) if site.matches(selector)]
    before = outputs(model, example) if example is not None else None
    with Edit(model, "fold_") as edit, torch.no_grad():
        for site in chosen:
            _fold_parametrizations_(edit, site)
        _fold_decoupled_(edit, chosen, strict=where is not None)
        fold_norms_(edit, {id(site.module) for site in chosen})
        if not edit.changes:
            raise NoMatchError("fold_", str(selector), [], refused=[site.path for site in chosen if site.owners])
        if before is not None:
            _check(edit, before, outputs(model, example))
    return edit.done()


def _fold_parametrizations_(edit: Edit, site: Site) -> None:
    module = site.module
    for name, raw in list(module._parameters.items()):
        parametrization = parametrization_of(module, name)
        if parametrization is None or raw is None:
            continue
        edit.snapshot_(module)
        edit.set_data_(raw, raw)
        detach(module, name, keep="weight")
        edit.changed(site.path, f"{name}: {type(parametrization).__name__} folded")


def _fold_decoupled_(edit: Edit, chosen: list[Site], *, strict: bool) -> None:
    for site in chosen:
        to_plain = getattr(site.module, "to_plain", None)
        if to_plain is None or not site.owners:
            continue
        try:
            plain = to_plain()
        except NotApplicableError as error:
            if strict:
                raise
            edit.note(f"{site.path} stays: {error}")
            continue
        plain.train(site.module.training)
        edit.replace_(site, plain, what=f"{type(site.module).__name__} → {type(plain).__name__}")


def _check(edit: Edit, before: list[torch.Tensor], after: list[torch.Tensor]) -> None:
    moved = deviation(before, after)
    allowed = max(_ALLOWED.get(x.dtype, 0.05) for x in before)
    if moved.relative > allowed:
        raise NotApplicableError("fold_", "", f"the outputs changed: {moved}", "Please report this model.")
    edit.note(str(moved))
