"""`fold_`: turn what training needed into plain layers that compute the same."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from gonio.errors import NoMatchError, NotApplicableError, listing
from gonio.parametrizations.base import detach, is_parametrized
from gonio.surgery.bypass import note_other_references
from gonio.surgery.edit import Edit, Edited
from gonio.surgery.equivalent import deviation, outputs
from gonio.surgery.fold_norm import fold_norms_
from gonio.surgery.fold_torch import fold_torchs_
from gonio.surgery.site import Site, sites
from gonio.surgery.where import Where, as_selector
from gonio.surgery.wrapping import refuse_shards, unwrapped

__all__ = ["fold_"]

# largest relative deviation of the outputs that is rounding and not a mistake
_ALLOWED = {torch.float64: 1e-12, torch.float32: 1e-5}
_ROUNDINGS = 10  # or this many times what the model's own arithmetic loses


def fold_(model: nn.Module, *, example: Any = None, where: Where = None) -> Edited:
    r"""Replace parametrizations, batch norms and exact decoupled layers by plain torch layers.

    What is folded: every parametrization, those of ``torch.nn.utils.parametrize`` too (the weight becomes
    the tensor that it computed); a batch norm, or a switchable norm whose mixture is batch statistics
    alone, into the layer whose output it alone reads,

    .. math::
        W' = \frac{\gamma}{\sqrt{\sigma^2 + \varepsilon}}\, W, \qquad
        b' = \frac{\gamma}{\sqrt{\sigma^2 + \varepsilon}}\,(b - \mu) + \beta;

    and a decoupled layer that is linear in its input. The result computes what the model computes in
    evaluation mode; it is meant for export and inference, not for further training. What stays is named
    in the result's notes with the reason.

    Args:
        model: changed in place.
        example: an input on which the outputs before and after are compared; the largest deviation is
            in the result's notes. None skips the comparison.
        where: which modules; None for all that can be folded. Naming one that cannot is an error.

    Raises:
        NoMatchError: if nothing that `where` selects can be folded.
        NotApplicableError: if `where` is given and selects a decoupled layer that is not linear or a norm that
            cannot be folded, if the model is sharded or replicated, or if the outputs changed by more than
            rounding; the model then is as it was before.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        >>> edited = gonio.fold_(model, example=torch.ones(1, 1, 5, 5))
        >>> [type(layer).__name__ for layer in model]
        ['Conv2d', 'Identity', 'ReLU']
    """
    selector = as_selector(where)
    chosen = [site for site in sites(model) if site.matches(selector)]
    refuse_shards(model, "fold_")
    before = outputs(model, example) if example is not None else None
    with Edit(model, "fold_") as edit, torch.no_grad():
        stay = _fold_parametrizations_(edit, chosen) | fold_torchs_(edit, chosen)
        stay |= _fold_decoupled_(edit, chosen) | fold_norms_(edit, chosen)
        _say_what_stays(edit, stay, strict=where is not None)
        if not edit.changes:
            refused = [f"{site.path} ({stay.get(site.path, 'nothing to fold')})" for site in chosen if site.owners]
            raise NoMatchError("fold_", str(selector), [], refused=refused)
        note_other_references(edit, chosen)
        if before is not None:
            _check(edit, example, before, outputs(model, example))
    return edit.done()


def _fold_parametrizations_(edit: Edit, chosen: list[Site]) -> dict[str, str]:
    """Fold every parametrization of this library that can be; the layers that stay, by path, and why."""
    stay: dict[str, str] = {}
    selected = {id(site.module) for site in chosen}
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in edit.model.modules():
        for name, raw in module._parameters.items():
            owners.setdefault(id(raw), []).append((module, name))
    # decided for all before any is folded: one that shares its tensor with a folded one still is parametrized
    shared = {
        key
        for key, found in owners.items()
        if any(id(m) not in selected or not is_parametrized(m, n) for m, n in found)
    }
    folded: set[int] = set()  # a tensor that several layers share is overwritten once
    for site in chosen:
        for name, raw in list(site.module._parameters.items()):
            if raw is None or not is_parametrized(site.module, name):
                continue
            if id(raw) in shared:
                stay[site.path] = f"it shares its {name} with a layer that is not selected or computes none"
                continue
            edit.snapshot_(site.module)
            edit.set_data_(raw, raw)
            parametrization = detach(site.module, name, keep="raw" if id(raw) in folded else "weight")
            folded.add(id(raw))
            edit.changed(site.path, f"{name}: {type(parametrization).__name__} folded")
    return stay


def _fold_decoupled_(edit: Edit, chosen: list[Site]) -> dict[str, str]:
    stay: dict[str, str] = {}
    for site in chosen:
        to_plain = getattr(site.module, "to_plain", None)
        if to_plain is None:
            continue
        if not site.path:
            stay[site.path] = "it is the model itself"
            continue
        try:
            plain = to_plain()
        except NotApplicableError as error:
            stay[site.path] = str(error)
            continue
        plain.train(site.module.training)
        edit.replace_(site, plain, what=f"{type(site.module).__name__} → {type(plain).__name__}")
    return stay


def _say_what_stays(edit: Edit, stay: dict[str, str], *, strict: bool) -> None:
    reasons: dict[str, list[str]] = {}
    for path, why in stay.items():
        reasons.setdefault(why, []).append(path or "the model")
    for why, paths in reasons.items():
        if strict:
            raise NotApplicableError("fold_", listing(paths), why, "Leave it out of `where`.")
        edit.note(f"{listing(paths)} stay{'s' * (len(paths) == 1)}: {why}")


def _check(edit: Edit, example: Any, before: list[Tensor], after: list[Tensor]) -> None:
    moved = deviation(before, after)
    allowed = max(_ALLOWED.get(x.dtype, 0.05) for x in before)
    if moved.relative > allowed:
        # Some networks enlarge rounding: then the folded one differs from itself in float64 as much.
        own = deviation(after, _in_float64(edit.model, example))
        if moved.relative > _ROUNDINGS * own.relative:
            raise NotApplicableError("fold_", "", f"the outputs changed: {moved}", "Please report this model.")
        edit.note(f"this model enlarges rounding: in float64 its outputs differ by {own.relative:.3g} relative")
    edit.note(str(moved))


def _in_float64(model: nn.Module, example: Any) -> list[Tensor]:
    wide = tree_map(lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x, example)
    return outputs(copy.deepcopy(unwrapped(model)).double(), wide)
